# SPDX-License-Identifier: Apache-2.0
"""vLLM's objects are changed in one place, where each new version is held against them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_ascend_pd

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(vllm_ascend_pd.__file__).parent
API = PACKAGE / "engine" / "vllm_api"
ENGINE = [path for path in (PACKAGE / "engine").rglob("*.py") if API not in path.parents]
ALWAYS = ("request", "scheduler")
"""What a name says whose object is vLLM's, also where one of ours has such an attribute."""


def changed(code: str) -> Iterator[ast.Attribute]:
    """Where an attribute is set or deleted."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def attributes(*paths: Path) -> set[str]:
    """By the bodies of classes, and by what these set of themselves."""
    names = set()
    for path in paths:
        code = path.read_text()
        names |= {node.attr for node in changed(code) if ast.unparse(node.value) == "self"}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ClassDef):
                fields = (it.target for it in node.body if isinstance(it, ast.AnnAssign))
                names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return names


def test_engine_changes_vllms_objects_only_through_its_one_door() -> None:
    theirs = attributes(API / "types.py", API / "config_types.py")
    ours = attributes(*ENGINE, *PACKAGE.glob("*.py"))
    found = []
    for path in ENGINE:
        for node in changed(path.read_text()):
            owner = ast.unparse(node.value)
            is_theirs = node.attr not in ours or owner.split(".")[-1] in ALWAYS
            if owner != "self" and node.attr in theirs and is_theirs:
                found.append(f"{path.relative_to(PACKAGE)}: {owner}.{node.attr}")
    assert found == []
