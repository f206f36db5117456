# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Verdict(str, Enum):
    """In rising order of concern."""

    SKIPPED = "skipped"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    found: str
    """What is there; of a skipped check, why it was skipped."""
    fix: str = ""
    """A command, or what to change. Set if the verdict is ``WARN`` or ``FAIL``."""
    values: dict[str, Any] = field(default_factory=dict)
    """The same in figures, for ``--json``."""


class Check(Protocol):
    """Looks at one thing. What it needs is given to its constructor."""

    name: str

    async def run(self) -> Sequence[Finding]:
        """Never raises for what it finds; waits for nothing longer than some seconds."""


def ok(check: str, found: str, **values: Any) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, found, "", values)


def skipped(check: str, reason: str) -> Finding:
    """It was not looked at."""
    return Finding(check, Verdict.SKIPPED, reason)


def warn(check: str, found: str, fix: str, **values: Any) -> Finding:
    """It works, but not as it should."""
    return Finding(check, Verdict.WARN, found, fix, values)


def fail(check: str, found: str, fix: str, **values: Any) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAIL, found, fix, values)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when anything failed."""
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def reason_of(error: Exception) -> str:
    """What a person is told of it. A deadline that has passed has no words of its own."""
    late = isinstance(error, asyncio.TimeoutError)
    return str(error) or ("no answer in time" if late else type(error).__name__)
