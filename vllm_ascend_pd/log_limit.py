# SPDX-License-Identifier: Apache-2.0
"""Loggers whose lines peers and clients can cause, so that they cannot fill a disk."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LINES = 50
WINDOW_S = 10.0


def limited_logger(name: str) -> logging.Logger:
    """Of each message, whatever its arguments, so many lines in so many seconds; the next line
    says how many were left out.
    """
    logger = logging.getLogger(name)
    logger.addFilter(LimitRepeats())
    return logger


class LimitRepeats(logging.Filter):
    """Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[object, tuple[float, int]] = {}
        """By message: when its window began, and how many came since."""

    def forget(self) -> None:
        """No line came before."""
        with self._lock:
            self._windows.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        with self._lock:
            began, count = self._windows.get(record.msg, (now, 0))
            left_out = 0
            if now - began >= WINDOW_S:
                left_out = max(0, count - MAX_LINES)
                began, count = now, 0
            self._windows[record.msg] = began, count + 1
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more were left out)", ()
        return count < MAX_LINES
