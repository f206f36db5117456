# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests of this folder; when one ends, nothing may be left in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ascend_pd.engine.scheduler import supported
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytest.register_assert_rewrite("tests.schedulers.harness")

from tests.schedulers.harness import BLOCK_SIZE, NUM_BLOCKS, Engine, Engines  # noqa: E402


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", seed=0, max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


@pytest.fixture(scope="module", autouse=True)
def patches_are_read_once() -> Iterator[None]:
    """They would be for each of thousands of engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supported, "refuse_other_patches", cache(supported.refuse_other_patches))
        yield


@pytest.fixture(params=[Scheduler, AsyncScheduler], ids=["sync", "async"])
def engines(request: pytest.FixtureRequest, base_config: VllmConfig) -> Iterator[Engines]:
    engines = Engines(request.param, base_config)
    num_failed = request.session.testsfailed
    yield engines
    if request.session.testsfailed > num_failed:
        engines.shutdown()
    else:
        engines.end()


@pytest.fixture
def producer(engines: Engines) -> Engine:
    return engines.make("kv_producer")


@pytest.fixture
def consumer(producer: Engine, engines: Engines) -> Engine:
    return engines.make("kv_consumer")
