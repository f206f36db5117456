# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of registered memory, the same for every transfer engine."""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class RegionTable:
    """Disjoint address ranges, sorted by start. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._starts)

    def add(self, addr: int, num_bytes: int) -> None:
        """Raises `ValueError` for a null or empty range, or one that overlaps another."""
        if addr <= 0 or num_bytes <= 0:
            raise ValueError(f"cannot register {num_bytes} bytes at address {addr:#x}")
        with self._lock:
            i = bisect.bisect_right(self._starts, addr)
            neighbours = self._starts[max(i - 1, 0) : i + 1]
            for start in neighbours:
                if start < addr + num_bytes and addr < start + self._sizes[start]:
                    raise ValueError(
                        f"{num_bytes} bytes at {addr:#x} overlap the registered region of "
                        f"{self._sizes[start]} bytes at {start:#x}"
                    )
            self._starts.insert(i, addr)
            self._sizes[addr] = num_bytes

    def remove(self, addr: int) -> None:
        """Raises `ValueError` if no region starts at `addr`."""
        with self._lock:
            if addr not in self._sizes:
                raise ValueError(f"no region is registered at {addr:#x}")
            del self._sizes[addr]
            self._starts.remove(addr)

    def contains(self, addr: int, num_bytes: int) -> bool:
        """True if the range lies inside one region."""
        with self._lock:
            i = bisect.bisect_right(self._starts, addr) - 1
            return i >= 0 and addr + num_bytes <= self._starts[i] + self._sizes[self._starts[i]]

    def check_inside(self, addr: int, num_bytes: int) -> None:
        """Raises `ValueError` if the range is empty or not inside one region."""
        if num_bytes <= 0:
            raise ValueError(f"a write of {num_bytes} bytes")
        if not self.contains(addr, num_bytes):
            raise ValueError(f"{num_bytes} bytes at {addr:#x} are not inside a registered region")

    def clear(self) -> list[int]:
        """Forgets all regions; returns their start addresses."""
        with self._lock:
            starts, self._starts = self._starts, []
            self._sizes.clear()
        return starts


def check_batch(
    regions: RegionTable,
    src_addrs: Sequence[int],
    dst_addrs: Sequence[int],
    lengths: Sequence[int],
) -> None:
    """Raises `ValueError` for lists that do not fit, or a source that is not registered."""
    if not lengths or not len(src_addrs) == len(dst_addrs) == len(lengths):
        raise ValueError(
            f"a batch of {len(src_addrs)} sources, {len(dst_addrs)} targets, {len(lengths)} lengths"
        )
    for addr, num_bytes in zip(src_addrs, lengths, strict=True):
        regions.check_inside(addr, num_bytes)
