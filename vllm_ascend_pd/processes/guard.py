# SPDX-License-Identifier: Apache-2.0
"""Ends a supervisor's children when the supervisor is gone, however it went.

A process of its own. It reads from a pipe that only the supervisor has open: ``+PID`` and ``-PID``,
a line for each child that was started or is over. At the end of the pipe it sends each child that
is left SIGTERM, and its process group SIGKILL some seconds later; then it removes the files that
were there for them alone. A signal by the kernel (PR_SET_PDEATHSIG) would come once, and vLLM loses
a SIGTERM that comes while it loads a model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

POLL_S = 0.05


def end_groups(groups: Iterable[int], patience_s: float) -> None:
    """SIGTERM for the leader of each group, SIGKILL for the groups that do not end by it."""
    left = {group for group in groups if _send(os.kill, group, signal.SIGTERM)}
    end = time.monotonic() + patience_s
    while left and time.monotonic() < end:
        time.sleep(POLL_S)
        left = {group for group in left if _send(os.kill, group, 0)}
    for group in groups:
        _send(os.killpg, group, signal.SIGKILL)


def _send(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Whether the target was there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)
        return True
    return False


def main() -> None:
    """``python -m vllm_ascend_pd.processes.guard PATIENCE_S [FILE...]``, with the pipe as standard
    input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    end_groups(groups, float(sys.argv[1]))
    for path in sys.argv[2:]:
        Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
