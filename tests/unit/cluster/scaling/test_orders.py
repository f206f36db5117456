# SPDX-License-Identifier: Apache-2.0
"""What a node is told to run, and what runs beside the router."""

from __future__ import annotations

import json
import socket
import sys
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_ascend_pd.cluster.commands import Programs
from vllm_ascend_pd.cluster.launch import Manner, with_secrets
from vllm_ascend_pd.cluster.machine import Machine
from vllm_ascend_pd.cluster.scaling import on_ray, ray_fleet
from vllm_ascend_pd.cluster.scaling.driver import DriverSpec
from vllm_ascend_pd.cluster.scaling.keeper import KeeperOrder
from vllm_ascend_pd.cluster.scaling.orders import Node, Shared, order_engine
from vllm_ascend_pd.cluster.scaling.ray_fleet import Cluster
from vllm_ascend_pd.cluster.scaling.target import Ratio, Target
from vllm_ascend_pd.cluster.topology import parse
from vllm_ascend_pd.config import ANYWHERE
from vllm_ascend_pd.errors import ConfigError

GIB = 1 << 30
GPU = Machine("cuda", (0, 1), (3, 5), GIB)
ROUTER = "http://10.0.0.1:8000"


def node(address: str = "10.0.0.2", **fields: Any) -> Node:
    machine = Machine("cpu", tuple(range(8)), (), 64 * GIB)
    given = {"machine": machine, "num_places": 4} | fields
    given |= {"port": 9000, "kv_port": 9001, "inner_port": 9002}
    return Node(address=address, programs=Programs(vllm="/there/vllm"), **given)


def shared(topology: dict[str, Any] | None = None, **fields: Any) -> Shared:
    given = {"device": "cpu", "cores": 2, "router_url": ROUTER, "log_dir": "/logs"} | fields
    return Shared(topology=parse({"model": "m", **(topology or {})}), **given)


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def transfer_config(made: KeeperOrder) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(option(made.argv, "--kv-transfer-config"))
    return config


def test_an_engine_can_have_either_role_and_registers_with_the_router() -> None:
    made = order_engine(shared(), "engine-3", node(), place=0)
    config = transfer_config(made)
    assert (config["kv_role"], config["engine_id"], config["kv_ip"]) == (
        *("kv_both", "engine-3", "10.0.0.2"),
    )
    assert config["kv_port"] == 9001
    assert made.env["VLLM_PORT"] == "9002"
    assert config["kv_connector_extra_config"]["router"] == {
        "url": ROUTER,
        "http_url": "http://10.0.0.2:9000",
        "instance_id": "engine-3",
    }
    assert made.health_url == "http://10.0.0.2:9000/health"


def test_engines_of_a_cpu_host_have_their_parts_of_it() -> None:
    parts = [order_engine(shared(), f"engine-{n}", node(), n).argv for n in range(4)]
    assert [option(argv, "-c") for argv in parts] == ["0,1", "2,3", "4,5", "6,7"]
    assert {option(argv, "--kv-cache-memory-bytes") for argv in parts} == {str(8 * GIB)}
    assert parts[0][3] == "/there/vllm"


def test_engines_of_a_node_publish_their_events_at_ports_of_their_own() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    for_all = shared({"args": {"kv-events-config": events}})
    there = node(num_places=2)
    made = [order_engine(for_all, f"engine-{place}", there, place) for place in range(2)]
    said = [json.loads(option(one.argv, "--kv-events-config")) for one in made]
    assert [events["endpoint"] for events in said] == ["tcp://*:5557", "tcp://*:5558"]


def test_an_engine_uses_the_accelerators_that_it_was_given() -> None:
    topology = {"args": {"tensor-parallel-size": 2}}
    there = node(machine=GPU, num_places=1)
    for_gpus = shared(topology, device="cuda")
    assert for_gpus.resources == {"CPU": 2, "GPU": 2}
    made = order_engine(for_gpus, "engine-0", there, place=0)
    assert made.env["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert shared(topology, device="npu").resources == {"CPU": 2, "NPU": 2}
    assert shared(topology).resources == {"CPU": 2}


def test_a_node_gets_the_secrets_as_files_for_its_engine_alone() -> None:
    secrets = {"security.secret_file": "s3cret", "router.token_file": "t0ken"}
    made = order_engine(shared(secrets=secrets), "engine-1", node(), place=0)
    extra = transfer_config(made)["kv_connector_extra_config"]
    assert made.secrets == {"/logs/.engine-1-secret": "s3cret", "/logs/.engine-1-token": "t0ken"}
    assert extra["security"] == {
        "secret_file": "/logs/.engine-1-secret",
        "allowed_peers": list(ANYWHERE),
    }
    assert extra["router"]["token_file"] == "/logs/.engine-1-token"
    assert not any(secret in repr(made) for secret in secrets.values())
    assert not any(secret in " ".join(made.argv) for secret in secrets.values())


def test_an_engine_uses_the_pools_files_of_the_one_whose_place_it_takes() -> None:
    """Each has a name of its own; else each would leave its files to nobody."""
    ssd = {"path": "/data/kv", "size": "1GiB"}
    pool = {"tiers": ["dram", "fs"], "dram_size": "64MiB", "ssd": ssd}
    topology = {"extra_config": {"pool": pool}}
    paths = []
    for name, place in (("engine-0", 0), ("engine-1", 1), ("engine-7", 0)):
        made = transfer_config(order_engine(shared(topology), name, node(), place))
        paths.append(made["kv_connector_extra_config"]["pool"]["ssd"]["path"])
    assert paths == ["/data/kv/10.0.0.2-0", "/data/kv/10.0.0.2-1", "/data/kv/10.0.0.2-0"]


def test_on_loopback_peers_are_those_of_loopback() -> None:
    made = order_engine(shared(), "engine-1", node("127.0.0.1"), place=0)
    assert transfer_config(made)["kv_connector_extra_config"].get("security", {}) == {}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "ask_cluster", lambda address: Cluster("10.0.0.1", "cuda"))


ASKED = on_ray.OnRay("auto", Target(Ratio(1, 2), 6), cores=1)


@pytest.mark.usefixtures("cluster")
def test_beside_the_router_runs_a_driver_that_knows_all(tmp_path: Path) -> None:
    here = on_ray.at_router(parse({"model": "m", "extra_config": {"pool": {}}}), ASKED)
    topology, _ = with_secrets(here, tmp_path)
    numbers = count(9000)
    manner = Manner(tmp_path, token_file=tmp_path / ".token")
    deployment, manner = on_ray.deployment_on_ray(
        topology, ASKED, manner, Programs(), lambda _: next(numbers)
    )
    assert [command.name for command in deployment.commands] == ["master", "router", "ray"]
    router = deployment.commands[1].argv
    assert option(router, "--host") == "10.0.0.1"
    assert option(router, "--registration-token-file") == str(tmp_path / ".token")
    assert "--decode" not in router
    spec_file = tmp_path / "ray.json"
    assert spec_file.stat().st_mode & 0o777 == 0o600
    spec = msgspec.json.decode(spec_file.read_bytes(), type=DriverSpec)
    assert (spec.shared.device, spec.shared.master) == ("cuda", "10.0.0.1:9005")
    assert spec.secret_files == {
        "security.secret_file": str(tmp_path / ".secret"),
        "router.token_file": str(tmp_path / ".token"),
    }
    assert manner.scaling is not None
    assert manner.scaling.target() == ASKED.target
    made = order_engine(spec.shared, "engine-0", node(machine=GPU, num_places=1), 0)
    assert made.health_url == "http://10.0.0.2:9000/health"


@pytest.mark.usefixtures("cluster")
def test_a_pool_without_mooncake_has_no_master_there(tmp_path: Path) -> None:
    pool = {"tiers": ["dram"], "dram_size": "64MiB"}
    here = on_ray.at_router(parse({"model": "m", "extra_config": {"pool": pool}}), ASKED)
    topology, _ = with_secrets(here, tmp_path)
    manner, numbers = Manner(tmp_path, token_file=tmp_path / ".token"), count(9000)
    deployment, _ = on_ray.deployment_on_ray(
        topology, ASKED, manner, Programs(), lambda _: next(numbers)
    )
    assert [command.name for command in deployment.commands] == ["router", "ray"]
    spec = msgspec.json.decode((tmp_path / "ray.json").read_bytes(), type=DriverSpec)
    assert spec.shared.master is None


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hosts": {"a": {"address": "10.0.0.1"}}}, "hosts: with --ray the cluster says where"),
        ({"args": {"data-parallel-size": 2}}, "data-parallel-size: with --ray each engine has one"),
        (
            {"router": {"args": {"--roles": "auto"}}},
            "router.args.roles: with --ray, --pd-ratio says",
        ),
        ({"both": [{"count": 2}]}, "both: with --ray, --pd-ratio and --max-instances say how many"),
        ({"prefill": [{}, {}]}, "prefill: with --ray, --pd-ratio and --max-instances say how"),
        ({"decode": [{"args": {"max-num-seqs": 4}}]}, "decode: with --ray every engine may get"),
    ],
)
def test_a_topology_does_not_say_what_the_cluster_decides(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ray.at_router(parse({"model": "m", **fields}), ASKED)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--ray: Ray is not installed .* vllm-ascend-pd\[ray\]"):
        ray_fleet.ask_cluster("auto")


def test_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--ray ray://h:10001: .* start this on a node"):
        ray_fleet.connect("ray://h:10001")


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "auto"])
def test_a_cluster_that_is_not_there_is_said_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    message = rf"no Ray cluster answers at 127.0.0.1:{port} .*ray start --head"
    with pytest.raises(ConfigError, match=message):
        ray_fleet.ask_cluster(address.format(port))
