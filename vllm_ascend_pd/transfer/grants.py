# SPDX-License-Identifier: Apache-2.0
"""What a producer's worker may serve, and how far each span is computed.

                   tokens  0 .. num_ready   .. num_coming
    layers that the running step has done    all of these
    the other layers       all of these      not yet

When the step ends, ``num_ready`` becomes ``num_coming``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_ascend_pd.types import LeaseRef

_NUM_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Grant:
    """A span that peers may read, scheduler to worker, in each step that computes some of it.

    ``block_ids`` are its blocks by KV cache group. Its first ``num_ready`` tokens are computed
    before the step, ``num_coming`` after it.
    """

    lease: LeaseRef
    epoch: str
    block_ids: tuple[tuple[int, ...], ...]
    num_ready: int
    num_coming: int


class Grants:
    """Grants by lease. One that was given up does not come back: the next lease of the same
    transfer id has another number.

    Written by the worker's main thread (begin and end of a step, after each layer), read by the
    data server. A grant is given up before the forward that may reuse its blocks; the server looks
    again after it has packed, and drops what it packed when the grant is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[LeaseRef, Grant] = {}
        self._in_step: dict[LeaseRef, None] = {}
        self._num_layers_done = 0
        # The last ones that were given up, for consumers that come too late.
        self._gone: dict[LeaseRef, None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._grants)

    def begin_step(self, grants: Iterable[Grant]) -> None:
        with self._lock:
            self._num_layers_done = 0
            self._in_step = {}
            for grant in grants:
                self._grants[grant.lease] = grant
                self._in_step[grant.lease] = None

    def layer_done(self, layer: int) -> None:
        """Layers up to and with this one are computed."""
        with self._lock:
            self._num_layers_done = max(self._num_layers_done, layer + 1)

    def in_step(self) -> list[LeaseRef]:
        """Those of which the running step computes some."""
        with self._lock:
            return list(self._in_step)

    def end_step(self) -> None:
        with self._lock:
            for lease in self._in_step:
                grant = self._grants.get(lease)
                if grant is not None:
                    self._grants[lease] = replace(grant, num_ready=grant.num_coming)
            self._in_step = {}

    def discard(self, leases: Iterable[LeaseRef]) -> None:
        with self._lock:
            for lease in leases:
                self._grants.pop(lease, None)
                self._gone[lease] = None
            while len(self._gone) > _NUM_REMEMBERED:
                del self._gone[next(iter(self._gone))]

    def discard_all(self) -> None:
        with self._lock:
            leases = list(self._grants)
        self.discard(leases)

    def __contains__(self, lease: LeaseRef) -> bool:
        """Whether its blocks may be served, still."""
        with self._lock:
            return lease in self._grants

    def look(self, lease: LeaseRef) -> tuple[Grant | None, int, bool]:
        """The grant, the layers that the running step has done for it, and whether it is gone."""
        with self._lock:
            grant = self._grants.get(lease)
            done = self._num_layers_done if lease in self._in_step else 0
            return grant, done, lease in self._gone
