# SPDX-License-Identifier: Apache-2.0
"""Kills apply_patches.py at each of its system calls that write, and looks at what each leaves.

Started as ``kill_points.py PATCHES ROOT COMMAND``, with one thread, since it forks. For each such
call of ``apply_patches.py COMMAND`` on a copy of ROOT it prints a line of JSON: the call, and what
`status`, `apply` and `revert` made of it. The last line is of the run that nobody killed.
"""

import builtins
import contextlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import apply_patches

WRITING = ("open", "write", "fchown", "fchmod", "fsync", "replace", "unlink")
"""Functions of ``os`` through which the tool writes; `audit` says when there is another."""
AUDITED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown",
           "os.link", "os.symlink", "os.truncate", "os.utime", "shutil.copymode")  # fmt: skip


class Killer:
    """Counts the calls, and ends the process in the n-th: before it, or half way of a write."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.num_calls = 0
        self.inside = False
        for name in WRITING:
            setattr(os, name, self._wrap(name, getattr(os, name)))
        sys.addaudithook(self.audit)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_WRONLY:
                return call(*args, **kwargs)
            if self.num_calls == self.kill_at:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                print(name, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            self.num_calls += 1
            self.inside = True
            try:
                return call(*args, **kwargs)
            finally:
                self.inside = False

        return wrapped

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event in AUDITED and (event != "open" or (args[2] or 0) & os.O_ACCMODE)
        if writes and not self.inside:
            builtins.print(f"a write that is not counted: {event} {args}", file=sys.stderr)
            os._exit(99)


def run(places: list[str], command: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = apply_patches.main([command, *places, *(["--json"] if command == "status" else [])])
    return code, said.getvalue()


def killed(places: list[str], command: str, kill_at: int) -> str:
    """The call in which it was killed; empty where it came to its end."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writes, 1)
        Killer(kill_at)
        with contextlib.redirect_stderr(io.StringIO()):
            os._exit(apply_patches.main([command, *places]))
    os.close(writes)
    with open(reads) as said:
        last = said.read().split("\n")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"ended with {status}: {last}"
    return last[-2] if status else ""


def snapshot(root: Path) -> dict[str, list[Any]]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(root)): [path.read_bytes().decode(), path.stat().st_mode & 0o7777]
        for path in files
    }


def main(patches: str, origin: str, command: str) -> None:
    call, kill_at = "start", 0
    while call:
        outcome: dict[str, Any] = {}
        root = Path(origin).with_name("killed")
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(origin, root, symlinks=True)
        call = killed(["--patches-dir", patches, "--source-tree", str(root)], command, kill_at)
        outcome["call"], outcome["left"] = call, snapshot(root)
        for then in ("status", "apply", "revert"):
            copy = root.with_name(f"{root.name}-{then}")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(root, copy, symlinks=True)
            places = ["--patches-dir", patches, "--source-tree", str(copy)]
            outcome[then], said = run(places, then)
            if then == "status":
                outcome["verdict"] = json.loads(said)[0]["verdict"]
            else:
                outcome[f"{then} left"] = snapshot(copy)
        print(json.dumps(outcome))
        kill_at += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
