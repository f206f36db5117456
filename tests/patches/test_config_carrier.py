# SPDX-License-Identifier: Apache-2.0
"""The reserved name ``InEngine`` carries the configuration and makes no connector object."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ascend_pd import hooks
from vllm_ascend_pd.engine.carrier import InEngineCarrier, PDStats
from vllm_ascend_pd.engine.scheduler.gauges import EngineInfo
from vllm_ascend_pd.metrics import COUNTERS, Stats
from vllm_ascend_pd.registration import MAX_ADAPTERS
from vllm_ascend_pd.router.health import parse_makers
from vllm_ascend_pd.router.instances import TokensMadeBy
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

BLOCK_SIZE = 16
init_none_hash(sha256)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", seed=0, max_model_len=512),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="InEngine", kv_role="kv_both", kv_port=0),
    )
    config.cache_config.num_gpu_blocks = 32
    return config


@pytest.fixture(scope="module")
def kv_cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=32,
        kv_cache_tensors=[KVCacheTensor(page * 32, ["layer"], page * 32, page)],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        kv_cache_layout="LBHNC",
    )


@pytest.fixture
def scheduler(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[Scheduler]:
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    yield scheduler
    scheduler.shutdown()


def make_request(kv_transfer_params: dict[str, Any] | None) -> Request:
    extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    return Request(
        request_id="r",
        prompt_token_ids=list(range(40)),
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def test_name_is_registered_and_selects_the_path(config: VllmConfig) -> None:
    carrier = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert carrier is InEngineCarrier
    assert hooks.in_engine(config.kv_transfer_config)


def test_carrier_asks_for_no_piecewise_graphs_and_no_layout(config: VllmConfig) -> None:
    assert not InEngineCarrier.requires_piecewise_for_cudagraph({})
    assert InEngineCarrier.get_required_kvcache_layout(config) is None


def test_scheduler_has_hooks_and_no_connector(scheduler: Scheduler) -> None:
    assert scheduler.connector is None
    assert scheduler.get_kv_connector() is None
    assert scheduler.pd is not None
    assert scheduler.kv_cache_manager.pd is scheduler.pd


def test_worker_makes_no_connector(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    ensure_kv_transfer_initialized(config, kv_cache_config)
    assert not has_kv_transfer_group()


def add_request(scheduler: Any, request: Request) -> None:
    """``EngineCore.add_request`` over the parts of a core that it uses."""
    EngineCore.add_request(SimpleNamespace(scheduler=scheduler), request)  # type: ignore[arg-type]


def test_core_does_not_warn_that_params_are_ignored(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.v1.engine.core")
    logger.addHandler(caplog.handler)
    try:
        add_request(scheduler, make_request({"do_remote_decode": True}))
    finally:
        logger.removeHandler(caplog.handler)
    assert "no KVConnector found" not in caplog.text
    assert "r" in scheduler.requests


def test_core_still_warns_without_the_in_engine_path(caplog: pytest.LogCaptureFixture) -> None:
    added: list[Request] = []
    stock = SimpleNamespace(
        get_kv_connector=lambda: None, get_ec_connector=lambda: None, add_request=added.append
    )
    logger = logging.getLogger("vllm.v1.engine.core")
    logger.addHandler(caplog.handler)
    try:
        add_request(stock, make_request({"do_remote_decode": True}))
    finally:
        logger.removeHandler(caplog.handler)
    assert "no KVConnector found" in caplog.text
    assert len(added) == 1


# Statistics on their way to the log and to Prometheus.


def every_counter() -> dict[str, float]:
    stats = Stats()
    for name, (_, label) in COUNTERS.items():
        stats.add(name, 2, "some" if label else None)
    return stats.take()


def test_log_line_adds_up_what_arrived(config: VllmConfig) -> None:
    lines: list[tuple[Any, ...]] = []
    logging_ = KVConnectorLogging(config.kv_transfer_config)
    logging_.observe({"loads/ok": 1, "load_ms": 0.25})
    logging_.observe({"loads/ok": 2, "loads/checksum": 1})
    logging_.log(log_fn=lambda *args: lines.append(args))
    assert lines == [("KV Transfer metrics: %s", "load_ms=0.25, loads/checksum=1, loads/ok=3")]
    logging_.log(log_fn=lambda *args: lines.append(args))
    assert len(lines) == 1


def unregister(prom: KVConnectorProm) -> None:
    metrics: Any = prom.prom_metrics
    for metric in (*metrics._counters.values(), *metrics._gauges.values()):
        REGISTRY.unregister(metric)


def test_gauges_appear_in_the_metrics_page(config: VllmConfig) -> None:
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"]})
    try:
        for registered in (1, 0):
            stats = Stats()
            stats.set("router_registered", registered, "r1")
            info = ("p0", "kv_producer", "e1", "127.0.0.1:1", "a=b c=d/e", "127.0.0.1:2")
            stats.set("engine_info", 1, *info)
            prom.observe(stats.take())
        page = generate_latest(REGISTRY).decode()
    finally:
        unregister(prom)
    assert 'vllm:pd_router_registered{engine="0",model_name="tiny",router="r1"} 0.0' in page
    assert (
        'vllm:pd_engine_info{engine="0",engine_id="p0",epoch="e1",fingerprint="a=b c=d/e",'
        'kv_endpoint="127.0.0.1:1",model_name="tiny",pool_master="127.0.0.1:2",'
        'role="kv_producer"} 1.0'
    ) in page


def test_series_of_former_weights_go(config: VllmConfig) -> None:
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"]})
    common: Any = SimpleNamespace(stats=Stats(), scheduler=SimpleNamespace(log_stats=True))
    trust: Any = None  # no step ends here
    labels = ("p0", "kv_producer", "e1", "", "weights=0", "")
    info = EngineInfo(common, trust, labels, {"processors": "none"})
    try:
        for generation in range(1, 4):
            prom.observe(common.stats.take())
            info.identify(f"weights={generation}")
            for first in (0, 1):
                names = [f"of {number}" for number in range(first, MAX_ADAPTERS + first)]
                info.note_adapters(dict.fromkeys(names, f"{generation}"))
        prom.observe(common.stats.take())
        page = generate_latest(REGISTRY).decode()
    finally:
        unregister(prom)
    [series] = re.findall(r"^vllm:pd_engine_info\{.*", page, re.MULTILINE)
    assert 'fingerprint="weights=3"' in series
    assert series.endswith(" 1.0")
    assert parse_makers(page.encode()) == TokensMadeBy(
        sampling={"processors": "none"},
        adapters={f"of {number}": "3" for number in range(1, MAX_ADAPTERS + 1)},
    )


def test_gauges_are_not_in_the_log_line() -> None:
    stats = PDStats(data={"router_registered": 1})
    assert stats.is_empty()
    stats.aggregate(PDStats(data={"router_registered": 0, "loads/ok": 1}))
    assert stats.data["router_registered"] == 0
    assert stats.reduce() == {"loads/ok": 1}


def test_counters_appear_in_the_metrics_page(config: VllmConfig) -> None:
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    assert prom.prom_metrics is not None
    try:
        prom.observe(every_counter(), 1)
        prom.observe(every_counter(), 1)
        page = generate_latest(REGISTRY).decode()
    finally:
        unregister(prom)
    for name, (_, label) in COUNTERS.items():
        labels = 'engine="1",model_name="tiny"'
        labels = ",".join(sorted([*labels.split(","), *([f'{label}="some"'] if label else [])]))
        assert f"vllm:pd_{name}_total{{{labels}}} 4.0" in page


def test_stats_add_up_and_reset() -> None:
    stats = PDStats(data={"loads/ok": 1})
    assert stats.aggregate(PDStats(data={"loads/ok": 2, "load_bytes": 5})) is stats
    assert stats.reduce() == {"load_bytes": 5, "loads/ok": 3}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_statuses_of_the_release_keep_their_numbers() -> None:
    ours = RequestStatus.WAITING_FOR_KV
    others = [status for status in RequestStatus if status is not ours]
    assert others == list(range(1, len(others) + 1))
    assert not RequestStatus.is_finished(ours)
