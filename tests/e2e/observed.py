# SPDX-License-Identifier: Apache-2.0
"""What the dashboard and the alert rules ask a Prometheus for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

import vllm_ascend_pd.cluster
from vllm_ascend_pd.metrics import COUNTERS, GAUGES
from vllm_ascend_pd.router import snapshot

PROMETHEUS = shutil.which("prometheus")
PROGRAMS = ("prometheus",) if PROMETHEUS else ()
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None,
    reason="needs prometheus: apt-get install --no-install-recommends prometheus",
)
DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "vllm-pd.json"
SCALING = DEPLOY / "components" / "keda" / "scaling.yaml"
ALERTS = Path(vllm_ascend_pd.cluster.__path__[0]) / "alerts.yaml"


def expressions() -> Iterator[tuple[str, set[str] | None]]:
    """Each query, with the labels that its legend names; ``None`` for an alert, which finds
    nothing while all is well."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            selects = re.search(r"{\w+!?=", target["expr"])
            query = target["expr"].replace("$__rate_interval", "1m")
            yield query, None if selects else labels
    for one in yaml.safe_load_all(SCALING.read_text()):
        for trigger in one["spec"]["triggers"]:
            yield trigger["metadata"]["query"], set()
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        yield rule["expr"], None


def metric_names(expression: str) -> set[str]:
    return {re.sub("_bucket$", "", name) for name in re.findall(r"vllm:\w+", expression)}


def asked_labels(expression: str) -> set[str]:
    """By which it groups or selects."""
    groups = re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", expression)
    grouped = {label.strip() for group in groups if group for label in group.split(",")}
    return grouped | set(re.findall(r"[{,]\s*(\w+)\s*(?:=|!=|=~|!~)", expression))


def declared_metrics(urls: list[str]) -> dict[str, set[str] | None]:
    """What these processes expose, and its labels, with those that a Prometheus adds: ``None`` of
    what has no value now. Of counters that appear when they are first counted, all."""
    added = {"instance", "job", "namespace"}
    ours = {"engine", "model_name", *added}
    known: dict[str, set[str] | None] = {
        f"vllm:pd_{n}_total": {label or "", *ours} for n, (_, label) in COUNTERS.items()
    }
    known |= {f"vllm:pd_{n}": {*labels, *ours} for n, (_, labels) in GAUGES.items()}
    routers = snapshot.COUNTERS.items()
    known |= {f"{snapshot.PREFIX}{n}_total": {*labels, *added} for n, (_, labels) in routers}
    for url in urls:
        page = requests.get(f"{url}/metrics", timeout=30).text
        for name in re.findall(r"^# TYPE (\S+)", page, re.M):
            known.setdefault(name, None)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = re.sub("_bucket$", "", sample.name)
                known[name] = (known.get(name) or added) | set(sample.labels)
    return known


def present_metrics(prometheus: str) -> set[str]:
    """Names of what has had values for some scrapes, and has them now."""
    known = '{__name__=~"vllm:.*"}'
    found = query(prometheus, f"count by (__name__) ({known} and ({known} offset 15s))")
    return {re.sub("_bucket$", "", series["metric"]["__name__"]) for series in found}


def get(prometheus: str, path: str, **params: str) -> Any:
    answer = requests.get(f"{prometheus}/api/v1/{path}", params=params, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(prometheus, "query", query=expression)["result"]
    return found
