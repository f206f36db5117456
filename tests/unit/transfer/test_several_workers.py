# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers: each loads its KV heads from the workers that hold them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.pages import one_group
from vllm_ascend_pd.backends.block_copy import PageLayout, Region
from vllm_ascend_pd.backends.fake_engine import FakeTransferEngine
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import Transports
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import Cause, LeaseRef, LoadId

NUM_LAYERS = 3
NUM_BLOCKS = 6
NUM_HEADS = 4
HEAD_BYTES = 24
SLOT_BYTES = 4 * NUM_HEADS * HEAD_BYTES
NUM_SLOTS = 4
LEASE = LeaseRef("t", 1)


class Worker:
    """Pages of ``bytes[layer, block, head]``, and what serves or loads them."""

    def __init__(self, num_heads: int, script: FaultScript | None = None) -> None:
        shape = (NUM_LAYERS, NUM_BLOCKS, num_heads, HEAD_BYTES)
        self.bytes = np.zeros(shape, dtype=np.uint8)
        self.layout = PageLayout(
            region=Region(self.bytes.ctypes.data, self.bytes.nbytes),
            layer_offsets=np.arange(NUM_LAYERS, dtype=np.int64) * self.bytes[0].nbytes,
            block_stride=self.bytes[0, 0].nbytes,
            page_bytes=self.bytes[0, 0].nbytes,
        )
        self.engine = FakeTransferEngine(script)
        self.pool = StagingPool(self.engine, NUM_SLOTS, SLOT_BYTES)
        self.threads: list[DataServer | PeerLoader] = []

    def serve(self, block_ids: tuple[int, ...]) -> DataServer:
        grants = Grants()
        grants.begin_step([Grant(LEASE, "e", (block_ids,), len(block_ids), len(block_ids))])
        grants.end_step()
        transports = Transports({"fake": self.engine})
        server = DataServer(
            host="127.0.0.1",
            transports=transports,
            copier=PythonBlockCopier(),
            groups=one_group(self.layout),
            pool=self.pool,
            grants=grants,
            allows_host=lambda host: host == "fake",
            write_timeout_s=5.0,
            trust=Trust(),
        )
        server.start()
        self.threads.append(server)
        return server

    def load(self, sharding: Sharding) -> PeerLoader:
        sessions = {"fake": self.engine.session}
        copier = PythonBlockCopier()
        loader = PeerLoader(
            sessions, copier, one_group(self.layout), self.pool, Trust(), sharding=sharding
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
