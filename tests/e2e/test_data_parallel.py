# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --data-parallel-size 2``, twice, behind ``vllm-pd router``."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import LONG, routing, scraped, texts, until
from tests.e2e.servers import free_port
from vllm_ascend_pd.registration import RANK_HEADER
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

ORDERS = ("prefill-first", "concurrent")
INSTANCES = {f"{name}-dp{rank}" for name in ("p", "d") for rank in (0, 1)}


@dataclass
class Ranks:
    """A producer and a consumer of two ranks each, and a router for each order, which they have
    registered with."""

    p: ForkedEngine
    d: ForkedEngine
    routers: dict[str, str]

    def complete(
        self, url: str, prompt: str, rank: int | None = None, **options: Any
    ) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body |= {"ignore_eos": True, **options}
        headers = {} if rank is None else {RANK_HEADER: str(rank)}
        response = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def alone(self, prompt: str) -> list[str]:
        """What one engine says: a consumer computes what it has no parameters for."""
        return texts(self.complete(self.d.url, prompt))

    def count(self, rank: int, outcome: str) -> float:
        """Of the requests of the consumer's rank that asked for a peer's KV."""
        labels = f'engine="{rank}",model_name="tiny",outcome="{outcome}"'
        return scraped(self.d.url, f"pd_requests_total{{{labels}}}")

    def listed(self, order: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = requests.get(
            f"{self.routers[order]}/instances", timeout=10
        ).json()
        return found


@pytest.fixture(scope="module")
def ranks(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_model(folder / "model")
    ports = {order: free_port() for order in ORDERS}
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports.values())
    engines = {}
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        extra: dict[str, Any] = {"transfer": {"arrival_timeout_s": 15.0}}
        extra["router"] = {"url": urls, "instance_id": name}
        transfer = {"kv_connector": "InEngine", "kv_role": role, "kv_connector_extra_config": extra}
        transfer |= {"kv_port": free_port(), "engine_id": name}
        options = ["--data-parallel-size", "2", "--api-server-count", "1"]
        options += ["--kv-transfer-config", json.dumps(transfer)]
        engines[name] = launched.engine(name, folder / "model", folder, free_port(), *options)
        engines[name].start()
    for engine in engines.values():
        engine.wait_ready()
    policy = ("--policy", "round-robin")
    first, second = ORDERS
    with (
        routing(folder, [], "--order", first, *policy, port=ports[first]) as prefill_first,
        routing(folder, [], "--order", second, *policy, port=ports[second]) as concurrent,
    ):
        made = Ranks(**engines, routers={first: prefill_first, second: concurrent})
        for order in ORDERS:
            until(lambda order=order: {i["instance_id"] for i in made.listed(order)} == INSTANCES)
            until(lambda order=order: all(i["state"] == "ready" for i in made.listed(order)))
        yield made


def test_each_rank_is_an_instance_with_a_port_of_its_own(ranks: Ranks) -> None:
    listed = {i["instance_id"]: i for i in ranks.listed("concurrent")}
    assert {(i["url"], i["data_parallel_rank"]) for i in listed.values()} == {
        (engine.url, rank) for engine in (ranks.p, ranks.d) for rank in (0, 1)
    }
    page = requests.get(f"{ranks.p.url}/metrics", timeout=30).text
    info = re.findall(r"^vllm:pd_engine_info\{(.*)\} 1.0$", page, re.M)
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in info]
    assert {(one["engine"], one["engine_id"]) for one in labels} == {("0", "p_dp0"), ("1", "p_dp1")}
    ports = {one["engine"]: int(one["kv_endpoint"].rpartition(":")[2]) for one in labels}
    assert ports["1"] == ports["0"] + 1
    assert len({one["epoch"] for one in labels}) == 2
    assert len({one["fingerprint"] for one in labels}) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_takes_kv_from_every_rank(ranks: Ranks, order: str) -> None:
    loaded = [ranks.count(rank, "loaded") for rank in (0, 1)]
    prompts = [f"{order} {i}. " + LONG[: 500 + 100 * i] for i in range(8)]
    for prompt in prompts:
        got = ranks.complete(ranks.routers[order], prompt)
        assert texts(got) == ranks.alone(prompt)
    until(lambda: sum(ranks.count(rank, "loaded") for rank in (0, 1)) == sum(loaded) + 8)
    assert [ranks.count(rank, "loaded") for rank in (0, 1)] == [number + 4 for number in loaded]
    assert scraped(ranks.routers[order], f'pd_router_orders_total{{order="{order}"}}') == 8


def test_proxy_that_knows_no_ranks(ranks: Ranks) -> None:
    """What P returns names the rank that has the KV, whichever rank of D asks for it."""
    for i in range(4):
        prompt = f"Stock {i}. " + LONG[:600]
        sent = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
        params = ranks.complete(ranks.p.url, prompt, **sent)["kv_transfer_params"]
        params["return_provenance"] = True
        got = ranks.complete(ranks.d.url, prompt, kv_transfer_params=params)
        assert got["kv_transfer_params"]["provenance"]["outcome"] == "loaded"
        assert texts(got) == ranks.alone(prompt)


def test_prompt_that_went_to_another_rank_is_computed(ranks: Ranks) -> None:
    """Both requests sent at once, and P's without the header, as far as chance has it."""
    prompt = "Astray. " + LONG[:600]
    sent = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    params = ranks.complete(ranks.p.url, "Where? " + prompt, 0, **sent)["kv_transfer_params"]
    assert params["remote_data_parallel_rank"] == 0
    again = {"do_remote_decode": True, "transfer_id": "astray"}
    ranks.complete(ranks.p.url, prompt, 1, kv_transfer_params=again, max_tokens=1)
    params |= {"transfer_id": "astray", "remote_epoch": "", "return_provenance": True}
    got = ranks.complete(ranks.d.url, prompt, kv_transfer_params=params)
    assert got["kv_transfer_params"]["provenance"]["outcome"] == "not_arrived"
    assert texts(got) == ranks.alone(prompt)


def test_rank_that_dies_takes_its_server_along_and_no_request(ranks: Ranks) -> None:
    """vLLM's front end ends with the first of its engine cores; D computes the prompts."""
    prompts = [f"Dead {i}. " + LONG[:600] for i in range(4)]
    cores = [
        child
        for child in psutil.Process(ranks.p.pid).children(recursive=True)
        if "EngineCore_DP1" in " ".join(child.cmdline())
    ]
    cores[0].send_signal(signal.SIGKILL)
    for prompt in prompts:
        assert texts(ranks.complete(ranks.routers["concurrent"], prompt)) == ranks.alone(prompt)

    def is_alone() -> bool:
        listed = ranks.listed("concurrent")
        return not any(i["healthy"] for i in listed if i["url"] == ranks.p.url)

    until(is_alone)
