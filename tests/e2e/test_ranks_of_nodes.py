# SPDX-License-Identifier: Apache-2.0
"""Data parallel ranks that share experts, of which each of two front ends has two, as on two nodes
(``vllm serve --data-parallel-hybrid-lb``).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.checkpoints import copy_with_experts
from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import LONG, PATIENT, complete, routing, scraped, texts, until
from tests.e2e.servers import free_port
from tests.e2e.test_ranks_with_experts import (
    ORDERS,
    ROUND_ROBIN,
    Rank,
    hand_over,
    listed,
    until_served,
)
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

ROLES = ("prefill", "decode")


@dataclass
class Nodes:
    """One group of ``kv_both`` ranks, of which the router uses the first node's for prefill; a
    router for each order, of which the first one has a file of instances and the second those that
    register."""

    engines: list[ForkedEngine]
    kv_port: int
    routers: dict[str, str]

    def loaded(self) -> list[float]:
        """Requests of each rank of the second node that a peer's KV came for."""
        name = 'pd_requests_total{engine="%d",model_name="tiny",outcome="loaded"}'
        return [scraped(self.engines[1].url, name % rank) for rank in (2, 3)]


@pytest.fixture(scope="module")
def nodes(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    model = copy_with_experts(make_tiny_model(folder / "tiny").path, folder / "experts")
    first, second = ORDERS
    port = free_port()
    kv_port = 17_000 + port % 2_900  # nobody else looks for ports there: the next ones are free
    together = ["--enable-expert-parallel", "--data-parallel-size", "4", "--api-server-count", "1"]
    together += ["--data-parallel-size-local", "2", "--data-parallel-hybrid-lb"]
    together += ["--data-parallel-rpc-port", str(free_port()), "--data-parallel-start-rank"]
    engines, static = [], []
    for i, role in enumerate(ROLES):
        link = {"url": f"http://127.0.0.1:{port}", "instance_id": "e", "role": role}
        config: dict[str, Any] = {"kv_connector": "InEngine", "kv_role": "kv_both"}
        config |= {"engine_id": "e", "kv_port": kv_port}
        config["kv_connector_extra_config"] = {**PATIENT, "router": link}
        options = (*together, str(2 * i), "--kv-transfer-config", json.dumps(config))
        engine = launched.engine(f"node{i}", model, folder, free_port(), *options)
        engines.append(engine)
        static += [{"url": engine.url, "role": role, "data_parallel_rank": n} for n in (0, 1)]
    with ExitStack() as running:
        running.callback(launched.kill_engines)
        for engine in engines:
            engine.start()
        by_file = running.enter_context(routing(folder, static, "--order", first, *ROUND_ROBIN))
        registered = running.enter_context(
            routing(folder, [], "--order", second, *ROUND_ROBIN, port=port)
        )
        for engine in engines:
            engine.wait_ready()
        routers = {first: by_file, second: registered}
        for url in routers.values():
            until_served(url, 4)
        yield Nodes(engines, kv_port, routers)


def test_each_rank_is_an_instance_by_its_number_at_its_front_end(nodes: Nodes) -> None:
    at_rank = {rank: (nodes.engines[rank // 2].url, rank % 2) for rank in range(4)}
    found = {i["instance_id"]: i for i in listed(nodes.routers["concurrent"])}
    assert {name: (i["url"], i["data_parallel_rank"]) for name, i in found.items()} == {
        f"e-dp{rank}": at for rank, at in at_rank.items()
    }
    found = {i["instance_id"]: i for i in listed(nodes.routers["prefill-first"])}
    assert {(i["url"], i["data_parallel_rank"]) for i in found.values()} == set(at_rank.values())
    pages = [requests.get(f"{engine.url}/metrics", timeout=30).text for engine in nodes.engines]
    labels = [
        dict(re.findall(r'(\w+)="([^"]*)"', one))
        for page in pages
        for one in re.findall(r"^vllm:pd_engine_info\{(.*)\} 1.0$", page, re.M)
    ]
    told = {(one["engine"], one["engine_id"], one["kv_endpoint"]) for one in labels}
    assert told == {
        (str(rank), f"e_dp{rank}", f"127.0.0.1:{nodes.kv_port + rank}") for rank in range(4)
    }
    assert len({one["epoch"] for one in labels}) == 4


def test_the_router_reads_what_each_rank_counts(nodes: Nodes) -> None:
    """Of the second node's ranks ``/metrics`` tell as of engines 2 and 3."""
    router = nodes.routers["concurrent"]
    numbers = itertools.count()

    def are_read() -> bool:
        """Lookups in prefix caches, which are told of where there were any lately."""
        complete(router, f"Look {next(numbers)}. " + LONG[:600])
        page = requests.get(f"{router}/metrics", timeout=30).text
        read = r'^vllm:pd_router_instance_prefix_hit_rate\{instance="([^"]*)"'
        return set(re.findall(read, page, re.M)) == {f"e-dp{rank}" for rank in range(4)}

    until(are_read)


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_takes_kv_from_the_other_node(nodes: Nodes, order: str) -> None:
    router, d = nodes.routers[order], nodes.engines[1].url
    before = nodes.loaded()
    orders = f'pd_router_orders_total{{order="{order}"}}'
    in_order = scraped(router, orders)
    for i in range(4):
        prompt = f"{order} {i}. " + LONG[: 500 + 100 * i]
        assert texts(complete(router, prompt)) == texts(complete(d, prompt, cache_salt="alone"))
    until(lambda: sum(nodes.loaded()) == sum(before) + 4)
    assert nodes.loaded() == [number + 2 for number in before]
    assert scraped(router, orders) == in_order + 4


def test_ranks_hand_over_by_the_numbers_that_their_front_ends_give(nodes: Nodes) -> None:
    """In the second node, and from there to the first one."""
    first, second = (engine.url for engine in nodes.engines)
    for p, d in ((Rank(second, 0), Rank(second, 1)), (Rank(second, 1), Rank(first, 0))):
        prompt = f"From {p.number} to {d}. " + LONG[:700]
        got = hand_over(p, d, prompt)
        assert texts(got) == texts(complete(second, prompt, 0, cache_salt="alone"))
