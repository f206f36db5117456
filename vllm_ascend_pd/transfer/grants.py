# SPDX-License-Identifier: Apache-2.0
"""What a producer's worker may serve, and how far each prompt is computed.

                   blocks  0 .. num_ready   .. num_coming
    layers that the running step has done    all of these
    the other layers       all of these      not yet

When the step ends, ``num_ready`` becomes ``num_coming``.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUM_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class GrantSpec:
    """Blocks of one prompt that peers may read, scheduler to worker, in each step that computes it.

    ``num_ready`` of them, in the order of the prompt, are computed before the step, ``num_coming``
    after it. The tail block counts once the whole prompt is computed.
    """

    transfer_id: str
    epoch: str
    block_ids: tuple[int, ...]
    num_ready: int
    num_coming: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A state of a grant; ``generation`` tells a grant from an earlier one of the same name."""

    epoch: str
    block_ids: tuple[int, ...]
    generation: int
    num_ready: int
    num_coming: int


class Grants:
    """Grants by transfer id.

    Written by the worker's main thread (begin and end of a step, after each layer), read by the
    data server. A grant is given up before the forward that may reuse its blocks; the server looks
    again after it has packed, and drops what it packed when the grant is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}
        self._in_step: list[str] = []
        self._num_layers_done = 0
        self._generations = itertools.count(1)
        # The last ones that were given up, for consumers that come too late.
        self._gone: dict[str, None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._grants)

    def begin_step(self, specs: Iterable[GrantSpec]) -> None:
        with self._lock:
            self._num_layers_done = 0
            self._in_step = []
            for spec in specs:
                known = self._grants.get(spec.transfer_id)
                generation = next(self._generations) if known is None else known.generation
                self._grants[spec.transfer_id] = Grant(
                    spec.epoch, spec.block_ids, generation, spec.num_ready, spec.num_coming
                )
                self._in_step.append(spec.transfer_id)

    def layer_done(self, layer: int) -> None:
        """Layers up to and with this one are computed."""
        with self._lock:
            self._num_layers_done = max(self._num_layers_done, layer + 1)

    def end_step(self) -> None:
        with self._lock:
            self._num_layers_done = 0
            for transfer_id in self._in_step:
                grant = self._grants.get(transfer_id)
                if grant is not None:
                    self._grants[transfer_id] = replace(grant, num_ready=grant.num_coming)
            self._in_step = []

    def discard(self, transfer_ids: Iterable[str]) -> None:
        with self._lock:
            for transfer_id in transfer_ids:
                self._grants.pop(transfer_id, None)
                self._gone[transfer_id] = None
            while len(self._gone) > _NUM_REMEMBERED:
                del self._gone[next(iter(self._gone))]

    def get(self, transfer_id: str) -> Grant | None:
        with self._lock:
            return self._grants.get(transfer_id)

    def is_current(self, transfer_id: str, grant: Grant) -> bool:
        """Whether the blocks of ``grant`` may still be served."""
        with self._lock:
            now = self._grants.get(transfer_id)
            return now is not None and now.generation == grant.generation

    def look(self, transfer_id: str) -> tuple[Grant | None, int, bool]:
        """The grant, the layers that the running step has done for it, and whether it is gone."""
        with self._lock:
            grant = self._grants.get(transfer_id)
            done = self._num_layers_done if transfer_id in self._in_step else 0
            return grant, done, grant is None and transfer_id in self._gone
