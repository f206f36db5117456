# SPDX-License-Identifier: Apache-2.0
"""What our code imports of a package, or says that it touches, and whether its source has it.

By syntax alone: nothing is imported. A docstring says it below ``Touches:``, indented, as
``path:name`` or ``path:Class.attribute``; ``|`` stands between what one version or another has. A
class whose docstring names another one says that it touches what its own body declares.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from patch_series import Files

_TOUCHES = re.compile(r"^( *)Touches:(?: (\S.*)$|\n((?:\1 +\S.*\n?)+))", re.MULTILINE)


def wanted_names(code: Path, package: str) -> dict[str, str]:
    """What the Python files below `code` take from `package`, and the first place of each."""
    wanted: dict[str, str] = {}
    for path in sorted(code.rglob("*.py")):
        module = ast.parse(path.read_bytes())
        for line, name in (*_imports(module, package), *_touched(module, package)):
            wanted.setdefault(name, f"{path.relative_to(code.parent)}:{line}")
    return wanted


def missing_names(wanted: Mapping[str, str], *files: Files) -> list[str]:
    """Those that are not in `files`, with their places; what comes first there hides the rest."""
    source = Source(files)
    return [
        f"{name} ({place})"
        for name, place in wanted.items()
        if not any(source.has(one) for one in name.split(" | "))
    ]


def _imports(module: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            dotted, name = alias.name, ""
            if isinstance(node, ast.ImportFrom):
                dotted, name = node.module or "", alias.name
            if dotted.partition(".")[0] == package:
                yield node.lineno, f"{dotted.replace('.', '/')}.py:{name}"


def _touched(module: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            for _, one, several in _TOUCHES.findall(ast.get_docstring(node) or ""):
                for line in re.sub(r"\s*\n\s*\|\s*", " | ", one or several).split("\n"):
                    if (wanted := line.strip()).startswith(f"{package}/"):
                        yield getattr(node, "lineno", 1), wanted
                        if isinstance(node, ast.ClassDef):
                            yield from _members(node, wanted)


def _members(node: ast.ClassDef, wanted: str) -> Iterator[tuple[int, str]]:
    for name, declared in _bound(node.body):
        if not name.startswith("__"):
            yield declared.lineno, " | ".join(f"{one}.{name}" for one in wanted.split(" | "))


class Source:
    """The modules of one version, parsed when they are asked for."""

    def __init__(self, files: tuple[Files, ...]) -> None:
        self._files = files
        self._parsed: dict[str, dict[str, ast.stmt] | None] = {}
        self._attributes: dict[ast.ClassDef, set[str]] = {}

    def has(self, wanted: str) -> bool:
        path, _, dotted = wanted.partition(":")
        bound = self._module(path)
        if bound is None:
            return False
        name, _, attribute = dotted.partition(".")
        if not attribute:
            folder = path.removesuffix("/__init__.py").removesuffix(".py")
            return not name or name in bound or self._module(f"{folder}/{name}.py") is not None
        return self._class_has(path, name, attribute)

    def _module(self, path: str) -> dict[str, ast.stmt] | None:
        if path not in self._parsed:
            places = path, path.removesuffix(".py") + "/__init__.py"
            found = (files[place] for place in places for files in self._files if place in files)
            content = next(found, None)
            self._parsed[path] = None if content is None else dict(_bound(ast.parse(content).body))
        return self._parsed[path]

    def _class_has(self, path: str, name: str, attribute: str) -> bool:
        """Also what a base class has, where that is of the same package."""
        node = (self._module(path) or {}).get(name)
        if isinstance(node, ast.ImportFrom) and node.module:
            return self._class_has(f"{node.module.replace('.', '/')}.py", name, attribute)
        if not isinstance(node, ast.ClassDef):
            return False
        if node not in self._attributes:
            self._attributes[node] = {*dict(_bound(node.body)), *_assigned(node)}
        if attribute in self._attributes[node]:
            return True
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return any(self._class_has(path, base, attribute) for base in bases)


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    """What its methods assign to ``self``."""
    for target in ast.walk(node):
        if (
            isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        ):
            yield target.attr


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that these statements bind, also in their branches."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for leaf in ast.walk(target):
                    if isinstance(leaf, ast.Name):
                        yield leaf.id, node
        for branch in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for inner in getattr(node, branch, []):
                    is_handler = isinstance(inner, ast.ExceptHandler)
                    yield from _bound(inner.body if is_handler else [inner])
