# SPDX-License-Identifier: Apache-2.0
"""From a topology to commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from vllm_ascend_pd.cluster.commands import Command, Deployment, make_deployment
from vllm_ascend_pd.cluster.machine import Machine
from vllm_ascend_pd.cluster.restart import in_turns
from vllm_ascend_pd.cluster.topology import LOCAL, parse
from vllm_ascend_pd.config import RouterLink
from vllm_ascend_pd.errors import ConfigError

GIB = 1 << 30
CPU = Machine("cpu", (0, 1, 2, 3, 4), (), 16 * GIB)
GPU = Machine("cuda", (0, 1, 2, 3), (0, 1, 2, 3), 64 * GIB)
HOSTS = {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}}


def deployment(machine: Machine = CPU, local: str = LOCAL, **fields: Any) -> Deployment:
    numbers = count(9000)
    return make_deployment(parse({"model": "m", **fields}), machine, local, lambda _: next(numbers))


def option(command: Command, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_engines_are_restarted_by_roles_in_turn() -> None:
    commands = deployment(prefill=[{"count": 2}], decode=[{"count": 3}]).commands
    turns = in_turns([one for one in commands if one.is_engine])
    assert [one.name for one in turns] == [
        *("prefill-0", "decode-0", "prefill-1", "decode-1", "decode-2")
    ]


def transfer_config(command: Command) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(option(command, "--kv-transfer-config"))
    return config


def test_one_machine() -> None:
    prefill, decode, router = deployment(served_model_name="name").commands
    assert prefill.argv[:5] == ("taskset", "-c", "0,1", "vllm", "serve")
    assert decode.argv[:3] == ("taskset", "-c", "2,3")
    assert (prefill.url, decode.url) == ("http://127.0.0.1:9000", "http://127.0.0.1:9003")
    assert option(prefill, "--port") == "9000"
    assert option(prefill, "--served-model-name") == "name"
    assert option(prefill, "--shutdown-timeout") == "30"
    assert option(prefill, "--disable-access-log-for-endpoints") == "/health,/metrics,/v1/models"
    assert prefill.argv.count("--enable-prompt-tokens-details") == 1
    assert option(prefill, "--kv-cache-memory-bytes") == str(4 * GIB)
    assert transfer_config(prefill) == {
        "kv_connector": "InEngine",
        "kv_role": "kv_producer",
        "engine_id": "prefill-0",
        "kv_ip": "127.0.0.1",
        "kv_port": 9001,
        "kv_connector_extra_config": {
            "router": {
                "url": "http://127.0.0.1:8000",
                "http_url": "http://127.0.0.1:9000",
                "instance_id": "prefill-0",
            }
        },
    }
    # Its running requests can be copied, and it gets no prompts of others.
    assert transfer_config(decode)["kv_role"] == "kv_both"
    assert transfer_config(decode)["kv_connector_extra_config"]["router"]["role"] == "decode"
    assert transfer_config(decode)["kv_port"] == 0
    assert router.argv == ("vllm-pd", "router", "--host", "127.0.0.1", "--port", "8000")
    assert router.url == "http://127.0.0.1:8000"


def test_engines_that_can_do_both() -> None:
    first, second, router = deployment(both=[{"count": 2}]).commands
    assert [one.name for one in (first, second)] == ["both-0", "both-1"]
    config = transfer_config(first)
    assert (config["kv_role"], config["kv_port"]) == ("kv_both", 9001)
    assert "role" not in config["kv_connector_extra_config"]["router"]
    assert option(router, "--roles") == "auto"
    said = {"roles": "operator", "require-prefill": False}
    by_hand = deployment(both=[{"count": 2}], router={"args": said}).commands[-1]
    assert not [word for word in by_hand.argv if "require-prefill" in word]
    assert by_hand.argv.count("--roles") == 1
    assert option(by_hand, "--roles") == "operator"
    args = {"--roles": "operator", "workers": 2}
    workers = deployment(both=[{"count": 2}], router={"args": args}).commands[-1]
    assert workers.argv.count("--roles") == 1


EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}


def endpoints(commands: Sequence[Command]) -> list[tuple[str, str | None]]:
    said = [json.loads(option(one, "--kv-events-config")) for one in commands if one.is_engine]
    assert all(events.items() >= EVENTS.items() for events in said)
    return [(events["endpoint"], events.get("replay_endpoint")) for events in said]


def test_engines_of_a_host_publish_their_events_at_ports_of_their_own() -> None:
    two = {"prefill": [{"count": 1}], "decode": [{"count": 1}]}
    words = ["--kv_events_config", json.dumps(EVENTS)]
    assert endpoints(deployment(**two, more_args=words).commands) == [
        ("tcp://*:5557", None),
        ("tcp://*:5558", None),
    ]
    # As the docs give it: the one range must not meet the other.
    replayed = {**EVENTS, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}
    decodes = [{"count": 1, "args": {"data-parallel-size": 2}}]
    commands = deployment(
        prefill=[{}], decode=decodes, args={"kv-events-config": replayed}
    ).commands
    assert endpoints(commands) == [
        ("tcp://*:5557", "tcp://127.0.0.1:5561"),
        ("tcp://*:5558", "tcp://127.0.0.1:5562"),
    ]
    assert all(one.argv.count("--kv-events-config") == 1 for one in commands if one.is_engine)


def test_who_collects_the_events_of_all_engines_is_where_it_is() -> None:
    collected = {**EVENTS, "endpoint": "tcp://10.0.0.9:5557"}
    assert (
        endpoints(deployment(args={"kv-events-config": collected}).commands)
        == [("tcp://10.0.0.9:5557", None)] * 2
    )


def test_events_that_do_not_meet_stay_where_they_were_said() -> None:
    own = [{**EVENTS, "endpoint": f"tcp://*:{port}"} for port in (6001, 6002)]
    groups = [[{"args": {"kv-events-config": events}}] for events in own]
    assert endpoints(deployment(prefill=groups[0], decode=groups[1]).commands) == [
        ("tcp://*:6001", None),
        ("tcp://*:6002", None),
    ]
    apart = {**EVENTS, "endpoint": "ipc:///e", "replay_endpoint": "tcp://127.0.0.1:7000"}
    hosts = {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}}
    there = {"hosts": hosts, "prefill": [{"host": "a"}], "decode": [{"host": "b"}]}
    commands = deployment(local="a", **there, args={"kv-events-config": apart}).commands
    assert endpoints(commands) == [("ipc:///e", "tcp://127.0.0.1:7000")] * 2


def test_router_may_listen_at_all_addresses() -> None:
    command = deployment(router={"args": {"host": "0.0.0.0"}}).commands[-1]
    assert command.argv[-2:] == ("--host", "0.0.0.0")
    assert command.asked.startswith("http://127.0.0.1:")


def test_engines_that_can_do_both_and_do_not_register() -> None:
    groups = {"prefill": [{}], "both": [{"host": "b", "count": 2}]}
    router = deployment(local="a", hosts=HOSTS, **groups).commands[-1]
    assert option(router, "--prefill") == "http://10.0.0.1:8100"
    assert option(router, "--static-backends") == "http://10.0.0.2:8101,http://10.0.0.2:8102"
    assert "--both" not in router.argv


def test_names_count_across_groups_and_shell_lines_can_be_run() -> None:
    made = deployment(decode=[{"count": 2}, {"args": {"max-num-seqs": 7}, "env": {"A": "b c"}}])
    assert [c.name for c in made.commands] == [
        *("prefill-0", "decode-0", "decode-1", "decode-2", "router")
    ]
    last = made.commands[3]
    words = shlex.split(last.shell_line)
    assert words[:4] == [
        *("VLLM_HOST_IP=127.0.0.1", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=30"),
        *("VLLM_PORT=9008", "A=b c"),
    ]
    assert tuple(words[4:]) == last.argv


def test_engines_of_this_machine_look_for_ports_of_their_own_apart() -> None:
    engines = deployment(decode=[{"count": 2}], env={"VLLM_LOGGING_LEVEL": "INFO"}).commands[:-1]
    assert len({one.env["VLLM_PORT"] for one in engines}) == 3
    (mine, *_) = deployment(env={"VLLM_PORT": "7000"}).commands
    assert mine.env["VLLM_PORT"] == "7000"
    (ranks, *_) = deployment(args={"data-parallel-size": 2}).commands
    assert "VLLM_PORT" not in ranks.env


def test_args_of_a_group_win() -> None:
    made = deployment(
        args={"max_num_seqs": 1, "dtype": "float32"}, decode=[{"args": {"max-num-seqs": 2}}]
    )
    assert option(made.commands[0], "--max-num-seqs") == "1"
    assert made.commands[1].argv.count("--max-num-seqs") == 1
    assert option(made.commands[1], "--max-num-seqs") == "2"
    assert option(made.commands[1], "--dtype") == "float32"


def test_data_parallel_ranks_share_what_their_engine_gets() -> None:
    two = {"args": {"data-parallel-size": 2}}
    made = deployment(
        Machine("cpu", (0, 1, 2, 3), (), 12 * GIB), prefill=[two], decode=[{"count": 1}]
    )
    prefill, decode, _ = made.commands
    assert prefill.instance_ids == ("prefill-0-dp0", "prefill-0-dp1")
    assert decode.instance_ids == ("decode-0",)
    for engine in (prefill, decode):  # of each rank
        assert option(engine, "--kv-cache-memory-bytes") == str(2 * GIB)
    assert transfer_config(prefill)["kv_port"] == 0, "which ports in a row are free is not known"


def test_ports_for_peers_are_counted_by_ranks() -> None:
    many = {"host": "a", "count": 2, "args": {"data_parallel_size": 2}}
    made = deployment(GPU, "a", hosts=HOSTS, prefill=[many], decode=[{"host": "b"}])
    ports = [transfer_config(c)["kv_port"] for c in made.commands if c.role == "prefill"]
    assert ports == [14600, 14602]
    visible = [c.env["CUDA_VISIBLE_DEVICES"] for c in made.commands if c.role == "prefill"]
    assert visible == ["0,1", "2,3"]
    chosen = {"host": "a", "count": 2, "kv_port": 7000, "args": {"data-parallel-size": 2}}
    made = deployment(GPU, "a", hosts=HOSTS, prefill=[chosen], decode=[{"host": "b"}])
    ports = [transfer_config(c)["kv_port"] for c in made.commands if c.role == "prefill"]
    assert ports == [7000, 7002]
    with pytest.raises(ConfigError, match="port 7001 of host a is given both"):
        deployment(
            GPU, "a", hosts=HOSTS, prefill=[chosen | {"port": 7001, "count": 1}], decode=[{}]
        )


def test_peers_ask_a_decode_engine_at_the_port_that_the_user_chose() -> None:
    made = deployment(decode=[{"count": 2, "kv_port": 7000}, {}])
    ports = [transfer_config(c)["kv_port"] for c in made.commands if c.role == "decode"]
    assert ports == [7000, 7001, 0]
    with pytest.raises(ConfigError, match=r"port 7000 .* both to prefill-0 and to decode-0"):
        deployment(prefill=[{"port": 7000}], decode=[{"kv_port": 7000}])


def test_only_who_is_asked_for_kv_has_the_port_for_peers_that_was_chosen() -> None:
    groups = {"prefill": [{"host": "a"}], "decode": [{"host": "b", "kv_port": 14600}]}

    def config(**fields: Any) -> tuple[str, int]:
        made = deployment(CPU, "a", device="cpu", hosts=HOSTS, **groups, **fields).commands[1]
        return transfer_config(made)["kv_role"], transfer_config(made)["kv_port"]

    assert config(extra_config={"security": {"secret_file": "/etc/s"}}) == ("kv_both", 14600)
    assert config() == ("kv_consumer", 0)


def test_a_port_for_peers_that_was_chosen_is_no_other_engines() -> None:
    groups = {"prefill": [{"host": "a", "kv_port": 14601}], "decode": [{"host": "a"}]}
    secret = {"security": {"secret_file": "/etc/s"}}
    made = deployment(CPU, "a", device="cpu", hosts=HOSTS, **groups, extra_config=secret)
    ports = [transfer_config(one)["kv_port"] for one in made.commands if one.is_engine]
    assert ports == [14601, 0]


def test_ranks_behind_a_router_that_is_told_urls_are_balanced_by_vllm() -> None:
    """Off loopback and without a token engines do not register."""
    two = {"host": "a", "args": {"data-parallel-size": 2}}
    made = deployment(GPU, "a", hosts=HOSTS, prefill=[two], decode=[{"host": "b"}])
    assert made.commands[0].ranks == (None,)


@pytest.mark.parametrize(
    "chosen",
    [
        {"args": {"kv-cache-memory-bytes": 5}},
        {"args": {"gpu_memory_utilization": 0.2}},
        {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
        {"more_args": ["--gpu-memory-utilization=0.2"]},
    ],
    ids=str,
)
def test_memory_that_the_user_chose_stays(chosen: dict[str, Any]) -> None:
    made = deployment(**chosen)
    assert str(4 * GIB) not in made.commands[0].argv


def test_fewer_cores_than_engines_are_shared_in_turns() -> None:
    """vLLM would bind all of them to one, on which a worker that waits keeps the others off."""
    made = deployment(Machine("cpu", (0, 5), (), GIB), decode=[{"count": 2}])
    pinned = [c.argv[:3] for c in made.commands if c.role != "router"]
    assert pinned == [("taskset", "-c", core) for core in ("0", "5", "0")]
    wide = deployment(Machine("cpu", (0,), (), GIB), decode=[{"args": {"tensor-parallel-size": 2}}])
    assert wide.commands[1].argv[0] == "vllm"


def test_devices_are_divided_by_parallel_size() -> None:
    made = deployment(GPU, prefill=[{"args": {"tensor-parallel-size": 2}}], decode=[{"count": 2}])
    visible = [c.env.get("CUDA_VISIBLE_DEVICES") for c in made.commands]
    assert visible == ["0,1", "2", "3", None]
    assert "--kv-cache-memory-bytes" not in made.commands[0].argv
    npu = Machine("npu", (0,), (0, 1), GIB)
    assert deployment(npu).commands[1].env["ASCEND_RT_VISIBLE_DEVICES"] == "1"


def test_devices_that_are_hidden_without_numbers_are_named_in_the_topology() -> None:
    hidden = replace(GPU, hides_devices="CUDA_VISIBLE_DEVICES=GPU-1")
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=GPU-1 .* hosts.localhost.devices"):
        deployment(hidden)
    named = deployment(hidden, hosts={LOCAL: {"devices": [2, 3]}})
    assert [c.env.get("CUDA_VISIBLE_DEVICES") for c in named.commands] == ["2", "3", None]
    assert deployment(hidden, device="cpu").commands[0].argv[0] == "taskset"


def test_several_hosts() -> None:
    fields: dict[str, Any] = {
        "hosts": HOSTS,
        "device": "cpu",
        "prefill": [{"host": "a", "count": 2}],
        "decode": [{"host": "b"}],
    }
    made = deployment(local="a", **fields)
    assert [c.name for c in made.on("a")] == ["prefill-0", "prefill-1", "router"]
    assert [c.url for c in made.commands] == [
        *("http://10.0.0.1:8100", "http://10.0.0.1:8101", "http://10.0.0.2:8102"),
        "http://10.0.0.1:8000",
    ]
    config = transfer_config(made.on("b")[0])
    assert config["kv_ip"] == "10.0.0.2"
    extra = config["kv_connector_extra_config"]
    assert extra["security"] == {
        "allow_non_loopback": True,
        "allowed_peers": ["10.0.0.1", "10.0.0.2"],
    }
    assert option(made.commands[-1], "--decode") == "http://10.0.0.2:8102"
    assert "router" not in extra  # it would need a token to register from another host
    # The other host works out the same ports.
    assert [c.url for c in deployment(local="b", **fields).commands] == [
        c.url for c in made.commands
    ]


def test_extra_config_reaches_every_engine() -> None:
    made = deployment(
        extra_config={"transfer": {"lease_s": 5}, "router": {"labels": {"model": "x"}}}
    )
    for command in made.commands[:2]:
        extra = transfer_config(command)["kv_connector_extra_config"]
        assert extra["transfer"] == {"lease_s": 5}
        assert extra["router"]["labels"] == {"model": "x"}


def test_engines_register_with_other_routers_too() -> None:
    made = deployment(
        extra_config={"router": {"url": "http://127.0.0.1:8001,http://127.0.0.1:8002"}}
    )
    section = transfer_config(made.commands[0])["kv_connector_extra_config"]["router"]
    assert RouterLink(**section).urls == tuple(f"http://127.0.0.1:{8000 + i}" for i in range(3))


def test_engines_on_several_hosts_register_with_a_token() -> None:
    made = deployment(local="a", hosts=HOSTS, extra_config={"router": {"token_file": "/etc/token"}})
    router = made.commands[-1]
    assert option(router, "--registration-token-file") == "/etc/token"
    assert "--prefill" not in router.argv
    section = transfer_config(made.commands[0])["kv_connector_extra_config"]["router"]
    assert section["token_file"] == "/etc/token"
    assert section["url"] == "http://10.0.0.1:8000"


def test_a_pool_has_one_master() -> None:
    pool = {"ssd": {"path": "/ssd/kv", "size": "1GiB"}}
    master, *engines, _ = deployment(extra_config={"pool": pool}).commands
    assert (master.name, master.argv[0]) == ("master", "mooncake_master")
    assert "--enable_offload=true" in master.argv
    rpc_port = next(w for w in master.argv if w.startswith("--rpc_port=")).partition("=")[2]
    for engine in engines:
        section = transfer_config(engine)["kv_connector_extra_config"]["pool"]
        assert section["master"] == f"127.0.0.1:{rpc_port}"
        assert section["dram_size"] == 2 * GIB
        assert section["ssd"] == {"path": f"/ssd/kv/{engine.name}", "size": "1GiB"}


def test_a_master_of_the_users_own() -> None:
    pool = {"master": "127.0.0.1:50051", "dram_size": "1GiB"}
    made = deployment(extra_config={"pool": pool})
    assert [c.name for c in made.commands] == ["prefill-0", "decode-0", "router"]
    assert transfer_config(made.commands[0])["kv_connector_extra_config"]["pool"] == pool


@pytest.mark.parametrize("more", [{}, {"hosts": HOSTS, "device": "cpu"}], ids=["one", "two"])
def test_a_pool_without_mooncake_has_no_master(more: dict[str, Any]) -> None:
    pool = {"tiers": ["dram", "fs"], "dram_size": "1GiB", "ssd": {"path": "/kv", "size": "1GiB"}}
    local = "a" if more else LOCAL
    made = deployment(local=local, extra_config={"pool": pool}, **more)
    assert [c.name for c in made.commands] == ["prefill-0", "decode-0", "router"]
    for engine in made.commands[:2]:
        section = transfer_config(engine)["kv_connector_extra_config"]["pool"]
        assert section == {**pool, "ssd": {"path": f"/kv/{engine.name}", "size": "1GiB"}}


def test_ports_of_the_master_on_several_hosts_are_fixed() -> None:
    made = deployment(local="b", hosts=HOSTS, extra_config={"pool": {"dram_size": "1GiB"}})
    assert made.commands[0].host == "a"
    assert "--rpc_address=10.0.0.1" in made.commands[0].argv
    section = transfer_config(made.commands[1])["kv_connector_extra_config"]["pool"]
    assert section["master"] == "10.0.0.1:14500"


@pytest.mark.parametrize(
    ("machine", "fields", "message"),
    [
        (CPU, {"extra_config": {"transfer": {"lease": 1}}}, "extra_config, as prefill-0 gets it: "),
        (CPU, {"extra_config": {"pool": None}}, "as prefill-0 gets it: pool must be a mapping"),
        (CPU, {"extra_config": {"pool": {"tiers": 5}}}, "gets it: pool.tiers must be a list"),
        (GPU, {"prefill": [{"count": 4}]}, "hosts.localhost: its 5 engines need 5 devices, and it"),
        (GPU, {"args": {"tensor-parallel-size": "x"}}, "prefill-0: --tensor-parallel-size must"),
        (CPU, {"prefill": [{"port": 8000}]}, "port 8000 of host localhost is given both to the r"),
        (
            CPU,
            {"prefill": [{"port": 7000}], "decode": [{"port": 7000}]},
            "both to prefill-0 and to decode-0",
        ),
        (CPU, {"decode": [{"port": 65535, "count": 2}]}, "decode-1: port 65536 is not within"),
        (
            CPU,
            {"both": [{"count": 2}], "router": {"args": {"workers": 2}}},
            "router.args.workers: one process decides",
        ),
        (CPU, {"router": {"args": {"--roles": "auto", "workers": 2}}}, "router.args.workers: one"),
        (
            CPU,
            {"router": {"args": {"host": "10.0.0.5"}}},
            "router.args.host: .* at 127.0.0.1, hosts",
        ),
        (CPU, {"args": {"prefix-caching-hash-algo": "xxhash"}}, "env.PYTHONHASHSEED is missing"),
        (
            GPU,
            {"device": "cuda", "hosts": HOSTS, "decode": [{"host": "b", "count": 2}]},
            "hosts.b.devices is missing: 2 engines share that host",
        ),
    ],
)
def test_what_does_not_fit_is_named(machine: Machine, fields: dict[str, Any], message: str) -> None:
    local = "a" if "hosts" in fields else LOCAL
    with pytest.raises(ConfigError, match=message):
        deployment(machine, local, **fields)


@pytest.mark.parametrize(
    "said",
    [
        {"args": {"tool-call-parser": "hermes"}},
        {"args": {"tool_call_parser": "hermes"}},
        {"more_args": ["--tool_call_parser", "hermes"]},
        {"more_args": ["--tool-call-parser=hermes"]},
    ],
    ids=str,
)
def test_router_knows_the_tool_parser_that_all_engines_have(said: dict[str, Any]) -> None:
    assert option(deployment(**said).commands[-1], "--tool-call-parser") == "hermes"
    args = {"tool_call_parser": "hermes"}
    differing = deployment(args=args, decode=[{"args": {"tool-call-parser": "xlam"}}])
    assert "--tool-call-parser" not in differing.commands[-1].argv


def test_what_an_engine_says_of_cached_tokens_is_the_users_to_choose() -> None:
    off = "--no_enable_prompt_tokens_details"
    engine = deployment(more_args=[off]).commands[0]
    assert [word for word in engine.argv if "tokens" in word] == [off]


@pytest.mark.parametrize("said", [{"args": {"api_server_count": 0}}, {"more_args": ["-asc", "0"]}])
def test_engine_without_a_server_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="prefill-0: api-server-count must be at least 1"):
        deployment(**said)
    deployment(args={"api-server-count": 2})


@pytest.mark.parametrize(
    ("fields", "args", "message"),
    [
        ({}, {"prefill-model-labels": "p"}, r"\['p'\] \(none has any\); .* or name one as extra_c"),
        ({}, {"decode_model_labels": ["x", "y"]}, "decode-model-labels: no engine"),
        (
            {"extra_config": {"router": {"labels": {"model": "b"}}}},
            {"decode-model-labels": "a,c"},
            "all have 'b'",
        ),
        (
            {"hosts": HOSTS, "prefill": [{"host": "b"}]},
            {"decode-model-labels": "a"},
            "none has any.; leave it out$",
        ),
    ],
)
def test_labels_that_no_engine_has_are_refused(
    fields: dict[str, Any], args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        deployment(router={"args": args}, **fields)
    deployment(router={"args": {**args, "instances": "more.json"}}, **fields)


def test_labels_that_engines_have() -> None:
    labels = {"prefill-model-labels": "a, b", "decode-model-labels": ["b"]}
    extra = {"router": {"labels": {"model": "b"}}}
    router = deployment(router={"args": labels}, extra_config=extra).commands[-1]
    assert option(router, "--decode-model-labels") == "b"
