# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered as ``helm template`` does it, beside what kustomize makes."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml

from tests.deploy.test_manifests import (
    DEPLOY,
    Object,
    as_started,
    container,
    needs_kubectl,
    of,
    rendered,  # noqa: F401
    validate,
)
from vllm_ascend_pd.cluster.manifests import alert_rules

helm = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")

CHART = DEPLOY / "chart"


def render(**values: Any) -> list[Object]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="any", namespace="space")
    return [one for text in files.values() for one in yaml.safe_load_all(text) if one]


def comparable(deployment: Object) -> Object:
    """In no order where there is none, and with the names that kustomize gives to nothing."""
    spec = deployment["spec"]["template"]["spec"]
    one = container(deployment)
    words = [json.loads(word) if word.startswith("{") else word for word in one["args"]]
    one["args"] = sorted(words, key=str)
    if not one.get("resources"):
        one.pop("resources", None)
    for named in (spec["volumes"], one["volumeMounts"]):
        named.sort(key=lambda volume: volume["name"])
    for volume in spec["volumes"]:
        if "secret" in volume:
            volume["secret"]["secretName"] = volume["secret"]["secretName"][: len("vllm-pd")]
    return deployment


def test_there_is_nothing_to_say_against_it() -> None:
    report = helm.lint(CHART, strict=True)
    assert [one for one in report["messages"] if one["severity"] > 1] == report["errors"] == []


@needs_kubectl
@pytest.mark.parametrize("rendered", ["cuda"], indirect=True)
def test_without_values_it_is_the_overlay_for_cuda(rendered: list[Object]) -> None:  # noqa: F811
    objects = render()
    validate(objects)
    ours = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    theirs = {
        (one["kind"], one["metadata"]["name"]): one
        for one in rendered
        if one["kind"] not in ("Secret", "PersistentVolumeClaim")
    }
    del ours["Secret", "vllm-pd"]
    assert ours.keys() == theirs.keys()
    for key, one in theirs.items():
        if key[0] == "Deployment":
            assert comparable(ours[key]) == comparable(one)
        else:
            assert ours[key] == one


def test_values_reach_the_pods() -> None:
    tenants = {"header": "X-Tenant", "tenants": {"a": {"keys": ["sk-one"], "max_requests": 3}}}
    objects = render(
        image="mine:1",
        model="/models/a$(B)",
        args=["--dtype", "float32"],
        extraConfig={"lease_s": 9, "security": {"allowed_peers": ["10.0.0.0/8"]}},
        modelsClaim="mine",
        prefill={"replicas": 2, "args": ["--seed", "1"], "surge": 1},
        decode={"replicas": 3, "resources": {"limits": {"huawei.com/Ascend910": 2}}},
        router={"replicas": 1, "args": ["--policy", "round-robin"]},
        secret={"value": "s3cret" * 6},
        tenants=tenants,
        observe=True,
    )
    validate(objects)
    deployments = of(objects, "Deployment")
    assert [one["spec"]["replicas"] for one in deployments.values()] == [2, 3, 1]
    assert {container(one)["image"] for one in deployments.values()} == {"mine:1"}
    prefill, decode, router = deployments.values()
    replaced = [one["spec"]["strategy"]["rollingUpdate"] for one in (prefill, decode, router)]
    first = {"maxSurge": 1, "maxUnavailable": 0}
    assert replaced == [first, {"maxSurge": 0, "maxUnavailable": 1}, first]
    words = as_started(prefill, "10.0.0.1")
    assert words[:3] == ["vllm", "serve", "/models/a$(B)"]
    assert words[-4:] == ["--dtype", "float32", "--seed", "1"]
    extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    secret = "/etc/vllm-pd/secret/secret"
    security = {"allowed_peers": ["10.0.0.0/8"], "secret_file": secret}
    assert extra == {"lease_s": 9, "security": security}
    assert container(decode)["resources"]["limits"]["huawei.com/Ascend910"] == 2
    claims = [v.get("persistentVolumeClaim") for v in decode["spec"]["template"]["spec"]["volumes"]]
    assert {"claimName": "mine", "readOnly": True} in claims
    secrets = {name: one["data"] for name, one in of(objects, "Secret").items()}
    assert base64.b64decode(secrets["vllm-pd"]["secret"]) == b"s3cret" * 6
    assert json.loads(base64.b64decode(secrets["vllm-pd-tenants"]["tenants.json"])) == tenants
    words = as_started(router, "10.0.0.9")
    path = words[words.index("--tenants-file") + 1]
    assert words[-4:] == ["--policy", "round-robin", "--tenants-file", path]
    mounts = {one["mountPath"] for one in container(router)["volumeMounts"]}
    assert path.rpartition("/")[0] in mounts


def test_a_pod_has_the_time_that_its_options_give_it() -> None:
    def grace_s(**values: Any) -> list[int]:
        deployments = of(render(**values), "Deployment").values()
        pods = [one["spec"]["template"]["spec"] for one in deployments]
        return [pod["terminationGracePeriodSeconds"] for pod in pods]

    assert grace_s() == [50, 50, 80]
    said: Object = {
        "args": ["--shutdown-timeout", "300"],
        "decode": {"args": ["--shutdown-timeout=400"]},
        "router": {"args": ["--drain-timeout", "90.5"]},
    }
    assert grace_s(**said) == [320, 420, 111]


def test_a_secret_is_drawn_or_named() -> None:
    drawn = [of(render(), "Secret")["vllm-pd"]["data"]["secret"] for _ in range(2)]
    assert len(set(drawn)) == 2
    assert len(base64.b64decode(drawn[0])) == 64
    objects = render(secret={"existing": "mine"})
    assert of(objects, "Secret") == {}
    for one in of(objects, "Deployment").values():
        volumes = {v["name"]: v for v in one["spec"]["template"]["spec"]["volumes"]}
        assert volumes["secret"]["secret"]["secretName"] == "mine"


def test_observing_brings_the_monitor_the_rules_and_the_dashboard() -> None:
    objects = render(observe=True)
    [monitor] = yaml.safe_load_all((DEPLOY / "components/monitoring/podmonitor.yaml").read_text())
    assert monitor in objects
    assert alert_rules() in objects
    [dashboard] = of(objects, "ConfigMap").values()
    assert json.loads(dashboard["data"]["vllm-pd.json"]) == json.loads(
        (DEPLOY / "grafana/vllm-pd.json").read_text()
    )


def test_a_pool_without_mooncake_needs_no_master() -> None:
    pool = {"tiers": ["dram"], "dram_size": "1GiB"}
    prefill = of(render(extraConfig={"pool": pool}), "Deployment")["vllm-pd-prefill"]
    words = as_started(prefill, "10.0.0.1")
    extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra["pool"] == pool


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"decode": {"replicas": 0}}, "/decode/replicas"),
        ({"decode": {"surge": -1}}, "/decode/surge"),
        ({"router": {"surge": 1}}, "'surge' not allowed"),
        ({"extraConfig": {"pool": {}}}, "extraConfig.pool: name a master"),
        ({"extraConfig": {"pool": {"dram_size": "1GiB"}}}, "extraConfig.pool: name a master"),
        ({"args": ["--kv-transfer-config", "{}"]}, "args: --kv-transfer-config is set by"),
        ({"decode": {"args": ["--kv-transfer-config.kv_role=kv_both"]}}, "is set by the chart"),
        ({"prefill": {"args": ["--port=9000"]}}, "args: --port=9000 is set by the chart"),
        ({"args": ["--served_model_name", "m"]}, "servedModelName"),
        ({"router": {"args": ["--tls-key", "a"]}}, "router.args: --tls-key is set by the chart"),
        ({"secret": {"value": "s" * 32, "existing": "mine"}}, "secret: value and existing"),
        ({"secret": {"value": "s" * 31}}, "secret.value: engines take no secret of less"),
        ({"extraConfig": {"pool": {"tiers": ["fs"], "ssd": {"path": "/a"}}}}, "and no ssd"),
    ],
)
def test_what_does_not_fit_is_named(values: Object, message: str) -> None:
    with pytest.raises(Exception, match=message):
        render(**values)
