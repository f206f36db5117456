# SPDX-License-Identifier: Apache-2.0
"""Commands in the documents are there, with the options that they are given."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_ascend_pd.cli import main

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_AN_IMAGE = {"ascend.md", "first-hour.md", "kubernetes.md"}
"""Nothing there is run from a checkout."""
PROGRAMS = ("vllm-pd", "python", "python3", "make", "vllm", "pip")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """Of the page's blocks of code, each as a shell reads it."""
    text = page.read_text()
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.M | re.S):
        if language in ("", "bash", "sh"):
            lines = iter(block.replace("\\\n", " ").splitlines())
            for line in lines:
                words = re.sub(r"^( *[A-Z_]+=\S*)+ ", "", line).split()
                if words and Path(words[0]).name in PROGRAMS:
                    yield _split(line, lines)


def _split(line: str, more: Iterator[str]) -> list[str]:
    """The words of a command, of which a quoted one may go on over the next lines."""
    while True:
        try:
            words = shlex.split(line, comments=True)
            break
        except ValueError:
            line += "\n" + next(more)
    return [word for i, word in enumerate(words) if i or not re.match("[A-Z_]+=", word)]


def options(words: list[str]) -> set[str]:
    """Long ones; what follows ``--`` is another program's."""
    own = words[: [*words, "--"].index("--")]
    return {word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)}


def options_of(subcommand: list[str]) -> set[str]:
    command: Any = typer.main.get_command(main.app)
    for word in subcommand:
        if not hasattr(command, "get_command"):
            break
        context = typer.Context(command)
        found = command.get_command(context, word)
        assert found is not None, f"no command {word!r}"
        command = found
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_there(page: Path) -> None:
    for words in commands(page):
        told = f"{page.name}: {shlex.join(words)}"
        program = Path(words[0]).name
        if page.name not in IN_AN_IMAGE and program not in ("make", "python3"):
            assert words[0] == f".venv/bin/{program}", told
        if program == "make":
            assert {word for word in words[1:] if "=" not in word} <= {*TARGETS}, told
        elif program == "vllm-pd":
            subcommand = [word for word in words[1:] if re.fullmatch(r"[a-z]+", word)]
            assert options(words) <= options_of(subcommand), told
        elif program.startswith("python") and words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, told
        elif program.startswith("python") and words[1].endswith(".py"):
            folder = (ROOT / words[1]).parent
            text = "".join(path.read_text() for path in folder.glob("*.py"))
            assert (ROOT / words[1]).is_file(), told
            assert all(f'"{option}"' in text for option in options(words)), told
