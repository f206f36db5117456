# SPDX-License-Identifier: Apache-2.0
"""What the project asks for is what its locked files name, and what is installed."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
LOCKED = sorted((ROOT / "tools" / "requirements").glob("cpu-*.txt"))


def asked() -> list[Requirement]:
    """Of the package and of those extras that a CPU host has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = ("router", "kubernetes", "tracing", "cluster", "cpu", "dev")
    lines = [*project["dependencies"], *(line for name in names for line in extras[name])]
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != project["name"]]


def pins(path: Path) -> dict[str, Version]:
    lines = [line for line in path.read_text().splitlines() if "==" in line and line[0] != "#"]
    found = [Requirement(line) for line in lines]
    return {pin.name: Version(next(iter(pin.specifier)).version) for pin in found}


def test_aiohttp_is_none_whose_holes_are_known() -> None:
    [requirement] = [each for each in asked() if each.name == "aiohttp"]
    assert "3.14.5" in requirement.specifier
    assert "3.14.4" not in requirement.specifier
    assert Version(version("aiohttp")) in requirement.specifier


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_locked_versions_are_those_that_are_asked_for(path: Path) -> None:
    locked = pins(path)
    for requirement in asked():
        assert locked[requirement.name] in requirement.specifier, requirement
