# SPDX-License-Identifier: Apache-2.0
"""The transfer engines of one worker, and which of them reaches a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.transfer_engine import SupportsReach

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_ascend_pd.backends.transfer_engine import TransferEngine

SHARED_MEMORY = "shared_memory"
MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class Route:
    """How a peer is written to: ``name`` is that of the transport, in logs and metrics."""

    name: str
    engine: TransferEngine
    session: str


class Transports:
    """Engines by name, the one to prefer first. What is registered is registered with all."""

    def __init__(self, engines: Mapping[str, TransferEngine]) -> None:
        self.engines = dict(engines)

    @property
    def sessions(self) -> dict[str, str]:
        """Where peers write to this process, by transport."""
        return {name: engine.session for name, engine in self.engines.items()}

    def route(self, sessions: Mapping[str, str]) -> Route | None:
        """The first transport that both sides have and that reaches the peer."""
        for name, engine in self.engines.items():
            session = sessions.get(name)
            if session is None:
                continue
            if not isinstance(engine, SupportsReach) or engine.reaches(session):
                return Route(name, engine, session)
        return None

    def register(self, addr: int, num_bytes: int) -> None:
        for engine in self.engines.values():
            engine.register(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        for engine in self.engines.values():
            engine.unregister(addr)

    def num_regions(self) -> int:
        """Registered regions of all engines, for leak checks."""
        return sum(engine.num_regions() for engine in self.engines.values())

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
