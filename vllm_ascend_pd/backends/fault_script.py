# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in tests and drills, and when: ``"ok*3,corrupt,delay(5)*2,ok*"``."""

from __future__ import annotations

import re
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STEP = re.compile(r"(?P<kind>[a-z]+)(\((?P<number>\d+)\))?(?P<star>\*(?P<count>\d+)?)?")

KindT = TypeVar("KindT", bound=Enum)


def parse_steps(
    what: str, text: str, kinds: type[KindT]
) -> tuple[list[tuple[KindT, int]], tuple[KindT, int] | None]:
    """Outcomes in order, each with the number of its ``delay(n)`` or 0, and the one that is the end
    of the script for ever: ``*n`` repeats, a last ``*`` means for ever. ``what`` is for errors.
    """
    by_name = {str(kind.value): kind for kind in kinds}
    steps: list[tuple[KindT, int]] = []
    texts = [step.strip() for step in text.split(",")] if text.strip() else []
    for i, step in enumerate(texts):
        match = _STEP.fullmatch(step)
        if match is None or match["kind"] not in by_name:
            raise ConfigError(f"{what}: {step!r} is none of {sorted(by_name)}")
        if (match["kind"] == "delay") != (match["number"] is not None):
            raise ConfigError(f"{what}: {step!r}: write delay(n), and n only there")
        outcome = by_name[match["kind"]], int(match["number"] or 0)
        if match["star"] == "*":
            if i + 1 != len(texts):
                raise ConfigError(f"{what}: nothing can follow the endless {step!r}")
            return steps, outcome
        steps += [outcome] * int(match["count"] or 1)
    return steps, None


class FaultKind(Enum):
    """What happens to one write."""

    OK = "ok"
    FAIL = "fail"  # FAILED, nothing is written
    DROP = "drop"  # DONE, nothing is written
    SHORT = "short"  # DONE, only the first half is written
    CORRUPT = "corrupt"  # DONE, one bit in the middle is wrong
    GARBAGE = "garbage"  # DONE, every byte is 0xff: not a number in any format of KV
    DELAY = "delay"  # RUNNING for num_polls polls, then like OK
    NEVER = "never"  # RUNNING for ever, nothing is written
    LATE = "late"  # FAILED, and the bytes are written when the test says so


@dataclass(frozen=True, slots=True)
class Fault:
    """One scripted outcome; `num_polls` belongs to DELAY."""

    kind: FaultKind
    num_polls: int = 0


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """The arguments of one write, and how many came before it. Of a batch the addresses are those
    of its first piece, and `num_bytes` is the sum.
    """

    index: int
    session: str
    src_addr: int
    dst_addr: int
    num_bytes: int
    pieces: tuple[tuple[int, int, int], ...] = ()
    """Of a batch: (source, target, number of bytes) each."""

    def head(self, num_bytes: int) -> tuple[tuple[int, int, int], ...]:
        """The first `num_bytes` of a batch, as pieces."""
        pieces = []
        for src, dst, length in self.pieces:
            if num_bytes > 0:
                pieces.append((src, dst, min(length, num_bytes)))
            num_bytes -= length
        return tuple(pieces)


OK = Fault(FaultKind.OK)


class FaultScript:
    """Decides the fault of each write: by order, or by a predicate. Thread safe.

    Once an ordered script has run out, every further write is OK.
    """

    def __init__(
        self,
        faults: Iterable[Fault] = (),
        *,
        then: Fault = OK,
        choose: Callable[[WriteRequest], Fault] | None = None,
    ) -> None:
        """`faults` are used up in order, then `choose` decides, or it is `then` for ever."""
        self._faults = deque(faults)
        self._then = then
        self._choose = choose
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> FaultScript:
        """Reads "ok*3,corrupt,delay(5)*2,ok*": `*n` repeats, a last `*` means for ever."""
        steps, then = parse_steps("fault script", text, FaultKind)
        faults = [Fault(*step) for step in steps]
        return cls(faults, then=Fault(*then) if then is not None else OK)

    def next_fault(self, write: WriteRequest) -> Fault:
        with self._lock:
            if self._faults:
                return self._faults.popleft()
        return self._choose(write) if self._choose is not None else self._then
