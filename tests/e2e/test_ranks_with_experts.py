# SPDX-License-Identifier: Apache-2.0
"""Data parallel ranks that share experts, and so compute in lock-step: each with a front end of its
own (a ``vllm serve --data-parallel-rank`` for each), or all behind one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from tests.checkpoints import copy_with_experts
from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import LONG, PATIENT, complete, routing, scraped, texts, until
from tests.e2e.servers import free_port
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

ORDERS = ("prefill-first", "concurrent")
ROLES = {"p": "kv_producer", "d": "kv_both"}
ROUND_ROBIN = ("--policy", "round-robin")


class Rank(NamedTuple):
    url: str
    number: int | None = None
    """As requests name it, where its front end has several."""


def ranks_of(
    launcher: Launcher, name: str, model: Path, folder: Path, *options: str
) -> list[ForkedEngine]:
    """Two that wait for each other; all that differs is the number and the port."""
    together = ["--enable-expert-parallel", "--data-parallel-size", "2", *options]
    together += ["--data-parallel-rpc-port", str(free_port()), "--data-parallel-rank"]
    engines = []
    for rank in ("0", "1"):
        engine = launcher.engine(f"{name}{rank}", model, folder, free_port(), *together, rank)
        engine.start()
        engines.append(engine)
    return engines


def info(url: str) -> dict[str, str]:
    """What an engine says of itself."""
    page = requests.get(f"{url}/metrics", timeout=30).text
    (labels,) = re.findall(r"^vllm:pd_engine_info\{(.*)\} 1.0$", page, re.M)
    return dict(re.findall(r'(\w+)="([^"]*)"', labels))


def loaded(engines: list[ForkedEngine]) -> list[float]:
    """Requests of each rank that a peer's KV came for."""
    labels = 'engine="%d",model_name="tiny",outcome="loaded"'
    names = [f"pd_requests_total{{{labels % rank}}}" for rank in range(len(engines))]
    return [scraped(engine.url, name) for engine, name in zip(engines, names, strict=True)]


def listed(router: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = requests.get(f"{router}/instances", timeout=10).json()
    return found


def until_served(router: str, num: int) -> None:
    def are_served() -> bool:
        found = listed(router)
        return len(found) == num and all(i["healthy"] and i["state"] == "ready" for i in found)

    until(are_served)


def hand_over(p: Rank, d: Rank, prompt: str) -> dict[str, Any]:
    """By hand, from one to another, which must load it."""
    sent: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    params = complete(p.url, prompt, p.number, **sent)["kv_transfer_params"]
    assert params["remote_data_parallel_rank"] == p.number
    params["return_provenance"] = True
    answer = complete(d.url, prompt, d.number, kv_transfer_params=params)
    assert answer["kv_transfer_params"]["provenance"]["outcome"] == "loaded"
    return answer


@dataclass
class Groups:
    """A producer and a ``kv_both`` consumer of two ranks each, with experts; a router for each
    order, of which the first one has a file of instances and the second those that register."""

    model: Path
    engines: dict[str, list[ForkedEngine]]
    kv_port: int
    """That producers were given."""
    routers: dict[str, str]
    single: str
    """An engine that is alone, with all experts, and without this package's connector."""


@pytest.fixture(scope="module")
def groups(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    folder = tmp_path_factory.mktemp("groups")
    model = copy_with_experts(make_tiny_model(folder / "tiny").path, folder / "experts")
    first, second = ORDERS
    port = free_port()
    kv_port = 17_000 + port % 2_900  # nobody else looks for ports there: the next one is free, too
    single = launched.engine("single", model, folder, free_port())
    single.start()
    engines = {}
    for name, role in ROLES.items():
        link: dict[str, Any] = {"url": f"http://127.0.0.1:{port}", "instance_id": name}
        if name == "d":
            link["role"] = "decode"
        config: dict[str, Any] = {"kv_connector": "InEngine", "kv_role": role, "engine_id": name}
        config |= {"kv_port": kv_port if name == "p" else 0}
        config["kv_connector_extra_config"] = {**PATIENT, "router": link}
        options = ("--kv-transfer-config", json.dumps(config))
        engines[name] = ranks_of(launched, name, model, folder, *options)
    role_of = {"p": "prefill", "d": "decode"}
    static = [{"url": one.url, "role": role_of[name]} for name in engines for one in engines[name]]
    with ExitStack() as running:
        running.callback(launched.kill_engines)
        by_file = running.enter_context(routing(folder, static, "--order", first, *ROUND_ROBIN))
        registered = running.enter_context(
            routing(folder, [], "--order", second, *ROUND_ROBIN, port=port)
        )
        for engine in (single, *engines["p"], *engines["d"]):
            engine.wait_ready()
        routers = {first: by_file, second: registered}
        for url in routers.values():
            until_served(url, 4)
        yield Groups(model, engines, kv_port, routers, single.url)


def test_each_rank_is_an_instance_at_a_url_of_its_own(groups: Groups) -> None:
    found = {i["instance_id"]: i for i in listed(groups.routers["concurrent"])}
    assert {name: (one["url"], one["data_parallel_rank"]) for name, one in found.items()} == {
        f"{name}-dp{rank}": (engine.url, None)
        for name, ranks in groups.engines.items()
        for rank, engine in enumerate(ranks)
    }
    told = [info(engine.url) for engine in groups.engines["p"]]
    assert [one["engine_id"] for one in told] == ["p_dp0", "p_dp1"]
    ports = [int(one["kv_endpoint"].rpartition(":")[2]) for one in told]
    assert ports == [groups.kv_port, groups.kv_port + 1]
    of_all = [info(engine.url) for ranks in groups.engines.values() for engine in ranks]
    assert len({one["fingerprint"] for one in of_all}) == 1
    assert len({one["epoch"] for one in of_all}) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_takes_kv_from_every_rank(groups: Groups, order: str) -> None:
    router, ranks = groups.routers[order], groups.engines["d"]
    complete(router, "Which ranks are there? " + order)
    before = loaded(ranks)
    orders = f'pd_router_orders_total{{order="{order}"}}'
    in_order = scraped(router, orders)
    prompts = [f"{order} {i}. " + LONG[: 500 + 100 * i] for i in range(8)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda prompt: complete(router, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert texts(answer) == texts(complete(groups.single, prompt))
    until(lambda: sum(loaded(ranks)) == sum(before) + 8)
    assert loaded(ranks) == [number + 4 for number in before]
    assert scraped(router, orders) == in_order + 8


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_in_lock_step_hand_over_to_each_other(groups: Groups, first: int) -> None:
    """The other one of the group has nothing to compute meanwhile, and it comes to rest."""
    ranks = [Rank(engine.url) for engine in groups.engines["d"]]
    prompt = f"From {first}. " + LONG[:700]
    got = hand_over(ranks[first], ranks[1 - first], prompt)
    assert texts(got) == texts(complete(groups.single, prompt))


def test_prompts_are_computed_where_a_group_has_lost_a_rank(groups: Groups) -> None:
    """With it vLLM loses all of the group: they wait for its experts."""
    groups.engines["p"][1].kill()
    for order, router in groups.routers.items():
        for i in range(4):
            prompt = f"{order}, lost {i}. " + LONG[:600]
            assert texts(complete(router, prompt)) == texts(complete(groups.single, prompt))


def test_ranks_behind_one_front_end_hand_over_to_each_other(
    launched: Launcher, groups: Groups, tmp_path: Path
) -> None:
    config = {"kv_connector": "InEngine", "kv_role": "kv_both", "kv_port": 0}
    options = ["--enable-expert-parallel", "--data-parallel-size", "2", "--api-server-count", "1"]
    options += ["--kv-transfer-config", json.dumps(config)]
    engine = launched.engine("both", groups.model, tmp_path, free_port(), *options)
    engine.start()
    engine.wait_ready()
    for first in (0, 1):
        prompt = f"Behind one, from {first}. " + LONG[:700]
        got = hand_over(Rank(engine.url, first), Rank(engine.url, 1 - first), prompt)
        assert texts(got) == texts(complete(groups.single, prompt))
