# SPDX-License-Identifier: Apache-2.0
"""Commands in the documents are there, and so are their options, and the files that they name."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apply_patches
import pytest
import typer

from tests.unit.tools.documents import (
    CHECKED,
    EXISTING,
    PAGES,
    PATCH_COMMANDS,
    ROOT,
    Command,
    commands,
    files_of,
    made_by,
)
from vllm_ascend_pd.cli import main

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
IN_AN_IMAGE = {"ascend.md", "first-hour.md"}
"""Nothing there is run from a checkout."""
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)


def wrong(command: Command) -> str:
    """What is wrong with a command; empty: nothing."""
    words = command.arguments
    if command.program in ("python", "python3") and words:
        if words[0] == "-m":
            return _wrong_with_module(words[1:])
        return _wrong_with_script(words) if words[0] != "-c" else ""
    if Path(command.words[0]).suffix == ".py":
        return _wrong_with_script([command.words[0], *words])
    if command.program == "make":
        return _wrong_with_make(words)
    if command.program == "vllm-pd":
        return _wrong_with_vllm_pd(words, command.in_prose)
    if command.words[0] in PATCH_COMMANDS:
        return _wrong_with_patch_tool([command.words[0], *words], command.in_prose)
    return ""


def _wrong_with_make(words: list[str]) -> str:
    variables = {word.partition("=")[0] for word in words if "=" in word}
    if unknown := {word for word in words if "=" not in word} - {*TARGETS}:
        return f"no target {unknown}"
    unread = {name for name in variables if f"$({name})" not in MAKEFILE}
    return f"no variable {unread}" if unread else ""


def _wrong_with_vllm_pd(words: list[str], in_prose: bool) -> str:
    """Click's own opinion of it, as far as it forms one before it runs the command."""
    command: Any = typer.main.get_command(main.app)
    while hasattr(command, "get_command"):
        if not words or words[0].startswith("-"):
            return "" if in_prose or words else "no command"
        name, *words = words
        if name == "patch":
            return _wrong_with_patch_tool(words, in_prose)
        found = command.get_command(typer.Context(command), name)
        if found is None:
            return f"no command {name!r}"
        command = found
    try:
        words = [word for word in words if word != "--help"]
        command.make_context(command.name, ["1" if word.isupper() else word for word in words])
    except USAGE_ERROR as e:
        told = str(e.format_message())
        return "" if in_prose and re.search("Missing|requires an argument", told) else told
    return ""


def _wrong_with_patch_tool(words: list[str], in_prose: bool) -> str:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            apply_patches.build_parser().parse_args(words)
    except SystemExit as e:
        missing = "required" in told.getvalue()
        return "" if e.code == 0 or (in_prose and missing) else told.getvalue()
    return ""


def _wrong_with_module(words: list[str]) -> str:
    spec = importlib.util.find_spec(words[0])
    if spec is None or spec.origin is None:
        return f"no module {words[0]}"
    ours = words[0].startswith("vllm_ascend_pd.")
    return _wrong_with_options(Path(spec.origin), words[1:]) if ours else ""


def _wrong_with_script(words: list[str]) -> str:
    if words[0] == "tools/apply_patches.py" and len(words) > 1:
        return _wrong_with_patch_tool(words[1:], in_prose=False)
    script = ROOT / words[0]
    return _wrong_with_options(script, words[1:]) if script.is_file() else "no such script"


def _wrong_with_options(script: Path, words: list[str]) -> str:
    known = {"--help": None} | dict(options_of(script))
    option = ""
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
            if option not in known:
                return f"no option {option}"
        elif option and (choices := known[option]) and word not in choices:
            return f"{option} is one of {choices}"
    return ""


def options_of(script: Path) -> Iterator[tuple[str, list[str] | None]]:
    """Long options of a script and of what it imports beside it, each with its choices."""
    tree = ast.parse(script.read_text())
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.expr):
            names.setdefault(target.id, value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            beside = script.with_name(f"{node.module}.py")
            if beside.is_file():
                yield from options_of(beside)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            choices = [_texts(k.value, names) for k in node.keywords if k.arg == "choices"]
            for arg in node.args:
                if isinstance(arg, ast.Constant) and str(arg.value).startswith("--"):
                    yield str(arg.value), choices[0] if choices else None


def _texts(node: ast.expr | None, names: dict[str, ast.expr]) -> list[str] | None:
    """Of an expression that its file spells out; others have None."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Name):
        return _texts(names.get(node.id), names)
    if isinstance(node, ast.Starred):
        return _texts(node.value, names)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _texts(node.args[0], names)
    if isinstance(node, ast.Dict):
        parts = [_texts(key, names) for key in node.keys]
    elif isinstance(node, (ast.Tuple, ast.List)):
        parts = [_texts(part, names) for part in node.elts]
    else:
        return None
    return None if None in parts else [text for part in parts for text in part or ()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_work_as_written(page: Path) -> None:
    found = []
    made: set[str] = set()
    benchmark = ""
    for command in commands(page):
        if command.words[0] in ("--part", "--parts"):  # in prose: of the benchmark above
            command = Command((benchmark, *command.words), in_prose=True)
        elif scripts := [word for word in command.words if word.startswith("benchmarks/")]:
            benchmark = scripts[0]
        made |= made_by(command)
        files = {path for path in files_of(command) - EXISTING if not _is_below(path, made)}
        told = f"nothing on this page makes {files}" if files else wrong(command)
        if not command.in_prose and page.name not in IN_AN_IMAGE:
            in_venv = command.words[0] == f".venv/bin/{command.program}"
            if command.program in {*CHECKED} - {"make", "python3"} and not in_venv:
                told = "is not in .venv"
        if told:
            found.append(f"{command}: {told}")
    assert not found, "\n".join(found)


@functools.cache
def source_of_the_engine() -> str:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    parts = [Path(spec.origin).with_name(name) for name in ("engine", "entrypoints", "benchmarks")]
    return "".join(path.read_text() for part in parts for path in sorted(part.rglob("*.py")))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_the_engine_are_there(page: Path) -> None:
    """As fields of its arguments, or in the source of its commands: vLLM is not imported."""
    text = source_of_the_engine()
    for command in commands(page):
        words = command.arguments
        if command.program == "vllm-pd" and words[:1] == ["up"]:
            words = words[[*words, "--"].index("--") :]
        elif command.program != "vllm":
            continue
        options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        for option in options:
            field = option.removeprefix("--").replace("-", "_")
            assert f'"{option}"' in text or re.search(rf"\b{field}\b", text), f"{command}: {option}"


def _is_below(path: str, made: set[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in made)
