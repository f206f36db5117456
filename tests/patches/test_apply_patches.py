# SPDX-License-Identifier: Apache-2.0
"""apply_patches.py on a small package made here, and on copies of the pinned engine's files."""

import base64
import csv
import difflib
import hashlib
import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOOL = REPO / "tools" / "apply_patches.py"
sys.path.insert(0, str(TOOL.parent))

import apply_patches  # noqa: E402
import fetch_sdist  # noqa: E402
from patch_series import BAD_PATCH, GIT_FAILED, NO_PACKAGE, REFUSED, USAGE, blob_id  # noqa: E402
from patched_tree import pristine_contents, select  # noqa: E402
from scratch_repo import write_files  # noqa: E402

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

NUMBERS = "".join(f"n{i} = {i}\n" for i in range(40))
CORE = NUMBERS.replace("n20 = 20\n", "def run():\n    return 20\n")
CORE_HOOKED = CORE.replace("    return 20\n", "    hook()\n    return 20\n")
CORE_FINAL = CORE_HOOKED.replace("n5 = 5\n", "from toy import hook\nn5 = 5\n")
SIDE = NUMBERS
SIDE_FINAL = NUMBERS.replace("n30 = 30\n", "n30 = hook(30)\n")

TOY = "toy-1.2.0"

Steps = list[tuple[str, dict[str, tuple[str, str]]]]
STEPS: Steps = [
    ("engine: call hook in run", {"toy/core.py": (CORE, CORE_HOOKED)}),
    (
        "engine: import hook",
        {"toy/core.py": (CORE_HOOKED, CORE_FINAL), "toy/side.py": (SIDE, SIDE_FINAL)},
    ),
]


def write_patch(directory: Path, subject: str, changes: dict[str, tuple[str, str]]) -> str:
    text = f"From: A Person <a@person.invalid>\nSubject: {subject}\n\nWhy: a test\n\n"
    for path, (old, new) in changes.items():
        text += f"diff --git a/{path} b/{path}\n"
        text += f"index {blob_id(old.encode())}..{blob_id(new.encode())} 100644\n"
        lines = old.splitlines(True), new.splitlines(True)
        text += "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))
    name = subject.replace(": ", "-").replace(" ", "-") + ".patch"
    (directory / name).write_text(text)
    return name


def write_series(patches: Path, steps: Steps = STEPS, version: str = "1.2.0") -> None:
    directory = patches / f"toy-{version}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "pin.toml").write_text(
        f'package = "toy"\nversion = "{version}"\nsdist_sha256 = "{64 * "0"}"\n'
    )
    names = [write_patch(directory, subject, changes) for subject, changes in steps]
    (directory / "series").write_text("# the order\n" + "\n".join(names) + "\n")


def record_row(path: Path, root: Path) -> str:
    data = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(root)},sha256={digest},{len(data)}"


def write_package(root: Path) -> None:
    """Sources that cannot be imported: the tool must never do so."""
    (root / "toy").mkdir(parents=True)
    (root / "toy" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (root / "toy" / "core.py").write_text(CORE)
    (root / "toy" / "side.py").write_text(SIDE)
    (root / "toy" / "core.py").chmod(0o640)


def install(root: Path, version: str = "1.2.0", dist: str = "toy_cpu") -> None:
    write_package(root)
    info = root / f"{dist}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {dist}\nVersion: {version}\n")
    rows = [record_row(path, root) for path in sorted((root / "toy").glob("*.py"))]
    (info / "RECORD").write_bytes("\r\n".join([*rows, f"{info.name}/RECORD,,", ""]).encode())


class Site:
    """A site-packages directory with `toy` and a patches directory, driven in process."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "site"
        self.patches = tmp_path / "patches"
        install(self.root)
        write_series(self.patches)
        self.core = self.root / "toy" / "core.py"
        self.side = self.root / "toy" / "side.py"
        self.record = next(self.root.glob("*.dist-info/RECORD"))

    def __call__(self, command: str, *options: str) -> int:
        places = ("--patches-dir", str(self.patches), "--source-tree", str(self.root))
        return apply_patches.main([command, *places, *options])

    def snapshot(self) -> dict[str, bytes]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# ---- apply and revert ----------------------------------------------------------------------------


def test_apply_patches_every_file(site: Site) -> None:
    assert site("apply") == 0
    assert site.core.read_text() == CORE_FINAL
    assert site.side.read_text() == SIDE_FINAL
    assert site("status") == 0


def test_revert_restores_the_tree_byte_for_byte(site: Site) -> None:
    before = site.snapshot()
    assert site("apply") == 0
    assert site("revert") == 0
    assert site.snapshot() == before


def test_apply_keeps_the_file_mode(site: Site) -> None:
    site("apply")
    assert site.core.stat().st_mode & 0o777 == 0o640


def test_second_apply_writes_nothing(site: Site) -> None:
    site("apply")
    times = {path: path.stat().st_mtime_ns for path in site.root.rglob("*")}
    assert site("apply") == 0
    assert {path: path.stat().st_mtime_ns for path in site.root.rglob("*")} == times


def test_revert_of_a_pristine_tree_writes_nothing(site: Site) -> None:
    before = site.snapshot()
    assert site("revert") == 0
    assert site.snapshot() == before


def test_record_describes_the_patched_files(site: Site) -> None:
    site("apply")
    rows = site.record.read_bytes().decode().split("\r\n")
    assert record_row(site.core, site.root) in rows
    assert record_row(site.side, site.root) in rows


def test_record_lists_what_the_tool_adds(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    """So that an installer removes it with the package."""
    venv = site.root.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/*/site-packages"))
    shutil.copytree(site.root, packages, dirs_exist_ok=True)
    python = str(venv / "bin" / "python")
    assert (
        apply_patches.main(["apply", "--patches-dir", str(site.patches), "--python", python]) == 0
    )
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "uninstall", "--yes", "toy_cpu"], check=True)
    # What that RECORD does not list, METADATA, stays.
    assert [path.name for path in packages.iterdir()] == ["toy_cpu-1.2.0.dist-info"]


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
@pytest.mark.parametrize("last", [True, False])
def test_record_is_restored_whatever_ends_its_lines(site: Site, ending: str, last: bool) -> None:
    text = ending.join(site.record.read_text().split())
    site.record.write_bytes((text + ending * last).encode())
    before = site.snapshot()
    assert site("apply") == 0
    with site.record.open(newline="") as file:
        assert [f".vllm_ascend_pd-{TOY}.json", "", ""] in list(csv.reader(file))
    assert site("revert") == 0
    assert site.snapshot() == before


def test_record_row_of_unknown_content_is_left_alone(site: Site) -> None:
    row = record_row(site.core, site.root).encode()
    text = site.record.read_bytes().replace(row, b"toy/core.py,,")
    site.record.write_bytes(text)
    site("apply")
    assert b"\r\ntoy/core.py,,\r\n" in site.record.read_bytes()
    site("revert")
    assert site.record.read_bytes() == text


def test_apply_removes_stale_bytecode_of_touched_files_only(site: Site) -> None:
    cache = site.root / "toy" / "__pycache__"
    cache.mkdir()
    for name in ("core.cpython-311.pyc", "core.cpython-311.opt-1.pyc", "other.cpython-311.pyc"):
        (cache / name).touch()
    site("apply")
    assert [path.name for path in cache.iterdir()] == ["other.cpython-311.pyc"]


def test_link_stays_a_link(site: Site, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "core.py"
    elsewhere.parent.mkdir()
    site.core.rename(elsewhere)
    site.core.symlink_to(elsewhere)
    assert site("apply") == 0
    assert site.core.readlink() == elsewhere
    assert elsewhere.read_text() == CORE_FINAL
    assert site("revert") == 0
    assert site.core.readlink() == elsewhere
    assert elsewhere.read_text() == CORE
    assert [path.name for path in elsewhere.parent.iterdir()] == ["core.py"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_stays(site: Site) -> None:
    os.chown(site.core, 1234, 4321)
    site.core.chmod(0o640)
    for command in ("apply", "revert"):
        assert site(command) == 0
        now = site.core.stat()
        assert (now.st_uid, now.st_gid, now.st_mode & 0o7777) == (1234, 4321, 0o640)


def test_owner_that_cannot_stay_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = site.snapshot()
    real = os.fstat

    def fstat(handle: int) -> os.stat_result:
        found = real(handle)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))

    def fchown(handle: int, uid: int, gid: int) -> None:
        raise PermissionError("not the owner")

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "fchown", fchown)
    assert site("apply") == REFUSED
    assert "not the owner" in capsys.readouterr().err
    assert site.snapshot() == before


def test_hard_linked_cache_copy_is_not_changed(site: Site, tmp_path: Path) -> None:
    os.link(site.core, tmp_path / "cache.py")
    site("apply")
    assert (tmp_path / "cache.py").read_text() == CORE


def test_only_newlines_separate_lines(site: Site) -> None:
    old = "a = 1\r\nb = 2\x0c\nc = '\x0b\x85'\nd = 4\n"
    new = old.replace("b = 2", "b = 3")
    write_series(site.patches, [])
    (site.patches / "toy-1.2.0" / "series").write_text("engine-x.patch\n")
    (site.patches / "toy-1.2.0" / "engine-x.patch").write_bytes(
        (
            "From: A <a@a.invalid>\nSubject: engine: x\n\nWhy: y\n\n"
            "diff --git a/toy/side.py b/toy/side.py\n"
            f"index {blob_id(old.encode())}..{blob_id(new.encode())} 100644\n"
            "--- a/toy/side.py\n+++ b/toy/side.py\n@@ -1,4 +1,4 @@\n"
            " a = 1\r\n-b = 2\x0c\n+b = 3\x0c\n c = '\x0b\x85'\n d = 4\n"
        ).encode()
    )
    site.side.write_bytes(old.encode())
    assert site("apply") == 0
    assert site.side.read_bytes() == new.encode()


# ---- refusals: nothing is touched ----------------------------------------------------------------


def spoil_foreign(site: Site) -> None:
    site.side.write_text(SIDE + "# edited\n")


def spoil_shifted(site: Site) -> None:
    site.core.write_text("# one line above everything\n" + CORE)


def spoil_partial(site: Site) -> None:
    site.core.write_text(CORE_HOOKED)


def spoil_half(site: Site) -> None:
    site.core.write_text(CORE_FINAL)


def spoil_missing(site: Site) -> None:
    site.side.unlink()


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_foreign, "foreign   toy/side.py"),
        (spoil_shifted, "foreign   toy/core.py"),
        (spoil_partial, "partial   toy/core.py"),
        (spoil_half, "applied   toy/core.py"),
        (spoil_missing, "missing   toy/side.py"),
    ],
)
def test_unclean_tree_is_refused_by_name_and_untouched(
    site: Site,
    spoil: Callable[[Site], None],
    named: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(site)
    before = site.snapshot()
    assert site(command) == REFUSED
    assert named in capsys.readouterr().err
    assert site.snapshot() == before
    assert site("status") == REFUSED


def test_patched_file_edited_afterwards_is_not_reverted(site: Site) -> None:
    site("apply")
    site.core.write_text(CORE_FINAL + "# mine\n")
    before = site.snapshot()
    assert site("revert") == REFUSED
    assert site.snapshot() == before


def damage(site: Site, old: str, new: str) -> None:
    path = site.patches / "toy-1.2.0" / "engine-import-hook.patch"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (blob_id(SIDE_FINAL.encode()), "1" * 40, "does not give the blob id"),
        ("@@ -28,7 +28,7 @@", "@@ -27,7 +27,7 @@", "does not match the file"),
        ("+n30 = hook(30)", "+n30 = hook(31)", "does not give the blob id"),
        (" n29 = 29\n", " n29 = 28\n", "does not match the file"),
        (" n33 = 33\n", "", "as many lines as its header says"),
        (blob_id(CORE_HOOKED.encode()), "2" * 40, "fix the order"),
        (f"..{blob_id(SIDE_FINAL.encode())}", "..1234567", "full-index"),
    ],
)
def test_wrong_patch_file_is_reported_and_nothing_is_touched(
    site: Site, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(site, old, new)
    before = site.snapshot()
    assert site("apply") == BAD_PATCH
    assert said in capsys.readouterr().err
    assert site.snapshot() == before


def test_patch_whose_result_does_not_compile_is_refused(site: Site) -> None:
    broken = {"toy/side.py": (SIDE, SIDE.replace("n7 = 7\n", "n7 = = 7\n"))}
    write_series(site.patches, [("engine: break it", broken)])
    before = site.snapshot()
    assert site("apply") == BAD_PATCH
    assert site.snapshot() == before


def test_refusal_for_one_package_leaves_the_other_untouched(site: Site) -> None:
    (site.root / "zoo").mkdir()
    (site.root / "zoo" / "__init__.py").touch()
    (site.root / "zoo" / "a.py").write_text("edited = 1\n")
    directory = site.patches / "zoo-3.0"
    directory.mkdir()
    (directory / "pin.toml").write_text('package = "zoo"\nversion = "3.0"\nsdist_sha256 = "00"\n')
    name = write_patch(directory, "api: call zoo", {"zoo/a.py": ("a = 1\n", "a = 2\n")})
    (directory / "series").write_text(name + "\n")
    before = site.snapshot()
    assert site("apply") == REFUSED
    assert site.snapshot() == before


def write_zoo(site: Site) -> Path:
    """A second package, which calls what the first one's series adds; its module."""
    (site.root / "zoo").mkdir()
    (site.root / "zoo" / "__init__.py").touch()
    module = site.root / "zoo" / "a.py"
    module.write_text("a = 1\n")
    directory = site.patches / "zoo-3.0"
    directory.mkdir()
    (directory / "pin.toml").write_text(
        f'package = "zoo"\nversion = "3.0"\nsdist_sha256 = "00"\nrequires = "{TOY}"\n'
    )
    name = write_patch(directory, "api: call zoo", {"zoo/a.py": ("a = 1\n", "a = 2\n")})
    (directory / "series").write_text(name + "\n")
    return module


def refuse_writes_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_(path: Path, *args: int, **kwargs: int) -> int:
        if Path(path).parent == directory:
            raise PermissionError(f"no writes in {directory.name}")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)


def test_write_that_fails_at_the_second_package_tells_what_was_done(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write_zoo(site)
    with monkeypatch.context() as patch:
        refuse_writes_in(module.parent, patch)
        assert site("apply") == REFUSED
    said = capsys.readouterr().err
    assert "no writes in zoo" in said
    assert f"Done before that: {TOY} is applied" in said
    assert "othing was touched" not in said
    assert (site.core.read_text(), module.read_text()) == (CORE_FINAL, "a = 1\n")
    assert site("apply") == 0, "it does the rest"
    assert module.read_text() == "a = 2\n"


def test_write_that_fails_at_the_first_package_touches_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_zoo(site)
    before = site.snapshot()
    with monkeypatch.context() as patch:
        refuse_writes_in(site.core.parent, patch)
        assert site("apply") == REFUSED
    assert "Nothing was touched." in capsys.readouterr().err
    assert site.snapshot() == before


# ---- a series that changed -----------------------------------------------------

CHANGED: Steps = [
    (
        "engine: call hook in run",
        {"toy/core.py": (CORE, CORE.replace("    return 20\n", "    return hook()\n"))},
    )
]


def test_apply_takes_an_older_series_off_first(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site("apply")
    write_series(site.patches, CHANGED)
    assert site("status") == REFUSED
    assert "outdated" in capsys.readouterr().out
    assert site("apply") == 0
    assert site.core.read_text() == CHANGED[0][1]["toy/core.py"][1]
    assert site.side.read_text() == SIDE
    assert site("status") == 0


def test_revert_takes_an_older_series_off(site: Site) -> None:
    before = site.snapshot()
    site("apply")
    write_series(site.patches, CHANGED)
    assert site("revert") == 0
    assert site.snapshot() == before


def test_reinstalled_package_is_patched_again(site: Site) -> None:
    site("apply")
    site.core.write_text(CORE)
    site.side.write_text(SIDE)
    assert site("apply") == 0
    assert site.core.read_text() == CORE_FINAL


# ---- which package, which series -----------------------------------------------------------------


def run_tool(path: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_installed_package_is_found_without_importing_it(site: Site) -> None:
    done = run_tool([site.root], "apply", "--patches-dir", str(site.patches))
    assert (done.returncode, done.stderr) == (0, "")
    assert site.core.read_text() == CORE_FINAL


def test_alias_distribution_without_files_does_not_count(site: Site) -> None:
    alias = site.root / "toy-9.9.9+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text("Metadata-Version: 2.4\nName: toy\nVersion: 9.9.9+cpu\n")
    (alias / "RECORD").write_text(f"{alias.name}/METADATA,,\n{alias.name}/RECORD,,\n")
    assert run_tool([site.root], "status", "--patches-dir", str(site.patches)).returncode == 0


def test_editable_install_is_found_by_its_metadata(tmp_path: Path) -> None:
    write_package(tmp_path / "src")
    info = tmp_path / "site" / "toy-1.2.0+empty.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: toy\nVersion: 1.2.0+empty\n")
    write_series(tmp_path / "patches")
    write_series(tmp_path / "patches", version="1.3.0")
    places = [tmp_path / "src", tmp_path / "site"]
    done = run_tool(places, "status", "--json", "--patches-dir", str(tmp_path / "patches"))
    assert done.returncode == 0
    (entry,) = json.loads(done.stdout)
    assert (entry["series"], entry["version"]) == ("toy-1.2.0", "1.2.0+empty")
    assert entry["files"] == {"toy/core.py": "pristine", "toy/side.py": "pristine"}


def test_other_interpreter_is_patched_with_python_option(site: Site, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    shutil.copytree(site.root, packages, dirs_exist_ok=True)
    options = ("--patches-dir", str(site.patches), "--python", str(venv / "bin" / "python"))
    assert run_tool([], "apply", *options).returncode == 0
    assert (packages / "toy" / "core.py").read_text() == CORE_FINAL
    assert site.core.read_text() == CORE


@pytest.mark.parametrize("version", ["1.2.0+cpu", "1.2.0+empty"])
def test_local_version_is_accepted(tmp_path: Path, version: str) -> None:
    install(tmp_path / "other", version)
    write_series(tmp_path / "patches")
    options = ("--patches-dir", str(tmp_path / "patches"), "--source-tree", str(tmp_path / "other"))
    assert apply_patches.main(["apply", *options]) == 0


def test_other_version_is_refused_with_the_supported_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "other", "1.2.1")
    write_series(tmp_path / "patches")
    write_series(tmp_path / "patches", version="1.3.0")
    options = ("--patches-dir", str(tmp_path / "patches"), "--source-tree", str(tmp_path / "other"))
    assert apply_patches.main(["apply", *options]) == NO_PACKAGE
    said = capsys.readouterr().err
    assert "toy 1.2.1" in said
    assert "toy 1.2.0 (toy-1.2.0), toy 1.3.0 (toy-1.3.0)" in said


def test_absent_package_is_reported(site: Site, tmp_path: Path) -> None:
    done = run_tool([], "apply", "--patches-dir", str(site.patches))
    assert done.returncode == NO_PACKAGE
    assert "toy: not found" in done.stderr


def test_python_of_the_bootstrap_is_asked_where_another_has_no_package(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apply_patches, "REPO_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["status", "--patches-dir", str(site.patches)]
    assert apply_patches.main(command) == NO_PACKAGE  # there is none
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "asked: $*"\nexit 9\n')
    python.chmod(0o755)
    capfd.readouterr()
    assert apply_patches.main(command) == 9
    assert f"asked: {TOOL} {shlex.join(command)} --python=" in capfd.readouterr().out
    assert apply_patches.main([*command, "--python="]) == NO_PACKAGE  # as that one is run
    assert apply_patches.main([*command, "--source-tree", str(tmp_path)]) == NO_PACKAGE
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert apply_patches.main(command) == NO_PACKAGE


def test_bare_directory_of_the_same_name_is_no_package(site: Site, tmp_path: Path) -> None:
    (tmp_path / "cwd" / "toy").mkdir(parents=True)
    done = run_tool([tmp_path / "cwd"], "status", "--patches-dir", str(site.patches))
    assert done.returncode == NO_PACKAGE


def test_bare_source_tree_picks_the_series_by_blob_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_package(tmp_path / "src")
    write_series(tmp_path / "patches")
    write_series(tmp_path / "patches", [("engine: x", {"toy/core.py": ("a\n", "b\n")})], "1.3.0")
    options = ("--patches-dir", str(tmp_path / "patches"), "--source-tree", str(tmp_path / "src"))
    assert apply_patches.main(["apply", *options]) == 0
    assert "toy-1.2.0: now applied" in capsys.readouterr().out


def test_unknown_series_is_wrong_usage(site: Site) -> None:
    assert site("apply", "--series", "toy-0.1") == USAGE


# ---- check, export, port -------------------------------------------------------------------------


def canonical(site: Site) -> None:
    """Let git write the series once: difflib knows no section headings."""
    scratch = site.patches.parent / "canonical"
    port = ("--from", "toy-1.2.0", "--to", "toy-1.2.0", "--scratch", str(scratch))
    assert site("port", *port) == 0
    assert export(site, scratch) == 0


def export(site: Site, scratch: Path, series: str = "toy-1.2.0") -> int:
    places = ("--patches-dir", str(site.patches), "--source-tree", str(scratch))
    return apply_patches.main(["export", *places, "--series", series])


def git(repo: Path, *arguments: str) -> None:
    who = ("-c", "user.name=A Person", "-c", "user.email=a@person.invalid")
    subprocess.run(["git", *who, *arguments], cwd=repo, check=True, capture_output=True)


def check_errors(site: Site, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What `check` says beyond the lint, which has its own tests and dislikes toy headers."""
    capsys.readouterr()
    assert site("check", "--root", str(site.patches.parent), *options) == BAD_PATCH
    return [line for line in capsys.readouterr().err.splitlines() if "1.2.0: " in line]


@needs_git
@pytest.mark.parametrize("installed", ["pristine", "applied"])
def test_check_works_on_copies_of_a_pristine_or_patched_tree(
    site: Site, installed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    canonical(site)
    if installed == "applied":
        site("apply")
    before = site.snapshot()
    assert check_errors(site, capsys) == []
    assert site.snapshot() == before


@needs_git
def test_check_finds_a_patch_that_git_would_write_otherwise(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    canonical(site)
    damage(site, "Why: a test\n", "Why: a test   \n")
    (problem,) = check_errors(site, capsys)
    assert "engine-import-hook.patch is not as git writes it" in problem


@needs_git
def test_check_finds_a_hook_that_the_patched_file_lacks(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    canonical(site)
    damage(site, "Why: a test\n", "Why: a test\nHook: toy/core.py:walk\n")
    (problem,) = check_errors(site, capsys)
    assert "Hook: toy/core.py:walk: no such name" in problem


@needs_git
def test_check_against_an_sdist_by_its_sha256(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sdist = tmp_path / "toy-1.2.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for path, text in (("toy/core.py", CORE), ("toy/side.py", SIDE)):
            member = tarfile.TarInfo(f"toy-1.2.0/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    canonical(site)
    pin = site.patches / "toy-1.2.0" / "pin.toml"
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    pin.write_text(pin.read_text().replace(64 * "0", digest))
    assert check_errors(site, capsys, "--sdist", str(sdist)) == []
    sdist.write_bytes(sdist.read_bytes() + b"\0")
    assert site("check", "--sdist", str(sdist)) == BAD_PATCH
    assert "is that of no pin" in capsys.readouterr().err


@needs_git
def test_export_after_port_is_byte_identical(site: Site) -> None:
    canonical(site)
    directory = site.patches / "toy-1.2.0"
    first = {path.name: path.read_bytes() for path in directory.iterdir()}
    shutil.rmtree(site.patches.parent / "canonical")
    canonical(site)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == first
    assert b"\nDate:" not in b"".join(first.values())


@needs_git
def test_scratch_repository_inside_another_checkout(site: Site) -> None:
    git(site.patches.parent, "init", "--quiet")
    canonical(site)
    assert site("apply") == 0
    assert site.core.read_text() == CORE_FINAL


@needs_git
def test_export_adds_and_drops_patches_and_keeps_comments(site: Site, tmp_path: Path) -> None:
    directory = site.patches / "toy-1.2.0"
    names = (directory / "series").read_text().splitlines()[1:]
    (directory / "series").write_text(f"# first\n{names[0]}\n\n# second\n{names[1]}\n# end\n")
    scratch = tmp_path / "scratch"
    port = ("--from", "toy-1.2.0", "--to", "toy-1.2.0", "--file", "toy/__init__.py")
    assert site("port", *port, "--scratch", str(scratch)) == 0
    git(scratch, "reset", "--quiet", "--hard", "HEAD~1")
    (scratch / "toy" / "__init__.py").write_text("hooked = True\n")
    git(scratch, "commit", "--quiet", "--all", "--message=api: notify the hook\n\nWhy: new")
    assert export(site, scratch) == 0
    assert (directory / "series").read_text() == (
        "# first\nengine-call-hook-in-run.patch\napi-notify-hook.patch\n# end\n"
    )
    assert not (directory / names[1]).exists()
    assert site("apply") == 0
    assert (site.root / "toy" / "__init__.py").read_text() == "hooked = True\n"


def new_version(site: Site, core: str) -> Path:
    """The next release: a longer side.py, and the given core.py."""
    tree = site.patches.parent / "new"
    install(tree, "1.3.0")
    (tree / "toy" / "core.py").write_text(core)
    (tree / "toy" / "side.py").write_text("# moved down\n" * 9 + SIDE)
    return tree


def port_to_new(site: Site, tree: Path, scratch: Path) -> int:
    places = ("--patches-dir", str(site.patches), "--source-tree", str(tree))
    names = ("--from", "toy-1.2.0", "--to", "toy-1.3.0", "--scratch", str(scratch))
    return apply_patches.main(["port", *places, *names, "--from-tree", str(site.root)])


@needs_git
def test_port_moves_a_series_to_the_next_version(site: Site, tmp_path: Path) -> None:
    # The neighbouring line changed too: only a three-way merge gets through.
    tree = new_version(site, CORE.replace("n19 = 19\n", "n19 = 19.5\n"))
    commented = f"# The order.\n\n{(site.patches / 'toy-1.2.0' / 'series').read_text()}"
    (site.patches / "toy-1.2.0" / "series").write_text(commented)
    assert port_to_new(site, tree, tmp_path / "scratch") == 0
    assert export(site, tmp_path / "scratch", "toy-1.3.0") == 0
    assert (site.patches / "toy-1.3.0" / "series").read_text() == commented
    pin = (site.patches / "toy-1.2.0" / "pin.toml").read_text().replace("1.2.0", "1.3.0")
    (site.patches / "toy-1.3.0" / "pin.toml").write_text(pin)
    options = ("--patches-dir", str(site.patches), "--source-tree", str(tree))
    assert apply_patches.main(["apply", *options]) == 0
    assert (tree / "toy" / "core.py").read_text() == CORE_FINAL.replace("= 19\n", "= 19.5\n")


@needs_git
def test_port_stops_at_a_conflict_and_tells_how_to_go_on(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = new_version(site, CORE.replace("    return 20\n", "    return 21\n"))
    scratch = tmp_path / "scratch"
    assert port_to_new(site, tree, scratch) == GIT_FAILED
    said = capsys.readouterr()
    assert "engine: call hook in run" in said.err
    assert "git am --continue" in said.err
    assert "1 patches merge as they are, 0 are needless, 1 need you" in said.out
    conflict = said.out.partition("conflict  engine-call-hook-in-run.patch\n")[2].splitlines()
    assert conflict[0].startswith("    toy/core.py in or below run")
    assert [line.strip() for line in conflict[1:3]] == ["- return 20", "+ return 21"]
    assert export(site, scratch, "toy-1.3.0") == GIT_FAILED
    merged = CORE_HOOKED.replace("    return 20\n", "    return 21\n")
    (scratch / "toy" / "core.py").write_text(merged)
    git(scratch, "add", "toy/core.py")
    git(scratch, "am", "--continue")
    assert export(site, scratch, "toy-1.3.0") == 0
    assert len(list((site.patches / "toy-1.3.0").glob("*.patch"))) == 2


@needs_git
def test_port_says_what_upstream_has_done_already(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = new_version(site, CORE_HOOKED)
    assert port_to_new(site, tree, tmp_path / "scratch") == 0
    said = capsys.readouterr().out
    assert "1 patches merge as they are, 1 are needless, 0 need you" in said
    assert "needless  engine-call-hook-in-run.patch" in said


@needs_git
def test_port_fetches_a_version_that_has_no_pin_and_export_writes_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, sdist = new_version(site, CORE), io.BytesIO()
    with tarfile.open(fileobj=sdist, mode="w:gz") as archive:
        archive.add(tree / "toy", "toy-1.3.0/toy")
    digest = hashlib.sha256(sdist.getvalue()).hexdigest()
    monkeypatch.setattr(fetch_sdist, "_download", lambda pin: (sdist.getvalue(), digest))
    places = ("--patches-dir", str(site.patches), "--cache", str(tmp_path / "cache"))
    names = ("--from", "toy-1.2.0", "--to", "toy-1.3.0", "--scratch", str(tmp_path / "scratch"))
    assert apply_patches.main(["port", *places, *names, "--from-tree", str(site.root)]) == 0
    assert digest in capsys.readouterr().out
    assert export(site, tmp_path / "scratch", "toy-1.3.0") == 0
    pin = (site.patches / "toy-1.3.0" / "pin.toml").read_text()
    assert f'version = "1.3.0"\nsdist_sha256 = "{digest}"\n' in pin
    cached = tmp_path / "cache" / "toy-1.3.0.tar.gz"
    check = ("--root", str(tmp_path), "--series", "toy-1.3.0", "--sdist", str(cached))
    apply_patches.main(["check", *places[:2], *check])
    assert "toy-1.3.0: ok, 2 patches" in capsys.readouterr().out


def test_port_refuses_a_tree_of_another_version(site: Site, tmp_path: Path) -> None:
    port = ("--from", "toy-1.2.0", "--to", "toy-1.4.0", "--scratch", str(tmp_path / "scratch"))
    assert site("port", *port) == NO_PACKAGE


# ---- the real thing ------------------------------------------------------------------------------

VLLM = importlib.util.find_spec("vllm")


@pytest.mark.skipif(VLLM is None, reason="needs the pinned vLLM")
def test_every_touched_file_of_the_installed_engine_survives_a_round_trip(tmp_path: Path) -> None:
    assert VLLM is not None
    assert VLLM.origin is not None
    chosen = select(REPO / "patches", [], None)
    ((series, installed),) = [one for one in chosen if one[0].pin.package == "vllm"]
    released = pristine_contents(series, installed)
    assert series.chains
    write_files(tmp_path, released)
    options = ("--series", series.name, "--source-tree", str(tmp_path))
    assert apply_patches.main(["apply", *options]) == 0
    for path, chain in series.chains.items():
        assert blob_id((tmp_path / path).read_bytes()) == chain[-1].after
    assert apply_patches.main(["revert", *options]) == 0
    assert {path: (tmp_path / path).read_bytes() for path in released} == released
