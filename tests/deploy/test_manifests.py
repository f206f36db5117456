# SPDX-License-Identifier: Apache-2.0
"""What is applied to a Kubernetes cluster, as far as that can be seen without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_ascend_pd.cluster import topology
from vllm_ascend_pd.cluster.commands import make_deployment
from vllm_ascend_pd.cluster.machine import Machine
from vllm_ascend_pd.cluster.manifests import manifests
from vllm_ascend_pd.cluster.restart import LASTS_S
from vllm_ascend_pd.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
FILES = sorted(
    path.relative_to(DEPLOY)
    for path in DEPLOY.rglob("*.yaml")
    if DEPLOY / "chart" not in path.parents
)
NO_OBJECTS = {"topology.yaml", "kustomization.yaml", "mount.yaml", "model.yaml"}
OF_OPERATORS = {"PodMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds that a cluster knows if somebody installed them; their schemas are not Kubernetes' own."""
OLDEST, NEWEST = "1.29", "1.37"

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, for kubectl kustomize"
)

Object = dict[str, Any]


def validate(objects: list[Object]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in objects:
        if one["kind"] not in OF_OPERATORS:
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(one, version, strict=True)


def read(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture
def rendered(tmp_path: Path, request: pytest.FixtureRequest) -> list[Object]:
    """All objects of an overlay."""
    return kustomized(tmp_path / "deploy", request.param)


def kustomized(folder: Path, overlay: str, component: str | None = None) -> list[Object]:
    shutil.copytree(DEPLOY, folder)
    (folder / "base" / "secret").write_text("0123456789abcdef" * 4)
    if component is not None:
        path = folder / "overlays" / overlay / "kustomization.yaml"
        named = yaml.safe_load(path.read_text())
        named.setdefault("components", []).append(f"../../components/{component}")
        path.write_text(yaml.safe_dump(named))
    command = ["kubectl", "kustomize", str(folder / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of(objects: list[Object], kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def selects(selector: Object, labels: dict[str, str]) -> bool:
    some = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in some)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in some
    )


@pytest.mark.parametrize("path", [p for p in FILES if p.name not in NO_OBJECTS], ids=str)
def test_file_is_what_kubernetes_takes(path: Path) -> None:
    objects = read(DEPLOY / path)
    assert objects
    validate(objects)


@pytest.mark.parametrize("folder", ["chart", *(f"overlays/{one}" for one in OVERLAYS)])
def test_workloads_are_those_of_the_topology_beside_them(folder: str) -> None:
    path = DEPLOY / folder / "topology.yaml"
    made = manifests(topology.load(path), "vllm-pd")
    found = read(path.with_name("workloads.yaml"))
    assert found == made, f"make it anew: vllm-pd manifests {path}"


@needs_kubectl
@pytest.mark.parametrize("rendered", OVERLAYS, indirect=True)
def test_overlay_is_whole(rendered: list[Object]) -> None:
    """What one object names, another one is."""
    validate(rendered)
    deployments = of(rendered, "Deployment")
    assert set(deployments) == {"vllm-pd-prefill", "vllm-pd-decode", "vllm-pd-router"}
    pods = {name: one["spec"]["template"] for name, one in deployments.items()}
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}
    [secret] = of(rendered, "Secret")
    claims = of(rendered, "PersistentVolumeClaim")
    for name, pod in pods.items():
        spec = pod["spec"]
        assert selects(deployments[name]["spec"]["selector"], labels[name])
        volumes = {one["name"]: one for one in spec.get("volumes", ())}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["image"].startswith("vllm-pd:")
            assert {m["name"] for m in container.get("volumeMounts", ())} <= set(volumes)
        assert volumes["secret"]["secret"]["secretName"] == secret
        if "model" in labels[name]:
            assert "models" in volumes
            claimed = volumes["models"].get("persistentVolumeClaim", {}).get("claimName")
            assert claimed is None or claimed in claims
    assert pods["vllm-pd-router"]["spec"]["serviceAccountName"] in of(rendered, "ServiceAccount")
    [service] = of(rendered, "Service").values()
    assert service["spec"]["selector"].items() <= labels["vllm-pd-router"].items()
    for name, budget in of(rendered, "PodDisruptionBudget").items():
        assert [n for n in labels if selects(budget["spec"]["selector"], labels[n])] == [name]
    [policies] = [of(rendered, "NetworkPolicy")]
    engines = policies["vllm-pd-engines"]["spec"]["podSelector"]
    assert {n for n in labels if selects(engines, labels[n])} == {
        "vllm-pd-prefill",
        "vllm-pd-decode",
    }


def test_ports_that_mooncake_takes_are_open_to_engines_alone() -> None:
    [policy, _] = read(DEPLOY / "base" / "network.yaml")
    every_port = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    [[peer]] = [rule["from"] for rule in every_port]
    assert list(peer) == ["podSelector"]  # of the same namespace
    assert peer["podSelector"]["matchExpressions"] == [
        {"key": "app.kubernetes.io/component", "operator": "In", "values": ["prefill", "decode"]}
    ]
    others = [rule for rule in policy["spec"]["ingress"] if "ports" in rule]
    assert [rule["ports"] for rule in others] == [[{"protocol": "TCP", "port": "http"}]]


@needs_kubectl
@pytest.mark.parametrize("component", ["monitoring", "keda"])
@pytest.mark.parametrize("rendered", ["cuda"], indirect=True)
def test_component_fits_the_pods(component: str, rendered: list[Object]) -> None:
    path = {"monitoring": "podmonitor.yaml", "keda": "scaling.yaml"}[component]
    objects = read(DEPLOY / "components" / component / path)
    deployments = of(rendered, "Deployment")
    for one in objects:
        if one["kind"] == "ScaledObject":
            assert one["spec"]["scaleTargetRef"]["name"] in deployments
            continue
        for pod in (deployment["spec"]["template"] for deployment in deployments.values()):
            assert selects(one["spec"]["selector"], pod["metadata"]["labels"])
            names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {end["port"] for end in one["spec"]["podMetricsEndpoints"]} <= names


@needs_kubectl
def test_how_many_engines_there_are_is_the_scalers_to_say(tmp_path: Path) -> None:
    """Else an overlay that is applied again ends those that it has added."""
    objects = kustomized(tmp_path / "deploy", "cuda", "keda")
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in of(objects, "ScaledObject").values()}
    with_replicas = {n for n, d in of(objects, "Deployment").items() if "replicas" in d["spec"]}
    assert (scaled, with_replicas) == ({"vllm-pd-prefill", "vllm-pd-decode"}, {"vllm-pd-router"})


def test_engines_go_when_fewer_were_needed_for_long_and_come_although_none_is_known() -> None:
    for one in read(DEPLOY / "components" / "keda" / "scaling.yaml"):
        scaler = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
        assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
        for trigger in one["spec"]["triggers"]:
            first, plus, queued = trigger["metadata"]["query"].partition(" + ")
            assert not plus or first.endswith("or vector(0))"), queued


def test_an_engine_counts_once_however_many_routers_tell_of_it() -> None:
    for one in read(DEPLOY / "components" / "keda" / "scaling.yaml"):
        for trigger in one["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            once = re.findall(r"sum\(max by \(instance\) \(vllm:pd_router_instance_", query)
            assert len(once) == query.count("pd_router_instance_")


# ------------------------------------------------------------------------------ vllm-pd manifests

PLANNED: Object = {
    "model": "m",
    "device": "cuda",
    "args": {"tensor-parallel-size": 2},
    "prefill": [{"count": 2}],
    "decode": [{"count": 3, "args": {"max-num-seqs": 5}, "env": {"A": "$(B)"}}, {"count": 1}],
    "extra_config": {"pool": {"dram_size": "1GiB", "ssd": {"path": "/ssd", "size": "2GiB"}}},
}


def made(**changes: Any) -> dict[str, Object]:
    return of(manifests(topology.parse({**PLANNED, **changes}), "image"), "Deployment")


def container(deployment: Object) -> Object:
    [one] = deployment["spec"]["template"]["spec"]["containers"]
    return one


def as_started(deployment: Object, address: str) -> list[str]:
    """The words that a pod's process gets, as Kubernetes expands them."""
    pod = {"POD_IP": address, "POD_NAME": "pod", "POD_NAMESPACE": "space"}
    one = container(deployment)
    expanded = (re.sub(r"(?<!\$)\$\((\w+)\)", lambda m: pod[m[1]], word) for word in one["args"])
    return [*one["command"], *(word.replace("$$(", "$(") for word in expanded)]


def argument(deployment: Object, option: str) -> str:
    words = as_started(deployment, "10.0.0.1")
    return words[words.index(option) + 1]


def test_pods_run_the_commands_of_the_plan() -> None:
    hosts = {name: {"address": f"10.0.0.{n}"} for n, name in enumerate(("r", "p", "d", "e"), 1)}
    on_hosts = {
        **PLANNED,
        "hosts": hosts,
        "prefill": [{"host": "p", "port": 8000, "kv_port": 14600}],
        "decode": [
            {**group, "host": host, "count": 1, "port": 8000, "kv_port": 14600}
            for group, host in zip(PLANNED["decode"], "de", strict=True)
        ],
        "extra_config": {
            **PLANNED["extra_config"],
            "security": {
                "allowed_peers": ["0.0.0.0/0", "::/0"],
                "secret_file": "/etc/vllm-pd/secret/secret",
            },
        },
    }
    nothing = Machine("cuda", (), (), 0)
    on_their_hosts = make_deployment(topology.parse(on_hosts), nothing, "", lambda _: 0)
    commands = {command.name: command for command in on_their_hosts.commands}
    deployments = made()
    for name, address, planned in (
        ("vllm-pd-prefill", "10.0.0.2", "prefill-0"),
        ("vllm-pd-decode", "10.0.0.3", "decode-0"),
        ("vllm-pd-decode-1", "10.0.0.4", "decode-1"),
        ("vllm-pd-master", "10.0.0.1", "master"),
    ):
        expected = " ".join(commands[planned].argv)
        found = " ".join(as_started(deployments[name], address))
        found = found.replace("vllm-pd-master:", "10.0.0.1:")
        found = found.replace('"engine_id": "pod"', f'"engine_id": "{planned}"')
        assert json.dumps(found.replace("/ssd/pod", f"/ssd/{planned}")) == json.dumps(expected)


def test_groups_are_deployments_with_the_label_that_says_the_role() -> None:
    deployments = made()
    labels = {n: d["spec"]["template"]["metadata"]["labels"] for n, d in deployments.items()}
    assert {n: (labels[n].get("model"), d["spec"]["replicas"]) for n, d in deployments.items()} == {
        "vllm-pd-prefill": ("prefill", 2),
        "vllm-pd-decode": ("decode", 3),
        "vllm-pd-decode-1": ("decode", 1),
        "vllm-pd-router": (None, 2),
        "vllm-pd-master": (None, 1),
    }
    assert container(deployments["vllm-pd-decode"])["resources"] == {
        "limits": {"nvidia.com/gpu": 2}
    }
    words = as_started(deployments["vllm-pd-router"], "10.0.0.9")
    assert words[:4] == ["vllm-pd", "router", "--host", "0.0.0.0"]
    assert words[words.index("--k8s-namespace") + 1] == "space"


def test_what_the_user_writes_is_not_expanded_by_kubernetes() -> None:
    env = {one["name"]: one.get("value") for one in container(made()["vllm-pd-decode"])["env"]}
    assert env["A"] == "$$(B)"
    assert env["VLLM_HOST_IP"] == "$(POD_IP)"
    name = as_started(made(served_model_name="a$(POD_IP)")["vllm-pd-prefill"], "10.0.0.1")
    assert "a$(POD_IP)" in name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "args": {"shutdown-timeout": 300},
            "router": {"args": {"drain-timeout": 120.5}},
        },
    ],
    ids=["unsaid", "said"],
)
def test_a_pod_has_the_time_to_end_its_requests(changes: Object) -> None:
    for name, deployment in made(**changes).items():
        spec = deployment["spec"]["template"]["spec"]
        leave = int(container(deployment)["lifecycle"]["preStop"]["exec"]["command"][1])
        words = as_started(deployment, "10.0.0.1")
        drain = "--drain-timeout" if name == "vllm-pd-router" else "--shutdown-timeout"
        drain_s = float(words[words.index(drain) + 1]) if drain in words else 0
        assert spec["terminationGracePeriodSeconds"] > leave + drain_s, name


def test_a_pod_that_ends_soon_takes_no_other_with_it_and_one_that_loads_long_is_waited_for() -> (
    None
):
    for deployment in made().values():
        spec, startup = deployment["spec"], container(deployment)["startupProbe"]
        assert spec["minReadySeconds"] == LASTS_S
        loads_s = startup["periodSeconds"] * startup["failureThreshold"]
        assert spec["progressDeadlineSeconds"] > loads_s + spec["minReadySeconds"]


def test_what_a_pod_answers_can_be_copied_to_another_one() -> None:
    config = argument(made()["vllm-pd-decode"], "--kv-transfer-config")
    assert json.loads(config)["kv_role"] == "kv_both"


def test_a_pool_without_mooncake_brings_no_master() -> None:
    pool = {"tiers": ["fs"], "ssd": {"path": "/ssd", "size": "1GiB"}}
    planned = topology.parse({**PLANNED, "extra_config": {"pool": pool}})
    assert not [one for one in manifests(planned, "image") if "master" in one["metadata"]["name"]]


def test_own_networks_and_the_pools_own_master_are_kept() -> None:
    extra = {"security": {"allowed_peers": ["10.1.0.0/16"]}, "pool": {"master": "10.1.0.5:1"}}
    deployments = made(extra_config=extra)
    assert "vllm-pd-master" not in deployments
    config = json.loads(argument(deployments["vllm-pd-prefill"], "--kv-transfer-config"))
    found = config["kv_connector_extra_config"]
    assert found["security"]["allowed_peers"] == ["10.1.0.0/16"]
    assert found["pool"]["master"] == "10.1.0.5:1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": {"a": {"address": "10.0.0.1"}}}, "hosts: Kubernetes says where pods run"),
        (
            {"prefill": [{"port": 8000}, {"port": 8100}]},
            r"prefill\[1\].port: .* that is 8000; leave",
        ),
        ({"decode": [{"kv_port": 9}]}, r"decode\[0\].kv_port: .* that is 14600; leave it out"),
        ({"device": None}, "device is missing"),
        (
            {"extra_config": {"security": {"allowed_peers": ["10.0.0.0/8"]}, "pool": {}}},
            "security.allowed_peers: the pool's master is reached by its name",
        ),
        ({"both": [{"count": 2}]}, "both: each of several routers would choose"),
        ({"args": {"tensor-parallel-size": "two"}}, "positive number, not 'two'"),
        (
            {"args": {"shutdown-timeout": "long"}},
            "prefill-0: shutdown-timeout must be seconds, not 'long'",
        ),
        ({"args": {"shutdown-timeout": -30}}, "shutdown-timeout must not be negative, not -30"),
        ({"router": {"args": {"drain-timeout": -1}}}, "router: drain-timeout must not be negative"),
    ],
)
def test_what_does_not_fit_is_named(changes: Object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**changes)


def test_command_prints_objects_and_alert_rules(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vllm_ascend_pd.cli import main

    path = tmp_path / "topology.yaml"
    path.write_text(json.dumps(PLANNED))
    result = CliRunner().invoke(main.app, ["manifests", str(path), "--image", "mine:1", "--alerts"])
    assert result.exit_code == 0, result.output
    objects = list(yaml.safe_load_all(result.output))
    validate(objects)
    assert container(of(objects, "Deployment")["vllm-pd-prefill"])["image"] == "mine:1"
    assert of(objects, "PrometheusRule")["vllm-pd"]["spec"]["groups"]
    assert of(objects, "Service")["vllm-pd-master"]["spec"]["ports"]

    path.write_text("{}")
    result = CliRunner().invoke(main.app, ["manifests", str(path)])
    assert (result.exit_code, "model" in result.output) == (2, True)
