# SPDX-License-Identifier: Apache-2.0
"""Loads that are parked: their requests wait, and others run beside them."""

from __future__ import annotations

import time

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.schedulers.harness import (
    BLOCK_SIZE,
    CHOSEN,
    NUM_BLOCKS,
    POLL_LIMIT_S,
    SPEC,
    WINDOW,
    Engine,
    Engines,
    prompt_of,
    session_of,
    tails_of,
)
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.engine.scheduler.sources import BlockSource, SourceState
from vllm_ascend_pd.kv.span import Wanted
from vllm_ascend_pd.types import Cause


def test_parked_load_holds_its_blocks_and_ends_cached(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.run(lambda: bool(consumer.worker.parked))
    ((load_id, load),) = consumer.worker.parked.items()
    assert load.blocks[0].indices == tuple(range(7))
    assert not load.in_step
    assert load.blocks[0].has_tail
    assert request.status is RequestStatus.WAITING_FOR_KV
    assert consumer.counts()["free_blocks"] == consumer.counts_at_start["free_blocks"] - 7
    assert consumer.cached_block(request, 0) is None
    consumer.step()
    assert request.status is RequestStatus.WAITING_FOR_KV
    consumer.worker.end_parked(load_id)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    table = consumer.scheduler.kv_cache_manager.get_block_ids("c")[0]
    assert tuple(table) == load.block_ids
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_other_requests_run_beside_a_parked_load(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.add("other", prompt_of(40, start=500), max_tokens=3)
    consumer.run(lambda: len(consumer.tokens["other"]) == 3)
    consumer.expect_tokens("other", 3)
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_request_with_a_computed_prompt_does_not_wait_for_the_same_one_elsewhere(
    producer: Engine, engines: Engines, load_mode: str
) -> None:
    """Another request's load waits until a slow engine has computed it."""
    slow = engines.make("kv_producer")
    consumer = engines.make("kv_consumer", load_mode=load_mode)
    known = slow.prefill("where", prompt_of(3, start=50))
    slow.scheduler.reset_prefix_cache()
    slow.add("p", prompt_of(100), CHOSEN)
    address = ("remote_engine_id", "remote_host", "remote_port", "remote_key")
    there = {"do_remote_prefill": True, "transfer_id": CHOSEN["transfer_id"]}
    consumer.add("c", prompt_of(100), {**there, **{name: known[name] for name in address}})
    consumer.run(lambda: bool(consumer.worker.parked))
    ((awaited, _),) = consumer.worker.parked.items()

    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("d", prompt_of(100), params, max_tokens=3)
    if load_mode == "park":
        consumer.run(lambda: len(consumer.worker.parked) == 2)
        consumer.worker.end_parked(max(consumer.worker.parked))
    consumer.run(request.is_finished)
    consumer.expect_tokens("d", 3)
    assert [*consumer.worker.parked] == [awaited]

    slow.run(lambda: "p" in slow.params)
    consumer.worker.end_parked(awaited)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_failed_parked_load_frees_its_blocks(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), {**params, "return_provenance": True})
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)), Cause.TRANSFER_FAILED.value)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 100}
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    returned = consumer.params["c"]
    assert returned is not None
    assert returned["provenance"]["outcome"] == Cause.TRANSFER_FAILED.value
    assert returned["provenance"]["num_computed_tokens"] == 100


def test_abort_of_a_parked_request_frees_after_the_report(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.abort("c")
    assert consumer.counts()["free_blocks"] == consumer.counts_at_start["free_blocks"] - 7
    assert consumer.scheduler.has_requests()
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_abort_before_the_parked_load_left_frees_after_the_report(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    assert not consumer.scheduler.pd.try_promote(request)
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start


def test_loads_of_one_step_hold_it_up_no_longer_than_one_may(
    producer: Engine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemotePrompt, "load_ms", lambda source, places: [5.0] * len(places))
    consumer = engines.make("kv_consumer", load_mode="auto", max_step_load_ms=50.0)
    starts = {"a": 0, "b": 500, "c": 200}
    for name, start in starts.items():
        params = producer.prefill(name, prompt_of(100, start=start))
        consumer.add(name, prompt_of(100, start=start), params, max_tokens=2)
    answers = consumer.scheduler.pd.part(Consumer).client.outcomes
    consumer.poll(lambda: answers.qsize() == 3)
    step = consumer.schedule()
    assert step.output.num_scheduled_tokens == {"a": 1}
    assert sorted(load.in_step for load in step.loads) == [False, False, True]
    consumer.finish_step()
    for load_id in list(consumer.worker.parked):
        consumer.worker.end_parked(load_id)

    params = producer.prefill("d", prompt_of(100, start=300))
    request = consumer.add("d", prompt_of(100, start=300), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert [load.in_step for load in step.loads] == [True]
    consumer.run_to_end()
    for name in (*starts, "d"):
        consumer.expect_tokens(name, 2)


@pytest.mark.parametrize(("num_blocks", "parks"), [(13, False), (15, True)])
def test_load_is_not_parked_into_the_last_free_blocks(
    producer: Engine, engines: Engines, num_blocks: int, parks: bool
) -> None:
    """Six blocks are in use; six and the tail are missing; a tenth of all has to stay free."""
    params = producer.prefill("p", prompt_of(100))
    consumer = engines.make("kv_consumer", num_blocks=num_blocks, load_mode="park")
    consumer.add("long", prompt_of(90, start=500), max_tokens=4)
    consumer.step()
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    consumer.step()
    assert request.status is (RequestStatus.WAITING_FOR_KV if parks else RequestStatus.WAITING)
    assert consumer.counts()["loads"] == parks
    if parks:
        consumer.run(lambda: bool(consumer.worker.parked))
        consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.run_to_end()
    consumer.expect_tokens("long", 4)
    consumer.expect_tokens("c", 1)


def test_parked_load_brings_only_what_is_missing(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    consumer.warm("w", prompt_of(100))
    consumer.evict(consumer.requests["w"], 1, 4)
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    ((load_id, load),) = consumer.worker.parked.items()
    assert load.blocks[0].indices == (1, 4, 6)
    consumer.worker.end_parked(load_id)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_tail_of_a_parked_load_goes_back_with_a_request_that_is_not_admitted(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.step()
    consumer.run(lambda: session_of(consumer, request) in tails_of(consumer))
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start


def test_block_that_the_tail_of_a_parked_load_replaces_is_its_next_ones(engines: Engines) -> None:
    """The request that takes the tail gives a block back in the pass that admits it. The next one,
    which needs all that is free, has it: what then is found wrong in the first one's load says
    nothing of it."""
    engines.specs = SPEC, WINDOW
    producer = engines.make("kv_producer")
    consumer = engines.make("kv_consumer", load_mode="park", num_blocks=40)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=4)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.run(lambda: session_of(consumer, request) in tails_of(consumer))
    consumer.evict(request, 2)
    consumer.worker.cause_of = lambda load: Cause.CHECKSUM.value
    consumer.add("other", prompt_of(200, start=3000), max_tokens=12)
    assert consumer.step().output.num_scheduled_tokens == {"c": 1, "other": 200}
    consumer.run_to_end()
    consumer.expect_tokens("other", 12)
    consumer.expect_tokens("c", 4)


def test_tails_of_loads_that_wait_are_not_held_against_what_runs(
    producer: Engine, engines: Engines
) -> None:
    """A request grows into all of the memory, and others wait behind it."""
    consumer = engines.make("kv_consumer", num_blocks=17, load_mode="park")
    consumer.add("grows", prompt_of(16), max_tokens=200)
    consumer.step()
    names = [f"c{number}" for number in range(6)]
    for number, name in enumerate(names):
        prompt = prompt_of(20, start=3000 + 100 * number)
        consumer.add(name, prompt, producer.prefill(f"p{number}", prompt), max_tokens=2)
    consumer.poll(
        lambda: consumer.scheduler.pd.part(Consumer).client.outcomes.qsize() == len(names)
    )
    consumer.run(lambda: len(consumer.worker.parked) == len(names))
    scheduler = consumer.scheduler
    has_limit_of_its_own = hasattr(scheduler, "max_num_active_reqs")  # from 0.31 on
    limit = "max_num_active_reqs" if has_limit_of_its_own else "max_num_running_reqs"
    setattr(scheduler, limit, 1)
    for load_id in list(consumer.worker.parked):
        consumer.worker.end_parked(load_id)
    assert len(consumer.tokens["grows"]) < 20
    consumer.run_to_end()
    consumer.expect_tokens("grows", 200)
    for name in names:
        consumer.expect_tokens(name, 2)


def test_engines_that_wait_for_each_others_memory_go_on(engines: Engines) -> None:
    """Each keeps a prompt of 10 of its 16 blocks for the other, and has no room for the other's."""
    pair = [engines.make("kv_both", num_blocks=17, admission_timeout_s=0.3) for _ in range(2)]
    prompts = [prompt_of(160, start=3000 * number) for number in range(2)]
    params = [engine.prefill("p", prompt) for engine, prompt in zip(pair, prompts, strict=True)]
    for engine, prompt, theirs in zip(reversed(pair), prompts, params, strict=True):
        engine.add("c", prompt, {**theirs, "return_provenance": True}, max_tokens=4)
    deadline = time.monotonic() + POLL_LIMIT_S
    while any(len(engine.tokens["c"]) < 4 for engine in pair):
        assert time.monotonic() < deadline, [engine.counts() for engine in pair]
        for engine in pair:
            if engine.scheduler.has_requests():
                engine.step()
    for engine in pair:
        engine.run_to_end()
        engine.expect_tokens("c", 4)
    outcomes = {(engine.params["c"] or {})["provenance"]["outcome"] for engine in pair}
    assert Cause.DEADLINE.value in outcomes


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_request_that_waits_for_memory_renews_its_lease_until_its_deadline_only(
    producer: Engine, engines: Engines, load_mode: str
) -> None:
    """It waits on for as long as another request has the memory."""
    consumer = engines.make(
        "kv_consumer", num_blocks=13, load_mode=load_mode, admission_timeout_s=0.3
    )
    consumer.add("long", prompt_of(90, start=500), max_tokens=100)
    consumer.step()
    request = consumer.add("c", prompt_of(100), producer.prefill("p", prompt_of(100)))
    consumer.wait_for_answer()
    consumer.step()
    client = consumer.scheduler.pd.part(Consumer).client
    consumer.poll(lambda: client.counts()["kept"] == 1)
    assert producer.counts()["leases"] == 1
    session = session_of(consumer, request)
    consumer.poll(lambda: session.is_overdue(time.monotonic()))
    consumer.run(lambda: session.state.final)
    consumer.poll(lambda: client.counts()["kept"] == 0)
    producer.poll(lambda: producer.counts() == producer.counts_at_start)
    assert request.status is RequestStatus.WAITING
    consumer.run_to_end()
    consumer.expect_tokens("long", 100)
    consumer.expect_tokens("c", 1)


def test_reset_gives_the_tail_of_a_parked_load_back(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    session = session_of(consumer, request)
    consumer.run(lambda: session in tails_of(consumer))
    assert consumer.scheduler.reset_prefix_cache()
    assert session not in tails_of(consumer)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_prompts_that_find_no_memory_are_not_looked_at_whole_in_every_step(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are announced, and would be loaded as they are computed."""
    producer = engines.make("kv_producer", lease_s=0.5)
    patient = {"prefill_timeout_s": 60.0, "peer_timeout_s": 60.0, "arrival_timeout_s": 60.0}
    consumer = engines.make("kv_consumer", **patient)
    known = producer.prefill("known", prompt_of(3))
    where = {key: value for key, value in known.items() if key.startswith("remote_")}
    for i in range(12):
        prompt = prompt_of(12 * BLOCK_SIZE, start=1000 * (i + 1))
        producer.add(f"p{i}", prompt, {"do_remote_decode": True, "transfer_id": f"t{i}"})
        wants = {**where, "do_remote_prefill": True, "transfer_id": f"t{i}"}
        consumer.add(f"c{i}", prompt, wants)
    consumer.add("runs", prompt_of(20, start=1), max_tokens=100)
    part = consumer.scheduler.pd.part(Consumer)
    consumer.run(
        lambda: all(
            source.state in (SourceState.READY, SourceState.PARKED) for source in part.open.values()
        )
    )
    consumer.step()
    waiting = sum(source.state is SourceState.READY for source in part.open.values())
    looked: list[BlockSource] = []
    phantoms = consumer.scheduler.pd.common.phantoms
    find_missing = phantoms.find_missing

    def count(request: Request, source: BlockSource, *more: bool) -> list[Wanted]:
        looked.append(source)
        return find_missing(request, source, *more)

    monkeypatch.setattr(phantoms, "find_missing", count)
    for _ in range(20):
        consumer.step()
    assert waiting > 5
    assert len(looked) <= 3 * waiting, "once a second, on however slow a host, and not 20 times"
    for engine in consumer, producer:
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        engine.run_to_end()


@pytest.mark.parametrize("num_blocks", [10, 50])
def test_requests_that_wait_for_a_load_of_another_are_not_looked_through(
    num_blocks: int,
    producer: Engine,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many may share a long prompt, and each is tried in every pass."""
    consumer = engines.make("kv_consumer", load_mode="park", num_blocks=2 * NUM_BLOCKS)
    prompt = prompt_of(num_blocks * BLOCK_SIZE)
    consumer.add("first", prompt, producer.prefill("p0", prompt))
    consumer.run(lambda: bool(consumer.worker.parked))
    others = []
    for i in range(1, 4):
        params = producer.prefill(f"p{i}", prompt)
        others.append(consumer.add(f"c{i}", prompt, params))
        # A producer has no memory for more of them that nobody has opened.
        consumer.run(lambda: all(session_of(consumer, x).awaited_load for x in others))
    lookups = []
    cache = consumer.pool.cached_block_hash_to_block
    get_one = cache.get_one_block
    monkeypatch.setattr(cache, "get_one_block", lambda key: lookups.append(key) or get_one(key))
    consumer.step()
    assert lookups == []
    assert all(request.status is RequestStatus.WAITING_FOR_KV for request in others)
    consumer.worker.end_parked(*consumer.worker.parked)
    consumer.run_to_end()
    for request_id in ("first", "c1", "c2", "c3"):
        consumer.expect_tokens(request_id, 1)
