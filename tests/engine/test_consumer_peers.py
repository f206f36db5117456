# SPDX-License-Identifier: Apache-2.0
"""Which processes a consumer connects to, whoever names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.clock import Clock
from tests.engine.peer_world import ConsumerProcess, Network, ProducerProcess
from vllm_ascend_pd.config import SecurityConfig
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint

PROMPT = list(range(41))


class World:
    """A prompt that a producer has computed, and a consumer that is to load it."""

    def __init__(self) -> None:
        self.network = Network()
        self.producer = ProducerProcess(self.network, Clock(1000.0), 7001)
        self.consumer = ConsumerProcess(self.network, Clock(1000.0))
        request = self.producer.arrive(PROMPT)
        assert request is not None
        assert self.producer.compute(request)
        params = self.producer.end_prefill(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        assert params is not None
        self.params: dict[str, Any] = params

    def serve_at(self, *hosts: str) -> None:
        """What the producer says of its workers."""
        servers = (PageServer(Endpoint(host, 1, "key"), TicketKey()) for host in hosts)
        self.producer.book.page_servers = tuple(servers)

    def outcome(self) -> str:
        """Of a request that asks for the prompt; empty when it can be loaded."""
        assert self.consumer.add(PROMPT, self.params) is None
        session = self.consumer.remote(self.consumer.requests[0])
        self.consumer.turn()
        while frames := self.network.under_way():
            link, upwards, place = frames[0]
            link.deliver(upwards, (link.up if upwards else link.down).pop(place))
            self.consumer.turn()
        return session.provenance.outcome


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.consumer.stop()
    world.producer.stop()


def test_producer_names_workers_that_may_be_connected_to(world: World) -> None:
    world.serve_at("127.0.0.1")
    assert world.outcome() == ""


@pytest.mark.parametrize("hosts", [["192.0.2.1"], ["127.0.0.1", "192.0.2.1"], ["example.org"]])
def test_producer_with_a_worker_anywhere_else_is_refused(world: World, hosts: list[str]) -> None:
    world.serve_at(*hosts)
    assert world.outcome() == Cause.PEER_NOT_ALLOWED.value


def test_request_that_names_no_key_is_refused_unless_there_is_a_secret(world: World) -> None:
    refused = world.consumer.add(PROMPT, {**world.params, "remote_key": ""})
    assert refused is not None
    assert refused[0] is Cause.BAD_PARAMS
    assert "kv_transfer_params.remote_key is missing" in refused[1]
    world.consumer.consumer._security = SecurityConfig(secret_file="/etc/secret")
    assert world.consumer.add(PROMPT, {**world.params, "remote_key": ""}) is None
