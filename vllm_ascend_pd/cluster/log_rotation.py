# SPDX-License-Identifier: Apache-2.0
"""Log files that do not grow without end.

A child writes to its log itself, so that it lives on and says why when ``vllm-pd up`` is killed. A
log that is full is therefore copied and cut, as logrotate's ``copytruncate`` does: a line that is
written in the moment between the two is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_S = 2.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """``name.log`` of at most ``max_bytes`` (and what comes in ``CHECK_S``), and the
    ``num_old`` before it: ``name.log.1`` is the newest.
    """

    max_bytes: int = 100 << 20
    num_old: int = 4

    def rotate(self, log: Path) -> bool:
        """If it is full; blocks while it is copied."""
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > self.max_bytes:
                self._shift(log)
                os.truncate(log, 0)
                return True
        return False

    def _shift(self, log: Path) -> None:
        if not self.num_old:
            return
        old = [log.with_name(f"{log.name}.{n}") for n in range(1, self.num_old + 1)]
        copy = log.with_name(f"{log.name}.new")
        try:
            shutil.copyfile(log, copy)
            for newer, older in reversed(list(itertools.pairwise(old))):
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(older)
            copy.replace(old[0])
        except OSError as e:
            if e.errno == errno.ENOSPC:
                old[-1].unlink(missing_ok=True)  # it goes anyway: the next time there is its room
            raise
        finally:
            copy.unlink(missing_ok=True)  # a part, where the disk is full

    async def keep(self, logs: Sequence[Path]) -> None:
        """Until cancelled. One that cannot be copied grows until it can."""
        growing: set[Path] = set()
        while True:
            await asyncio.sleep(CHECK_S)
            for log in logs:
                try:
                    await asyncio.to_thread(self.rotate, log)
                    growing.discard(log)
                except (OSError, RuntimeError) as e:  # the latter: no thread is left for it
                    if log not in growing:
                        logger.warning("%s is not rotated, and grows: %s", log, e)
                    growing.add(log)
