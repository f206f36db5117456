# SPDX-License-Identifier: Apache-2.0
"""What the start of a scheduler side opens."""

from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from tests.schedulers.harness import SPEC, WINDOW, Engines, hasher, kv_cache_config_of
from tests.unit.engine.test_registrar import Web
from tests.unit.engine.test_registrar import until as wait_until
from vllm_ascend_pd.engine.fingerprint import fingerprint
from vllm_ascend_pd.engine.vllm_api.config import keep_contents
from vllm_ascend_pd.errors import ConfigError


def test_an_engine_registers_with_each_of_its_routers(engines: Engines) -> None:
    routers = [Web(), Web()]
    try:
        link = {"url": ",".join(web.url for web in routers), "http_url": routers[0].url}
        engine = engines.make("kv_both", router=link)
        for web in routers:
            wait_until(lambda web=web: "ready" in web.states(), 20)
        engine.scheduler.shutdown()
        assert [web.states()[-1] for web in routers] == ["DELETE", "DELETE"]
    finally:
        for web in routers:
            web.close()


def test_what_was_opened_is_closed_where_the_rest_cannot_be_made(engines: Engines) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="http_url is missing"):
        engines.make("kv_both", router={"url": "http://127.0.0.1:1"})
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_pages_of_one_size_that_a_backend_packs_otherwise_are_told_apart(
    base_config: VllmConfig, num_heads: int
) -> None:
    """K of all heads and then V of all, where others have a slot for each head."""
    size = 8 // num_heads
    by_heads = replace(SPEC, num_kv_heads=num_heads, head_size=size, head_size_v=size)
    planes = replace(by_heads, num_head_slots=2, state_content_bytes=8 * 4)
    assert planes.page_size_bytes == by_heads.page_size_bytes
    plain = fingerprint(base_config, kv_cache_config_of(8, by_heads))
    packed = fingerprint(base_config, kv_cache_config_of(8, planes))
    assert "slots=" not in plain
    assert packed == f"{plain} slots=2x32"
    beside = kv_cache_config_of(8, planes, WINDOW)
    assert fingerprint(base_config, beside).endswith(" slots=2x32,heads")


@pytest.mark.parametrize(
    ("kv_dtype", "formats"),
    [
        ("fp8", ["plain"] * 4),
        ("nvfp4", ["plain", "plain", "plain", "sm100"]),
        ("turboquant_k8v4", ["e4b15", "plain", "plain", "plain"]),
        ("turboquant_4bit_nc", ["plain"] * 4),
    ],
)
def test_pages_that_another_gpu_writes_otherwise_are_told_apart(
    base_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, formats: list[str]
) -> None:
    config, found = deepcopy(base_config), []
    config.device_config = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(config.model_config, "pd_built_with", (4096, kv_dtype), raising=False)
    for capability in ((8, 6), (8, 9), (9, 0), (10, 3)):
        known = DeviceCapability(*capability)
        name = "get_device_capability"
        monkeypatch.setattr(type(current_platform), name, lambda _, known=known: known)
        parts = fingerprint(config, kv_cache_config_of(8, SPEC)).split()
        found += [part.removeprefix("isa=") for part in parts if part.startswith("isa=")]
    assert found == formats


def test_an_engine_says_what_its_workers_tell_of_their_pages(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for kernels in ("", "64"):
        side = engines.make("kv_both").scheduler.pd
        scheduler = side.common.scheduler
        before = fingerprint(scheduler.vllm_config, scheduler.kv_cache_config)
        device = SimpleNamespace(device_type="cuda")
        monkeypatch.setattr(scheduler.vllm_config, "device_config", device)
        executor = SimpleNamespace(collective_rpc=lambda method, kernels=kernels: [kernels])
        core: Any = SimpleNamespace(model_executor=executor, request_block_hasher=hasher)
        side.identify = told.append
        side.on_engine_started(core)
    assert told == [f"{before} kernel=64"]


def test_kv_dtype_is_the_one_that_the_model_was_built_with(base_config: VllmConfig) -> None:
    """Layers of sparse MLA write the format of their backend over it: with one worker in the
    scheduler's process, with several in theirs. How large its pages are tells it apart."""
    config, caches = deepcopy(base_config), kv_cache_config_of(8, SPEC)
    keep_contents(config)
    before = fingerprint(config, caches)
    config.cache_config.cache_dtype = "fp8_ds_mla"
    assert fingerprint(config, caches) == before


def test_kv_dtype_is_auto_where_it_is_the_models_own(base_config: VllmConfig) -> None:
    config, caches = deepcopy(base_config), kv_cache_config_of(8, SPEC)
    before = fingerprint(config, caches)
    config.cache_config.cache_dtype = str(config.model_config.dtype).removeprefix("torch.")
    assert fingerprint(config, caches) == before


def test_fp8_is_one_kv_dtype_by_either_name(base_config: VllmConfig) -> None:
    """``auto`` with a checkpoint that asks for it comes to the longer one."""
    config, found = deepcopy(base_config), []
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        config.cache_config.cache_dtype = name
        found.append(fingerprint(config, kv_cache_config_of(8, SPEC)))
    assert found[0] == found[1] != found[2]
