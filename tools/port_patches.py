# SPDX-License-Identifier: Apache-2.0
"""The commands port and export of ``apply_patches.py``: a series as commits, and back."""

import argparse
import sys
import tarfile
import tempfile
from pathlib import Path

from patch_series import (
    APPLIED,
    GIT_FAILED,
    NO_PACKAGE,
    USAGE,
    Contents,
    Series,
    ToolError,
    read_order,
    walk_chain,
)
from patched_tree import Tree, find_tree, load_selected, pristine_contents
from scratch_repo import BASE_TAG, export_commits, git, make_scratch, reorder


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
