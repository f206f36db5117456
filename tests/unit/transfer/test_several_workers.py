# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers: each loads its KV heads and layers from those that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.pages import one_group
from tests.unit.transfer.raw_peers import wait_until
from vllm_ascend_pd.backends.block_copy import PageLayout, Region, WorkerPages
from vllm_ascend_pd.backends.fake_engine import FakeTransferEngine
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import Transports
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import Cause, Layers, LeaseRef, LoadId

NUM_LAYERS = 3
NUM_BLOCKS = 6
NUM_HEADS = 4
HEAD_BYTES = 24
SLOT_BYTES = 4 * NUM_HEADS * HEAD_BYTES
NUM_SLOTS = 4
LEASE = LeaseRef("t", 1)


class Worker:
    """Pages of ``bytes[layer, block, head]``, and what serves or loads them."""

    def __init__(
        self, num_heads: int, script: FaultScript | None = None, num_layers: int = NUM_LAYERS
    ) -> None:
        shape = (num_layers, NUM_BLOCKS, num_heads, HEAD_BYTES)
        self.bytes = np.zeros(shape, dtype=np.uint8)
        self.layout = PageLayout.packed(
            region=Region(self.bytes.ctypes.data, self.bytes.nbytes),
            layer_offsets=np.arange(num_layers, dtype=np.int64) * self.bytes[0].nbytes,
            page_bytes=self.bytes[0, 0].nbytes,
        )
        self.engine = FakeTransferEngine(script)
        self.pool = StagingPool(self.engine, NUM_SLOTS, SLOT_BYTES)
        self.threads: list[DataServer | PeerLoader] = []
        self.grants = Grants()

    def serve(
        self,
        block_ids: tuple[int, ...],
        layers: Layers | None = None,
        num_ready: int | None = None,
        num_layers_done: int = 0,
    ) -> DataServer:
        """The last ones behind ``num_ready`` are being computed, in so many layers already."""
        num_coming = len(block_ids)
        if num_ready is None:
            num_ready = num_coming
        self.grants.begin_step([Grant(LEASE, "e", (block_ids,), num_ready, num_coming)])
        if num_layers_done:
            self.grants.layer_done(num_layers_done - 1)
        transports = Transports({"fake": self.engine})
        server = DataServer(
            host="127.0.0.1",
            transports=transports,
            pages=WorkerPages(PythonBlockCopier(), one_group(self.layout), layers),
            pool=self.pool,
            grants=self.grants,
            allows_host=lambda host: host == "fake",
            write_timeout_s=5.0,
            trust=Trust(),
        )
        server.start()
        self.threads.append(server)
        self.server = server
        return server

    def load(self, sharding: Sharding, layers: Layers | None = None) -> PeerLoader:
        sessions = {"fake": self.engine.session}
        loader = PeerLoader(
            sessions,
            WorkerPages(PythonBlockCopier(), one_group(self.layout), layers),
            self.pool,
            Trust(),
            push_mode=PushMode.LAYER,
            sharding=sharding,
        )
        loader.start()
        self.threads.append(loader)
        return loader


class Engines:
    """A producer and a consumer of so many workers each."""

    def __init__(self, num_peers: int, num_workers: int, *scripts: FaultScript | None) -> None:
        whole = np.random.default_rng(3).integers(
            0, 256, (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_BYTES), dtype=np.uint8
        )
        self.whole = whole
        self.peers = [
            Worker(NUM_HEADS // num_peers, script) for script in scripts or (None,) * num_peers
        ]
        for rank, peer in enumerate(self.peers):
            peer.bytes[:] = np.split(whole, num_peers, axis=2)[rank]
        self.workers = [Worker(NUM_HEADS // num_workers) for _ in range(num_workers)]
        servers = [peer.serve((4, 1, 0)).page_server for peer in self.peers]
        self.admitted = tuple(server.admit(LEASE, 3) for server in servers)
        self.loaders = [
            worker.load(Sharding(rank, num_workers, NUM_HEADS))
            for rank, worker in enumerate(self.workers)
        ]

    def run(self, timeout_s: float = 10.0) -> list[LoadResult]:
        """Blocks 4, 1 and 0 of the producer into 2, 3 and 5 of the consumer."""
        blocks = (LoadBlocks(0, (0, 1, 2), (2, 3, 5), has_tail=True),)
        spec = LoadSpec(LoadId(1), self.admitted, "t", "e", blocks, True, timeout_s)
        for loader in self.loaders:
            loader.start_load(spec)
            loader.wait_all()
        return [result for loader in self.loaders for result in loader.take_results()]

    def stop(self) -> None:
        for worker in (*self.workers, *self.peers):
            for thread in worker.threads:
                thread.stop()
            worker.pool.close()


class Stages:
    """A producer and a consumer of so many stages, of one worker each."""

    def __init__(self, theirs: list[Layers | None], ours: list[Layers | None]) -> None:
        shape = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_BYTES)
        self.whole = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
        self.theirs, self.ours = theirs, ours
        self.peers = [self._make(layers) for layers in theirs]
        self.workers = [self._make(layers) for layers in ours]
        for peer, layers in zip(self.peers, theirs, strict=True):
            peer.bytes[:] = self.whole[slice(*(layers or ALL))]

    def _make(self, layers: Layers | None) -> Worker:
        return Worker(NUM_HEADS, num_layers=len(range(*(layers or ALL))))

    def start(self, **serving: int) -> None:
        admitted = tuple(
            peer.serve((4, 1, 0), layers, **serving).page_server.admit(LEASE, 3)
            for peer, layers in zip(self.peers, self.theirs, strict=True)
        )
        self.admitted = admitted
        self.loaders = [
            worker.load(Sharding(rank, 1, NUM_HEADS, len(self.ours)), layers)
            for rank, (worker, layers) in enumerate(zip(self.workers, self.ours, strict=True))
        ]

    def load(self, in_step: bool, num_awaited: int | None = None) -> None:
        """Blocks 4, 1 and 0 of the producer into 2, 3 and 5 of the consumer."""
        blocks = (LoadBlocks(0, (0, 1, 2), (2, 3, 5), has_tail=in_step),)
        spec = LoadSpec(LoadId(1), self.admitted, "t", "e", blocks, in_step, 10.0, num_awaited)
        for loader in self.loaders:
            loader.start_load(spec)

    def loaded(self) -> np.ndarray[Any, Any]:
        got = np.concatenate([worker.bytes for worker in self.workers])
        assert not got[:, [0, 1, 4]].any(), "a block that nobody asked for was written"
        return got[:, [2, 3, 5]]

    def stop(self) -> None:
        for worker in (*self.workers, *self.peers):
            for thread in worker.threads:
                thread.stop()
            worker.pool.close()


ALL = Layers(0, NUM_LAYERS)
SPLITS: list[list[Layers | None]] = [
    [None],
    [Layers(0, 2), Layers(2, 3)],
    [Layers(0, 1), Layers(1, 3)],
    [Layers(0, 1), Layers(1, 2), Layers(2, 3)],
]


@pytest.fixture
def stages(request: pytest.FixtureRequest) -> Iterator[Stages]:
    made = Stages(*request.param)
    yield made
    made.stop()


@pytest.mark.parametrize("stages", list(product(SPLITS, SPLITS)), indirect=True)
def test_each_stage_gets_its_layers(stages: Stages) -> None:
    stages.start()
    stages.load(in_step=True)
    for loader in stages.loaders:
        loader.wait_all()
    results = [result for loader in stages.loaders for result in loader.take_results()]
    assert [result.cause for result in results] == [""] * len(stages.workers)
    assert (stages.loaded() == stages.whole[:, [4, 1, 0]]).all()


@pytest.mark.parametrize("stages", list(product(SPLITS, SPLITS)), indirect=True)
def test_layers_of_a_step_come_as_each_stage_has_computed_them(stages: Stages) -> None:
    """The last block is being computed, each stage of the producer has done one layer of it."""
    stages.start(num_ready=2, num_layers_done=1)
    stages.load(in_step=False, num_awaited=3)
    done = {(layers or ALL).first for layers in stages.theirs}
    expected = stages.whole[:, [4, 1, 0]].copy()
    expected[[layer for layer in range(NUM_LAYERS) if layer not in done], 2] = 0
    wait_until(lambda: bool((stages.loaded() == expected).all()))
    for peer in stages.peers:
        peer.grants.end_step()
        peer.server.notify()
    wait_until(lambda: bool((stages.loaded() == stages.whole[:, [4, 1, 0]]).all()))


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    made = Engines(*request.param)
    yield made
    made.stop()


@pytest.mark.parametrize(
    "engines", [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4)], indirect=True
)
def test_each_worker_gets_its_heads(engines: Engines) -> None:
    results = engines.run()
    assert [result.cause for result in results] == [""] * len(engines.workers)
    assert sum(result.num_bytes for result in results) == engines.whole[:, :3].nbytes
    got = np.concatenate([worker.bytes for worker in engines.workers], axis=2)
    assert (got[:, [2, 3, 5]] == engines.whole[:, [4, 1, 0]]).all()
    assert not got[:, [0, 1, 4]].any(), "a block that nobody asked for was written"


@pytest.mark.parametrize("engines", [(2, 1, None, FaultScript.parse("fail"))], indirect=True)
def test_a_load_fails_as_a_whole(engines: Engines) -> None:
    (result,) = engines.run()
    assert result.cause == Cause.TRANSFER_FAILED.value
    assert not engines.loaders[0].num_loads()


@pytest.mark.parametrize("engines", [(2, 1)], indirect=True)
def test_one_worker_that_is_silent_ends_the_load_in_time(engines: Engines) -> None:
    engines.peers[1].threads[0].stop()
    (result,) = engines.run(timeout_s=0.5)
    assert result.cause in (Cause.DEADLINE.value, Cause.PEER_UNREACHABLE.value)
