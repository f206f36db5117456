# SPDX-License-Identifier: Apache-2.0
"""Fifty requests at once, half in each order, and a peer that dies or stops in the middle."""

from __future__ import annotations

import signal
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import Engine, assert_no_leak, make_prompt
from tests.integration.pairs import EVERY_LAYER, Pair

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

NUM_REQUESTS = 50
NUM_OUTPUT = 4
PROMPTS = {f"r{n}": make_prompt(40 + 5 * n % 230, f"fault matrix {n}") for n in range(NUM_REQUESTS)}
TIMES = {"lease_s": 2.0, "peer_timeout_s": 1.0, "step_load_timeout_s": 1.0, "load_timeout_s": 2.0}
PRODUCER = {"transfer": TIMES, "num_blocks": 700}
CONSUMER = {"transfer": {**TIMES, **EVERY_LAYER, "breaker_failures": 3}, "num_blocks": 700}
MOMENTS = ["arrival", "mid-push", "after the push"]


class Crowd:
    """The requests of one case."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.producer, self.consumer = producer, consumer
        pair = Pair(producer, consumer, make_prompt(5, "where"))
        names = list(PROMPTS)
        self.late, self.early = names[::2], names[1::2]
        # The first half of the prefills is done, in the other order.
        for name in self.late:
            producer.add(name, PROMPTS[name], 1, {"do_remote_decode": True})
        for name, answer in producer.run().items():
            consumer.add(name, PROMPTS[name], NUM_OUTPUT, answer.kv_transfer_params)
        for name in self.early:
            transfer_id = pair.new_id()
            pair.add_decode(name, PROMPTS[name], transfer_id, NUM_OUTPUT)
            pair.add_prefill(name, PROMPTS[name], transfer_id)

    def reach(self, moment: str) -> None:
        if moment == "arrival":
            return
        self.consumer.step()
        self.consumer.step()
        for _ in range(3 if moment == "mid-push" else 60):
            self.producer.step()
            self.consumer.step()


def survivor(engines: Engines, role: str, options: dict[str, Any]) -> Engine:
    """The same engine in each case, with nothing in its cache of the one before."""
    engine = engines.shared(role, **options)
    assert engine.reset_prefix_cache()
    return engine


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_producer_is_lost(
    engines: Engines, single: SingleEngine, number: signal.Signals, moment: str
) -> None:
    producer = engines.own("kv_producer", **PRODUCER)
    consumer = survivor(engines, "kv_consumer", CONSUMER)
    before = consumer.counts()
    crowd = Crowd(producer, consumer)
    crowd.reach(moment)
    producer.signal(number)
    answers = consumer.run(timeout=60)
    engines.kill(producer)
    for name, prompt in PROMPTS.items():
        assert answers[name].token_ids == single(prompt, NUM_OUTPUT).token_ids, name
    assert_no_leak(consumer, before)
    prompt = make_prompt(100, f"afterwards {number} {moment}")
    assert consumer.ask(prompt, 4).token_ids == single(prompt, 4).token_ids


@pytest.mark.parametrize("moment", MOMENTS)
def test_producer_that_was_stopped_goes_on_and_is_used_again(
    engines: Engines, single: SingleEngine, moment: str
) -> None:
    producer = engines.own("kv_producer", **PRODUCER)
    consumer = survivor(engines, "kv_consumer", CONSUMER)
    before = producer.counts(), consumer.counts()
    crowd = Crowd(producer, consumer)
    crowd.reach(moment)
    producer.signal(signal.SIGSTOP)
    answers = consumer.run(timeout=60)
    producer.signal(signal.SIGCONT)
    producer.run(timeout=60)
    for name, prompt in PROMPTS.items():
        assert answers[name].token_ids == single(prompt, NUM_OUTPUT).token_ids, name
    assert_no_leak(producer, before[0], timeout=60)
    assert_no_leak(consumer, before[1], timeout=60)
    deadline = time.monotonic() + 60
    for number in count():  # it is tried now and then until its KV comes
        prompt = make_prompt(100, f"afterwards {moment} {number}")
        answer = consumer.ask(prompt, 4, producer.prefill(prompt))
        assert answer.token_ids == single(prompt, 4).token_ids
        if answer.outcome == "loaded":
            break
        assert time.monotonic() < deadline, answer.outcome


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_consumer_is_lost(
    engines: Engines, single: SingleEngine, number: signal.Signals, moment: str
) -> None:
    producer = survivor(engines, "kv_producer", PRODUCER)
    consumer = engines.own("kv_consumer", **CONSUMER)
    before = producer.counts()
    crowd = Crowd(producer, consumer)
    crowd.reach(moment)
    consumer.signal(number)
    producer.run(timeout=60)
    if number == signal.SIGSTOP:
        # Its leases have ended when it goes on: it computes what it has not got.
        deadline = time.monotonic() + 20
        while producer.counts()["leases"] and time.monotonic() < deadline:
            time.sleep(0.1)
        consumer.signal(signal.SIGCONT)
        answers = consumer.run(timeout=60)
        for name, prompt in PROMPTS.items():
            if name in answers:
                assert answers[name].token_ids == single(prompt, NUM_OUTPUT).token_ids, name
    engines.kill(consumer)
    assert_no_leak(producer, before, timeout=60)
    prompt = make_prompt(100, f"afterwards {number} {moment}")
    assert producer.ask(prompt, 4).token_ids == single(prompt, 4).token_ids
