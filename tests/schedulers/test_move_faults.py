# SPDX-License-Identifier: Apache-2.0
"""A message of a move is lost, late or comes twice: one engine computes, and nothing is left.

In the real schedulers with real control threads between them; workers are simulated.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.schedulers.harness import (
    BLOCK_SIZE,
    POLL_LIMIT_S,
    SLOWLY,
    SPEC,
    STATE,
    TURN_S,
    WINDOW,
    Engine,
    Engines,
    prompt_of,
    right_token,
)
from vllm_ascend_pd.engine.scheduler import moves_in
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.engine.vllm_api.status import preempt
from vllm_ascend_pd.resume import ResumeKey, RunningAt
from vllm_ascend_pd.transfer.control import ControlClient, ControlServer
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause
from vllm_ascend_pd.wire import Extend, Extended, Go, More, Open, Ready, Take, Told, decode_control

SHAPES: dict[str, tuple[Any, ...]] = {
    "full": (),
    "windows": (SPEC, WINDOW),
    "windows alone": (replace(WINDOW, sliding_window=6 * BLOCK_SIZE),),
    "states": (SPEC, STATE, WINDOW),
}
"""Of KV cache groups."""
NUM_OUTPUT = 150
PROMPT = prompt_of(5 * BLOCK_SIZE + 3)
NUM_TURNS, NUM_BLOCKS = 300, 240
NUM_OUTPUT_OF_TURNS = 1100
"""More than is computed meanwhile."""
QUICK = {"peer_timeout_s": 0.4, "max_freeze_s": 0.3, "lease_s": 1.0}
PATIENT = {name: 25 * seconds for name, seconds in QUICK.items()}
"""Where nothing is lost, and a slow host must not be taken for a fault."""
PATIENCE = 1, 5, 25
"""Times ``QUICK``: on a slow host a move may be given up before the message in question is sent."""


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, engines: Engines) -> str:
    """That of the engines of this test."""
    engines.specs = SHAPES[request.param]
    return request.param


EACH_SHAPE = pytest.mark.usefixtures("shape")


def kind_of(message: object) -> str:
    if isinstance(message, Extend):
        return "freeze" if message.freeze else "extend"
    if isinstance(message, Extended):
        return "frozen" if message.is_frozen else "extended"
    kinds = {Open: "open", Ready: "ready", Go: "go", Take: "take", More: "more", Told: "told"}
    return kinds.get(type(message), "")


class Wire:
    """What becomes of the first message of one kind."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, fate: str) -> None:
        self._kind, self._fate = kind, fate
        self.has_met = False
        self._late: Callable[[], None] | None = None
        for reactor in ControlServer, ControlClient:
            patch.setattr(reactor, "_on_frame", self._filtered(reactor._on_frame))

    def _filtered(self, receive: Callable[..., None]) -> Callable[..., None]:
        return lambda reactor, who, frame: self._meet(
            reactor, partial(receive, reactor, who, frame), frame
        )

    def _meet(self, reactor: Any, deliver: Callable[[], None], frame: bytes) -> None:
        if self.has_met or kind_of(decode_control(frame)) != self._kind:
            deliver()
            return
        self.has_met = True
        if self._fate in ("late", "again"):
            self._late = partial(reactor.submit, deliver)
        if self._fate not in ("late", "lost"):
            deliver()
        if self._fate == "twice":
            deliver()

    def deliver_late(self) -> None:
        if self._late is not None:
            self._late()


class Move:
    """Request ``r`` of the source becomes ``t`` of the target."""

    def __init__(self, engines: Engines, **transfer: Any) -> None:
        self.source = engines.make("kv_both", **transfer)
        self.target = engines.make("kv_both", **transfer)
        self.source.worker.peers.append(self.target.worker)
        self.is_here = False
        self.num_in_flight: int | None = None
        """Steps of the source, after each of them; as many as it likes with ``None``."""
        self.grants: list[Grant] = []
        """Of the source."""
        self.loads: list[LoadSpec] = []
        """Of the target."""
        self.loads_end = True
        self.answers_only: Callable[[], bool] = lambda: False
        """Whether the source makes no step."""
        self._num_turns = 0

    def begin(self, num_output: int = NUM_OUTPUT, num_known: int = 3) -> None:
        self.source.add("r", PROMPT, max_tokens=num_output, temperature=0)
        self.source.run(lambda: len(self.source.tokens["r"]) >= num_known)
        self.resume = coming("r", self.source)
        params = {"resume": self.resume}
        self.target.add("t", PROMPT, params, max_tokens=num_output, temperature=0)

    def step(self) -> None:
        """One of each engine; no step of both computes the request. The source computes slowly, so
        that the move comes first.
        """
        self._num_turns += 1
        is_idle = True
        for engine in self.source, self.target:
            has_news = engine.scheduler.pd.has_pending_work()
            is_slow = not has_news and self._num_turns % SLOWLY
            if engine is self.source and (is_slow or self.answers_only()):
                continue
            if not (engine.scheduler.has_requests() or engine.in_flight):
                continue
            step = engine.step()
            is_idle = False
            if engine is self.source:
                self.grants += step.meta.grants if step.output.pd_metadata is not None else ()
                assert not (self.is_here and "r" in step.output.num_scheduled_tokens)
                self._keep_in_flight()
            else:
                self.loads += step.loads
                self.is_here |= "t" in step.output.num_scheduled_tokens
            if self.loads_end:
                self.end_loads(engine)
        if is_idle:
            time.sleep(TURN_S)

    def _keep_in_flight(self) -> None:
        if self.num_in_flight is None or not self.source.scheduler.running:
            return
        while len(self.source.in_flight) > self.num_in_flight:
            self.source.finish_step()
        while len(self.source.in_flight) < self.num_in_flight:
            self.source.schedule()

    def end_loads(self, engine: Engine) -> None:
        """As the loader does: what can be read has been, what never can be has failed."""
        for load_id, load in list(engine.worker.parked.items()):
            grant = engine.worker.grant_of(load)
            if grant is None and not self.source.scheduler.requests:
                engine.worker.end_parked(load_id, Cause.LEASE_EXPIRED.value)
            elif grant is not None and grant.num_ready >= (load.num_awaited or 0):
                engine.worker.end_parked(load_id)

    def to_and_fro(self, request: str, num_turns: int) -> None:
        """It begins at the source, and leaves nothing where it has been."""
        here, there = self.source, self.target
        old = f"{request} 0"
        here.add(old, PROMPT, max_tokens=NUM_OUTPUT_OF_TURNS, temperature=0)
        here.run(lambda: len(here.tokens[old]) > 0)
        for turn in range(num_turns):
            deadline = time.monotonic() + POLL_LIMIT_S
            new = f"{request} {turn + 1}"
            resume = {"resume": coming(old, here)}
            there.add(new, PROMPT, resume, max_tokens=NUM_OUTPUT_OF_TURNS, temperature=0)
            while here.scheduler.requests or len(there.tokens[new]) <= len(here.tokens[old]):
                has_news = here.scheduler.pd.has_pending_work() or there.worker.parked
                if has_news and here.scheduler.requests:
                    here.step()
                there.scheduler.pd.has_pending_work()  # as an engine's loop asks
                there.step()
                self.end_loads(there)
                assert time.monotonic() < deadline, (here.counts(), there.counts())
            there.expect_tokens(new, len(there.tokens[new]))
            assert here.params[old] == {"moved": True}
            assert here.counts() == here.counts_at_start
            here, there, old = there, here, new
        here.abort(old)

    def run(self, wire: Wire | None = None, act: Callable[[Move], object] | None = None) -> None:
        """Until both have ended it; ``act`` once the message is on its way."""
        deadline = time.monotonic() + POLL_LIMIT_S
        while self.source.scheduler.requests or self.target.scheduler.requests:
            self.step()
            if wire is not None and wire.has_met and act is not None:
                act(self)
                act = None
            assert time.monotonic() < deadline, (self.source.counts(), self.target.counts())
        self.step()

    @property
    def has_left(self) -> bool:
        return self.source.params.get("r") == {"moved": True}

    @property
    def outcome(self) -> str:
        """At the target; empty if its client has left."""
        params = self.target.params.get("t")
        if params is None:
            return ""
        resume = params["resume"]
        return resume.get("refused") or resume["outcome"]

    def expect_one_answer(self, num_output: int = NUM_OUTPUT) -> None:
        right = [right_token(len(PROMPT) + i) for i in range(num_output)]
        given = self.source.tokens["r"]
        assert given == right[: len(given)]
        if self.outcome == "exact":
            assert self.target.tokens["t"] == right
        else:
            assert not self.is_here or not self.outcome
        assert self.has_left or given == right or self.source.requests["r"].is_finished()


def move_that_meets(
    wire: Wire,
    engines: Engines,
    act: Callable[[Move], object] | None = None,
    patiences: Sequence[int] = PATIENCE,
) -> Move:
    """A move that both have ended, and of which ``wire`` has met its message."""
    for patience in patiences:
        move = Move(engines, **{name: patience * value for name, value in QUICK.items()})
        move.begin()
        move.run(wire, act)
        if wire.has_met:
            return move
    raise AssertionError("the message was never sent")


def coming(name: str, source: Engine, prompt: list[int] = PROMPT) -> dict[str, Any]:
    """The ``resume`` of a request that runs there."""
    producer = source.scheduler.pd.part(Producer)
    at = producer.endpoint
    said = RunningAt(at.host, at.port, at.key, producer.epoch)
    return ResumeKey(None).sign(name, prompt, [], source=said).to_params()


KINDS = ["open", "extended", "extend", "freeze", "frozen", "ready", "go"]


@EACH_SHAPE
def test_lease_grows_by_what_is_not_written_any_more(engines: Engines) -> None:
    """By full blocks while the request runs; by the tail, too, when it has stopped."""
    move = Move(engines, **PATIENT)
    move.begin()
    move.run()
    move.expect_one_answer()
    ends = [grant.num_coming for grant in move.grants]
    assert len(ends) > 2
    assert ends == sorted(ends)
    assert not any(end % BLOCK_SIZE for end in ends[:-1])
    assert ends[-1] == len(PROMPT) + len(move.source.tokens["r"]) - 1
    assert [grant.num_ready for grant in move.grants] == ends


def use_all_blocks(engine: Engine, beside: str = "", times: int = 1) -> None:
    """Others are given those that are free, ``beside`` a request that runs on."""
    num_before = len(engine.requests)
    for i in range(num_before, num_before + 12 * times):
        name = f"other {i}"
        engine.add(name, prompt_of(2 * BLOCK_SIZE, 2000 + 100 * i))
        engine.run(lambda name=name: bool(engine.tokens[name]))
        assert not beside or engine.requests[beside] in engine.scheduler.running


def test_request_that_goes_on_after_a_stop_has_no_drafts(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that runs ahead is told of those of the last step only, which was another's."""
    wire = Wire(monkeypatch, "frozen", "lost")
    move = Move(engines, num_drafts=3, **PATIENT)
    schedule, outputs = move.source.schedule, list[Any]()

    def note() -> Any:
        step = schedule()
        outputs.append(step.output)
        return step

    def leave(move: Move) -> None:
        for _ in range(3):
            move.source.step()
        move.target.abort("t")

    monkeypatch.setattr(move.source, "schedule", note)
    move.source.add("beside", prompt_of(20, 500), max_tokens=NUM_OUTPUT, temperature=0)
    move.begin()
    move.run(wire, leave)
    move.expect_one_answer()
    assert not move.has_left
    names = ["r" if "r" in it.num_scheduled_tokens else "" for it in outputs]
    stopped = names.index("", names.index("r"))
    goes_on = names.index("r", stopped)
    assert "beside" in outputs[goes_on - 1].num_scheduled_tokens
    assert "r" not in outputs[goes_on].scheduled_spec_decode_tokens
    assert "r" in outputs[goes_on + 1].scheduled_spec_decode_tokens


@pytest.mark.parametrize("num_known", [3, 13, 14, 15])
def test_windows_slide_while_they_are_copied(
    engines: Engines,
    num_known: int,
) -> None:
    """What they leave behind is not another request's before it is there; no block is loaded twice,
    nor one that was out of the window before.
    """
    window = 2 * BLOCK_SIZE + 8
    engines.specs = (SPEC, replace(WINDOW, sliding_window=window))
    move = Move(engines, num_blocks=40, peer_timeout_s=60, max_freeze_s=60)
    move.begin(num_known=num_known)
    move.loads_end = False
    while not move.loads:
        move.step()
    use_all_blocks(move.source, "r")
    move.loads_end = True
    while move.target.worker.parked:
        move.step()
    use_all_blocks(move.target)
    move.run()
    move.expect_one_answer()
    assert move.outcome == "exact"
    loaded = [{(b.group, i) for b in load.blocks for i in b.indices} for load in move.loads]
    assert len(loaded) > 1
    assert sum(map(len, loaded)) == len(set[tuple[int, int]]().union(*loaded))
    num_computed = len(PROMPT) + num_known - 1
    first_needed = (num_computed - window + 1) // BLOCK_SIZE
    assert min(i for group, i in loaded[0] if group) >= first_needed
    left_for_the_stop = {i for _, i in loaded[-1]}
    assert len(left_for_the_stop) <= 3, "two blocks and the tail"


def test_transfer_id_of_a_move_may_be_that_of_a_request(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine chooses it."""
    move = Move(engines, **PATIENT)
    move.source.add("own", prompt_of(40, 500), {"do_remote_decode": True}, max_tokens=1)
    move.source.run_to_end()
    monkeypatch.setattr(moves_in.secrets, "token_hex", lambda num_bytes: "own")
    move.begin()
    move.run()
    assert move.outcome == "exact"
    move.expect_one_answer()
    producer = move.source.scheduler.pd.part(Producer)
    assert producer.counts()["prompts"] == 1
    producer.revoke_all()
    assert not any(producer.counts().values())


def test_question_that_comes_again_gives_nothing_up(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its first answer has told of is still copied."""
    engines.specs = (SPEC, WINDOW)
    wire = Wire(monkeypatch, "extend", "again")
    move = Move(engines, num_blocks=48, peer_timeout_s=60, max_freeze_s=60)
    move.begin(2 * NUM_OUTPUT)
    source = move.source
    move.loads_end = False
    while not move.loads:
        move.step()
    use_all_blocks(source, "r", 5)
    move.loads_end = True
    while not wire.has_met:
        move.step()
    move.loads_end = False
    while len(move.loads) < 2:
        move.step()
    use_all_blocks(source, "r", 2)
    wire.deliver_late()
    asked = source.scheduler.pd.part(Producer).server.of_running
    source.poll(lambda: not asked.empty())
    source.counts()
    use_all_blocks(source, "r")
    move.loads_end = True
    move.run()
    move.expect_one_answer(2 * NUM_OUTPUT)
    assert move.outcome == "exact"


@pytest.mark.parametrize("num_known", [3, 13, 14, 15])
def test_request_goes_on_from_the_last_boundary_where_it_is_preempted(
    engines: Engines,
    num_known: int,
) -> None:
    """Its state there comes along, and before it is stopped."""
    engines.specs = (SPEC, STATE)
    move = Move(engines, peer_timeout_s=60, max_freeze_s=60)
    move.begin(num_known=num_known)
    while not move.is_here:
        move.step()
    target = move.target
    while target.in_flight:
        target.finish_step()
    preempt(target.scheduler, target.requests["t"], time.monotonic())
    num_scheduled = target.schedule().output.num_scheduled_tokens["t"]
    assert num_scheduled <= BLOCK_SIZE
    while_it_ran = {blocks.group for load in move.loads[:-1] for blocks in load.blocks}
    assert while_it_ran == {0, 1}
    move.run()
    move.expect_one_answer()


@EACH_SHAPE
def test_request_that_computes_its_output_again_does_not_move(
    engines: Engines,
) -> None:
    """After a preemption: its windows and states are behind what is known of it."""
    move = Move(engines, scheduler_fields={"max_num_batched_tokens": BLOCK_SIZE}, **PATIENT)
    source, target = move.source, move.target
    source.add("r", PROMPT, max_tokens=NUM_OUTPUT, temperature=0)
    source.run(lambda: len(source.tokens["r"]) >= 3 * BLOCK_SIZE)
    while source.in_flight:
        source.finish_step()
    preempt(source.scheduler, source.requests["r"], time.monotonic())
    source.scheduler.reset_prefix_cache()
    source.run(lambda: source.requests["r"].num_computed_tokens > len(PROMPT) + BLOCK_SIZE)
    params = {"resume": coming("r", source)}
    target.add("t", PROMPT, params, max_tokens=NUM_OUTPUT, temperature=0)

    def is_answered() -> bool:
        source.counts()  # it answers
        return not target.scheduler.has_requests()

    target.run(is_answered)
    assert move.outcome == "move_not_running"
    source.run_to_end()
    move.expect_one_answer()


@EACH_SHAPE
@pytest.mark.parametrize("fate", ["lost", "twice", "late"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_becomes_of_a_message_one_engine_computes(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fate: str,
) -> None:
    wire = Wire(monkeypatch, kind, fate)
    move = move_that_meets(wire, engines, patiences=PATIENCE[-1:] if fate == "twice" else PATIENCE)
    wire.deliver_late()
    move.expect_one_answer()
    if fate == "twice":
        assert move.outcome == "exact"
        assert move.has_left
    else:
        assert move.outcome.startswith("move_")
        assert move.has_left is (kind == "go")
        assert move.has_left or len(move.source.tokens["r"]) == NUM_OUTPUT


def preempt_at_the_source(move: Move) -> None:
    scheduler = move.source.scheduler
    if (request := move.source.requests["r"]) in scheduler.running:
        preempt(scheduler, request, time.monotonic())


def reset_the_source(move: Move) -> None:
    while move.source.in_flight:
        move.source.finish_step()
    move.source.scheduler.reset_prefix_cache(reset_running_requests=True)


ACTS: dict[str, Callable[[Move], object]] = {
    "preempted": preempt_at_the_source,
    "all are preempted": reset_the_source,
    "reset at the target": lambda move: move.target.scheduler.reset_prefix_cache(),
    "target's client leaves": lambda move: move.target.abort("t"),
}


@EACH_SHAPE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ACTS)
def test_whatever_happens_meanwhile_one_engine_computes(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    act: str,
    kind: str,
) -> None:
    """Until the source has given its word it goes on, from then on the target."""
    wire = Wire(monkeypatch, kind, "")
    move = move_that_meets(wire, engines, ACTS[act])
    move.expect_one_answer()
    if act == "target's client leaves":
        assert not move.outcome
    else:
        assert move.has_left is (move.outcome == "exact")
    assert move.has_left or len(move.source.tokens["r"]) == NUM_OUTPUT


@pytest.mark.parametrize("kind", KINDS[1:-2])
def test_target_with_other_weights_than_it_had_refuses_what_is_not_here(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    wire = Wire(monkeypatch, kind, "")
    move = move_that_meets(
        wire, engines, lambda move: move.target.scheduler.pd.forsake(move.target.requests["t"])
    )
    move.expect_one_answer()
    assert move.outcome == "move_incompatible"
    assert len(move.source.tokens["r"]) == NUM_OUTPUT


@EACH_SHAPE
@pytest.mark.parametrize("kind", KINDS)
def test_client_of_the_source_leaves(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    wire = Wire(monkeypatch, kind, "")
    move = move_that_meets(wire, engines, lambda move: move.source.abort("r"))
    move.expect_one_answer()
    assert move.has_left <= (move.outcome == "exact")


@EACH_SHAPE
@pytest.mark.parametrize("num_output", range(4, 60, 5))
def test_request_that_ends_meanwhile_is_not_needed(
    engines: Engines,
    num_output: int,
) -> None:
    """Wherever the answer ends: it is whole at one of them."""
    move = Move(engines, **PATIENT)
    move.begin(num_output)
    move.run()
    move.expect_one_answer(num_output)
    assert move.outcome in ("exact", "not_needed")


def counts_of_moves(engine: Engine) -> dict[str, float]:
    values = engine.scheduler.pd.common.stats.values
    return {k: v for k, v in values.items() if k.startswith(("moves", "resumes"))}


def test_refusals_of_the_source_are_counted_by_both(engines: Engines) -> None:
    move = Move(engines, **PATIENT)
    for engine in move.source, move.target:
        engine.scheduler.log_stats = False  # or each step takes them
    move.source.add("r", PROMPT, max_tokens=NUM_OUTPUT, temperature=0)
    move.source.run(lambda: len(move.source.tokens["r"]) >= 3)
    other = prompt_of(len(PROMPT), start=5000)
    resume = coming("r", move.source) | {
        "prompt_digest": coming("r", move.source, other)["prompt_digest"]
    }
    move.target.add("t", other, {"resume": resume}, max_tokens=NUM_OUTPUT, temperature=0)
    move.run()
    assert counts_of_moves(move.source) == {"moves/hash_mismatch": 1}
    assert counts_of_moves(move.target) == {"resumes/move_hash_mismatch": 1}


def test_engine_of_another_version_is_refused_by_the_fingerprint(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as one that asks for another request: the same sampling parameters have other fields."""
    monkeypatch.setattr(moves_in, "params_digest", lambda params: b"of other fields")
    move = Move(engines, **PATIENT)
    for engine in move.source, move.target:
        engine.scheduler.log_stats = False
    move.target.scheduler.pd.identify("vllm=0.1.0")
    move.begin()
    move.run()
    assert counts_of_moves(move.source) == {"moves/incompatible": 1}
    assert counts_of_moves(move.target) == {"resumes/move_incompatible": 1}


def test_source_counts_what_the_target_gives_up_as_cancelled(engines: Engines) -> None:
    move = Move(engines, **PATIENT)
    move.target = engines.make("kv_both", num_blocks=5, **PATIENT)
    move.source.worker.peers[:] = [move.target.worker]
    for engine in move.source, move.target:
        engine.scheduler.log_stats = False
    move.begin()
    move.run()
    assert counts_of_moves(move.source) == {"moves/cancelled": 1}
    assert counts_of_moves(move.target) == {"resumes/move_no_memory": 1}


@EACH_SHAPE
@pytest.mark.parametrize(("max_rounds", "outcome"), [(0, "move_too_slow"), (1, "exact")])
def test_last_blocks_are_left_for_when_it_has_stopped_after_so_many_rounds(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, max_rounds: int, outcome: str
) -> None:
    monkeypatch.setattr(moves_in, "_MAX_ROUNDS", max_rounds)
    move = Move(engines, **PATIENT)
    move.begin()
    move.run()
    move.expect_one_answer()
    assert move.outcome == outcome


def test_two_engines_ask_for_one_request(engines: Engines) -> None:
    """One of them has it."""
    move = Move(engines, **PATIENT)
    third = engines.make("kv_both", **PATIENT)
    move.begin()
    params = {"resume": move.resume}
    third.add("u", PROMPT, params, max_tokens=NUM_OUTPUT, temperature=0)
    third.schedule()
    third.finish_step()
    move.run()
    while third.scheduler.has_requests():
        third.step()
        move.end_loads(third)
        move.source.counts()  # it answers
    move.expect_one_answer()
    assert third.params["u"] is not None
    outcomes = move.outcome, third.params["u"]["resume"]["refused"]
    assert outcomes in [
        ("exact", "move_busy"),
        ("exact", "not_needed"),
        ("move_busy", "not_needed"),
    ]


def test_request_that_has_moved_is_not_given_again(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine asks for it before its client has been told that it has moved."""
    wire = Wire(monkeypatch, "ready", "")
    move = Move(engines, peer_timeout_s=60, max_freeze_s=60)
    third = engines.make("kv_both", peer_timeout_s=60)
    third.warm("w", PROMPT)
    move.answers_only = lambda: wire.has_met
    move.begin()
    while not move.is_here:
        move.step()
    params = {"resume": move.resume}
    third.add("u", PROMPT, params, max_tokens=NUM_OUTPUT, temperature=0)
    while third.scheduler.has_requests():
        third.step()
        move.source.counts()  # it answers
    assert third.params["u"] == {"resume": {"refused": "not_needed"}}
    move.answers_only = lambda: False
    move.run()
    move.expect_one_answer()
    assert (move.outcome, move.has_left) == ("exact", True)


@EACH_SHAPE
def test_reset_before_the_client_of_a_moved_request_is_told(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had here is in nobody's way."""
    wire = Wire(monkeypatch, "ready", "")
    move = Move(engines, peer_timeout_s=60, max_freeze_s=60)
    move.answers_only = lambda: wire.has_met
    move.begin()
    while not move.is_here:
        move.step()
    assert move.source.scheduler.reset_prefix_cache(reset_running_requests=True)
    move.answers_only = lambda: False
    move.run()
    move.expect_one_answer()
    assert (move.outcome, move.has_left) == ("exact", True)


def test_request_that_cannot_be_described_is_not_half_begun(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What raises is a bug, and leaves nothing that waits."""

    def raise_it(*_: object) -> bytes:
        raise TypeError("a parameter that cannot be encoded")

    move = Move(engines, **QUICK)
    monkeypatch.setattr("vllm_ascend_pd.engine.scheduler.moves_in.params_digest", raise_it)
    with pytest.raises(TypeError, match="cannot be encoded"):
        move.begin()
    assert move.target.counts() == move.target.counts_at_start
    move.source.run_to_end()
    move.expect_one_answer()


def test_engine_that_others_reach_believes_no_unsigned_tokens(
    engines: Engines,
) -> None:
    """Without a secret, anybody could have said them."""
    engine = engines.make("kv_consumer", at="192.0.2.1")
    params = {"resume": ResumeKey(None).sign("r", PROMPT, [7, 8]).to_params()}
    engine.add("t", PROMPT, params, max_tokens=8, temperature=0)
    engine.run_to_end()
    assert engine.params["t"] == {"resume": {"refused": "no_secret"}}


ASYNC = pytest.mark.parametrize("engines", [AsyncScheduler], ids=["async"], indirect=True)


@EACH_SHAPE
@ASYNC
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_steps_in_flight_are_waited_for(engines: Engines, num_steps: int) -> None:
    move = Move(engines, **PATIENT)
    move.num_in_flight = num_steps
    move.begin()
    move.run()
    move.expect_one_answer()
    assert (move.outcome, move.has_left) == ("exact", True)


@EACH_SHAPE
@ASYNC
def test_request_moves_to_and_fro_hundreds_of_times_and_nothing_is_left_of_a_turn(
    engines: Engines,
) -> None:
    """After others, which make what engines keep."""
    move = Move(engines, num_blocks=NUM_BLOCKS, peer_timeout_s=60, max_freeze_s=60)
    sizes = []
    for name, num_turns in ("a", NUM_TURNS // 20), ("b", NUM_TURNS // 20), ("c", NUM_TURNS):
        move.to_and_fro(name, num_turns)
        sizes.append(num_held())
    assert sizes[-1] - sizes[1] < NUM_TURNS, sizes


def num_held() -> int:
    """Objects of ours, and what is in their containers."""
    gc.collect()
    ours = [one for one in gc.get_objects() if type(one).__module__.startswith("vllm_ascend_pd.")]
    held: dict[int, int] = {}
    fields = gc.get_referents(*ours)
    while fields:
        new = [f for f in fields if isinstance(f, dict | set | list | tuple) and id(f) not in held]
        held |= {id(one): len(one) for one in new}
        fields = gc.get_referents(*new)
    return len(ours) + sum(held.values())
