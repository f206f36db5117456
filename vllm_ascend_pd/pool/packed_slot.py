# SPDX-License-Identifier: Apache-2.0
"""Values of blocks in staging memory, packed at once or layer by layer while their step computes.

    main thread   begin step: a slot for each group of blocks          layer 0 …  layer n written
    pack thread                                                        pack it  …  pack it
    next step     Save: these are good  ──► save thread: seal, put     DropAhead: slots go back

What is packed before the scheduler has confirmed the step is a guess. It is wrong when the step
went wrong, or when the blocks have become another request's meanwhile. Then no Save names its
group, and what no Save names is never stored.
"""

from __future__ import annotations

import queue
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.log_limit import limited_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.pool.messages import AheadSpec
    from vllm_ascend_pd.pool.values import BlockValues

logger = limited_logger(__name__)


class PackedSlot:
    """Values of some blocks side by side in one staging slot: a context manager, at whose end
    nothing is packed any more and the slot goes back, once. Its holder may hand it on, with the
    duty to leave it.

    Any thread; one at a time copies.
    """

    def __init__(self, values: BlockValues, slot: Slot, block_ids: Sequence[int]) -> None:
        """The slot is this one's from here on; also when this raises."""
        with ExitStack() as held:
            self._slot = held.enter_context(slot)
            self._values = values
            self._index_of = {block_id: i for i, block_id in enumerate(block_ids)}
            self._block_ids = np.array(block_ids, dtype=np.int64)
            self._lock = threading.Lock()  # guards all below, and the copy
            self._totals = np.zeros(len(block_ids), dtype=np.uint64)
            self._num_layers = 0
            self._is_open = True
            self._held = held.pop_all()

    def pack(self, stop: int) -> None:
        """The layers before ``stop`` that are not packed yet."""
        with self._lock:
            if not self._is_open or stop <= self._num_layers:
                return
            self._totals += self._values.pack_layers(
                self._num_layers, stop, self._block_ids, self._slot.region
            )
            self._num_layers = stop

    def pack_done(self, num_layers: int) -> None:
        """What is in the first ``num_layers`` of the engine."""
        self.pack(self._values.num_among(num_layers))

    def pack_all(self) -> None:
        self.pack(self._values.num_layers)

    @property
    def is_whole(self) -> bool:
        """Whether the pages are not read any more."""
        return self._num_layers == self._values.num_layers

    def seal(self, block_id: int, block_hash: bytes) -> int:
        """Complete the value of a block, all of whose layers are packed; its address."""
        index = self._index_of[block_id]
        offset = index * self._values.num_bytes
        self._values.seal(int(self._totals[index]), block_hash, self._slot.region, offset)
        return self._slot.addr + offset

    def quarantine(self, seconds: float) -> None:
        """A write that was given up may still read it for so long after its end."""
        self._slot.quarantine(seconds)

    def __enter__(self) -> PackedSlot:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_open = False
            self._held.close()


class PackAhead:
    """Packs what a step announces, as far as slots are free; it never waits for one."""

    def __init__(
        self, values: Sequence[BlockValues], slots: StagingPool | None, owns: Callable[[int], bool]
    ) -> None:
        """Without ``slots`` nothing is packed ahead; blocks that it does not own never are."""
        self._values = values
        self._owns = owns
        self._slots = slots
        self._in_step: list[PackedSlot] = []  # main thread only
        self._lock = threading.Lock()
        self._packings: dict[int, PackedSlot] = {}  # by ahead_id; under the lock
        self._work: queue.SimpleQueue[tuple[list[PackedSlot], int | None] | None]
        self._work = queue.SimpleQueue()

    def __len__(self) -> int:
        with self._lock:
            return len(self._packings)

    # Main thread.

    def begin_step(self, specs: Sequence[AheadSpec]) -> bool:
        """Whether anything of these is packed, so that ``layer_done`` is of use."""
        self._in_step = []
        if self._slots is None:
            return False
        for spec in specs:
            values, own = self._values[spec.group], list(filter(self._owns, spec.block_ids))
            slot = self._slots.acquire()
            if slot is None:
                break
            packing = PackedSlot(values, slot, own)
            with self._lock:
                self._packings[spec.ahead_id] = packing
            self._in_step.append(packing)
        return bool(self._in_step)

    def layer_done(self, layer: int) -> None:
        """Layers up to and with this one are written; returns at once."""
        self._work.put((self._in_step, layer + 1))

    # Pack thread.

    def run(self) -> None:
        while (work := self._work.get()) is not None:
            packings, stop = work
            for packing in packings:
                if stop is None:
                    with packing:
                        continue
                try:
                    packing.pack_done(stop)
                except Exception:
                    # Whoever saves it tries once more, and answers.
                    logger.exception("blocks cannot be packed ahead")

    def stop(self) -> None:
        self._work.put(None)

    # Any thread.

    def take(self, ahead_id: int) -> PackedSlot | None:
        """It is the caller's from here on. ``None`` if nothing was packed ahead."""
        with self._lock:
            return self._packings.pop(ahead_id, None)

    def drop(self, last_ahead_id: int) -> None:
        """Give up what was announced up to this one and not taken; returns at once."""
        with self._lock:
            dropped = [ahead_id for ahead_id in self._packings if ahead_id <= last_ahead_id]
            packings = [self._packings.pop(ahead_id) for ahead_id in dropped]
        if packings:
            self._work.put((packings, None))
