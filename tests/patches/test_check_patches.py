# SPDX-License-Identifier: Apache-2.0
"""check_patches.py: a good series passes, and each way to be wrong is named."""

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

import check_patches  # noqa: E402

HOOKS = '''
from typing import Protocol

current_step = None


class Base(Protocol):
    def shutdown(self) -> None: ...


class SchedulerHooks(Base, Protocol):
    def build_step(self) -> object: ...

    # not called by a patch: the engine side calls it
    def drain(self) -> None: ...


def begin_step(output):
    """Start."""


def helper(
    a,
):  # not called by a patch: begin_step calls it
    """Help."""


def _private(): ...
'''

SCHED = "sched-build-metadata.patch"
WORKER = "worker-begin-step.patch"
A, B, C, D = (digit * 40 for digit in "abcd")

GOOD_SCHED = f"""\
From: {check_patches.AUTHOR}
Subject: sched: build the metadata

Why: two lines
 of reason
Kind: incompatible
Hook: vllm/v1/core/sched/scheduler.py:Scheduler.update
Calls: vllm_ascend_pd.hooks.SchedulerHooks.build_step,
 vllm_ascend_pd.hooks.SchedulerHooks.shutdown
No-patch-because: no door
Shadowed-by: none
Upstream: none
Remove-when: never
Test: tests/patches/test_it.py

diff --git a/vllm/v1/core/sched/scheduler.py b/vllm/v1/core/sched/scheduler.py
index {A}..{B} 100644
--- a/vllm/v1/core/sched/scheduler.py
+++ b/vllm/v1/core/sched/scheduler.py
@@ -1,2 +1,4 @@
 one
+x = self.pd.build_step()
+self.pd.shutdown()
 two
"""
GOOD_WORKER = f"""\
From: {check_patches.AUTHOR}
Subject: worker: begin step

Why: reason
Kind: temporary
Hook: vllm/v1/worker/runner.py:Runner.step
Calls: vllm_ascend_pd.hooks.begin_step, vllm_ascend_pd.hooks.current_step
No-patch-because: no door
Upstream: rejected https://example.invalid/pull/1
Remove-when: never
Test: tests/patches/test_it.py

diff --git a/vllm/v1/worker/runner.py b/vllm/v1/worker/runner.py
index {C}..{D} 100644
--- a/vllm/v1/worker/runner.py
+++ b/vllm/v1/worker/runner.py
@@ -1,2 +1,4 @@
 one
+pd_hooks.begin_step(x)
+y = pd_hooks.current_step
 two
"""


class Project:
    """A repository with hooks, one test and a series of two good patches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.series = root / "patches" / "vllm-0.30.0"
        self.hooks = root / "vllm_ascend_pd" / "hooks.py"
        for directory in (self.series, self.hooks.parent, root / "tests" / "patches"):
            directory.mkdir(parents=True)
        self.hooks.write_text(HOOKS)
        (root / "tests" / "patches" / "test_it.py").touch()
        (self.series / "pin.toml").write_text(
            f'package = "vllm"\nversion = "0.30.0"\nsdist_sha256 = "{64 * "0"}"\n'
        )
        (self.series / "series").write_text(f"# comment\n{SCHED}\n\n{WORKER}  # why here\n")
        (self.series / SCHED).write_text(GOOD_SCHED)
        (self.series / WORKER).write_text(GOOD_WORKER)

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.series / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def problems(self) -> list[str]:
        return check_patches.lint(self.root / "patches", self.root)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_good_series_has_no_problem(project: Project) -> None:
    assert project.problems() == []


def test_command_line_reports_and_sets_the_exit_code(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_patches.main(["--root", str(project.root)]) == 0
    project.replace(WORKER, "Kind: temporary", "Kind: nice")
    assert check_patches.main(["--root", str(project.root)]) == 4
    assert "vllm-0.30.0/worker-begin-step.patch: Kind: nice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (check_patches.AUTHOR, "A Person <a@person.invalid>", "the author is not that of all"),
        (" <maintainers@", " <maintainer@", "the author is not that of all"),
        (f"From: {check_patches.AUTHOR}\n", "", "the author is not that of all"),
        ("Subject: worker: begin step", "Subject: begin step", "area: verb object"),
        ("Subject: worker: begin step", "Subject: tools: begin step", "area: verb object"),
        ("Subject: worker: begin step", "Subject: worker: end step", "worker-end-step.patch"),
        ("Kind: temporary", "Kind: nice", "Kind: nice"),
        ("Upstream: rejected https", "Upstream: maybe https", "Upstream: is not"),
        ("rejected https://example.invalid/pull/1", "none", "temporary, Upstream: none: give"),
        ("rejected https://example.invalid/pull/1", "not-forwardable", "give the URL"),
        ("Hook: vllm/v1/worker/runner.py", "Hook: vllm/v1/worker/walker.py", "Hook: vllm"),
        ("runner.py:Runner.step", "runner.py", "Hook: vllm/v1/worker/runner.py"),
        ("test_it.py", "test_no.py", "Test: tests/patches/test_no.py: no such file"),
        ("hooks.begin_step,", "hooks.begin_stop,", "begin_stop: no such name"),
        ("vllm_ascend_pd.hooks.begin_step,", "begin_step,", "begin_step: no such name"),
        (", vllm_ascend_pd.hooks.current_step", "", "uses current_step, which Calls:"),
        ("pd_hooks.begin_step(x)", "x = 1", "hooks.begin_step: no added line uses it"),
        ("+y = pd_hooks.current_step\n", "+y = pd_hooks.current_step \n", "ends in blanks"),
        ("+y = pd_hooks", "+while pd_hooks", "adds a 'while'"),
        (f"{C}..{D}", f"{C[:12]}..{D[:12]}", "full-index"),
        ("@@ -1,2 +1,4 @@", "@@ -1,2 +1,5 @@", "as many lines as its header says"),
        ("index", "new file mode 100644\nindex", "no new, deleted or renamed file"),
        (" two\n", " two", "no newline"),
    ],
)
def test_wrong_patch_is_named(project: Project, old: str, new: str, said: str) -> None:
    project.replace(WORKER, old, new)
    assert [problem for problem in project.problems() if WORKER in problem and said in problem]


def test_a_loop_that_is_changed_is_no_new_one(project: Project) -> None:
    changed = "@@ -1,2 +1,4 @@\n-for one in all:\n+for one in some:\n"
    project.replace(WORKER, "@@ -1,2 +1,4 @@\n one\n", changed)
    assert not [problem for problem in project.problems() if "adds a" in problem]
    project.replace(WORKER, "-for one in all:\n", "-one\n")
    assert [problem for problem in project.problems() if "adds a 'for'" in problem]


@pytest.mark.parametrize(
    "key",
    ["Why", "Kind", "Hook", "Calls", "No-patch-because", "Upstream", "Remove-when", "Test"],
)
def test_each_trailer_is_compulsory(project: Project, key: str) -> None:
    project.replace(WORKER, f"\n{key}: ", "\nNote: ")
    assert f"vllm-0.30.0/{WORKER}: no '{key}:' in the last paragraph of the header: add it" in (
        project.problems()
    )


def test_scheduler_hunk_needs_shadowed_by(project: Project) -> None:
    project.replace(SCHED, "Shadowed-by: none\n", "")
    (problem,) = project.problems()
    assert "no 'Shadowed-by:'" in problem


def test_trailers_above_the_last_paragraph_do_not_count(project: Project) -> None:
    project.replace(WORKER, "Upstream:", "\nUpstream:")
    assert any("no 'Why:'" in problem for problem in project.problems())


def test_too_many_added_lines_in_a_hunk(project: Project) -> None:
    project.replace(WORKER, "@@ -1,2 +1,4 @@\n one\n", "@@ -1,2 +1,8 @@\n one\n" + "+a = 1\n" * 4)
    (problem,) = project.problems()
    assert "adds 6 lines, the limit is 5" in problem


def test_too_many_changed_lines_in_a_patch(project: Project) -> None:
    hunks = "".join(f"@@ -{n},2 +{n},1 @@\n one\n-two\n" for n in range(10, 100, 4))
    (project.series / WORKER).write_text(GOOD_WORKER + hunks)
    (problem,) = project.problems()
    assert "changes 25 lines, more than 20" in problem


def test_too_many_files_in_a_patch(project: Project) -> None:
    diff = GOOD_WORKER[GOOD_WORKER.index("diff --git") :]
    more = "".join(diff.replace("runner.py", f"runner{n}.py") for n in range(2))
    (project.series / WORKER).write_text(GOOD_WORKER + more)
    (problem,) = project.problems()
    assert "changes 3 files, more than 2" in problem


def test_broken_chain_of_ids(project: Project) -> None:
    path = "vllm/v1/core/sched/scheduler.py"
    project.replace(WORKER, "vllm/v1/worker/runner.py", path)
    project.replace(WORKER, "Upstream:", "Shadowed-by: none\nUpstream:")
    (problem,) = project.problems()
    assert f"{path} starts from {C[:12]}" in problem
    project.replace(WORKER, C, B)
    assert project.problems() == []


def test_unlisted_patch(project: Project) -> None:
    (project.series / "series").write_text(f"{SCHED}\n")
    assert f"vllm-0.30.0/{WORKER}: not listed in series" in "\n".join(project.problems())


def test_listed_patch_that_does_not_exist(project: Project) -> None:
    (project.series / "series").write_text(f"{SCHED}\n{WORKER}\nworker-gone.patch\n")
    (problem,) = project.problems()
    assert "lists worker-gone.patch, which does not exist" in problem


def test_patch_listed_twice(project: Project) -> None:
    (project.series / "series").write_text(f"{SCHED}\n{WORKER}\n{SCHED}\n")
    (problem,) = project.problems()
    assert f"lists {SCHED} twice" in problem


def test_directory_named_otherwise_than_its_pin(project: Project) -> None:
    project.replace("pin.toml", "0.30.0", "0.31.0")
    (problem,) = project.problems()
    assert "pin.toml is for vllm-0.31.0" in problem


def test_directory_without_a_pin(project: Project) -> None:
    (project.series / "pin.toml").unlink()
    (problem,) = project.problems()
    assert "need package, version and sdist_sha256" in problem


def test_hook_that_no_patch_calls(project: Project) -> None:
    project.hooks.write_text(HOOKS + "\n\ndef new_hook(): ...\n")
    (problem,) = project.problems()
    assert "hooks.py: no patch calls new_hook" in problem


def test_method_of_a_hook_class_that_no_patch_calls(project: Project) -> None:
    method = "    def reset(self) -> None: ...\n\n"
    project.hooks.write_text(HOOKS.replace("    def build_step", f"{method}    def build_step"))
    (problem,) = project.problems()
    assert "hooks.py: no patch calls SchedulerHooks.reset" in problem


def test_mark_without_a_reason_does_not_count(project: Project) -> None:
    project.hooks.write_text(HOOKS.replace("patch: begin_step calls it", "patch:"))
    (problem,) = project.problems()
    assert "no patch calls helper" in problem


def test_patch_without_calls_says_none(project: Project) -> None:
    project.replace(SCHED, "+self.pd.shutdown()\n", "+y = 1\n")
    project.replace(SCHED, ",\n vllm_ascend_pd.hooks.SchedulerHooks.shutdown", "")
    project.replace(WORKER, "Calls: vllm", "Calls: none\nNote: vllm")
    project.replace(WORKER, "pd_hooks.", "")
    project.hooks.write_text(HOOKS.replace("def begin_step", "def _begin_step"))
    assert project.problems() == []
    project.replace(WORKER, "Kind: temporary", "Kind: incompatible")
    (problem,) = project.problems()
    assert "Calls: none: only what is temporary or not-forwardable may" in problem
    project.replace(WORKER, "rejected https://example.invalid/pull/1", "not-forwardable")
    assert project.problems() == []


def test_missing_hooks_file_is_reported_when_patches_call_it(project: Project) -> None:
    project.hooks.unlink()
    (problem,) = project.problems()
    assert "hooks.py: not found" in problem
