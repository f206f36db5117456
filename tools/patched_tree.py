# SPDX-License-Identifier: Apache-2.0
"""Where a package is, in which state a series has left it, and how that is changed.

Used by the commands of ``apply_patches.py``; standard library only, without git.
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patch_series import (
    APPLIED,
    NO_PACKAGE,
    PRISTINE,
    REFUSED,
    USAGE,
    Contents,
    PatchError,
    Series,
    ToolError,
    chain_diffs,
    file_state,
    load_series,
    parse_patch,
    series_dirs,
    walk_chain,
)
from patch_writes import (
    list_file,
    remove,
    rename_beside,
    replace,
    rewrite_record,
    sweep,
    write_beside,
)

# ---- where the package is ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory that holds the package: site-packages, or a source tree."""

    root: Path
    version: str | None  # None: a bare source tree, the blob ids alone decide
    records: tuple[Path, ...]  # RECORD files that list the package's files

    def read(self, paths: Iterable[str]) -> Contents:
        return {p: (self.root / p).read_bytes() for p in paths if (self.root / p).is_file()}


class TreeFiles(Mapping[str, bytes]):
    """All files of a tree, read when they are asked for, but for those that are given."""

    def __init__(self, tree: Tree, given: Contents) -> None:
        self._root = tree.root
        self._given = given

    def __getitem__(self, path: str) -> bytes:
        if path in self._given:
            return self._given[path]
        if not (self._root / path).is_file():
            raise KeyError(path)
        return (self._root / path).read_bytes()

    def __iter__(self) -> Iterator[str]:
        return (str(path.relative_to(self._root)) for path in self._root.rglob("*.py"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def find_tree(package: str, source_tree: Path | None) -> Tree | None:
    """The tree named by the user, or the one that `import package` would take; imports nothing."""
    if source_tree is not None:
        return _describe(source_tree, package) if (source_tree / package).is_dir() else None
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        spec = None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None  # a bare directory of that name is no package
    tree = _describe(Path(spec.submodule_search_locations[0]).parent, package)
    if tree.version is not None:
        return tree
    # An editable install: its metadata is elsewhere and lists none of the package's files.
    for dist in importlib.metadata.distributions():
        names = (dist.read_text("top_level.txt") or "").split()
        if package in names or str(dist.metadata["Name"]).replace("-", "_").lower() == package:
            return Tree(tree.root, dist.version, ())
    return tree


def _describe(root: Path, package: str) -> Tree:
    """The owner is the distribution whose RECORD lists the package, whatever its name is."""
    listed = re.compile(rb"^%s/__init__\.py," % package.encode(), re.MULTILINE)
    records = [r for r in sorted(root.glob("*.dist-info/RECORD")) if listed.search(r.read_bytes())]
    sources = [record.with_name("METADATA") for record in records] or [root / "PKG-INFO"]
    versions = {
        match[1].partition("+")[0]: match[1]
        for source in sources
        if source.is_file() and (match := re.search(r"(?m)^Version: *(\S+)", source.read_text()))
    }
    if len(versions) > 1:
        owners = ", ".join(record.parent.name for record in records)
        raise ToolError(f"{root}: several distributions own {package}: {owners}", NO_PACKAGE)
    return Tree(root, next(iter(versions.values()), None), tuple(records))


# ---- state of a tree against a series ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the last apply or revert set out to do here; `complete` when it got to its end."""

    series: Series
    complete: bool


def receipt_path(series: Series, tree: Tree) -> Path:
    return tree.root / f".vllm_ascend_pd-{series.name}.json"


def read_receipt(series: Series, tree: Tree) -> Receipt | None:
    path = receipt_path(series, tree)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
        texts: dict[str, str] = data["patches"]
        patches = tuple(
            parse_patch(name, text.encode("utf-8", "surrogateescape"))
            for name, text in texts.items()
        )
        old = Series(series.name, series.pin, patches, chain_diffs(patches))
        return Receipt(old, bool(data["complete"]))
    except (ValueError, KeyError, TypeError, AttributeError, PatchError) as error:
        raise ToolError(f"{path}: not readable ({error}): remove it", REFUSED) from error


def receipt_text(series: Series, complete: bool) -> bytes:
    texts = {p.name: p.text.decode("utf-8", "surrogateescape") for p in series.patches}
    return json.dumps({"complete": complete, "patches": texts}).encode()


@dataclass(frozen=True, slots=True)
class Survey:
    """`verdict`: pristine, applied, interrupted, outdated, half-patched, foreign or empty."""

    verdict: str
    files: dict[str, str]  # path -> state
    receipt: Receipt | None


def survey(series: Series, tree: Tree) -> Survey:
    files = _states(series, tree)
    receipt = read_receipt(series, tree)
    found = set(files.values())
    same = receipt is not None and _ends(receipt.series) == _ends(series)
    if receipt is not None and not same:
        before = set(_states(receipt.series, tree).values())
        unfinished = before == {APPLIED} or (before <= {PRISTINE, APPLIED} and not receipt.complete)
        if unfinished and before:
            return Survey("outdated", files, receipt)
    if not found <= {PRISTINE, APPLIED}:
        return Survey("foreign", files, receipt)
    if receipt is not None and same and not receipt.complete:
        return Survey("interrupted", files, receipt)
    if len(found) > 1:
        return Survey("half-patched", files, receipt)
    return Survey(found.pop() if found else "empty", files, receipt)


def _states(series: Series, tree: Tree) -> dict[str, str]:
    contents = tree.read(series.chains)
    return {path: file_state(contents.get(path), chain) for path, chain in series.chains.items()}


def _ends(series: Series) -> dict[str, tuple[str, str]]:
    return {path: (chain[0].before, chain[-1].after) for path, chain in series.chains.items()}


# ---- moving a tree between pristine and applied --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """Everything that `commit` writes, built and verified beforehand."""

    series: Series
    tree: Tree
    goal: str
    current: Contents
    pristine: Contents
    applied: Contents

    @property
    def wanted(self) -> Contents:
        return self.applied if self.goal == APPLIED else self.pristine


def stage(series: Series, tree: Tree, goal: str, current: Contents) -> Move:
    """Derive both ends of every file from whichever end it is at; pure, writes nothing."""
    pristine: Contents = {}
    applied: Contents = {}
    for path, chain in series.chains.items():
        at_start = file_state(current.get(path), chain) == PRISTINE
        far_end = walk_chain(current[path], chain, APPLIED if at_start else PRISTINE)
        pristine[path], applied[path] = (
            (current[path], far_end) if at_start else (far_end, current[path])
        )
        if path.endswith(".py"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compile(applied[path], path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise PatchError(f"{path}: does not compile once patched: {error}") from error
    return Move(series, tree, goal, current, pristine, applied)


def plan(series: Series, tree: Tree, goal: str) -> list[Move]:
    """The moves that lead to the goal, or a refusal; the tree is only read."""
    found = survey(series, tree)
    if found.verdict in (goal, "empty"):
        return []
    if found.verdict in ("half-patched", "foreign"):
        raise ToolError(_refusal(series, tree, found), REFUSED)
    if found.verdict != "outdated" or found.receipt is None:
        return [stage(series, tree, goal, tree.read(series.chains))]
    old = found.receipt.series
    back = stage(old, tree, PRISTINE, tree.read(old.chains))
    if goal == PRISTINE:
        return [back]
    return [back, stage(series, tree, APPLIED, _pristine_after(series, tree, [back]))]


def pristine_contents(series: Series, tree: Tree) -> Contents:
    """The touched files as released, whether or not the tree is patched; only reads."""
    return _pristine_after(series, tree, plan(series, tree, PRISTINE))


def _pristine_after(series: Series, tree: Tree, moves: list[Move]) -> Contents:
    contents = tree.read(series.chains)
    for move in moves:
        contents.update((p, data) for p, data in move.pristine.items() if p in series.chains)
    states = {p: file_state(contents.get(p), chain) for p, chain in series.chains.items()}
    if set(states.values()) - {PRISTINE}:
        raise ToolError(_refusal(series, tree, Survey("foreign", states, None)), REFUSED)
    return contents


def _refusal(series: Series, tree: Tree, found: Survey) -> str:
    wrong = {p: s for p, s in found.files.items() if found.verdict != "foreign" or s != PRISTINE}
    listed = "\n".join(f"  {state:9} {path}" for path, state in wrong.items())
    return (
        f"{series.name}: {found.verdict} files in {tree.root}; nothing was touched:\n{listed}\n"
        "They were changed by something else, or patched by another version of this series. "
        "Revert with what changed them, or reinstall the package: pip install --force-reinstall "
        f"--no-deps {series.pin.package}=={series.pin.version} (or your build of it)"
    )


def commit(move: Move) -> None:
    """Note what is under way, write all files beside their targets, then rename them.

    Raises:
        ToolError: they cannot be written; the tree is as it was before this move.
    """
    root, receipt = move.tree.root, receipt_path(move.series, move.tree)
    writes = {root / p: data for p, data in move.wanted.items() if move.current[p] != data}
    for record in move.tree.records:
        old = record.read_bytes()
        if (new := _rewrite_record(old, move)) != old:
            writes[record] = new
    noted = receipt.read_bytes() if receipt.is_file() else None
    try:
        replace(receipt, receipt_text(move.series, complete=False))
        for target, data in writes.items():
            write_beside(target, data)
    except OSError as error:
        sweep([*writes, receipt])
        if noted is None:
            remove(receipt)
        else:
            replace(receipt, noted)
        name = move.series.name
        raise ToolError(
            f"{name}: cannot write in {root} ({error}); its files are as they were", REFUSED
        ) from error
    for target in writes:
        rename_beside(target)  # stopped in between: the verdict is "interrupted"
    for path in move.wanted:
        target = root / path
        for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
            remove(stale)
    if move.goal == APPLIED:
        replace(receipt, receipt_text(move.series, complete=True))
    else:
        remove(receipt)


def _rewrite_record(record: bytes, move: Move) -> bytes:
    """For the files of the goal, and with our own file while they are patched."""
    far_ends = move.pristine if move.goal == APPLIED else move.applied
    changes = {path: (far_ends[path], wanted) for path, wanted in move.wanted.items()}
    own = receipt_path(move.series, move.tree).name
    return list_file(rewrite_record(record, changes), own, move.goal == APPLIED)


def sweep_tree(series: Series, tree: Tree) -> None:
    """Remove what a killed run has left; nobody else writes here meanwhile."""
    paths = set(series.chains)
    if (receipt := read_receipt(series, tree)) is not None:
        paths.update(receipt.series.chains)
    sweep([*(tree.root / path for path in paths), *tree.records, receipt_path(series, tree)])


# ---- which series and which tree are meant ------------------------------------------------------


def load_selected(patches_dir: Path, names: list[str]) -> list[Series]:
    dirs = {path.name: path for path in series_dirs(patches_dir)}
    if unknown := [name for name in names if name not in dirs]:
        have = ", ".join(dirs) or "none"
        raise ToolError(f"{patches_dir}: no series {', '.join(unknown)}; there are: {have}", USAGE)
    return [load_series(dirs[name]) for name in names or dirs]


def select(
    patches_dir: Path, names: list[str], source_tree: Path | None
) -> list[tuple[Series, Tree]]:
    """The series that fit what is there: the same package at the same (public) version."""
    chosen: list[tuple[Series, Tree]] = []
    by_package: dict[str, list[Series]] = {}
    for series in load_selected(patches_dir, names):
        by_package.setdefault(series.pin.package, []).append(series)
    for package, candidates in by_package.items():
        tree = find_tree(package, source_tree)
        if tree is None:
            if names or not any(series.pin.requires for series in candidates):
                print(f"{package}: not found, skipped", file=sys.stderr)
            continue
        if tree.version is not None:
            public = tree.version.partition("+")[0]
            fitting = [series for series in candidates if series.pin.version == public]
        elif len(candidates) == 1:
            fitting = candidates
        else:
            fitting = [s for s in candidates if survey(s, tree).verdict != "foreign"]
        if len(fitting) != 1:
            pins = ", ".join(f"{s.pin.package} {s.pin.version} ({s.name})" for s in candidates)
            raise ToolError(
                f"{package} {tree.version or 'of unknown version'} in {tree.root} is not "
                f"supported; supported: {pins}",
                NO_PACKAGE,
            )
        chosen.append((fitting[0], tree))
    if not chosen:
        place = source_tree or sys.executable
        raise ToolError(
            f"no package to patch found in {place}; see --python, --source-tree", NO_PACKAGE
        )
    return chosen


def torn_pairs(
    patches_dir: Path, chosen: list[tuple[Series, Tree]], goal: str, source_tree: Path | None
) -> list[str]:
    """What would be patched without the series that it requires, once `goal` is reached."""
    every = {path.name: load_series(path) for path in series_dirs(patches_dir)}
    reached = {series.name: goal for series, _ in chosen}
    for name, series in every.items():
        tree = None if name in reached else find_tree(series.pin.package, source_tree)
        if tree is not None:
            reached[name] = survey(series, tree).verdict
    return [
        f"{name} calls what {series.pin.requires} adds, and that would not be applied: install the "
        "pinned versions of both packages, and name both series or none with --series"
        for name, series in every.items()
        if series.pin.requires
        and reached.get(name) == APPLIED
        and reached.get(series.pin.requires) != APPLIED
    ]
