# SPDX-License-Identifier: Apache-2.0
"""Lint the patch series: structure only, no package needed, well under a second.

    python tools/check_patches.py [--patches-dir DIR] [--root DIR]

Prints one line for each problem, ``file: what is wrong: how to mend it``. Exit code 0 when there
is none, 4 otherwise. ``apply_patches.py check`` does this and what needs the package itself.
"""

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from patch_series import (
    BAD_PATCH,
    Contents,
    Patch,
    PatchError,
    Series,
    chain_diffs,
    parse_patch,
    read_order,
    read_pin,
    slug,
)

AUTHOR = "vllm-ascend-pd maintainers <maintainers@vllm-ascend-pd.invalid>"
AREAS = ("sched", "engine", "worker", "connector", "config", "api", "ascend")
KINDS = ("temporary", "ascend-only", "incompatible")
TRAILERS = ("Why", "Kind", "Hook", "Calls", "No-patch-because", "Upstream", "Remove-when", "Test")
UPSTREAM = re.compile(r"none|not-forwardable|(rejected )?https?://\S+")
MAX_FILES, MAX_CHANGED, MAX_ADDED_IN_HUNK = 2, 20, 5
NOT_A_CALL = re.compile(r"(async\s+)?(class|for|while|try)\b")
HOOKS_MODULE = "vllm_ascend_pd.hooks"
CALLED_BY_PATCHES = ("SchedulerHooks", "StepHooks")  # classes whose methods the patches call
UNCALLED = re.compile(r"#\s*not called by a patch:\s*\S")


def lint(patches_dir: Path, root: Path) -> list[str]:
    """Every problem of every series under `patches_dir`; `root` is the repository."""
    problems: list[str] = []
    patches: list[Patch] = []
    for directory in sorted(path for path in patches_dir.glob("*") if path.is_dir()):
        found = list(_read_directory(directory, problems))
        try:
            chain_diffs(found)
        except PatchError as error:
            problems.append(f"{directory.name}/{error}")
        for patch in found:
            where = f"{directory.name}/{patch.name}"
            problems += [f"{where}: {text}" for text in _lint_header(patch, root)]
            problems += [f"{where}: {text}" for text in _lint_size(patch)]
        patches += found
    hooks_file = root.joinpath(*HOOKS_MODULE.split(".")).with_suffix(".py")
    if hooks_file.is_file():
        problems += _lint_calls(patches, Outline(hooks_file.read_text()), hooks_file.name)
    elif any(_calls(patch) for patch in patches):
        problems.append(f"{hooks_file}: not found, but patches call it: write it")
    return problems


# ---- a series directory --------------------------------------------------------------------------


def _read_directory(directory: Path, problems: list[str]) -> Iterator[Patch]:
    name = directory.name
    try:
        pin = read_pin(directory / "pin.toml")
        wanted = f"{pin.package.replace('_', '-')}-{pin.version}"
        if name != wanted:
            problems.append(f"{name}: pin.toml is for {wanted}: rename the directory")
        if pin.requires and not (directory.parent / pin.requires / "pin.toml").is_file():
            problems.append(
                f"{name}/pin.toml: requires {pin.requires}, which is no series: correct it"
            )
        if not re.fullmatch(r"[0-9a-f]{64}", pin.sdist_sha256):
            problems.append(f"{name}/pin.toml: sdist_sha256 is no sha256: copy it from the index")
    except PatchError as error:
        problems.append(str(error))
    series = directory / "series"
    order = read_order(series.read_text()) if series.is_file() else []
    if not series.is_file():
        problems.append(f"{name}/series: not found: list the patches in it, one a line")
    for twice in sorted({entry for entry in order if order.count(entry) > 1}):
        problems.append(f"{name}/series: lists {twice} twice: drop one line")
    present = {path.name for path in directory.iterdir()} - {"pin.toml", "series"}
    for stray in sorted(present - set(order)):
        problems.append(f"{name}/{stray}: not listed in series: add the line or remove the file")
    for entry in dict.fromkeys(order):
        if entry not in present:
            problems.append(f"{name}/series: lists {entry}, which does not exist: drop the line")
            continue
        try:
            yield parse_patch(entry, (directory / entry).read_bytes())
        except PatchError as error:
            problems.append(f"{name}/{error}")


# ---- one patch -----------------------------------------------------------------------------------


def trailers(patch: Patch) -> dict[str, str]:
    """The git trailers: the last paragraph of the body, continuation lines folded in."""
    last = re.sub(r"\n[ \t]+", " ", patch.body.rpartition("\n\n")[2])
    return dict(re.findall(r"(?m)^([A-Za-z-]+):[ ]*(.*?)[ ]*$", last))


def _listed(value: str) -> list[str]:
    return [] if value == "none" else [item for item in re.split(r"[,\s]+", value) if item]


def _calls(patch: Patch) -> list[str]:
    return _listed(trailers(patch).get("Calls", ""))


def _lint_header(patch: Patch, root: Path) -> Iterator[str]:
    if patch.headers.get("From") != AUTHOR:
        yield f"the author is not that of all patches: its first line is 'From: {AUTHOR}'"
    subject = patch.headers.get("Subject", "")
    if subject.partition(":")[0] not in AREAS or not re.fullmatch(r"[a-z]+: \S.*[^.\s]", subject):
        yield f"the subject is not 'area: verb object', area one of {', '.join(AREAS)}: reword it"
    if patch.name != f"{slug(subject)}.patch":
        yield f"the subject asks for the name {slug(subject)}.patch: rename the file, or reword it"
    given = trailers(patch)
    paths = [diff.path for diff in patch.diffs]
    needed = [*TRAILERS]
    if any("/sched/" in path or "scheduler" in path.rpartition("/")[2] for path in paths):
        needed.append("Shadowed-by")
    for key in needed:
        if not given.get(key):
            yield f"no '{key}:' in the last paragraph of the header: add it"
    yield from _lint_kind(given)
    for hook in _listed(given.get("Hook", "")):
        path, colon, name = hook.partition(":")
        if path not in paths or not colon or not name:
            yield f"Hook: {hook}: is not PATH:NAME with a PATH that the patch changes: correct it"
    for test in _listed(given.get("Test", "")):
        if not (root / test.partition("::")[0]).is_file():
            yield f"Test: {test}: no such file: write the test or correct the path"


def _lint_kind(given: dict[str, str]) -> Iterator[str]:
    kind, upstream = given.get("Kind", KINDS[0]), given.get("Upstream", "")
    if kind not in KINDS:
        yield f"Kind: {kind}: use one of {', '.join(KINDS)}"
    if upstream and not UPSTREAM.fullmatch(upstream):
        yield "Upstream: is not 'none', 'not-forwardable', a URL or 'rejected URL': change it"
    if kind == "temporary" and upstream in ("none", "not-forwardable"):
        yield f"Kind: temporary, Upstream: {upstream}: give the URL of the bug or its cause"
    if given.get("Calls") == "none" and kind != "temporary" and upstream != "not-forwardable":
        yield "Calls: none: only what is temporary or not-forwardable may: call a hook"


def _lint_size(patch: Patch) -> Iterator[str]:
    if len(patch.diffs) > MAX_FILES:
        yield f"changes {len(patch.diffs)} files, more than {MAX_FILES}: split it"
    changed = 0
    for diff in patch.diffs:
        for hunk in diff.hunks:
            added = [line[1:].decode(errors="replace") for line in hunk.lines if line[:1] == b"+"]
            changed += sum(line[:1] != b" " for line in hunk.lines)
            removed = [line[1:].decode(errors="replace") for line in hunk.lines if line[:1] == b"-"]
            changes = {word[0] for line in removed if (word := NOT_A_CALL.match(line.strip()))}
            where = f"{diff.path}, hunk at line {hunk.new_start}"
            if len(added) > MAX_ADDED_IN_HUNK:
                yield f"{where}: adds {len(added)} lines, the limit is {MAX_ADDED_IN_HUNK}: thin it"
            for line in added:
                if line != line.rstrip():
                    yield f"{where}: an added line ends in blanks: strip them and export anew"
                if (word := NOT_A_CALL.match(line.strip())) and word[0] not in changes:
                    yield f"{where}: adds a '{word[0]}': move it into what the hook calls"
    if changed > MAX_CHANGED:
        yield f"changes {changed} lines, more than {MAX_CHANGED}: split it, or call a hook"


def lost_hooks(series: Series, applied: Contents) -> list[str]:
    """The `Hook:` names that the patched files do not define."""
    lost = []
    outline = functools.cache(lambda path: Outline(applied[path].decode()))
    for patch in series.patches:
        for hook in _listed(trailers(patch).get("Hook", "")):
            path, _, name = hook.partition(":")
            if path not in applied or not outline(path).resolves(name):
                lost.append(f"{patch.name}: Hook: {hook}: no such name in the patched file")
    return lost


# ---- patches against hooks.py --------------------------------------------------------------------


class Outline:
    """The names that a module defines, read by AST: nothing is imported."""

    def __init__(self, source: str) -> None:
        self._lines = source.split("\n")
        self._module = ast.parse(source)
        self._classes = {
            node.name: node for node in self._module.body if isinstance(node, ast.ClassDef)
        }

    def resolves(self, name: str) -> bool:
        """Whether `name` ("function", "attribute" or "Class.member") exists."""
        owner, _, member = name.partition(".")
        if not member:
            return owner in _names(self._module)
        return owner in self._classes and member in self._members(self._classes[owner])

    def expected(self) -> Iterator[str]:
        """Every name that some patch has to call."""
        for node in self._module.body:
            if isinstance(node, ast.FunctionDef) and self._is_expected(node):
                yield node.name
        for owner in CALLED_BY_PATCHES:
            if owner in self._classes and not self._is_marked(self._classes[owner]):
                for node in self._classes[owner].body:
                    if isinstance(node, ast.FunctionDef) and self._is_expected(node):
                        yield f"{owner}.{node.name}"

    def _members(self, node: ast.ClassDef) -> set[str]:
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        inherited = [self._members(self._classes[b]) for b in bases if b in self._classes]
        return _names(node).union(*inherited)

    def _is_expected(self, node: ast.FunctionDef) -> bool:
        return not node.name.startswith("_") and not self._is_marked(node)

    def _is_marked(self, node: ast.FunctionDef | ast.ClassDef) -> bool:
        """The mark stands in the line above the definition, or anywhere in its signature."""
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return any(UNCALLED.search(x) for x in self._lines[max(first - 2, 0) : node.body[0].lineno])


def _names(node: ast.Module | ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
        elif isinstance(item, ast.Assign):
            found.update(target.id for target in item.targets if isinstance(target, ast.Name))
    return found


def _lint_calls(patches: list[Patch], hooks: Outline, hooks_name: str) -> Iterator[str]:
    called: set[str] = set()
    for patch in patches:
        code = "\n".join(_added_code(patch))
        named = set()
        for call in _calls(patch):
            name = call.removeprefix(f"{HOOKS_MODULE}.")
            named.add(name.rpartition(".")[2])
            called.add(name)
            if name == call or not hooks.resolves(name):
                yield f"{patch.name}: Calls: {call}: no such name in {HOOKS_MODULE}: correct it"
            elif not re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", code):
                yield f"{patch.name}: Calls: {call}: no added line uses it: drop it"
        for used in sorted(set(re.findall(r"\b(?:pd_)?hooks\.(\w+)", code)) - named):
            yield f"{patch.name}: uses {used}, which Calls: does not name: add it"
    for name in hooks.expected():
        if name not in called:
            yield (
                f"{hooks_name}: no patch calls {name}: name it in a Calls:, remove it, or mark it "
                "'# not called by a patch: REASON'"
            )


def _added_code(patch: Patch) -> Iterator[str]:
    for diff in patch.diffs:
        for hunk in diff.hunks:
            for line in hunk.lines:
                text = line[1:].decode(errors="replace")
                if line[:1] == b"+" and not re.match(r"\s*(#|from .* import |import )", text):
                    yield text


def main(argv: list[str] | None = None) -> int:
    repo = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=repo, help="the repository")
    parser.add_argument("--patches-dir", type=Path, help="default: ROOT/patches")
    args = parser.parse_args(argv)
    problems = lint(args.patches_dir or args.root / "patches", args.root)
    for problem in problems:
        print(problem, file=sys.stderr)
    return BAD_PATCH if problems else 0


if __name__ == "__main__":
    sys.exit(main())
