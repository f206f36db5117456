# SPDX-License-Identifier: Apache-2.0
"""A clock for what takes one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Time that only the test moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now
