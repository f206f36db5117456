# SPDX-License-Identifier: Apache-2.0
"""The commands port and export of ``apply_patches.py``: a series as commits, and back."""

import argparse
import re
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from patch_series import (
    APPLIED,
    GIT_FAILED,
    NO_PACKAGE,
    USAGE,
    Contents,
    Files,
    Patch,
    Pin,
    Series,
    ToolError,
    pin_text,
    read_order,
    walk_chain,
)
from patched_tree import TreeFiles, find_tree, load_selected, pristine_contents
from scratch_repo import BASE_TAG, export_commits, git, make_scratch, reorder

PIN_FILE = ".git/pd-pin.toml"  # of a scratch repository: what export writes
SERIES_FILE = ".git/pd-series"  # what the series of a new version begins as


def read_sdist(sdist: Path, package: str) -> Contents:
    """All Python files of the package."""
    contents = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            is_wanted = path.startswith(f"{package}/") and path.endswith(".py")
            if is_wanted and (file := archive.extractfile(member)):
                contents[path] = file.read()
    return contents


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
    is_new = not order.is_file()
    begun = args.source_tree / SERIES_FILE if is_new else order
    text_now = begun.read_text() if begun.is_file() else ""
    if is_new or read_order(text_now) != list(exported):
        order.write_text(reorder(text_now, list(exported)))
        print("wrote series")
    pin = directory / "pin.toml"
    if not pin.is_file() and (args.source_tree / PIN_FILE).is_file():
        pin.write_text((args.source_tree / PIN_FILE).read_text())
        print("wrote pin.toml")
    elif not pin.is_file():
        print(f"now write {pin}")
    return 0


def cmd_port(args: argparse.Namespace) -> int:
    (old,) = load_selected(args.patches_dir, [args.from_series])
    prefix = f"{old.pin.package.replace('_', '-')}-"
    if not args.to_series.startswith(prefix):
        raise ToolError(f"--to {args.to_series}: not a version of {old.pin.package}", USAGE)
    target = Pin(old.pin.package, args.to_series.removeprefix(prefix), "")
    is_new = args.to_series != args.from_series
    new_files, pin = _released(args, target, args.source_tree, None if is_new else old)
    wanted = [*old.chains, *args.file]
    contents = {path: new_files[path] for path in wanted if path in new_files}
    if missing := [path for path in args.file if path not in contents]:
        raise ToolError(f"{args.to_series}: no such file: {', '.join(missing)}", USAGE)
    repo: Path = args.scratch or Path(tempfile.mkdtemp(prefix=f"{args.to_series}-"))
    repo.mkdir(parents=True, exist_ok=True)
    if any(repo.iterdir()):
        raise ToolError(f"{repo}: not empty; name another --scratch", USAGE)
    make_scratch(repo, contents)
    if is_new:
        try:
            old_files, _ = _released(args, old.pin, args.from_tree, old)
        except ToolError as error:
            print(f"{error}\nso conflicts cannot be merged: see --from-tree", file=sys.stderr)
        else:
            _store_blobs(repo, old, old_files)
            print_overview(old, args.to_series, look_ahead(repo, old, old_files, contents))
        shutil.copyfile(args.patches_dir / old.name / "series", repo / SERIES_FILE)
        if pin:
            (repo / PIN_FILE).write_text(pin)
            print(f"export will write this pin.toml:\n{pin}", end="")
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


def _released(
    args: argparse.Namespace, pin: Pin, tree_of_user: Path | None, series: Series | None
) -> tuple[Files, str]:
    """The released files of a version: of the tree that the user names, of the installed package if
    it is that version, or of the index. And the text of a pin, if it was fetched without one.
    """
    tree = find_tree(pin.package, tree_of_user)
    public = (tree.version or "").partition("+")[0] if tree is not None else ""
    if tree_of_user is not None:
        if tree is None:
            raise ToolError(f"{pin.package} not found in {tree_of_user}", NO_PACKAGE)
        if public not in ("", pin.version):
            raise ToolError(
                f"{tree.root} holds {pin.package} {public}, not {pin.version}", NO_PACKAGE
            )
    elif public != pin.version:
        import fetch_sdist  # it needs pip

        sdist, found = fetch_sdist.fetch_pin(pin, args.cache)
        return read_sdist(sdist, pin.package), "" if pin.sdist_sha256 else pin_text(found)
    assert tree is not None
    return TreeFiles(tree, pristine_contents(series, tree) if series is not None else {}), ""


def _store_blobs(repo: Path, old: Series, files: Files) -> None:
    """A three-way merge needs the files as they were before each patch."""
    for path, chain in old.chains.items():
        content = files[path]
        for diff in chain:
            git(repo, "hash-object", "-w", "--stdin", data=content)
            content = walk_chain(content, [diff], APPLIED)


# ---- what a port will take ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    """How one patch will fare: merges, needless or conflict; and for each conflict, why."""

    patch: Patch
    verdict: str
    reasons: tuple[str, ...] = ()


def look_ahead(repo: Path, old: Series, old_files: Files, new: Contents) -> list[Outlook]:
    """Each patch on the new files with those before it, less the hunks that do not merge."""
    before = {path: old_files[path] for path in old.chains}
    now = dict(new)
    outlooks = []
    for patch in old.patches:
        reasons: list[str] = []
        changes = False
        for diff in patch.diffs:
            after = walk_chain(before[diff.path], [diff], APPLIED)
            if diff.path not in now:
                reasons.append(f"{diff.path}: upstream has removed this file")
            else:
                sides = now[diff.path], before[diff.path], after
                merged, conflicts = merge(repo, *sides)
                reasons += [f"{diff.path}{conflict}" for conflict in conflicts]
                changes |= merged != now[diff.path]
                now[diff.path] = merged
            before[diff.path] = after
        verdict = "conflict" if reasons else "merges" if changes else "needless"
        outlooks.append(Outlook(patch, verdict, tuple(reasons)))
    return outlooks


_CONFLICT = re.compile(
    r"^<{7} [^\n]*\n(.*?)^\|{7} [^\n]*\n(.*?)^={7}\n.*?^>{7} [^\n]*\n", re.MULTILINE | re.DOTALL
)


def merge(repo: Path, ours: bytes, base: bytes, theirs: bytes) -> tuple[bytes, list[str]]:
    """`ours` with what leads from `base` to `theirs`, where that fits; elsewhere, why not."""
    with tempfile.TemporaryDirectory(dir=repo / ".git") as folder:
        for name, content in (("ours", ours), ("base", base), ("theirs", theirs)):
            (Path(folder) / name).write_bytes(content)
        files = [f"{folder}/{name}" for name in ("ours", "base", "theirs")]
        merged = git(repo, "merge-file", "-p", "--ours", *files)
        marked = git(repo, "merge-file", "-p", "--diff3", *files, most=127).decode()
    conflicts = []
    for conflict in _CONFLICT.finditer(marked):
        upstream, released = (side.splitlines() for side in conflict.group(1, 2))
        defined = re.findall(r"^ *(?:async )?(?:def|class) (\w+)", marked[: conflict.start()], re.M)
        said = [f" in or below {defined[-1]}:" if defined else " at its top:"]
        said += [f"      - {line.strip()}" for line in released if line not in upstream][:4]
        said += [f"      + {line.strip()}" for line in upstream if line not in released][:4]
        conflicts.append("\n".join(said))
    return merged, conflicts


def print_overview(old: Series, target: str, outlooks: list[Outlook]) -> None:
    count = Counter(outlook.verdict for outlook in outlooks)
    print(
        f"{old.name} on {target}: {count['merges']} patches merge as they are, {count['needless']}"
        f" are needless, {count['conflict']} need you (- what upstream has removed, + added)"
    )
    for outlook in outlooks:
        is_mend = "Kind: temporary" in outlook.patch.body
        if outlook.verdict != "merges" or is_mend:
            ask = "  (temporary: is it mended upstream?)" if is_mend else ""
            print(f"  {outlook.verdict:9} {outlook.patch.name}{ask}")
        for reason in outlook.reasons:
            print(f"    {reason}")
