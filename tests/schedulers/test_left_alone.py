# SPDX-License-Identifier: Apache-2.0
"""A producer that answers and whose KV does not come, or comes slowly, holds nobody up for long."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.schedulers.harness import Engine, Engines, prompt_of, session_of
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.known_peers import KnownPeer
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause, LoadId


def in_vain(spec: LoadSpec) -> str:
    """A step waits for it until its deadline."""
    return Cause.DEADLINE.value


def prompt(number: int) -> list[int]:
    return prompt_of(100, start=1000 + 200 * number)


def peer_of(consumer: Engine) -> KnownPeer:
    """Of its one producer."""
    [peer] = consumer.scheduler.pd.part(Consumer).known._peers.values()
    return peer


@pytest.fixture
def left_alone(producer: Engine, consumer: Engine) -> Engine:
    """A consumer, for which a load of its producer has not come in time."""
    params = producer.prefill("p0", prompt(0))
    consumer.worker.cause_of = in_vain
    consumer.add("c0", prompt(0), params)
    consumer.run_to_end()
    consumer.expect_tokens("c0", 1)
    consumer.worker.cause_of = lambda spec: ""
    return consumer


def test_next_prompt_is_computed_at_once(producer: Engine, left_alone: Engine) -> None:
    params = {**producer.prefill("p", prompt(1)), "return_provenance": True}
    request = left_alone.add("c", prompt(1), params)
    step = left_alone.schedule()
    assert step.output.num_scheduled_tokens == {"c": 100}
    left_alone.finish_step()
    left_alone.run_to_end()
    left_alone.expect_tokens("c", 1)
    provenance = (left_alone.params["c"] or {})["provenance"]
    assert provenance["outcome"] == Cause.DEADLINE.value
    assert provenance["num_computed_tokens"] == 100
    assert request.is_finished()
    producer.run(lambda: not producer.counts()["leases"])  # what it kept is given back


def test_one_at_a_time_is_tried_beside_the_steps_until_its_kv_comes(
    producer: Engine, left_alone: Engine
) -> None:
    tried, meanwhile, after = (
        (f"c{n}", prompt(n), producer.prefill(f"p{n}", prompt(n))) for n in (1, 2, 3)
    )
    peer_of(left_alone)._breaker._next_probe_at = 0.0  # its time has come
    left_alone.add(*tried)
    left_alone.run(lambda: bool(left_alone.worker.parked))
    left_alone.add(*meanwhile)
    left_alone.run(lambda: bool(left_alone.tokens["c2"]))
    ((load_id, load),) = left_alone.worker.parked.items()
    assert load.transfer_id == tried[2]["transfer_id"]
    left_alone.worker.end_parked(load_id)
    left_alone.run_to_end()
    request = left_alone.add(*after)
    step = left_alone.schedule_until_admitted(request)
    assert [load.in_step for load in step.loads] == [True]
    left_alone.run_to_end()
    for name in ("c1", "c2", "c3"):
        left_alone.expect_tokens(name, 1)


def test_who_has_begun_nothing_computes(producer: Engine, engines: Engines) -> None:
    """The first fails while the second waits for room."""
    consumer = engines.make("kv_consumer", scheduler_fields={"max_num_seqs": 1})
    params = [producer.prefill(f"p{n}", prompt(n)) for n in (1, 2)]
    consumer.worker.cause_of = in_vain
    first = consumer.add("c1", prompt(1), params[0])
    second = consumer.add("c2", prompt(2), params[1])
    consumer.poll(lambda: consumer.scheduler.pd.part(Consumer).client.outcomes.qsize() == 2)
    consumer.schedule_until_admitted(first)
    while consumer.in_flight:
        consumer.finish_step()
    assert session_of(consumer, second).provenance.outcome == Cause.DEADLINE.value
    steps = consumer.run_to_end()
    assert not any(step.loads for step in steps)
    consumer.expect_tokens("c1", 1)
    consumer.expect_tokens("c2", 1)


def test_unreachable_producer_is_not_waited_for_by_each_request(
    engines: Engines, producer: Engine
) -> None:
    consumer = engines.make("kv_consumer", peer_timeout_s=0.2, breaker_failures=2)
    params = {**producer.prefill("p", prompt(0)), "remote_port": 9}
    for number in (1, 2):
        consumer.add(f"c{number}", prompt(number), params)
        consumer.run_to_end()
    consumer.add("c3", prompt(3), params)
    assert consumer.schedule().output.num_scheduled_tokens == {"c3": 100}
    consumer.finish_step()
    consumer.run_to_end()
    for number in (1, 2, 3):
        consumer.expect_tokens(f"c{number}", 1)
    producer.scheduler.reset_prefix_cache()


def test_loads_of_a_slow_producer_are_parked_and_those_of_another_are_not(
    engines: Engines, producer: Engine
) -> None:
    slow = engines.make("kv_producer")
    consumer = engines.make("kv_consumer", load_mode="auto")
    own, others = slow.prefill("p1", prompt(1)), producer.prefill("p2", prompt(2))
    request = consumer.add("c1", prompt(1), own)
    peer = session_of(consumer, request).peer
    peer.load_ended(LoadResult(LoadId(0), "", 1000, 4000.0), 50.0)
    consumer.add("running", prompt(3), max_tokens=30)
    consumer.run(lambda: bool(consumer.worker.parked))
    assert request.status is RequestStatus.WAITING_FOR_KV
    step = consumer.schedule_until_admitted(consumer.add("c2", prompt(2), others))
    assert [load.in_step for load in step.loads] == [True]
    consumer.worker.end_parked(*consumer.worker.parked)
    consumer.run_to_end()
    for name in ("c1", "c2"):
        consumer.expect_tokens(name, 1)
