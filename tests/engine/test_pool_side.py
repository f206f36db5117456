# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the pool: what goes with a step, and what beside the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.test_pool_scheduler import World, keys
from vllm_ascend_pd.config import LoadMode, TransferConfig
from vllm_ascend_pd.engine.metadata import StepMeta
from vllm_ascend_pd.engine.scheduler import pool_side
from vllm_ascend_pd.engine.scheduler.pool_prompt import PoolPrompt
from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide
from vllm_ascend_pd.engine.scheduler.sources import SourceEvent
from vllm_ascend_pd.engine.scheduler.supply import Supply
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import Wanted
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.messages import (
    DropAhead,
    DropSaves,
    Found,
    Lookup,
    Packed,
    Save,
    Saved,
)
from vllm_ascend_pd.types import LoadId, Place

NOTHING_SCHEDULED: Any = SimpleNamespace(
    preempted_req_ids=None, total_num_scheduled_tokens=0, num_scheduled_tokens={}
)


class Engine(World):
    """A scheduler of which the pool's side sees the queues, and a worker that only listens."""

    def __init__(self, folder: Path, num_batches: int = 1) -> None:
        super().__init__()
        address = folder / "pool"
        self.arrived: list[Any] = []
        self.worker = PoolLink("worker", self.arrived.append)
        self.worker.listen(str(address))
        self.worker.start()
        vars(self.scheduler).update(
            vllm_config=SimpleNamespace(max_concurrent_batches=num_batches),
            scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=64),
            waiting=[],
            skipped_waiting=[],
            running=[],
        )
        self.side = PoolSide(self.common, 4, lambda request: None, wake=lambda: None)
        self.side.connect([str(address)])
        self.saves = self.side.saves

    def close(self) -> None:
        self.side.stop()
        self.worker.stop()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def test_workers_on_several_hosts_are_refused_by_name(engine: Engine) -> None:
    """A worker's socket that is not here is on another host."""
    with pytest.raises(ConfigError, match="worker 0 is on another one than the scheduler"):
        engine.side.connect(["/another-host/pool"])


def test_a_save_waits_for_the_next_step(engine: Engine) -> None:
    request = engine.request()
    engine.scheduler.running.append(request)
    engine.run_step(request, 40)
    engine.side.send_held_if_idle()
    assert engine.arrived == []
    (save,) = engine.side.take_held()
    assert isinstance(save, Save)
    assert engine.side.take_held() == ()


def test_what_waits_for_pins_goes_when_they_are_free_though_no_step_follows(
    engine: Engine,
) -> None:
    request = engine.request(200)
    engine.run_step(request, 192)
    saved: list[bytes] = []
    while len(saved) < 12:
        engine.side.settle()  # nothing waits and nothing runs: what is held goes
        saves = [message for message in engine.arrived if isinstance(message, Save)]
        assert saves
        engine.arrived.clear()
        for save in saves:
            saved += save.hashes
            engine.side.on_message(Packed(save.save_id))
            engine.side.on_message(Saved(save.save_id, ("ok",) * len(save.hashes), 1, 1.0))
    assert sorted(saved) == sorted(map(bytes, request.block_hashes[:12]))


def test_a_save_goes_at_once_while_another_step_is_under_way(tmp_path: Path) -> None:
    engine = Engine(tmp_path, num_batches=2)
    request = engine.request()
    engine.scheduler.running.append(request)
    engine.run_step(request, 40)
    (save,) = engine.arrived
    assert isinstance(save, Save)
    assert engine.side.take_held() == ()
    engine.close()


def finish(engine: Engine) -> None:
    engine.scheduler.running[0].status = RequestStatus.FINISHED_STOPPED


def leave(engine: Engine) -> None:
    engine.scheduler.running.clear()


@pytest.mark.parametrize("end", [finish, leave])
@pytest.mark.parametrize("queue", ["waiting", "skipped_waiting", "running", None])
def test_without_a_next_step_it_goes_at_once(
    engine: Engine, end: Callable[[Engine], None], queue: str | None
) -> None:
    """Another request makes the engine go on."""
    request = engine.request()
    engine.scheduler.running.append(request)
    engine.run_step(request, 40)
    end(engine)
    if queue is not None:
        getattr(engine.scheduler, queue).append(engine.request(name="other"))
    engine.side.send_held_if_idle()
    assert len(engine.arrived) == (queue is None)
    assert len(engine.side.take_held()) == (queue is not None)


def test_what_is_given_up_reaches_the_worker_after_its_save(engine: Engine) -> None:
    request = engine.request()
    engine.scheduler.running.append(request)
    engine.run_step(request, 40, confirm=False)
    request.num_preemptions += 1
    engine.saves.confirm()
    engine.run_step(request, 16)
    assert engine.arrived == []
    engine.saves.drop()
    assert [type(message) for message in engine.arrived] == [*(DropAhead, Save, Save, DropSaves)]


def test_of_many_answers_a_few_are_folded_in_at_a_time(engine: Engine) -> None:
    requests = [engine.request(name=str(i), start=100 * i) for i in range(30)]

    def waiting() -> list[Any]:
        return [r for r in requests if r.status == RequestStatus.WAITING_FOR_KV]

    for request in requests:
        engine.side.source.add(request)
    for lookup in engine.arrived[:-1]:
        assert isinstance(lookup, Lookup)
        engine.side.on_message(Found(lookup.lookup_id, bytes(4), True))
    engine.side.collect()
    assert waiting() == requests[8:]
    prompt = engine.side.source.find(requests[17])
    assert prompt is not None
    assert engine.side.source.has_answer(prompt)
    assert waiting() == requests[24:]
    prompt = engine.side.source.find(requests[-1])
    assert prompt is not None
    assert not engine.side.source.has_answer(prompt)
    assert waiting() == requests[-1:]


def test_requests_that_are_next_are_looked_up_again(engine: Engine) -> None:
    requests = [engine.request(name=str(i), start=100 * i) for i in range(20)]
    for request in requests:
        engine.side.source.add(request)
    for lookup in engine.arrived:
        engine.side.source.on_found(Found(lookup.lookup_id, bytes(4), True), 0.0)
    engine.arrived.clear()
    for prompt in engine.side.source.closed.values():
        prompt.asked_at -= 1
    waits_for_a_grammar, has_none = requests[2], requests[5]
    waits_for_a_grammar.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.side.source.finish(has_none)
    engine.scheduler.skipped_waiting += requests[:10]
    engine.scheduler.waiting += requests[10:]
    num_passes = num_answered = 0
    while True:
        engine.side.begin_step(NOTHING_SCHEDULED, StepMeta())
        waiting = [r for r in requests if r.status == RequestStatus.WAITING_FOR_KV]
        assert len(waiting) == num_answered  # the others keep their places
        if not engine.arrived:
            break
        num_passes += 1
        assert len(engine.arrived) <= pool_side._LOOKS_AT_A_TIME  # no pass pays for many
        for lookup in engine.arrived:
            found = Found(lookup.lookup_id, bytes([Place.DRAM] * 4), True)
            engine.side.source.on_found(found, 0.0)
            num_answered += 1
        engine.arrived.clear()
    assert num_passes == 14 / pool_side._LOOKS_AT_A_TIME
    looked_up = [r for r in requests if r.status == RequestStatus.WAITING_FOR_KV]
    assert looked_up == [r for r in requests[:16] if r not in (waits_for_a_grammar, has_none)]


def test_queue_is_not_looked_through_in_every_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But in the next one if an answer is awaited."""
    request = engine.request()
    engine.scheduler.waiting.append(request)
    awaits = [False, True, False]
    asked: list[Any] = []
    monkeypatch.setattr(
        engine.side.source, "look_again", lambda request: asked.append(request) or awaits.pop(0)
    )
    now = 100.0
    monkeypatch.setattr(pool_side.time, "monotonic", lambda: now)
    nums_asked = []
    for now in (100.0, 100.05, 100.11, 100.12, 100.13):  # noqa: B007 - the clock reads it
        engine.side.begin_step(NOTHING_SCHEDULED, StepMeta())
        nums_asked.append(len(asked))
    assert nums_asked == [1, 1, 2, 3, 3]


def end_load(engine: Engine, cause: str = "", elapsed_ms: float = 1.0) -> None:
    """Of what is to be loaded next, and is parked."""
    (spec,) = engine.loads.take_new()
    record = engine.loads.end(spec.load_id)
    places = record.places()
    failed = tuple(places) if cause else ()
    result = LoadResult(spec.load_id, cause, 100, elapsed_ms, failed)
    record.source.load_ended(result, places, was_parked=True)
    engine.common.parking.end(record, result)


def open_load_breaker(engine: Engine, cause: str, elapsed_ms: float) -> None:
    """By loads in steps, of prompts that the pool has been asked for each time."""
    for i in range(2):
        if not engine.side.source.load_breaker.closed:
            return
        request = engine.request(name=f"failed {i}", start=3000 + 100 * i)
        found(engine, request).load_started()
        prompt = engine.side.source.find(request)
        assert prompt is not None
        result = LoadResult(LoadId(i), cause, 0, elapsed_ms)
        prompt.load_ended(result, {7: Wanted(0)}, was_parked=False)
        engine.side.source.finish(request)


def found(engine: Engine, request: Any) -> PoolPrompt:
    """The pool has said that it has the request's first blocks."""
    engine.scheduler.requests[request.request_id] = request
    engine.side.source.add(request)
    lookup = engine.arrived.pop()
    engine.side.source.on_found(Found(lookup.lookup_id, bytes([1] * 4), True), 0.0)
    prompt = engine.side.source.find(request)
    assert prompt is not None
    return prompt


@pytest.mark.parametrize("what", ["used blocks", "second look"])
def test_what_is_found_of_a_request_that_was_hashed_anew_is_not_taken_for_stored(
    engine: Engine, what: str
) -> None:
    request = engine.request()
    if what == "used blocks":
        engine.run_step(engine.request(name="before"), 70)
        engine.arrived.clear()
        engine.side.source.add(request)
    else:
        found(engine, request).advance(SourceEvent.PLACE)
        prompt = engine.side.source.find(request)
        assert prompt is not None
        prompt.asked_at -= 10
        assert engine.side.source.look_again(request)
    (lookup,) = engine.arrived
    engine.side.forsake(request)
    request.block_hashes = engine.request(salt="other weights").block_hashes
    engine.side.source.on_found(Found(lookup.lookup_id, bytes([1] * 4), True), 0.0)
    assert not any(key in engine.side.known for key in keys(request, 0, 1, 2, 3))


HANGS = pytest.mark.parametrize(
    ("cause", "elapsed_ms"), [("deadline", 5000.0), ("pool_failed", 1.0), ("", 2500.0)]
)


@HANGS
def test_loads_that_fail_or_are_late_are_bypassed_though_lookups_are_answered(
    engine: Engine, cause: str, elapsed_ms: float
) -> None:
    waiting = found(engine, engine.request(name="waiting", start=500))
    engine.phantoms.publish(waiting.request, [[]], waiting, 0)
    assert len(engine.phantoms) == 4
    open_load_breaker(engine, cause, elapsed_ms)
    assert not waiting.offers  # else a step would wait for it
    assert not engine.phantoms
    assert engine.side.source.breaker.closed
    request = engine.request()
    assert not found(engine, request).offers
    assert request.status == RequestStatus.WAITING
    assert engine.stats.take()["pool_breaker_opened/load"] == 1


@pytest.mark.parametrize(
    ("cause", "elapsed_ms", "was_parked", "is_enough"),
    [
        ("deadline", 5000.0, False, True),
        ("deadline", 500.0, False, False),  # where `step_load_timeout_s` is short
        ("deadline", 5000.0, True, False),
        ("pool_failed", 5000.0, False, False),
        ("", 5000.0, False, False),
    ],
)
def test_load_that_a_step_has_waited_for_in_vain_is_the_last_one(
    engine: Engine, cause: str, elapsed_ms: float, was_parked: bool, is_enough: bool
) -> None:
    result = LoadResult(LoadId(1), cause, 0, elapsed_ms)
    engine.side.source.load_ended(result, [Place.DRAM], was_parked)
    assert engine.side.source.load_breaker.closed == (not is_enough)


@pytest.mark.parametrize("load_mode", list(LoadMode))
def test_bypassed_loads_are_tried_one_at_a_time_beside_the_steps(
    engine: Engine, load_mode: LoadMode
) -> None:
    supply = Supply(engine.common)
    supply._transfer = TransferConfig(load_mode=load_mode)
    supply.parts = [engine.side]
    open_load_breaker(engine, "deadline", 5000.0)
    now = time.monotonic() + 1.5
    engine.side.source.load_breaker._clock = lambda: now
    for cause in ("deadline", ""):
        tried = engine.request(name=f"tried {cause}")
        assert found(engine, tried).offers
        assert not found(engine, engine.request(name=f"other {cause}", start=500)).offers
        assert not supply.try_promote(tried)
        assert not found(engine, engine.request(name=f"another {cause}", start=600)).offers
        assert engine.loads.need_steps
        end_load(engine, cause)
        assert supply.try_promote(tried)
        assert engine.side.source.load_breaker.closed == (not cause)
        assert engine.stats.take().get("pool_breaker_opened/load", 0) == bool(cause)
        now += 1.5
        engine.side.source._blacklist.clear()
    assert all(found(engine, engine.request(name=name, start=700)).offers for name in "ab")


@pytest.mark.parametrize(("load_mode", "num_queued"), [(LoadMode.STEP, 0), (LoadMode.AUTO, 1)])
def test_only_what_may_be_loaded_before_its_step_is_kept_for_that(
    engine: Engine, load_mode: LoadMode, num_queued: int
) -> None:
    engine.side.source.transfer = TransferConfig(load_mode=load_mode)
    assert found(engine, engine.request()).offers
    assert len(engine.side.source.queued) == num_queued


def test_what_could_not_be_loaded_is_not_remembered_for_ever(engine: Engine) -> None:
    source, now = engine.side.source, time.monotonic()
    for step in range(5):
        source._clock = lambda at=now + 20.0 * step: at
        request = engine.request(name=str(step), start=100 * step)
        source.failed_to_load(request, Wanted(0))
        source.failed_to_load(request, Wanted(0))
        source.failed_to_load(request, Wanted(1))
    assert len(source._blacklist) == 2 * 2


def test_bypassed_load_without_memory_to_be_parked_is_left_to_the_next_request(
    engine: Engine,
) -> None:
    supply = Supply(engine.common)
    supply.parts = [engine.side]
    open_load_breaker(engine, "deadline", 5000.0)
    engine.side.source.load_breaker._clock = lambda: time.monotonic() + 1.5
    others = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 6)
    request = engine.request()
    assert found(engine, request).offers
    assert supply.try_promote(request)  # computed
    assert not engine.loads.new
    engine.pool.free_blocks(others)
    request = engine.request(name="next", start=500)
    assert found(engine, request).offers
    assert not supply.try_promote(request)
    assert engine.loads.need_steps


def answer_late(engine: Engine, lookups: list[Any]) -> threading.Thread:
    def answer() -> None:
        time.sleep(0.02)
        for lookup in lookups:
            engine.side.on_message(Found(lookup.lookup_id, bytes(4), True))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("num_requests", [1, 3, 20])
def test_answers_are_waited_for_when_there_is_nothing_else_to_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    monkeypatch.setattr(pool_side, "_TICK_S", 10.0)
    requests = [engine.request(name=str(i), start=100 * i) for i in range(num_requests)]
    for request in requests:
        engine.side.source.add(request)
    engine.scheduler.skipped_waiting.extend(requests)
    thread = answer_late(engine, engine.arrived)
    engine.side.wait_if_nothing_else()
    thread.join()
    assert not engine.side.source.num_looking


@pytest.mark.parametrize("queue", ["waiting", "running"])
def test_nothing_is_waited_for_while_another_request_could_be_scheduled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    monkeypatch.setattr(pool_side, "_TICK_S", 10.0)
    request = engine.request()
    engine.side.source.add(request)
    engine.scheduler.skipped_waiting.append(request)
    getattr(engine.scheduler, queue).append(engine.request(name="other", start=500))
    thread = answer_late(engine, engine.arrived)
    engine.side.wait_if_nothing_else()
    assert engine.side.source.num_looking == 1
    thread.join()


def test_a_lookup_that_takes_long_is_waited_for_a_moment_only(engine: Engine) -> None:
    request = engine.request()
    engine.side.source.add(request)
    engine.scheduler.skipped_waiting.append(request)
    engine.side.wait_if_nothing_else()
    assert engine.side.source.num_looking == 1


def test_an_answer_that_is_here_is_not_too_late(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [engine.request(name=str(i), start=100 * i) for i in range(20)]
    for request in requests:
        engine.side.source.add(request)
    for lookup in engine.arrived:
        engine.side.on_message(Found(lookup.lookup_id, bytes([1] * 4), True))
    now = time.monotonic() + 3600
    monkeypatch.setattr(engine.side.source, "_clock", lambda: now)
    for _ in range(3):
        engine.side._next_tick_at = 0.0
        engine.side.collect()
    prompts = [engine.side.source.find(request) for request in requests]
    assert all(prompt is not None and prompt.offers for prompt in prompts)
    assert engine.side.source.breaker.closed
