# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine.TransferEngine`` of an NPU host, played in one process: no NPU, no Mooncake.

Bytes move, registered memory is checked, and failures can be scripted. What it cannot show is what
the real one does; its calls and return codes are those that vllm-ascend relies on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar


class NativeEngine:
    _sessions: ClassVar[dict[str, NativeEngine]] = {}
    _ports: ClassVar[Any] = count(15001)
    _moving: ClassVar[Any] = threading.Lock()
    """Held while bytes move: memory may go as soon as it is not registered any more."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rc = 0
        """Of ``initialize``."""
        self.batch_rcs: list[int] = []
        """Of the next batches, before they are 0 again."""
        self.hold = threading.Event()
        """Cleared, batches wait."""
        self.hold.set()
        self.knows: Callable[[int, int], bool] = lambda addr, num_bytes: True
        """Whether memory is such as the links of NPUs reach: device memory, pinned memory."""
        self.regions: dict[int, int] = {}
        self.port = next(NativeEngine._ports)
        self._done: dict[int, int] = {}

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self.calls.append(("initialize", host, metadata, protocol, device))
        self.forces_tcp = "MC_FORCE_TCP" in os.environ
        NativeEngine._sessions[f"{host}:{self.port}"] = self
        return self.rc

    def get_rpc_port(self) -> int:
        return self.port

    def get_engine(self) -> str:
        return f"the engine at port {self.port}"

    def register_memory(self, addr: int, num_bytes: int) -> int:
        self.calls.append(("register_memory", addr, num_bytes))
        if not self.knows(addr, num_bytes):
            return -1
        self.regions[addr] = num_bytes
        return 0

    def unregister_memory(self, addr: int) -> int:
        with NativeEngine._moving:
            del self.regions[addr]
        return 0

    def send_probe(self, session: str) -> int:
        self.calls.append(("probe", threading.current_thread().name))
        return 0 if session in NativeEngine._sessions else -102

    def transfer_submit_write(self, session: str, src: int, dst: int, num_bytes: int) -> int:
        self.calls.append(("write", threading.current_thread().name))
        batch_id = len(self._done) + 1
        self._done[batch_id] = self._move(session, [src], [dst], [num_bytes])
        return batch_id

    def transfer_check_status(self, batch_id: int) -> int:
        return 1 if self._done[batch_id] == 0 else -1

    def batch_transfer_sync_write(
        self, session: str, srcs: list[int], dsts: list[int], lengths: list[int]
    ) -> int:
        self.calls.append(("batch", session, list(srcs), list(dsts), list(lengths)))
        self.hold.wait()
        if self.batch_rcs and (rc := self.batch_rcs.pop(0)):
            return rc
        return self._move(session, srcs, dsts, lengths)

    def _move(self, session: str, srcs: list[int], dsts: list[int], lengths: list[int]) -> int:
        peer = NativeEngine._sessions.get(session)
        if peer is None:
            return -1
        with NativeEngine._moving:
            for addr, owner, length in [
                *((a, self, n) for a, n in zip(srcs, lengths, strict=True)),
                *((a, peer, n) for a, n in zip(dsts, lengths, strict=True)),
            ]:
                if not any(s <= addr and addr + length <= s + n for s, n in owner.regions.items()):
                    return -1
            for src, dst, length in zip(srcs, dsts, lengths, strict=True):
                ctypes.memmove(dst, src, length)
        return 0

    def close(self) -> None:
        """When its last reference goes, the real one leaves the network."""
        NativeEngine._sessions = {
            session: engine
            for session, engine in NativeEngine._sessions.items()
            if engine is not self
        }
