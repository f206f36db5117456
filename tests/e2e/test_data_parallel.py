# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd up`` with ``--data-parallel-size 2``, and one more router."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.router_cluster import LONG, complete, routing, scraped, texts, until
from tests.e2e.servers import free_port
from tests.e2e.test_up import Up, doctor
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

ORDERS = ("prefill-first", "concurrent")
INSTANCES = {f"{name}-0-dp{rank}" for name in ("prefill", "decode") for rank in (0, 1)}


@dataclass
class Ranks:
    """A producer and a consumer of two ranks each, and a router for each order, which they have
    registered with: the second one is that of ``vllm-pd up``."""

    up: Up
    topology: Path
    p: str
    d: str
    routers: dict[str, str]

    def alone(self, prompt: str) -> list[str]:
        """What one engine says: a consumer computes what it has no parameters for."""
        return texts(complete(self.d, prompt, cache_salt="alone"))

    def order(self, what: str, url: str = "") -> dict[str, Any]:
        """Of the consumer, or that engine, by a path for operators."""
        response = requests.post(f"{url or self.d}/{what}", timeout=120)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer

    def sleep(self, url: str) -> None:
        """As soon as nothing is stored any more: until then it is refused."""
        until(lambda: requests.post(f"{url}/sleep?level=1", timeout=120).status_code == 200)
        asleep = requests.get(f"{url}/is_sleeping", timeout=30)
        assert asleep.json() == {"is_sleeping": True}

    def count(self, rank: int, outcome: str) -> float:
        """Of the requests of the consumer's rank that asked for a peer's KV."""
        labels = f'engine="{rank}",model_name="tiny",outcome="{outcome}"'
        return scraped(self.d, f"pd_requests_total{{{labels}}}")

    def listed(self, order: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = requests.get(
            f"{self.routers[order]}/instances", timeout=10
        ).json()
        return found

    def are_served(self, order: str) -> bool:
        well = {i["instance_id"] for i in self.listed(order) if i["healthy"]}
        return well == INSTANCES and all(i["state"] == "ready" for i in self.listed(order))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_model(folder / "model")
    routers = {order: f"http://127.0.0.1:{free_port()}" for order in ORDERS}
    ports = {order: int(url.rpartition(":")[2]) for order, url in routers.items()}
    first, second = ORDERS
    topology = folder / "topology.yaml"
    engine_args = {"dtype": "float32", "enforce-eager": True, "max-model-len": 4096}
    engine_args |= {"kv-cache-memory-bytes": 192 << 20}
    engine_args |= {"data-parallel-size": 2, "api-server-count": 1}
    extra = {"transfer": {"arrival_timeout_s": 15.0}, "router": {"url": routers[first]}}
    pool = {"dram_size": "64MiB", "load": "all", "lookup_timeout_ms": 2000}
    router_args = {"order": second, "policy": "round-robin", "probe-interval": 0.5}
    plan = {"model": str(folder / "model"), "served_model_name": "tiny", "args": engine_args}
    plan |= {"extra_config": {**extra, "pool": pool}}
    plan |= {"env": {"VLLM_SERVER_DEV_MODE": "1"}}
    plan |= {"router": {"port": ports[second], "args": router_args}}
    topology.write_text(json.dumps(plan))  # JSON is YAML
    up = Up(folder, ports[second], "--config", str(topology))
    secrets = ["--registration-token-file", str(folder / "logs/.token")]
    secrets += ["--secret-file", str(folder / "logs/.secret")]
    options = ("--order", first, "--policy", "round-robin", *secrets)
    try:
        up.until(lambda: up.count("router", "ready"))
        with routing(folder, [], *options, port=ports[first]):
            up.until(lambda: "\nup after " in up.output)
            made = Ranks(
                up, topology, up.engine_url("prefill-0"), up.engine_url("decode-0"), routers
            )
            for order in ORDERS:
                up.until(lambda order=order: made.are_served(order))
            yield made
    finally:
        up.kill()


def test_each_rank_is_an_instance_with_a_port_of_its_own(ranks: Ranks) -> None:
    listed = {i["instance_id"]: i for i in ranks.listed("concurrent")}
    assert {(i["url"], i["data_parallel_rank"]) for i in listed.values()} == {
        (url, rank) for url in (ranks.p, ranks.d) for rank in (0, 1)
    }
    page = requests.get(f"{ranks.p}/metrics", timeout=30).text
    info = re.findall(r"^vllm:pd_engine_info\{(.*)\} 1.0$", page, re.M)
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in info]
    assert {(one["engine"], one["engine_id"]) for one in labels} == {
        ("0", "prefill-0_dp0"),
        ("1", "prefill-0_dp1"),
    }
    ports = {one["engine"]: int(one["kv_endpoint"].rpartition(":")[2]) for one in labels}
    assert ports["1"] != ports["0"]
    assert len({one["epoch"] for one in labels}) == 2
    assert len({one["fingerprint"] for one in labels}) == 1


def test_doctor_finds_nothing_wrong(ranks: Ranks) -> None:
    code, findings = doctor(ranks.up, "--config", str(ranks.topology))
    assert code == 0, findings
    others = {finding["check"] for finding in findings if finding["verdict"] != "ok"}
    assert others <= {"RDMA cards"}, findings


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_takes_kv_from_every_rank(ranks: Ranks, order: str) -> None:
    loaded = [ranks.count(rank, "loaded") for rank in (0, 1)]
    metric = f'pd_router_orders_total{{order="{order}"}}'
    in_order = scraped(ranks.routers[order], metric)
    prompts = [f"{order} {i}. " + LONG[: 500 + 100 * i] for i in range(8)]
    for prompt in prompts:
        got = complete(ranks.routers[order], prompt)
        assert texts(got) == ranks.alone(prompt)
    until(lambda: sum(ranks.count(rank, "loaded") for rank in (0, 1)) == sum(loaded) + 8)
    assert [ranks.count(rank, "loaded") for rank in (0, 1)] == [number + 4 for number in loaded]
    assert scraped(ranks.routers[order], metric) == in_order + 8


def test_proxy_that_knows_no_ranks(ranks: Ranks) -> None:
    """What P returns names the rank that has the KV, whichever rank of D asks for it."""
    for i in range(4):
        prompt = f"Stock {i}. " + LONG[:600]
        sent = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
        params = complete(ranks.p, prompt, **sent)["kv_transfer_params"]
        params["return_provenance"] = True
        got = complete(ranks.d, prompt, kv_transfer_params=params)
        assert got["kv_transfer_params"]["provenance"]["outcome"] == "loaded"
        assert texts(got) == ranks.alone(prompt)


def test_proxy_that_sends_both_at_once_names_the_rank_in_the_parameters(ranks: Ranks) -> None:
    """Where it sets no header, or the path heeds none."""
    sent: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    learned = complete(ranks.p, "Which? " + LONG[:600], 1, **sent)["kv_transfer_params"]
    learned |= {"remote_epoch": "", "return_provenance": True}
    for i in range(4):
        prompt = f"At once {i}. " + LONG[:600]
        both = {"transfer_id": f"at-once-{i}"}
        to_prefill = both | {"do_remote_decode": True}
        to_prefill["data_parallel_rank"] = learned["remote_data_parallel_rank"]
        with ThreadPoolExecutor(1) as threads:
            threads.submit(complete, ranks.p, prompt, kv_transfer_params=to_prefill, max_tokens=1)
            got = complete(ranks.d, prompt, kv_transfer_params=learned | both)
        assert got["kv_transfer_params"]["provenance"]["outcome"] == "loaded"
        assert texts(got) == ranks.alone(prompt)
    body = {"model": "tiny", "prompt": "x", "kv_transfer_params": {"data_parallel_rank": 2}}
    refused = requests.post(f"{ranks.p}/v1/completions", json=body, timeout=120)
    assert (refused.status_code, "out of range [0, 2)" in refused.text) == (400, True)


def test_prompt_that_went_to_another_rank_is_computed(ranks: Ranks) -> None:
    """Both requests sent at once, and P's without the header, as far as chance has it."""
    prompt = "Astray. " + LONG[:600]
    sent = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    params = complete(ranks.p, "Where? " + prompt, 0, **sent)["kv_transfer_params"]
    assert params["remote_data_parallel_rank"] == 0
    again = {"do_remote_decode": True, "transfer_id": "astray"}
    complete(ranks.p, prompt, 1, kv_transfer_params=again, max_tokens=1)
    params |= {"transfer_id": "astray", "remote_epoch": "", "return_provenance": True}
    got = complete(ranks.d, prompt, kv_transfer_params=params)
    assert got["kv_transfer_params"]["provenance"]["outcome"] == "not_arrived"
    assert texts(got) == ranks.alone(prompt)


@pytest.mark.parametrize(("owner", "rank"), [("d", 1), ("p", 0)])
def test_ranks_share_a_pool(ranks: Ranks, owner: str, rank: int) -> None:
    """What one has computed another one loads, of the same engine or another."""
    numbers = itertools.count()

    def loads() -> bool:
        """Each time of another prompt: what is not stored yet is computed."""
        prompt = f"Shared with {owner}, {next(numbers)}. " + LONG[:1500]
        expected = texts(complete(ranks.d, prompt, 0))
        asked = {"kv_transfer_params": {"return_provenance": True}}
        got = complete(getattr(ranks, owner), prompt, rank, **asked)
        assert texts(got) == expected
        origin = got["kv_transfer_params"]["provenance"]
        return bool(origin["num_dram_tokens"])

    until(loads)


def test_reset_reaches_every_rank_and_what_it_has_in_the_pool(ranks: Ranks) -> None:
    prompt = "Reset. " + LONG[:1500]
    expected = ranks.alone(prompt)

    def origin(rank: int) -> dict[str, int]:
        asked = {"kv_transfer_params": {"return_provenance": True}}
        got = complete(ranks.d, prompt, rank, **asked)
        assert texts(got) == expected
        told: dict[str, int] = got["kv_transfer_params"]["provenance"]
        return told

    for rank in (0, 1):
        origin(rank)
        assert origin(rank)["num_local_tokens"]
    until(lambda: ranks.order("reset_prefix_cache?reset_external=true")["success"])
    first, second = origin(0), origin(1)
    assert first["num_computed_tokens"] == first["num_prompt_tokens"]
    assert second["num_local_tokens"] == 0  # the first rank may have stored it again


def test_ranks_that_were_paused_load_what_has_waited(ranks: Ranks) -> None:
    sent: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    prompts = [f"Paused {rank}. " + LONG[:600] for rank in (0, 1)]
    known = [complete(ranks.p, prompt, **sent)["kv_transfer_params"] for prompt in prompts]
    ranks.order("pause?mode=keep")
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(
                complete,
                ranks.d,
                prompt,
                rank,
                kv_transfer_params={**params, "return_provenance": True},
            )
            for rank, (prompt, params) in enumerate(zip(prompts, known, strict=True))
        ]
        complete(ranks.p, "Meanwhile. " + LONG[:600])
        assert not any(answer.done() for answer in asked)
        ranks.order("resume")
    for prompt, answer in zip(prompts, asked, strict=True):
        got = answer.result()
        assert got["kv_transfer_params"]["provenance"]["outcome"] == "loaded"
        assert texts(got) == ranks.alone(prompt)


def test_ranks_sleep_and_wake_up(ranks: Ranks) -> None:
    """P, and then D. Each rank lets its KV caches go, and takes them again."""
    sent: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}

    def hand_over(why: str, outcome: str) -> None:
        """From each rank of P, to each of D."""
        for rank in (0, 1):
            prompt = f"{why}, {rank}. " + LONG[:600]
            params = complete(ranks.p, prompt, rank, **sent)["kv_transfer_params"]
            if outcome == "lease_expired":
                ranks.sleep(ranks.p)
                ranks.order("wake_up", ranks.p)
            params["return_provenance"] = True
            got = complete(ranks.d, prompt, 1 - rank, kv_transfer_params=params)
            assert got["kv_transfer_params"]["provenance"]["outcome"] == outcome
            assert texts(got) == ranks.alone(prompt)

    hand_over("Before", "loaded")
    hand_over("Asleep meanwhile", "lease_expired")
    hand_over("Awake", "loaded")
    ranks.sleep(ranks.d)
    ranks.sleep(ranks.d)  # once more does no harm
    ranks.order("wake_up", ranks.d)
    hand_over("D is awake", "loaded")


def test_engine_whose_rank_dies_is_started_again_and_no_request_fails(ranks: Ranks) -> None:
    """vLLM's front end ends with the first of its engine cores; D computes the prompts."""
    prompts = [f"Dead {i}. " + LONG[:600] for i in range(4)]
    cores = [
        child
        for child in psutil.Process(ranks.up.pid("prefill-0")).children(recursive=True)
        if "EngineCore_DP1" in " ".join(child.cmdline())
    ]
    cores[0].send_signal(signal.SIGKILL)
    for prompt in prompts:
        assert texts(complete(ranks.routers["concurrent"], prompt)) == ranks.alone(prompt)
    ranks.up.until(lambda: ranks.up.count("prefill-0", "ready") == 2)

    for order in ORDERS:
        ranks.up.until(lambda order=order: ranks.are_served(order))
    got = complete(ranks.routers["prefill-first"], prompts[0] + " Again.")
    assert texts(got) == ranks.alone(prompts[0] + " Again.")
