# SPDX-License-Identifier: Apache-2.0
"""``kv_connector_extra_config.pool``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.config import LoadFromPool, PDConfig, PoolConfig, PoolSave, SsdConfig
from vllm_ascend_pd.errors import ConfigError


def transfer_config(extra: dict[str, Any]) -> Any:
    return SimpleNamespace(
        kv_role="kv_both",
        engine_id="e",
        kv_ip="127.0.0.1",
        kv_port=0,
        kv_connector_extra_config=extra,
    )


def parse(pool: Any, **extra: Any) -> PoolConfig | None:
    return PDConfig.from_kv_transfer_config(transfer_config({"pool": pool, **extra})).pool


def test_an_empty_section_switches_the_pool_on() -> None:
    assert parse({}) == PoolConfig()


def test_workers_divide_memory_and_disk() -> None:
    config = PoolConfig(dram_size=100 << 20, ssd=SsdConfig("/data/kv", 1 << 30))
    assert config.for_worker(0, 1) == config
    parts = [config.for_worker(rank, 4) for rank in range(4)]
    assert {part.dram_size for part in parts} == {25 << 20}
    assert [part.ssd for part in parts] == [
        SsdConfig(f"/data/kv/worker-{rank}", 256 << 20) for rank in range(4)
    ]


@pytest.mark.parametrize("size", [None, 0])
def test_memory_that_is_not_given_is_not_divided(size: int | None) -> None:
    assert PoolConfig(dram_size=size).for_worker(1, 4).dram_size == size


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PoolConfig(dram_size=63 << 20), r"pool.dram_size is divided among 4 .* least 64 MiB"),
        (PoolConfig(ssd=SsdConfig("/a", 128 << 20)), r"pool.ssd.size .* 4 .* least 256 MiB"),
    ],
)
def test_parts_that_are_too_small_are_refused(config: PoolConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.for_worker(0, 4)


def test_files_of_mooncake_are_refused_at_an_ipv6_address() -> None:
    ssd = {"path": "/data/kv", "size": "1GiB"}
    config = transfer_config({"pool": {"ssd": ssd}})
    PDConfig.from_kv_transfer_config(config)
    config.kv_ip = "::1"
    with pytest.raises(ConfigError, match=r"reads no file back over IPv6, and kv_ip is ::1"):
        PDConfig.from_kv_transfer_config(config)
    config.kv_connector_extra_config["pool"]["tiers"] = ["mooncake", "fs"]
    PDConfig.from_kv_transfer_config(config)


def test_without_the_section_there_is_no_pool() -> None:
    assert PDConfig.from_kv_transfer_config(transfer_config({})).pool is None


def test_every_option_is_read() -> None:
    options = {
        "master": "127.0.0.1:50051",
        "dram_size": "1.5GiB",
        "ssd": {"path": "/data/kv", "size": "2T"},
        "get": False,
        "put_decoded": False,
        "save": "write_through",
        "load": "all",
        "lookup_timeout_ms": 5,
        "io_threads": 3,
        "staging_slot_bytes": 1 << 20,
        "breaker_failures": 5,
        "breaker_slow_ms": 100,
        "probe_interval_s": 2,
    }
    config = parse(options)
    assert config == PoolConfig(
        master="127.0.0.1:50051",
        dram_size=1536 << 20,
        ssd=SsdConfig("/data/kv", 2 << 40),
        get=False,
        put_decoded=False,
        save=PoolSave.WRITE_THROUGH,
        load=LoadFromPool.ALL,
        lookup_timeout_ms=5.0,
        io_threads=3,
        staging_slot_bytes=1 << 20,
        breaker_failures=5,
        breaker_slow_ms=100.0,
        probe_interval_s=2.0,
    )
    assert parse({"put": False}) == PoolConfig(put=False)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ([], "pool must be a mapping"),
        ({"size": 1}, r"pool: unknown keys \['size'\]"),
        ({"master": "host"}, "pool.master must be host:port"),
        ({"master": "etcd://"}, "pool.master must be host:port, or etcd://host:port;host:port"),
        ({"master": "etcd://a:1;b"}, "pool.master must be host:port, or etcd://"),
        ({"master": "redis://127.0.0.1:1"}, "pool.master must be host:port, or etcd://"),
        ({"master": "etcd://127.0.0.1:1;192.0.2.1:5"}, "nor in security.allowed_peers"),
        ({"master": "h:\u00b2"}, "pool.master must be host:port"),
        ({"dram_size": "\u00b2"}, "pool.dram_size must be bytes or a text"),
        ({"master": 5}, "pool.master must be a string, not 5"),
        ({"dram_size": "much"}, "pool.dram_size must be bytes or a text"),
        ({"dram_size": 1}, "pool.dram_size must be 0 or at least 16 MiB"),
        ({"ssd": "/data"}, "pool.ssd must be a mapping"),
        ({"ssd": {"path": "/data"}}, r"pool.ssd: \['size'\] is missing"),
        ({"ssd": {"path": "data", "size": "1G"}}, "pool.ssd.path must be an absolute path"),
        ({"ssd": {"path": "/data", "size": "1M"}}, "pool.ssd.size must be at least 64 MiB"),
        ({"load": "some"}, "pool.load: 'some' is not one of"),
        ({"save": "never"}, "pool.save: 'never' is not one of"),
        ({"save": "eviction", "put_decoded": False}, "pool.put_decoded false needs pool.save"),
        ({"get": "yes"}, "pool.get must be bool"),
        ({"tiers": []}, "pool.tiers must name some tiers, each once"),
        ({"tiers": ["dram", "dram"]}, "pool.tiers must name some tiers, each once"),
        ({"tiers": ["mooncake", "dram"]}, "mooncake and dram both take pool.dram_size"),
        ({"tiers": ["dram", "fs"]}, "pool.tiers: fs needs pool.ssd"),
        ({"tiers": ["dram"], "ssd": {"path": "/a", "size": "1G"}}, "pool.ssd is for the tiers fs"),
        ({"tiers": ["dram"], "master": "h:1"}, "pool.master is for the tier mooncake"),
        ({"tenant_share": 0.5}, "pool.tenant_share: mooncake evicts by itself"),
        ({"tiers": ["dram"], "tenant_share": 0}, "pool.tenant_share must be above 0 and below 1"),
        ({"tiers": ["dram"], "tenant_share": 1}, "pool.tenant_share must be above 0 and below 1"),
        ({"tiers": ["dram", "mine"], "tenant_share": 0.5}, "pool.tenant_share: mine evicts by"),
        ({"tenant_shares": {"a": 0.5}}, "pool.tenant_shares.a: mooncake evicts by itself"),
        ({"tiers": ["dram"], "tenant_shares": {"a": 2}}, "pool.tenant_shares.a must be above 0"),
        ({"tiers": ["dram"], "tenant_share": "1/2"}, "pool.tenant_share must be float"),
        ({"io_threads": 0}, "pool.io_threads must be positive"),
        ({"master": "192.0.2.1:5"}, "neither a loopback address nor in security.allowed_peers"),
    ],
)
def test_wrong_value_is_named(pool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(pool)


def test_blocks_may_be_stored_when_they_are_evicted() -> None:
    config = parse({"save": "eviction"})
    assert config is not None
    assert config.save is PoolSave.EVICTION


def test_master_on_another_host_needs_to_be_allowed() -> None:
    security = {"allow_non_loopback": True, "allowed_peers": ["192.0.2.0/24"]}
    config = parse({"master": "192.0.2.1:5"}, security=security)
    assert config is not None
    assert config.master == "192.0.2.1:5"


def test_an_etcd_may_tell_which_master_leads() -> None:
    config = parse({"master": "etcd://127.0.0.1:2379;[::1]:2379"})
    assert config is not None
    assert config.master_hosts == ["127.0.0.1", "::1"]
