# SPDX-License-Identifier: Apache-2.0
"""Parsing the configuration: every error names the field and the fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_ascend_pd.config import (
    DEFAULT_KV_PORT,
    LoadMode,
    PDConfig,
    PushMode,
    Role,
    RouterLink,
    SecurityConfig,
    TransferConfig,
    Transport,
)
from vllm_ascend_pd.errors import ConfigError, PDError
from vllm_ascend_pd.types import Endpoint


@dataclass
class KVTransfer:
    """The fields of ``KVTransferConfig`` that are read."""

    kv_role: Any = "kv_both"
    engine_id: str | None = "engine"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)


def parse(**fields: Any) -> PDConfig:
    return PDConfig.from_kv_transfer_config(KVTransfer(**fields))


def parse_extra(**extra: Any) -> PDConfig:
    return parse(kv_connector_extra_config=extra)


def test_only_an_engine_of_both_roles_says_which_the_router_may_use() -> None:
    extra = {"router": {"url": "http://127.0.0.1:1", "role": "decode"}}
    assert parse(kv_connector_extra_config=extra).router.role == "decode"
    with pytest.raises(ConfigError, match=r"router\.role: leave it out, for kv_role kv_consumer"):
        parse(kv_role="kv_consumer", kv_connector_extra_config=extra)


def test_peers_to_forward_to_are_of_engines_of_both_roles() -> None:
    extra = {"forward": {"peers": ["[::1]:7", "127.0.0.1:8"]}, "security": {"secret_file": "s"}}
    peers = parse(kv_connector_extra_config=extra).forward.endpoints
    assert peers == (Endpoint("::1", 7), Endpoint("127.0.0.1", 8))
    with pytest.raises(ConfigError, match=r"forward\.peers needs kv_role kv_both"):
        parse(kv_role="kv_consumer", kv_connector_extra_config=extra)


def test_engine_forwards_to_others() -> None:
    extra = {"forward": {"peers": ["127.0.0.1:7"]}, "security": {"secret_file": "s"}}
    with pytest.raises(ConfigError, match=r"forward\.peers: 127\.0\.0\.1:7 is this engine"):
        parse(kv_port=7, kv_connector_extra_config=extra)
    # The default port may be another engine's of this host.
    extra["forward"] = {"peers": [f"127.0.0.1:{DEFAULT_KV_PORT}"]}
    assert parse(kv_connector_extra_config=extra).forward.peers


def test_nothing_set_works_on_one_machine() -> None:
    config = parse()
    assert config.host == "127.0.0.1"
    assert config.transfer == TransferConfig()
    assert config.security == SecurityConfig()
    assert config.transfer.load_mode is LoadMode.AUTO


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_role_says_what_the_engine_does(role: str, produces: bool, consumes: bool) -> None:
    config = parse(kv_role=role)
    assert config.role is Role(role)
    assert config.role.produces is produces
    assert config.role.consumes is consumes


def test_every_option_is_read() -> None:
    config = parse_extra(
        transfer={
            "lease_s": 5,
            "peer_timeout_s": 0.5,
            "step_load_timeout_s": 1,
            "load_timeout_s": 2.5,
            "load_mode": "park",
            "push_mode": "step",
            "transport": "mooncake",
            "arrival_timeout_s": 4,
            "prefill_timeout_s": 7,
            "max_step_load_ms": 0,
            "staging_slots": 3,
            "staging_slot_bytes": 65536,
        },
        security={"allow_non_loopback": True, "allowed_peers": ["192.0.2.0/24", "2001:db8::1"]},
    )
    assert config.transfer == TransferConfig(
        lease_s=5.0,
        peer_timeout_s=0.5,
        step_load_timeout_s=1.0,
        load_timeout_s=2.5,
        arrival_timeout_s=4.0,
        prefill_timeout_s=7.0,
        push_mode=PushMode.STEP,
        load_mode=LoadMode.PARK,
        max_step_load_ms=0.0,
        staging_slots=3,
        staging_slot_bytes=65536,
        transport=Transport.MOONCAKE,
    )
    assert isinstance(config.transfer.lease_s, float)
    assert config.security.allowed_peers == ("192.0.2.0/24", "2001:db8::1")


@pytest.mark.parametrize("protocol", ["tcp", "rdma", "ascend"])
def test_protocol_of_mooncake(protocol: str) -> None:
    assert parse_extra(transfer={"protocol": protocol}).transfer.protocol.value == protocol


@pytest.mark.parametrize(
    ("transfer", "is_direct"),
    [
        ({}, False),
        ({"placement": "staged"}, False),
        ({"protocol": "rdma"}, False),
        ({"protocol": "ascend"}, True),
        ({"protocol": "ascend", "placement": "direct"}, True),
        ({"protocol": "ascend", "placement": "staged"}, False),
    ],
)
def test_pages_are_placed_directly_over_the_links_of_npus(
    transfer: dict[str, str], is_direct: bool
) -> None:
    assert parse_extra(transfer=transfer).transfer.places_directly is is_direct


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_direct_placement_where_bytes_land_after_a_failure_is_refused(protocol: str) -> None:
    with pytest.raises(ConfigError, match=r"placement direct needs transfer\.protocol ascend"):
        parse_extra(transfer={"placement": "direct", "protocol": protocol})


def test_shared_memory_between_npus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shared_memory .* ascend: leave one of them out"):
        parse_extra(transfer={"protocol": "ascend", "transport": "shared_memory"})


def test_unknown_protocol_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"transfer.protocol: 'roce' .*'tcp', 'rdma', 'ascend'"):
        parse_extra(transfer={"protocol": "roce"})


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        parse().transfer.lease_s = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"router": {"url": "http://127.0.0.1:9/p\u00e4th"}}, "router.url"),
        ({"router": {"url": "http://me:secret@127.0.0.1:9"}}, "router.url: it has a user"),
        ({"transfers": {}}, r"kv_connector_extra_config: unknown keys \['transfers'\]; valid"),
        ({"identity": "fast"}, r"identity: 'fast' is not one of \['samples', 'full'\]"),
        ({"transfer": {"lease": 1}}, r"transfer: unknown keys \['lease'\]; valid: .*'lease_s'"),
        ({"transfer": {"open_timeout": 1}}, "unknown keys .*; valid: .*'peer_timeout_s'"),
        ({"router": {"uri": "x"}}, r"router: unknown keys \['uri'\]; valid: .*'url'"),
        ({"router": {"url": "router:8000"}}, "router.url: 'router:8000' is not http://HOST:PORT"),
        ({"router": {"url": "http://a:1,"}}, "router.url: '' is not http://HOST:PORT"),
        ({"router": {"url": "http://a:1,http://b..c:1"}}, r"router.url: 'http://b\.\.c:1' is not"),
        ({"router": {"url": "http://a:65536"}}, "router.url: 'http://a:65536' is not"),
        ({"router": {"url": "http://[::1:80"}}, r"router.url: 'http://\[::1:80' is not"),
        (
            {"router": {"url": "http://a:1", "http_url": "http://.:1"}},
            r"router.http_url: 'http://\.:1' is not http://HOST:PORT",
        ),
        ({"router": {"instance_id": "p0"}}, "router.url is missing"),
        ({"router": {"url": 7}}, "router.url must be a string, not 7"),
        ({"router": {"labels": {"a": 1}}}, "router.labels.a must be a string, not 1"),
        ({"router": {"role": "decode"}}, "router.url is missing"),
        ({"forward": {"peers": ["a"]}}, "forward.peers: 'a' is not HOST:PORT"),
        ({"forward": {"peers": [":7"]}}, "forward.peers: ':7' is not HOST:PORT"),
        ({"forward": {"peers": ["a:70000"]}}, "forward.peers: 'a:70000' is not HOST:PORT"),
        ({"forward": {"peers": ["127.0.0.1:7"]}}, "forward.peers needs security.secret_file"),
        (
            {
                "forward": {"peers": ["127.0.0.1:7"]},
                "security": {"secret_file": "s"},
                "router": {"url": "http://r:1"},
            },
            "forward.peers and router.url: leave one of them out",
        ),
        (
            {"forward": {"peers": ["10.0.0.1:7"]}, "security": {"secret_file": "s"}},
            "forward.peers: '10.0.0.1' is neither a loopback address nor in",
        ),
        (
            {"transfer": {"lease_s": 600}},
            "transfer.lease_s 600 is longer than transfer.max_lease_s 300",
        ),
        ({"pool": {"get": False, "put": False}}, "pool.get and pool.put are both false"),
        ({"security": {"peers": []}}, r"security: unknown keys \['peers'\]; valid"),
        ({"transfer": 5}, "transfer must be a mapping, not int"),
        ({"transfer": None}, "transfer must be a mapping, not NoneType"),
        ({"pool": None}, "pool must be a mapping, not NoneType"),
        ({"transfer": {"lease_s": "30"}}, "transfer.lease_s must be float, not '30'"),
        ({"transfer": {"lease_s": True}}, "transfer.lease_s must be float, not True"),
        ({"transfer": {"lease_s": None}}, "transfer.lease_s must be float, not None"),
        ({"transfer": {"lease_s": 0}}, "transfer.lease_s must be positive"),
        ({"transfer": {"load_timeout_s": -1}}, "transfer.load_timeout_s must be positive"),
        ({"transfer": {"step_load_timeout_s": 1e10}}, "positive and at most 1e9, not 1000"),
        ({"transfer": {"max_step_load_ms": -1}}, "transfer.max_step_load_ms must not be negative"),
        ({"transfer": {"staging_slots": 2.5}}, "transfer.staging_slots must be int, not 2.5"),
        ({"transfer": {"staging_slots": 0}}, "transfer.staging_slots must be positive"),
        ({"transfer": {"load_mode": "both"}}, r"transfer.load_mode: 'both' is not one of .*park"),
        ({"security": {"allow_non_loopback": 1}}, "allow_non_loopback must be bool, not 1"),
        (
            {"security": {"allowed_peers": "10.0.0.1"}},
            "allowed_peers must be a list",
        ),
        ({"security": {"secret_file": ""}}, "secret_file is empty; give a path"),
        ({"security": {"secret_file": 5}}, "security.secret_file must be a string, not 5"),
        ({"security": {"secret_file": None}}, "secret_file must be a string, not None"),
        ({"security": {"allowed_peers": [1]}}, r"allowed_peers\[0\] must be a string, not 1"),
        (
            {"security": {"allow_non_loopback": True, "allowed_peers": ["host"]}},
            "allowed_peers: 'host' is not an IP address or network",
        ),
        (
            {"security": {"allowed_peers": ["192.0.2.1"]}},
            "allowed_peers needs security.secret_file, or .* security.allow_non_loopback",
        ),
    ],
    ids=str,
)
def test_wrong_value_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_extra(**extra)


def test_whole_number_may_be_written_as_a_float() -> None:
    assert (
        parse_extra(transfer={"staging_slot_bytes": 8e6}).transfer.staging_slot_bytes == 8_000_000
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("option", ["lease_s", "staging_slots"])
def test_number_that_is_no_number_is_refused(option: str, value: float) -> None:
    """JSON as Python reads it has NaN and Infinity."""
    with pytest.raises(ConfigError, match=option):
        parse_extra(transfer={option: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_role": None}, "kv_role is missing; set it to one of kv_producer"),
        ({"kv_ip": "somewhere"}, "kv_ip must be an IP address, not 'somewhere'"),
        ({"kv_ip": "192.0.2.1"}, "kv_ip 192.0.2.1 is not a loopback address.*secret_file"),
        ({"kv_ip": "0.0.0.0"}, "kv_ip 0.0.0.0 is not a loopback address"),
        (
            {
                "kv_ip": "::",
                "kv_connector_extra_config": {"security": {"allow_non_loopback": True}},
            },
            "kv_ip ::: peers are told it",
        ),
        ({"kv_port": -1}, "kv_port must be within 0..65535, not -1"),
        ({"kv_port": 65536}, "kv_port must be within 0..65535, not 65536"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**fields)


@pytest.mark.parametrize(
    ("port", "of_second"), [(14601, 14602), (DEFAULT_KV_PORT, DEFAULT_KV_PORT), (0, 0)]
)
def test_chosen_port_is_that_of_the_first_data_parallel_rank(port: int, of_second: int) -> None:
    config = parse(kv_port=port)
    assert [config.port_of(rank) for rank in (0, 1)] == [port, of_second]


def test_data_parallel_rank_has_a_folder_of_its_own() -> None:
    pool = parse_extra(pool={"ssd": {"path": "/pool", "size": "1GiB"}, "dram_size": "1GiB"}).pool
    assert pool is not None
    assert pool.for_rank(None) == pool
    second = pool.for_rank(1)
    assert second.ssd is not None
    assert (second.ssd.path, second.dram_size) == ("/pool/dp1", 1 << 30)
    assert second.for_worker(1, 2).ssd.path == "/pool/dp1/worker-1"  # type: ignore[union-attr]


def test_errors_can_be_caught_as_ours_and_as_value_errors() -> None:
    with pytest.raises(ValueError, match="kv_port") as caught:
        parse(kv_port=-1)
    assert isinstance(caught.value, PDError)


def test_localhost_is_loopback() -> None:
    assert parse(kv_ip="localhost").host == "127.0.0.1"


def test_other_addresses_need_to_be_allowed() -> None:
    config = parse(
        kv_ip="192.0.2.1", kv_connector_extra_config={"security": {"allow_non_loopback": True}}
    )
    assert config.host == "192.0.2.1"


def test_secret_allows_other_addresses_and_peers() -> None:
    security = {"secret_file": "/etc/pd-secret", "allowed_peers": ["192.0.2.2"]}
    config = parse(kv_ip="192.0.2.1", kv_connector_extra_config={"security": security})
    assert config.host == "192.0.2.1"
    assert config.security.allows("192.0.2.2")
    assert not config.security.allows("192.0.2.3")


def test_router_section() -> None:
    assert parse().router == RouterLink()
    router = parse_extra(router={"url": "http://[::1]:80", "labels": {"a": "b"}}).router
    assert router == RouterLink(url="http://[::1]:80", labels={"a": "b"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_peers_are_allowed(host: str) -> None:
    assert SecurityConfig().allows(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "example.com", "", "2130706433"])
def test_other_peers_are_not_allowed_by_default(host: str) -> None:
    assert not SecurityConfig().allows(host)


def test_a_name_is_allowed_where_any_address_is() -> None:
    anywhere = ("0.0.0.0/0", "::/0")
    assert SecurityConfig(True, anywhere).allows("vllm-pd-master")
    assert not SecurityConfig(True, anywhere).allows("")
    assert not SecurityConfig(True, anywhere[:1]).allows("vllm-pd-master")


def test_allowed_peers_are_addresses_or_networks() -> None:
    security = SecurityConfig(True, ("192.0.2.0/24", "2001:db8::1"))
    assert security.allows("192.0.2.200")
    assert security.allows("2001:db8::1")
    assert not security.allows("192.0.3.1")
    assert not security.allows("2001:db8::2")
    assert security.allows("127.0.0.1")
