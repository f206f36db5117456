# SPDX-License-Identifier: Apache-2.0
"""One step of the worker: begin, start loads, wait layer by layer, report."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd import hooks
from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.vllm_api.outputs import (
    attach_report,
    output_without_forward,
    step_output,
)
from vllm_ascend_pd.engine.worker.loaders import Loaders
from vllm_ascend_pd.engine.worker.saved_layers import SavedLayers
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.pool.messages import PoolLoadSpec
from vllm_ascend_pd.transfer.load import LoadSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm_ascend_pd.backends.staging import StagingPool
    from vllm_ascend_pd.backends.transports import Transports
    from vllm_ascend_pd.engine.vllm_api.types import (
        KVConnectorOutput,
        ModelRunnerOutput,
        SchedulerOutput,
    )
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.loader import Loader
    from vllm_ascend_pd.net.trust import Trust
    from vllm_ascend_pd.pool.io import PoolIO
    from vllm_ascend_pd.pool.packed_slot import PackAhead
    from vllm_ascend_pd.transfer.grants import Grants
    from vllm_ascend_pd.transfer.receive import PeerLoader
    from vllm_ascend_pd.transfer.send import DataServer
    from vllm_ascend_pd.types import Layers, LoadId


logger = logging.getLogger(__name__)

_DRAIN_S = 10.0


class ArmedStep:
    """Wraps the forward of a step that loads KV, or computes KV for a consumer or the pool;
    implements ``hooks.StepHooks`` inside it.
    """

    def __init__(
        self,
        loader: Loaders | None,
        grants: Grants,
        server: DataServer | None,
        layers: Mapping[str, range],
        wait_all: bool,
        ahead: PackAhead | None = None,
        saved: SavedLayers | None = None,
    ) -> None:
        """``loader``, ``server`` and ``ahead`` are ``None`` when the step has nothing for them,
        and ``saved`` when it has nothing for the last two.
        """
        self._loader = loader
        self._grants = grants
        self._server = server
        self._layers = layers
        self._wait_all = wait_all
        self._ahead = ahead
        self._saved = saved

    def __enter__(self) -> None:
        """The loads are under way since ``begin_step``; wait for what may not overlap.

        The attention of a layer runs after the new tokens' KV has been written, so a tail block,
        which holds a new token too, is in place before the forward. A FULL graph runs no layer
        hook, so everything is.
        """
        if self._loader is not None:
            if self._wait_all:
                self._loader.wait_all()
            else:
                self._loader.wait_tails()
        if not self._wait_all:
            hooks.current_step = self

    def wait_layer(self, layer_name: str) -> None:
        if self._loader is not None:
            for layer in self._layers[layer_name]:
                self._loader.wait_layer(layer)

    def save_layer(self, layer_name: str) -> None:
        """Consumers that watch may fetch the layer's new KV while the next layer is computed, and
        blocks that the pool lacks are packed.
        """
        if self._saved is None:
            return
        last = self._saved.save(layer_name) - 1
        if self._ahead is not None:
            self._ahead.layer_done(last)
        if self._server is not None:
            self._grants.layer_done(last)
            self._server.notify_layer()

    def __exit__(self, *exc: object) -> None:
        hooks.current_step = None


class StepOutput:
    """Around the forward; a class, because every step pays for a generator's frames."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._output = step_output()

    def __enter__(self) -> KVConnectorOutput:
        return self._output

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            attach_report(self._output, self._side.end_step())


@dataclass(frozen=True, slots=True)
class WorkerLayers:
    """The attention layers of a worker."""

    index: Mapping[str, range]
    """In the order of their names, aliases included; one with large pages counts as several."""
    stage: Layers | None = None
    """Which of the model's they are, where there are several pipeline stages."""
    drafts: bool = False
    """Some are those of a drafter, which runs behind the model."""
    read_early: bool = False
    """Some may be read where no hook waits for them: states before the forward, what an indexer
    keeps before its layer's attention, and what a model's own attention reads."""
    hooked: Collection[str] = ()
    """Those that each forward saves, the drafter's apart."""
    kernels: str = ""
    """See ``kv_caches.kernel_blocks``."""
    whole_blocks: bool = False
    """Several make one page, so none is served before all are computed."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What others reach of a worker's memory."""

    transports: Transports
    pools: Sequence[StagingPool]
    live_regions: Sequence[tuple[int, int]] = ()
    """The parts of the KV caches that ``transports`` know by address."""


class WorkerSide:
    """Implements ``hooks.WorkerHooks``: main thread of the worker process."""

    def __init__(
        self,
        layers: WorkerLayers,
        memory: WorkerMemory,
        grants: Grants,
        trust: Trust,
        server: DataServer | None,
        loader: PeerLoader | None,
        pool: PoolIO | None = None,
        rank: int = 0,
        num_under_way: int = 1,
    ) -> None:
        """``num_under_way`` steps are under way at a time, at most."""
        self.layers = layers
        self._saved = None if layers.whole_blocks else SavedLayers(layers.index, layers.hooked)
        self._memory = memory
        self._grants = grants
        self._trust = trust
        self._server = server
        self._reactors = [thread for thread in (server, loader) if thread is not None]
        loaders: dict[type, Loader[Any, Any]] = {}
        if loader is not None:
            loaders[LoadSpec] = loader
        if pool is not None:
            loaders[PoolLoadSpec] = pool.loader
        self._loader = Loaders(loaders) if loaders else None
        self.pool = pool
        self._meta: StepMeta | None = None
        self._armed = False
        self._has_loads = False
        self._has_grants = False
        self._packs_ahead = False
        self.num_under_way = num_under_way
        self._num_at_risk = 0
        """Steps, the next one included, that may compute on what a load fails to bring."""
        self._reported_server = server is None
        self.rank = rank
        self._is_suspended = False

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        meta = scheduler_output.pd_metadata
        if meta is None or meta is self._meta:
            return
        assert isinstance(meta, StepMeta)
        self._meta = meta
        # First what may no longer be served: this step may reuse those blocks.
        self._grants.discard(meta.revokes)
        self._grants.begin_step(meta.grants)
        self._has_grants = bool(meta.grants)
        if self._server is not None and meta.revokes:
            self._server.notify()
        if self._loader is not None:
            for load_id in meta.cancels:
                self._loader.cancel(load_id)
            for load in meta.loads:
                self._loader.start_load(load)
            self._has_loads = any(load.in_step for load in meta.loads)
            if self._has_loads:
                self._num_at_risk = self.num_under_way
                if self.layers.read_early:
                    self._loader.wait_all()
        if self.pool is not None:
            for message in meta.saves:
                self.pool.handle(message)
        self._packs_ahead = self.pool is not None and self.pool.ahead.begin_step(meta.ahead)
        self._armed = self._has_loads or self._has_grants or self._packs_ahead

    def is_at_risk(self) -> bool:
        """Whether what this step samples may be dropped: it loads KV, or the scheduler did not know
        how such a load would end. Counted are the steps that ask, each of them once.
        """
        if not self._num_at_risk:
            return False
        self._num_at_risk -= 1
        return True

    def loads_under_way(self) -> bool:
        """Whether the armed step has KV that has not landed yet."""
        return self._armed and self._loader is not None and self._loader.in_step_under_way()

    def take_armed_step(self, wait_all: bool) -> ArmedStep | None:
        if not self._armed:
            return None
        self._armed = False
        if self._saved is not None:
            self._saved.begin_step()
        return ArmedStep(
            self._loader if self._has_loads else None,
            self._grants,
            self._server if self._has_grants else None,
            self.layers.index,
            wait_all,
            self.pool.ahead if self.pool is not None and self._packs_ahead else None,
            self._saved if self._has_grants or self._packs_ahead else None,
        )

    def step_output(self) -> StepOutput:
        return StepOutput(self)

    def end_forward(self) -> None:
        """The model has run: wait for what the step loads, the drafter's layers included."""
        loader = self._busy_loader()
        if loader is not None:
            loader.wait_all()
        if not self.layers.drafts:
            self.end_drafts()

    def end_drafts(self) -> None:
        """What follows in this step writes no KV: peers may fetch what it has computed."""
        self._end_grants()

    def end_step(self) -> StepReport | None:
        """Say what has become of what the step loads."""
        self.end_forward()
        return self._report(self._busy_loader())

    def no_forward(self) -> ModelRunnerOutput:
        # Nothing has taken the armed step; the next forward, perhaps a dummy's, must not.
        self._armed = False
        self._end_grants()
        return output_without_forward(self._report(self._busy_loader()))

    def _busy_loader(self) -> Loaders | None:
        return None if self._loader is None or self._loader.is_idle else self._loader

    def _end_grants(self) -> None:
        if self._has_grants:
            self._has_grants = False
            self._grants.end_step()
            if self._server is not None:
                self._server.notify()

    def _report(self, loader: Loaders | None) -> StepReport | None:
        rested: list[LoadId] = []
        results: list[LoadResult] = []
        if loader is not None:
            # A load rests after it has ended, so what has rested is never ahead of its result.
            rested = loader.take_rested()
            results = loader.take_results()
        servers = {}
        if not self._reported_server and self._server is not None:
            self._reported_server = True
            servers = {self.rank: self._server.page_server}
        refused = self._trust.take_refused()
        errors: dict[str, int] = {}
        for thread in self._reactors:
            errors |= thread.take_errors()
        if not (results or refused or servers or rested or errors):
            return None
        return StepReport(tuple(results), servers, refused, tuple(rested), errors)

    @property
    def transports(self) -> Transports:
        return self._memory.transports

    @property
    def pool_address(self) -> tuple[str, int]:
        """See ``pool.link.pool_address``."""
        assert self.pool is not None
        return self.pool.address, self.pool.blocks_per_batch

    def suspend(self) -> None:
        """The KV caches are about to be unmapped, unless they are; nothing is computed meanwhile.

        Raises:
            TransferError: they are still in use.
        """
        if self._is_suspended:
            return
        self._grants.discard_all()
        if self._server is not None and not self._server.drain(_DRAIN_S):
            raise TransferError(f"KV is still read by a consumer after {_DRAIN_S:.0f} s: no sleep")
        if self._loader is not None and not self._loader.is_idle:
            raise TransferError("KV is still loaded: no sleep; abort what waits for it first")
        for addr, _ in self._memory.live_regions:
            self.transports.unregister(addr)
        self._is_suspended = True

    def resume(self) -> None:
        """The KV caches are mapped, where they were; perhaps they have been all the time."""
        if not self._is_suspended:
            return
        with ExitStack() as undo:
            for region in self._memory.live_regions:
                self.transports.register(*region)
                undo.callback(self.transports.unregister, region[0])
            undo.pop_all()
        self._is_suspended = False

    def counts(self) -> dict[str, int]:
        """What a leak check compares: all but ``regions`` are zero when nothing is under way."""
        return {
            "regions": self.transports.num_regions(),
            "busy_slots": sum(pool.num_held for pool in self._memory.pools),
            "loads": self._loader.num_loads() if self._loader is not None else 0,
            "loaded_bytes": self._loader.num_loaded_bytes() if self._loader is not None else 0,
            "grants": len(self._grants),
        }

    def shutdown(self) -> None:
        for part in (*self._reactors, self.pool):
            if part is not None:
                part.stop()
        for pool in self._memory.pools:
            pool.close()
        if self.pool is not None:
            self.pool.close()
        if any(thread.is_alive() for thread in self._reactors):
            logger.warning("a thread of transfers does not end: peers' memory stays mapped for it")
        else:
            self.transports.close()
        logger.info("in-engine transfers stopped")
