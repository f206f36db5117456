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

Exit codes: 0 done, or nothing to do · 1 refused: nothing was touched but what it names · 2 wrong
usage · 3 package not found, or no series for its version · 4 patch files are wrong, or a check
failed · 5 git failed, or a patch conflicts (port, export)
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import check_patches
from patch_series import (
    APPLIED,
    BAD_PATCH,
    NO_PACKAGE,
    PRISTINE,
    REFUSED,
    Contents,
    Files,
    PatchError,
    Series,
    ToolError,
    series_dirs,
    walk_chain,
)
from patch_writes import locked
from patched_tree import (
    Tree,
    TreeFiles,
    commit,
    load_selected,
    plan,
    pristine_contents,
    receipt_path,
    select,
    survey,
    sweep_tree,
    torn_pairs,
)
from port_patches import cmd_export, cmd_port, read_sdist
from scratch_repo import BASE_TAG, export_commits, git, make_scratch, write_files

REPO_ROOT = Path(__file__).resolve().parent.parent
IS_INSTALLED = REPO_ROOT.name == "_patching"
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
        done: list[str] = []
        for (series, tree), moves in zip(chosen, plans, strict=True):
            for move in moves:
                try:
                    commit(move)
                except ToolError as error:
                    raise ToolError(
                        f"{error}\n{_what_is_left(args.command, done)}", REFUSED
                    ) from error
                done.append(f"{move.series.name} is {move.goal}")
            what = f"now {goal}" if moves else f"already {goal}"
            count = len(series.patches)
            print(f"{series.name}: {what}, {count} patches, {tree.root / series.pin.package}")
    return 0


def _what_is_left(command: str, done: list[str]) -> str:
    if not done:
        return "Nothing was touched."
    back = "revert" if command == "apply" else "apply"
    return (
        f"Done before that: {', '.join(done)}. Once these files can be written, '{command}' does"
        f" the rest; '{back}' undoes what was done."
    )


# ---- command: check -----------------------------------------------------------------------------


def cmd_check(args: argparse.Namespace) -> int:
    # An installed copy has neither the tests nor the hooks that the headers name beside it.
    problems = [] if IS_INSTALLED else check_patches.lint(args.patches_dir, args.root)
    for problem in problems:
        print(problem, file=sys.stderr)
    checked = set()
    for series, files, source in _check_sources(args):
        contents = {path: files[path] for path in series.chains if path in files}
        try:
            with tempfile.TemporaryDirectory() as scratch:
                check_series(series, contents, Path(scratch))
            what = f"{len(series.patches)} patches"
            if not IS_INSTALLED:
                what += f" and {_check_names(args.root, series, files)} names"
            print(f"{series.name}: ok, {what} against {source}")
        except ToolError as error:
            problems.append(f"{series.name}: {error} (against {source})")
            print(problems[-1], file=sys.stderr)
        checked.add(series.name)
    for name in [path.name for path in series_dirs(args.patches_dir) if not args.series]:
        if name not in checked:
            print(f"{name}: only its form; for the rest install the package, or give --sdist")
    return BAD_PATCH if problems else 0


def _check_sources(args: argparse.Namespace) -> Iterator[tuple[Series, Files, str]]:
    """Each series with the released files of its package."""
    pinned = load_selected(args.patches_dir, args.series)
    sdists = list(args.sdist)
    if args.fetch:
        import fetch_sdist  # it needs pip

        cache = args.root / ".cache" / "sdists"
        sdists += [fetch_sdist.fetch(series.name, cache, args.patches_dir) for series in pinned]
    for sdist in sdists:
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        fitting = [series for series in pinned if series.pin.sdist_sha256 == digest]
        if not fitting:
            raise PatchError(f"{sdist}: its sha256 {digest} is that of no pin")
        for series in fitting:
            yield series, read_sdist(sdist, series.pin.package), sdist.name
    if not sdists or args.source_tree:
        for series, tree in select(args.patches_dir, args.series, args.source_tree):
            released = pristine_contents(series, tree)
            yield series, TreeFiles(tree, released), str(tree.root)


def _check_names(root: Path, series: Series, files: Files) -> int:
    """How many names of the package our code takes from it; they are there in the patched one."""
    from touched_names import missing_names, wanted_names

    patched = {p: walk_chain(files[p], chain, APPLIED) for p, chain in series.chains.items()}
    wanted = wanted_names(root / "vllm_ascend_pd", series.pin.package)
    if missing := missing_names(wanted, patched, files):
        raise PatchError("our code uses what is not there:\n  " + "\n  ".join(missing))
    return len(wanted)


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


# ---- command line --------------------------------------------------------------------------------

EXAMPLES = """\
examples:
  apply_patches.py status                       what is installed, and in which state
  apply_patches.py apply                        patch the installed package(s)
  apply_patches.py apply --python /opt/venv/bin/python
  apply_patches.py revert                       restore the released files, byte for byte
  apply_patches.py apply --source-tree ../vllm  a checkout instead of the installed package
  apply_patches.py check --fetch                every series, on the released sources
  apply_patches.py port --from vllm-0.30.0 --to vllm-0.30.0 --scratch /tmp/s    edit the series
  apply_patches.py port --from vllm-0.30.0 --to vllm-0.31.0 --scratch /tmp/s    the next release
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
    check.add_argument("--fetch", action="store_true", help="check against every pin's sdist")
    export = command("export", cmd_export, "write a series from the commits of a scratch one")
    export.add_argument("--base", default=BASE_TAG, help="commit below the series (%(default)s)")
    port = command("port", cmd_port, "say what a port takes, and make the series commits")
    port.add_argument("--from", dest="from_series", required=True, help="series to start from")
    port.add_argument("--to", dest="to_series", required=True, help="the same, to edit it")
    port.add_argument("--scratch", type=Path, help="where to; default: a new temporary directory")
    port.add_argument("--from-tree", type=Path, help="the old version's files, for 3-way merges")
    cache = REPO_ROOT / ".cache" / "sdists"
    port.add_argument("--cache", type=Path, default=cache, help="for fetched sdists (%(default)s)")
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
