# SPDX-License-Identifier: Apache-2.0
"""Apply, revert and maintain the patch series under ``patches/``; standard library only.

Each directory ``patches/<package>-<version>/`` is a *series*: a ``pin.toml`` (which package, which
version), a file ``series`` (the order) and one ``.patch`` per concern. The package is located
without importing it. What decides is git blob ids: every patch names the id of each file before
and after it, so the ids along a series say of a file on disk whether it is

    pristine   as released              partial   between two patches of the series
    applied    fully patched            foreign   anything else              missing

A series may require that of another package (vllm-ascend's calls what vLLM's adds): they are
applied in one call, each at its pinned version, and one is never left patched without the other.

Only a package that is pristine in every touched file is patched; one that is applied in every
touched file is left alone; anything else is refused, with the files named and nothing touched.
Results are built in memory, compiled, compared with the expected ids, written beside their
targets, and only then renamed into place. A file ``.vllm_ascend_pd-<series>.json`` beside the
package, which its RECORD lists, holds the patches that were used. After an interruption ``apply``
finishes the work and ``revert`` undoes it; when the series has changed since, ``apply`` takes the
old patches off first. A Python that has no package to patch leaves it to that of ``.venv``.

Exit codes: 0 done, or nothing to do · 1 refused, nothing was touched · 2 wrong usage
· 3 package not found, or no series for its version · 4 patch files are wrong, or a check failed
· 5 git failed, or a patch conflicts (port, export)
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import check_patches
from patch_series import (
    APPLIED,
    BAD_PATCH,
    GIT_FAILED,
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
    read_order,
    series_dirs,
    walk_chain,
)
from patch_writes import (
    list_file,
    locked,
    remove,
    rename_beside,
    replace,
    rewrite_record,
    sweep,
    write_beside,
)
from scratch_repo import BASE_TAG, export_commits, git, make_scratch, reorder, write_files

REPO_ROOT = Path(__file__).resolve().parent.parent
IS_INSTALLED = REPO_ROOT.name == "_patching"
# ---- where the package is ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory that holds the package: site-packages, or a source tree."""

    root: Path
    version: str | None  # None: a bare source tree, the blob ids alone decide
    records: tuple[Path, ...]  # RECORD files that list the package's files

    def read(self, paths: Iterable[str]) -> Contents:
        return {p: (self.root / p).read_bytes() for p in paths if (self.root / p).is_file()}


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
    """Note what is under way, write all files beside their targets, then rename them."""
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
        raise ToolError(f"{root}: cannot write ({error}); nothing was touched", REFUSED) from error
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


# ---- commands: status, apply, revert -------------------------------------------------------------


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


ADVICE = {
    "interrupted": "an earlier command was interrupted: 'apply' finishes it, 'revert' undoes it",
    "outdated": "patched by another version of this series: 'apply' updates, 'revert' takes it off",
    "half-patched": "some files are patched and some are not: reinstall the package",
    "foreign": "some files are neither the released nor the patched ones: reinstall the package",
}


def cmd_status(args: argparse.Namespace) -> int:
    report = []
    chosen = select(args.patches_dir, args.series, args.source_tree)
    torn = torn_pairs(args.patches_dir, [], APPLIED, args.source_tree)
    for series, tree in chosen:
        found = survey(series, tree)
        report.append(
            {
                "series": series.name,
                "package": series.pin.package,
                "version": tree.version,
                "root": str(tree.root),
                "verdict": found.verdict,
                "files": found.files,
            }
        )
        if not args.json:
            print(f"{series.name}: {found.verdict} ({tree.root / series.pin.package})")
            for path, state in found.files.items():
                print(f"  {state:9} {path}")
            if found.verdict in ADVICE:
                print(f"  {ADVICE[found.verdict]}")
    if args.json:
        print(json.dumps(report, indent=2))
    for problem in torn:
        print(problem, file=sys.stderr)
    return REFUSED if torn or any(entry["verdict"] in ADVICE for entry in report) else 0


def cmd_move(args: argparse.Namespace) -> int:
    goal = APPLIED if args.command == "apply" else PRISTINE
    chosen = select(args.patches_dir, args.series, args.source_tree)
    if torn := torn_pairs(args.patches_dir, chosen, goal, args.source_tree):
        raise ToolError("\n".join([*torn, "Nothing was touched."]), REFUSED)
    # What others call is there before them, and goes after them.
    chosen.sort(key=lambda pair: bool(pair[0].pin.requires), reverse=goal == PRISTINE)
    with contextlib.ExitStack() as locks:
        for root in sorted({tree.root for _, tree in chosen}):
            locks.enter_context(locked(root))
        for series, tree in chosen:
            sweep_tree(series, tree)
        # All series are planned before one is written: a refusal leaves every tree as it was.
        plans = [plan(series, tree, goal) for series, tree in chosen]
        for (series, tree), moves in zip(chosen, plans, strict=True):
            for move in moves:
                commit(move)
            what = f"now {goal}" if moves else f"already {goal}"
            count = len(series.patches)
            print(f"{series.name}: {what}, {count} patches, {tree.root / series.pin.package}")
    return 0


# ---- commands: check, export, port ---------------------------------------------------------------


def cmd_check(args: argparse.Namespace) -> int:
    # An installed copy has neither the tests nor the hooks that the headers name beside it.
    problems = [] if IS_INSTALLED else check_patches.lint(args.patches_dir, args.root)
    for problem in problems:
        print(problem, file=sys.stderr)
    checked = set()
    for series, contents, source in _check_sources(args):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                check_series(series, contents, Path(scratch))
            print(f"{series.name}: ok, {len(series.patches)} patches against {source}")
        except ToolError as error:
            problems.append(f"{series.name}: {error} (against {source})")
            print(problems[-1], file=sys.stderr)
        checked.add(series.name)
    for name in [path.name for path in series_dirs(args.patches_dir) if not args.series]:
        if name not in checked:
            print(f"{name}: only its form; for the rest install the package, or give --sdist")
    return BAD_PATCH if problems else 0


def _check_sources(args: argparse.Namespace) -> Iterator[tuple[Series, Contents, str]]:
    for sdist in args.sdist:
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        pinned = load_selected(args.patches_dir, args.series)
        fitting = [series for series in pinned if series.pin.sdist_sha256 == digest]
        if not fitting:
            raise PatchError(f"{sdist}: its sha256 {digest} is that of no pin")
        for series in fitting:
            yield series, read_sdist(sdist, series.chains), sdist.name
    if not args.sdist or args.source_tree:
        for series, tree in select(args.patches_dir, args.series, args.source_tree):
            yield series, pristine_contents(series, tree), str(tree.root)


def read_sdist(sdist: Path, paths: Iterable[str]) -> Contents:
    wanted, contents = set(paths), {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if path in wanted and (file := archive.extractfile(member)):
                contents[path] = file.read()
    return contents


def check_series(series: Series, contents: Contents, scratch: Path) -> None:
    """On copies: apply, revert, and re-create every patch with git."""
    tree = Tree(scratch / "tree", None, ())
    write_files(tree.root, contents)
    for goal in (APPLIED, PRISTINE):
        for move in plan(series, tree, goal):
            commit(move)
        if series.chains and survey(series, tree).verdict != goal:
            raise PatchError(f"the files are not {goal} after the move")
        if goal == APPLIED and (wrong := check_patches.lost_hooks(series, tree.read(contents))):
            raise PatchError(", ".join(wrong))
    if tree.read(contents) != contents or receipt_path(series, tree).exists():
        raise PatchError("revert does not restore the files exactly")
    if shutil.which("git") is None:
        print(f"{series.name}: git not found, patches are not re-created", file=sys.stderr)
        return
    repo = scratch / "repo"
    repo.mkdir()
    make_scratch(repo, contents)
    for patch in series.patches:
        git(repo, "am", "--quiet", "--keep", data=patch.text)
    exported = export_commits(repo, BASE_TAG)
    for patch in series.patches:
        if exported.get(patch.name) != patch.text:
            raise PatchError(
                f"{patch.name} is not as git writes it: 'port' and 'export' the series"
            )


def cmd_export(args: argparse.Namespace) -> int:
    if args.source_tree is None or len(args.series) != 1:
        raise ToolError("export needs --source-tree SCRATCH and one --series", USAGE)
    if (args.source_tree / ".git" / "rebase-apply").exists():
        raise ToolError(f"{args.source_tree}: 'git am' is not finished there yet", GIT_FAILED)
    exported = export_commits(args.source_tree, args.base)
    directory: Path = args.patches_dir / args.series[0]
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.patch"):
        if old.name not in exported:
            old.unlink()
            print(f"dropped {old.name}")
    for name, text in exported.items():
        target = directory / name
        if not target.is_file() or target.read_bytes() != text:
            target.write_bytes(text)
            print(f"wrote {name}")
    order = directory / "series"
    text_now = order.read_text() if order.is_file() else ""
    if read_order(text_now) != list(exported):
        order.write_text(reorder(text_now, list(exported)))
        print("wrote series")
    if not (directory / "pin.toml").is_file():
        print(f"now write {directory / 'pin.toml'}")
    return 0


def cmd_port(args: argparse.Namespace) -> int:
    (old,) = load_selected(args.patches_dir, [args.from_series])
    package = old.pin.package
    tree = find_tree(package, args.source_tree)
    if tree is None:
        raise ToolError(f"{package} not found in {args.source_tree or sys.executable}", NO_PACKAGE)
    is_new = args.to_series != args.from_series
    name = f"{package.replace('_', '-')}-{(tree.version or '').partition('+')[0]}"
    if tree.version and name != args.to_series:
        raise ToolError(f"{tree.root} holds {name}, not {args.to_series}", NO_PACKAGE)
    contents = tree.read([*old.chains, *args.file])
    if missing := [path for path in args.file if path not in contents]:
        raise ToolError(f"{tree.root}: no such file: {', '.join(missing)}", USAGE)
    if not is_new:
        contents.update(pristine_contents(old, tree))
    repo: Path = args.scratch or Path(tempfile.mkdtemp(prefix=f"{args.to_series}-"))
    repo.mkdir(parents=True, exist_ok=True)
    if any(repo.iterdir()):
        raise ToolError(f"{repo}: not empty; name another --scratch", USAGE)
    make_scratch(repo, contents)
    if is_new:
        _store_old_blobs(repo, old, find_tree(package, args.from_tree))
    print(f"scratch repository: {repo}")
    todo = f"apply_patches.py export --source-tree {repo} --series {args.to_series}"
    files = [str(args.patches_dir.resolve() / old.name / patch.name) for patch in old.patches]
    try:
        if files:
            git(repo, "am", "--3way", "--keep", *files, show=True)
    except ToolError as error:
        raise ToolError(
            f"A patch of {old.name} does not apply to {args.to_series}. In {repo}: mend the files,"
            " 'git add' them, 'git am --continue' (or 'git am --skip' to drop the patch) until "
            f"all are through; then: {todo}",
            GIT_FAILED,
        ) from error
    print(f"edit the commits above {BASE_TAG} there; then: {todo}")
    return 0


def _store_old_blobs(repo: Path, old: Series, tree: Tree | None) -> None:
    """A three-way merge needs the files as they were before each patch."""
    if tree is None or (tree.version or old.pin.version).partition("+")[0] != old.pin.version:
        print(f"no --from-tree with {old.name}: conflicts cannot be merged", file=sys.stderr)
        return
    for path, content in pristine_contents(old, tree).items():
        for diff in old.chains[path]:
            git(repo, "hash-object", "-w", "--stdin", data=content)
            content = walk_chain(content, [diff], APPLIED)


# ---- command line --------------------------------------------------------------------------------

EXAMPLES = """\
examples:
  apply_patches.py status                       what is installed, and in which state
  apply_patches.py apply                        patch the installed package(s)
  apply_patches.py apply --python /opt/venv/bin/python
  apply_patches.py revert                       restore the released files, byte for byte
  apply_patches.py apply --source-tree ../vllm  a checkout instead of the installed package
  apply_patches.py check --sdist vllm-0.30.0.tar.gz
  apply_patches.py port --from vllm-0.30.0 --to vllm-0.30.0 --scratch /tmp/s    edit the series
  apply_patches.py export --source-tree /tmp/s --series vllm-0.30.0             write it back
"""


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--patches-dir", type=Path, default=REPO_ROOT / "patches", help="default: %(default)s")
    add("--series", action="append", default=[], help="default: every series that fits")
    add("--source-tree", type=Path, help="directory that holds the package, e.g. vllm/")
    add("--python", help="interpreter whose packages are meant; default: the running one")
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, parents=[common], formatter_class=raw
        )
        sub.set_defaults(run=run)
        return sub

    status = command("status", cmd_status, "state of each touched file; exit code 1 if not clean")
    status.add_argument("--json", action="store_true", help="for scripts")
    command("apply", cmd_move, "patch the package; finishes or updates an earlier apply")
    command("revert", cmd_move, "restore the released files")
    check = command("check", cmd_check, "lint, then apply, revert and re-create on copies")
    check.add_argument("--root", type=Path, default=REPO_ROOT, help="repository of the patches")
    check.add_argument("--sdist", action="append", default=[], type=Path, help="check against it")
    export = command("export", cmd_export, "write a series from the commits of a scratch one")
    export.add_argument("--base", default=BASE_TAG, help="commit below the series (%(default)s)")
    port = command("port", cmd_port, "make a scratch repository with the series as commits")
    port.add_argument("--from", dest="from_series", required=True, help="series to start from")
    port.add_argument("--to", dest="to_series", required=True, help="the same, to edit it")
    port.add_argument("--scratch", type=Path, help="where to; default: a new temporary directory")
    port.add_argument("--from-tree", type=Path, help="the old version's files, for 3-way merges")
    port.add_argument("--file", action="append", default=[], help="one more file to start from")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    try:
        if args.python:
            return _run_with(args.python, argv)
        return int(args.run(args))
    except OSError as error:
        print(f"{error}", file=sys.stderr)
        return REFUSED
    except ToolError as error:
        print(error, file=sys.stderr)
        if error.code == NO_PACKAGE and args.python is None and args.source_tree is None:
            venv = REPO_ROOT / ".venv"
            if (venv / "bin" / "python").is_file() and Path(sys.prefix) != venv:
                python = os.path.relpath(venv / "bin" / "python")
                print(f"it may be in the environment of this repository: {python}", file=sys.stderr)
                return _run_with(python, argv)
        return error.code


def _run_with(python: str, argv: list[str]) -> int:
    """This very file runs there: it finds, and compiles as, that Python does."""
    return subprocess.run([python, str(Path(__file__).resolve()), *argv, "--python="]).returncode


if __name__ == "__main__":
    sys.exit(main())
