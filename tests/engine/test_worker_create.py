# SPDX-License-Identifier: Apache-2.0
"""A worker side as it is built for NPUs: real but for the device and Mooncake's library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from tests.engine.test_device_caches import (
    ALIGNMENT,
    GQA,
    HEADS,
    MLA,
    NAMES,
    SIZE,
    apart,
    combined,
    config_of,
    content,
)
from tests.unit.backends.native_mooncake import NativeEngine
from vllm_ascend_pd import hooks
from vllm_ascend_pd.backends import mooncake_engine
from vllm_ascend_pd.backends.block_copy import BlockCopier
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.fake_device import FakeDevice
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import Unregistered
from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.engine.metadata import StepMeta
from vllm_ascend_pd.engine.worker import side
from vllm_ascend_pd.engine.worker.device_step import DeviceWorkerSide
from vllm_ascend_pd.engine.worker.kv_caches import KVCaches, locate_on_device, parts
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import LeaseRef, LoadId


class KnowingDevice(FakeDevice):
    """Knows its own memory and what is page-locked for it, as a driver does."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[tuple[int, int]] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = super().pinned(num_bytes)
        self.known.append((memory.data_ptr(), num_bytes))
        return memory

    def knows(self, addr: int, num_bytes: int) -> bool:
        return any(a <= addr and addr + num_bytes <= a + n for a, n in self.known)


class Host:
    """One process with an NPU: its native engine, its KV caches, its worker side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.native = NativeEngine()
        self.device = KnowingDevice()
        self.host_copier: BlockCopier = PythonBlockCopier()
        self.copy_threads = 0
        self.layers: dict[str, type] = {}
        """The classes of those that are not ``Attention``."""
        self.pool_arguments: tuple[Any, ...] = ()
        self.worker: Any = None
        self.results: list[LoadResult] = []

    def start(
        self, role: str, spec: Any, caches: dict[str, Any], pool: bool = False, **transfer: Any
    ) -> Any:
        def locate(config: Any, kv_caches: Any) -> KVCaches:
            found = locate_on_device(config, kv_caches)
            return KVCaches(found.layout, found.layers, SimpleNamespace(type="npu"))

        def start_pool(*args: Any) -> None:
            self.pool_arguments = args

        def make_copier(device: Any, num_threads: int) -> DeviceBlockCopier:
            self.copy_threads = num_threads
            return DeviceBlockCopier(self.device, self.host_copier, num_threads)

        for name, value in {
            "locate": locate,
            "make_copier": make_copier,
            "sharding": lambda config: Sharding(),
            "start_pool": start_pool,
        }.items():
            self._monkeypatch.setattr(side, name, value)
        self._monkeypatch.setattr(
            mooncake_engine, "load_mooncake", lambda protocol: lambda: self.native
        )
        extra: dict[str, Any] = {"transfer": {"protocol": "ascend", **transfer}}
        if pool:
            extra["pool"] = {}
        config = KVTransferConfig(
            kv_connector="InEngine", kv_role=role, kv_connector_extra_config=extra
        )
        vllm_config: Any = SimpleNamespace(
            kv_transfer_config=config,
            speculative_config=None,
            parallel_config=SimpleNamespace(world_size=1),
            compilation_config=SimpleNamespace(
                static_forward_context={
                    name: object.__new__(self.layers.get(name, Attention)) for name in caches
                }
            ),
            max_concurrent_batches=1,
        )
        PDConfig.from_kv_transfer_config(config)
        for part in (part for cache in caches.values() for part in parts(cache)):
            memory = part.untyped_storage()
            self.device.known.append((memory.data_ptr(), memory.nbytes()))
        self.native.knows = self.device.knows
        self.worker = side._create(vllm_config, config_of(spec, list(caches)), caches)
        return self.worker

    def step(self, *grants: Grant, loads: tuple[LoadSpec, ...] = ()) -> None:
        meta = StepMeta(grants=grants, loads=loads)
        self.worker.begin_step(SimpleNamespace(pd_metadata=meta))
        with self.worker.step_output() as output:
            pass
        if (report := output.kv_connector_worker_meta) is not None:
            self.results += report.results  # of loads that were sooner than their step


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HCCL_INTRA_ROCE_ENABLE", "ASCEND_BUFFER_POOL", "ASCEND_GLOBAL_RESOURCE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Host]]:
    hosts: list[Host] = []

    def make() -> Host:
        hosts.append(Host(monkeypatch))
        return hosts[-1]

    yield make
    for host in hosts:
        if host.worker is not None:
            host.worker.shutdown()
            assert host.native.regions == {}
        host.native.close()


def result_of(host: Host) -> LoadResult:
    deadline = time.monotonic() + 10
    while not host.results:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
        host.results += host.worker._loader.take_results()
    return host.results[0]


CACHES = {
    "K and V in one allocation": (GQA, combined),
    "K and V apart": (GQA, lambda: apart(SIZE, SIZE, HEADS)),
    "MLA's latent and RoPE": (MLA, lambda: apart(64, 16, 1)),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("transfer", [{}, {"verify_placement": True}, {"placement": "staged"}])
def test_pages_go_from_one_npu_to_the_other(
    make_host: Callable[[], Host],
    name: str,
    transfer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By ``batch_transfer_sync_write`` from KV pages to KV pages, or through staging."""
    if "placement" in transfer:
        monkeypatch.setenv("ASCEND_BUFFER_POOL", "4:8")
    spec, make_caches = CACHES[name]
    theirs = {layer: make_caches() for layer in NAMES}
    ours = {layer: make_caches() for layer in NAMES}
    producer, consumer = make_host(), make_host()
    server = producer.start("kv_producer", spec, theirs, **transfer)._server
    consumer.start("kv_consumer", spec, ours, **transfer)
    assert isinstance(consumer.worker, DeviceWorkerSide)
    before = {layer: content(ours[layer], 0) for layer in NAMES}
    lease = LeaseRef("t", 1)
    producer.step(Grant(lease, "e", ((4, 5, 1),), 0, 3 * spec.block_size))
    admitted = (server.page_server.admit(lease, 3 * spec.block_size),)
    blocks = (LoadBlocks(0, (0, 1, 2), (2, 3, 5)),)
    load = LoadSpec(LoadId(1), admitted, "t", "e", blocks, False, 10.0)
    consumer.step(loads=(load,))
    result = result_of(consumer)
    assert (result.cause, result.num_resting) == ("", 0)
    assert result.num_bytes == len(NAMES) * 3 * spec.page_size_bytes
    for layer in NAMES:
        for source, target in ((4, 2), (5, 3), (1, 5)):
            assert content(ours[layer], target) == content(theirs[layer], source)
        assert content(ours[layer], 0) == before[layer]
    calls = {call[0] for call in producer.native.calls}
    assert ("batch" in calls) is (transfer.get("placement") != "staged")
    assert ("write" in calls) is (transfer.get("placement") == "staged")


class NoPasses(PythonBlockCopier):
    def gather(self, *args: Any, **options: Any) -> int:
        raise AssertionError("a pass over the bytes by the host")


def test_bytes_of_a_gpu_are_moved_and_verified_by_it_alone(make_host: Callable[[], Host]) -> None:
    """Through shared memory: P copies right into D's staging memory, D from there to its pages."""
    hosts = producer, consumer = make_host(), make_host()
    on_gpu = {"protocol": "tcp", "transport": "shared_memory"}
    theirs, ours = ({layer: combined() for layer in NAMES} for _ in hosts)
    for host in hosts:
        host.host_copier = NoPasses()
    server = producer.start("kv_producer", GQA, theirs, **on_gpu)._server
    consumer.start("kv_consumer", GQA, ours, **on_gpu)
    assert [len(host.device.pins) for host in hosts] == [1, 1]
    lease, num_tokens = LeaseRef("t", 1), 2 * GQA.block_size
    producer.step(Grant(lease, "e", ((4, 1),), 0, num_tokens))
    admitted = (server.page_server.admit(lease, num_tokens),)
    blocks = (LoadBlocks(0, (0, 1), (2, 3)),)
    load = LoadSpec(LoadId(1), admitted, "t", "e", blocks, False, 10.0)
    consumer.step(loads=(load,))
    assert result_of(consumer).cause == ""
    for layer in NAMES:
        for source, target in ((4, 2), (1, 3)):
            assert content(ours[layer], target) == content(theirs[layer], source)
    assert [len(host.device.pins) for host in hosts] == [2, 1]
    for host in hosts:
        host.worker.shutdown()
        assert not host.device.pins


def test_threads_of_a_copy_are_those_of_the_configuration_or_by_cores(
    make_host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "default_copy_threads", lambda num_workers: 2 * num_workers)
    before = threading.active_count()
    for options, expected in (({"copy_threads": 3}, 3), ({}, 2)):
        host = make_host()
        host.start("kv_consumer", GQA, {NAMES[0]: combined()}, **options)
        assert host.copy_threads == expected
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("pd-copy") for name in names) == expected - 1
        host.worker.shutdown()
        assert threading.active_count() == before


def test_everything_that_is_registered_begins_at_two_mib(make_host: Callable[[], Host]) -> None:
    caches = {layer: apart(64, 16, 1) for layer in NAMES}
    host = make_host()
    host.start("kv_both", MLA, caches)
    regions = host.native.regions
    assert all(addr % ALIGNMENT == 0 for addr in regions)
    pages = {part.data_ptr(): part.nbytes for pair in caches.values() for part in pair}
    assert pages.items() <= regions.items()
    assert regions.keys() == pages.keys()  # and no memory of the host, which HCCS knows not


def test_staged_placement_opens_no_page_and_pinned_memory_only(
    make_host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "1")
    caches = {layer: combined() for layer in NAMES}
    host = make_host()
    host.start("kv_both", GQA, caches, placement="staged")
    assert not {k.data_ptr() for k, _ in caches.values()} & set(host.native.regions)
    assert len(host.native.regions) == 2
    assert all(host.device.knows(*region) for region in host.native.regions.items())
    assert all(addr % ALIGNMENT == 0 for addr in host.native.regions)


@pytest.mark.parametrize(
    "setting", [{}, {"HCCL_INTRA_ROCE_ENABLE": "0"}, {"ASCEND_BUFFER_POOL": "0:0"}]
)
def test_staged_placement_inside_one_host_is_refused_without_a_way_to_its_memory(
    make_host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch, setting: dict[str, str]
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"placement staged .*HCCL_INTRA_ROCE_ENABLE=1"):
        make_host().start("kv_both", GQA, {NAMES[0]: combined()}, placement="staged")


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("transfer.placement staged", {"transfer": {"protocol": "ascend", "placement": "staged"}}),
        (
            "pool.master",
            {"transfer": {"protocol": "ascend"}, "pool": {"master": "10.0.0.2:50051"}},
        ),
    ],
)
def test_memory_of_other_hosts_is_refused_in_a_super_node_without_a_way_to_it(
    monkeypatch: pytest.MonkeyPatch, what: str, options: dict[str, Any]
) -> None:
    """On A3 other hosts may be as near; on A2 the link between hosts reaches their memory."""
    security = {"allow_non_loopback": True, "allowed_peers": ["10.0.0.2"]}
    extra = {**options, "security": security}
    config = PDConfig.from_kv_transfer_config(
        KVTransferConfig(
            kv_connector="InEngine",
            kv_role="kv_both",
            kv_ip="10.0.0.1",
            kv_connector_extra_config=extra,
        )
    )
    monkeypatch.setattr(side, "in_super_node", lambda: False)
    side._check_host_memory(config)
    monkeypatch.setattr(side, "in_super_node", lambda: True)
    with pytest.raises(ConfigError, match=rf"{what} .*HCCL_INTRA_ROCE_ENABLE=1"):
        side._check_host_memory(config)
    monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "1")
    side._check_host_memory(config)


def test_cache_that_is_not_aligned_is_refused_at_start(make_host: Callable[[], Host]) -> None:
    k, v = apart(SIZE, SIZE, HEADS)
    moved = v.new_empty(v.numel() + ALIGNMENT)
    start = (-moved.data_ptr() % ALIGNMENT + 4096) // 2
    v = moved[start : start + v.numel()].view(v.shape)
    with pytest.raises(ConfigError, match=rf"{NAMES[0]}.*multiple of 2 MiB"):
        make_host().start("kv_producer", GQA, {NAMES[0]: (k, v)})


def test_pool_is_given_the_engine_of_the_transfers(make_host: Callable[[], Host]) -> None:
    """One TransferEngine a process, as in vllm-ascend: the store never opens one of its own."""
    host = make_host()
    host.start("kv_both", GQA, {NAMES[0]: combined()}, pool=True)
    *_, shared, make_staging = host.pool_arguments
    assert shared.native == host.native.get_engine()
    assert shared.session == next(iter(host.worker.transports.sessions.values()))
    assert shared.protocol == "ascend"
    slots = make_staging(Unregistered(), 2, 4096)
    assert slots.region.base % ALIGNMENT == 0
    assert host.device.knows(slots.region.base, slots.region.size)
    slots.close()
    assert [call[3] for call in host.native.calls if call[0] == "initialize"] == ["ascend"]


class RenamedMLAAttention(MLAAttention):
    """As vllm-ascend has it."""


class OwnAttention(Attention):
    """As a model of a plugin may bring it along."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "reads_early"),
    [
        (Attention, False),
        (ChunkedLocalAttention, False),
        (RenamedMLAAttention, False),
        (MambaMixer2, True),
        (OwnAttention, True),
    ],
)
def test_attention_that_calls_no_hook_reads_early(
    make_host: Callable[[], Host], kind: type, reads_early: bool
) -> None:
    host = make_host()
    host.layers[NAMES[1]] = kind
    worker = host.start("kv_consumer", GQA, {name: combined() for name in NAMES[:2]})
    assert worker.layers.read_early is reads_early


def test_second_engine_of_a_process_is_refused_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of two ``LLM`` in a script with VLLM_ENABLE_V1_MULTIPROCESSING=0."""
    monkeypatch.setattr(hooks, "worker", object())
    with pytest.raises(ConfigError, match="has an engine with kv_connector InEngine already") as e:
        side.create(None, None, {})  # type: ignore[arg-type]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in str(e.value)
    assert "shutdown()" in str(e.value)
