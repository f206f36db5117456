# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

from vllm_ascend_pd.log_limit import MAX_LINES, WINDOW_S, LimitRepeats


class Lines:
    """What reaches a log, at times that the test chooses."""

    def __init__(self) -> None:
        self.now = 0.0
        self._filter = LimitRepeats(lambda: self.now)
        self.seen: list[str] = []

    def log(self, message: str, *args: object) -> None:
        record = logging.LogRecord("name", logging.WARNING, "", 0, message, args, None)
        if self._filter.filter(record):
            self.seen.append(record.getMessage())


def test_message_is_limited_whatever_its_arguments() -> None:
    lines = Lines()
    for number in range(3 * MAX_LINES):
        lines.log("refused %s", number)
    assert lines.seen == [f"refused {number}" for number in range(MAX_LINES)]
    lines.log("another one: %s", 1)
    assert lines.seen[-1] == "another one: 1"


def test_what_was_left_out_is_said_later() -> None:
    lines = Lines()
    for _ in range(MAX_LINES + 7):
        lines.log("refused %s", "100%")
    lines.now = WINDOW_S
    lines.log("refused %s", "100%")
    lines.log("refused %s", "b")
    assert lines.seen[-2:] == ["refused 100% (7 more were left out)", "refused b"]
