# SPDX-License-Identifier: Apache-2.0
"""Loads that begin before the producer has computed the prompt."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.transfer.raw_peers import wait_until
from tests.unit.transfer.test_send_receive import (
    LIMIT_S,
    NUM_LAYERS,
    NUM_SLOTS,
    PAGE,
    Pair,
)
from vllm_ascend_pd.backends.fault_script import Fault, FaultKind, FaultScript
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec, PeerLoad
from vllm_ascend_pd.transfer.pieces import Piece, plan_ready
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.types import Cause, LoadId

BLOCKS = (20, 21, 22, 23)
"""The producer's: three full blocks and a tail."""
ANSWER_TIMEOUT_S = 25.0
"""A producer that says nothing for twice as long is given up."""


class Prompt:
    """A prompt that the producer computes step by step, and a consumer that waits for it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.spec = replace(pair.spec((0, 1, 2), (5, 6, 7), in_step=False), num_awaited=4)

    def load(self, **changes: object) -> None:
        self.pair.loader.start_load(replace(self.spec, **changes))

    def begin_step(self, num_ready: int, num_coming: int, epoch: str = "e") -> None:
        spec = Grant(self.pair.lease(), epoch, (BLOCKS,), num_ready, num_coming)
        self.pair.grants.begin_step([spec])
        self.pair.server.notify()

    def layer(self, layer: int) -> None:
        self.pair.grants.layer_done(layer)
        self.pair.server.notify_layer()

    def end_step(self) -> None:
        self.pair.grants.end_step()
        self.pair.server.notify()

    def revoke(self) -> None:
        self.pair.grants.discard([self.pair.lease()])
        self.pair.server.notify()

    def wait_server(self) -> None:
        """Until the producer has done what it was told."""
        done = threading.Event()
        self.pair.server.submit(done.set)
        assert done.wait(LIMIT_S)

    def has(self, layer: int, num_blocks: int) -> bool:
        """Whether exactly these leading blocks of a layer have come."""
        ours, theirs = self.pair.ours.bytes[layer], self.pair.theirs.bytes[layer]
        return [
            bool((ours[mine] == theirs[BLOCKS[i]]).all()) for i, mine in enumerate((5, 6, 7))
        ] == [i < num_blocks for i in range(3)]

    def result(self) -> LoadResult:
        results: list[LoadResult] = []
        wait_until(lambda: bool(results.extend(self.pair.loader.take_results()) or results))
        return results[0]

    def result_in_time(self) -> LoadResult:
        """While time passes; the producer can answer between."""
        for _ in range(15):
            self.pair.pass_time(10.0)
            if results := self.pair.loader.take_results():
                return results[0]
        raise AssertionError("the load does not end")


@pytest.fixture
def make_prompt() -> Iterator[Callable[..., Prompt]]:
    pairs: list[Pair] = []

    def make(
        push_mode: PushMode = PushMode.LAYER, script: FaultScript | None = None, **loader: Any
    ) -> Prompt:
        loader = {"answer_timeout_s": ANSWER_TIMEOUT_S, **loader}
        pairs.append(Pair(script or FaultScript(), push_mode=push_mode, **loader))
        return Prompt(pairs[-1])

    yield make
    for pair in pairs:
        pair.time_passed = 1000.0
        pair.stop()


def test_layers_come_while_the_next_are_computed(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.load()
    prompt.begin_step(0, 2)
    assert prompt.has(0, 0)
    for layer in range(NUM_LAYERS):
        prompt.layer(layer)
        wait_until(lambda layer=layer: prompt.has(layer, 2))
    prompt.end_step()
    prompt.begin_step(2, 4)
    prompt.layer(NUM_LAYERS - 1)
    wait_until(lambda: all(prompt.has(layer, 3) for layer in range(NUM_LAYERS)))
    assert not prompt.pair.loader.take_results()
    prompt.end_step()
    result = prompt.result()
    assert (result.cause, result.num_bytes) == ("", 3 * NUM_LAYERS * PAGE)


def test_load_does_not_end_well_without_a_block_that_it_fills(
    make_prompt: Callable[..., Prompt],
) -> None:
    prompt = make_prompt()
    prompt.load(num_awaited=2)
    prompt.begin_step(0, 2)
    prompt.end_step()
    assert prompt.result().cause == Cause.NOT_COMPUTED.value


def test_step_mode_waits_for_whole_steps(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt(PushMode.STEP)
    prompt.load()
    prompt.begin_step(0, 2)
    for layer in range(NUM_LAYERS):
        prompt.layer(layer)
    prompt.wait_server()
    assert prompt.has(0, 0)
    prompt.end_step()
    wait_until(lambda: prompt.has(NUM_LAYERS - 1, 2))
    prompt.begin_step(2, 4)
    prompt.end_step()
    assert prompt.result().cause == ""
    assert prompt.has(0, 3)


@pytest.mark.parametrize("mode", [PushMode.PROMPT, PushMode.AUTO])
def test_what_is_small_comes_at_the_end(make_prompt: Callable[..., Prompt], mode: PushMode) -> None:
    prompt = make_prompt(mode)
    prompt.load()
    prompt.begin_step(0, 2)
    prompt.end_step()
    prompt.begin_step(2, 3)
    prompt.layer(NUM_LAYERS - 1)
    prompt.wait_server()
    assert prompt.pair.engine.num_writes == 0
    prompt.end_step()
    prompt.begin_step(3, 4)
    prompt.end_step()
    assert prompt.result().cause == ""
    assert prompt.has(0, 3)


def test_prompt_that_is_computed_already_comes_at_once(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.begin_step(0, 4)
    prompt.end_step()
    prompt.load()
    assert prompt.result().cause == ""
    assert prompt.has(0, 3)


def test_only_what_is_missing_comes(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.load(blocks=(LoadBlocks(0, (1,), (6,)),))
    prompt.begin_step(1, 4)
    prompt.end_step()
    assert prompt.result().num_bytes == NUM_LAYERS * PAGE
    ours, theirs = prompt.pair.ours.bytes, prompt.pair.theirs.bytes
    assert (ours[:, 6] == theirs[:, BLOCKS[1]]).all()
    assert not (ours[:, 5] == theirs[:, BLOCKS[0]]).all()


def test_nothing_missing_still_waits_for_the_tail(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.load(blocks=(LoadBlocks(0, (), ()),))
    prompt.begin_step(0, 3)
    prompt.end_step()
    prompt.wait_server()
    assert not prompt.pair.loader.take_results()
    prompt.begin_step(3, 4)
    prompt.end_step()
    assert prompt.result().cause == ""


@pytest.mark.parametrize("when", ["before", "between", "long ago"])
def test_revoked_prompt_ends_the_load(make_prompt: Callable[..., Prompt], when: str) -> None:
    prompt = make_prompt()
    if when == "long ago":
        prompt.revoke()
    prompt.load()
    if when == "between":
        prompt.begin_step(0, 2)
        prompt.end_step()
        wait_until(lambda: prompt.has(0, 2))
    prompt.revoke()
    assert prompt.result().cause == Cause.LEASE_EXPIRED.value
    wait_until(lambda: not prompt.pair.server.counts()["watches"])


def test_other_epoch_ends_the_load(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.begin_step(0, 2, epoch="other")
    prompt.load()
    assert prompt.result().cause == Cause.WRONG_EPOCH.value


def test_producer_that_computes_nothing_is_not_waited_for(
    make_prompt: Callable[..., Prompt],
) -> None:
    prompt = make_prompt()
    prompt.load(timeout_s=60.0)
    assert prompt.result_in_time().cause == Cause.DEADLINE.value


def test_progress_prolongs_the_wait(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt(answer_timeout_s=1000.0)
    prompt.load(timeout_s=60.0)
    for num_ready in range(3):
        prompt.begin_step(num_ready, num_ready + 1)
        prompt.end_step()
        wait_until(lambda done=num_ready + 1: prompt.has(NUM_LAYERS - 1, done))
        prompt.pair.pass_time(40.0)
    prompt.begin_step(3, 4)
    prompt.end_step()
    assert prompt.result().cause == ""


def test_producer_that_computes_no_further_is_not_waited_for(
    make_prompt: Callable[..., Prompt],
) -> None:
    prompt = make_prompt()
    prompt.begin_step(0, 2)
    prompt.end_step()
    prompt.load(timeout_s=60.0)
    wait_until(lambda: prompt.has(NUM_LAYERS - 1, 2))
    assert prompt.result_in_time().cause == Cause.DEADLINE.value


def test_producer_that_computes_to_and_fro_is_not_waited_for(
    make_prompt: Callable[..., Prompt],
) -> None:
    prompt = make_prompt(answer_timeout_s=1000.0)
    prompt.load(timeout_s=60.0)
    loader, num_there = prompt.pair.loader, 0
    for num_ready in (1, 2) * 5:
        heard_at = dict(loader._heard_at)
        prompt.begin_step(num_ready, num_ready)
        wait_until(lambda before=heard_at: loader._heard_at != before)
        # What it asks for meanwhile is there before the producer takes it back.
        num_there = max(num_there, num_ready)
        wait_until(lambda n=num_there: all(prompt.has(layer, n) for layer in range(NUM_LAYERS)))
        prompt.pair.pass_time(30.0)
        if results := loader.take_results():
            break
    assert [result.cause for result in results] == [Cause.DEADLINE.value]


def test_silent_producer_is_given_up(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.pair.server._watchers.add = lambda identity, message: None  # type: ignore[method-assign]
    prompt.load(timeout_s=1000.0)
    assert prompt.result_in_time().cause == Cause.PEER_UNREACHABLE.value


def test_producer_that_falls_silent_at_the_end_is_given_up(
    make_prompt: Callable[..., Prompt],
) -> None:
    never = FaultScript(then=Fault(FaultKind.NEVER))
    prompt = make_prompt(script=never, write_timeout_s=1000.0)
    prompt.begin_step(0, 4)
    prompt.end_step()
    prompt.load(timeout_s=1000.0)
    wait_until(lambda: prompt.pair.engine.num_writes > 0)
    prompt.pair.server._watchers.add = lambda identity, message: None  # type: ignore[method-assign]
    assert prompt.result_in_time().cause == Cause.PEER_UNREACHABLE.value


def test_corrupt_layer_ends_the_load(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt(script=FaultScript([Fault(FaultKind.CORRUPT)]))
    prompt.load()
    prompt.begin_step(0, 2)
    prompt.layer(0)
    assert prompt.result().cause == Cause.CHECKSUM.value
    wait_until(lambda: prompt.pair.receive_pool.num_free == NUM_SLOTS)


def test_cancelled_load_ends_at_once(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.load()
    prompt.pair.loader.cancel(prompt.spec.load_id)
    assert prompt.result().cause == Cause.CANCELLED.value


def test_fetch_of_what_is_not_computed_is_refused(make_prompt: Callable[..., Prompt]) -> None:
    prompt = make_prompt()
    prompt.begin_step(1, 3)
    prompt.layer(1)
    spec: LoadSpec = prompt.pair.spec((0, 1), (5, 6))
    assert prompt.pair.run(spec).cause == Cause.NOT_COMPUTED.value


def test_plan_of_what_is_ready() -> None:
    assert plan_ready([0, 0, 0], [0, 0, 0], 4) == []
    assert plan_ready([0, 0, 0], [2, 2, 0], 4) == [Piece(0, 2, 0, 2, False)]
    assert plan_ready([2, 2, 0], [3, 3, 3], 4) == [
        Piece(0, 2, 2, 3, False),
        Piece(2, 1, 0, 3, False),
    ]
    assert plan_ready([0], [9], 4) == [
        Piece(0, 1, 0, 4, False),
        Piece(0, 1, 4, 8, False),
        Piece(0, 1, 8, 9, False),
    ]


def test_turns_do_not_look_at_all_that_wait_for_their_prompts(
    make_prompt: Callable[..., Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: Counter[int] = Counter()
    keep = PeerLoader._keep_watching

    def counted(self: PeerLoader, load: PeerLoad, now: float) -> None:
        looked[load.load_id] += 1
        keep(self, load, now)

    monkeypatch.setattr(PeerLoader, "_keep_watching", counted)
    prompt, num_loads = make_prompt(answer_timeout_s=1000.0), 50
    loader = prompt.pair.loader

    def turns(num: int) -> None:
        for _ in range(num):
            done = threading.Event()
            loader.submit(done.set)
            assert done.wait(LIMIT_S)

    for number in range(num_loads):
        prompt.load(load_id=LoadId(100 + number))
    wait_until(lambda: len(looked) == num_loads)
    turns(3)
    looked.clear()
    turns(20)
    assert not looked
    loader.cancel(LoadId(100))
    turns(2)
    assert len(loader._active) == num_loads - 1
    prompt.begin_step(0, 4)
    prompt.revoke()
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(loader.take_results()) or len(results) == num_loads))
    causes = Counter(result.cause for result in results)
    assert causes == {Cause.CANCELLED.value: 1, Cause.LEASE_EXPIRED.value: num_loads - 1}
    turns(2)
    assert not loader._active
    assert not loader._awaited
