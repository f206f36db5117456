# SPDX-License-Identifier: Apache-2.0
"""Requests that another engine computes, while their clients stay: the client gets each token once,
whatever becomes of a message, of either engine, and of the client; and nothing is left.

In the real schedulers with real control threads between them; workers are simulated.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from msgspec.structs import replace
from vllm import PoolingParams, SamplingParams
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder

from tests.engine.scripted_source import ScriptedSource
from tests.schedulers.harness import (
    NUM_BLOCKS,
    POLL_LIMIT_S,
    SLOWLY,
    TURN_S,
    Engine,
    Engines,
    hasher,
    prompt_of,
    right_token,
)
from tests.schedulers.test_move_faults import (
    KINDS,
    NUM_OUTPUT,
    PATIENCE,
    PATIENT,
    PROMPT,
    QUICK,
    Wire,
)
from vllm_ascend_pd.engine.scheduler import forwards_in, forwards_out
from vllm_ascend_pd.engine.scheduler.content import Content
from vllm_ascend_pd.engine.scheduler.forwards_in import ForwardsIn
from vllm_ascend_pd.engine.scheduler.forwards_out import ForwardsOut
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.engine.scheduler.supported import check_config
from vllm_ascend_pd.engine.vllm_api.guests import encode_request, make_guest, read_request
from vllm_ascend_pd.engine.vllm_api.queues import give_row_back, take_out
from vllm_ascend_pd.engine.vllm_api.status import is_running, put_away
from vllm_ascend_pd.errors import ConfigError, TransferError
from vllm_ascend_pd.transfer.control import OpenOutcome
from vllm_ascend_pd.wire import Extend, Go, More, Opened, TokenLogprobs, Told

ALL_KINDS = [*KINDS, "take", "more", "told"]
SOON_SILENT = {**PATIENT, "lease_s": QUICK["lease_s"]}
"""A target ends soon what nobody asks for; nothing else is given up."""


class Core:
    """What of the target's engine core takes a guest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheduler = engine.scheduler

    def preprocess_add_request(self, sent: Any) -> tuple[Request, int]:
        return Request.from_engine_core_request(sent, hasher), 0

    def add_request(self, request: Request) -> None:
        self._engine.requests[request.request_id] = request
        self._engine.tokens[request.request_id] = []
        self._engine.scheduler.add_request(request)


class Pair:
    """The source is about to end and has one peer."""

    def __init__(
        self,
        engines: Engines,
        folder: Path,
        secret: bool = True,
        target: Engine | None = None,
        num_blocks: int = NUM_BLOCKS,
        times: dict[str, float] = PATIENT,
    ) -> None:
        path = folder / "secret"
        path.write_text("of both engines " * 4)
        path.chmod(0o600)
        ours = str(path)
        self.target = target or engines.make(
            "kv_both", num_blocks, secret_file=ours if secret else None, **times
        )
        port = self.target.scheduler.pd.part(Producer).endpoint.port
        peers = {"peers": [f"127.0.0.1:{port}"]}
        self.source = engines.make("kv_both", secret_file=ours, forward=peers, **times)
        self.source.scheduler.log_stats = False  # what is counted stays to be looked at
        self.target.worker.peers.append(self.source.worker)
        self.guests = self.target.scheduler.pd.part(ForwardsIn)
        self.guests.engine_core = lambda: Core(self.target)
        self.forwards = self.source.scheduler.pd.part(ForwardsOut)
        self.states: list[str] = []
        self._num_turns = 0
        self._away: set[str] = set()
        """At the start of the last step."""
        self.source.before_pass = self._note_away

    def begin(self, *names: str, num_output: int = NUM_OUTPUT, **sampling: Any) -> None:
        for name in names or ("r",):
            self.source.add(name, PROMPT, max_tokens=num_output, temperature=0.0, **sampling)
        self.source.run(lambda: all(len(tokens) >= 3 for tokens in self.source.tokens.values()))
        self.forwards.is_ending = lambda: True

    def step(self, with_target: bool = True) -> None:
        self._num_turns += 1
        has_news = self.source.scheduler.pd.has_pending_work()
        self.note()  # by the next turn it may have been refused
        is_idle = not has_news and self._num_turns % SLOWLY != 0
        if not is_idle:
            before = self._away
            step = self.source.step()
            assert self._away.isdisjoint(step.output.num_scheduled_tokens)
            # One that has just come back is in this step again, as a new one.
            still_away = self._away & before
            assert still_away.isdisjoint(self.source.worker.requests), "it has ended for the worker"
        if with_target:
            self.target.scheduler.pd.has_pending_work()
            if self.target.scheduler.has_requests() or self.target.in_flight:
                self.target.step()
                is_idle = False
            for load_id, load in list(self.target.worker.parked.items()):
                grant = self.target.worker.grant_of(load)
                if grant is None and not self.source.scheduler.requests:
                    self.target.worker.end_parked(load_id, "lease_expired")
                elif grant is not None and grant.num_ready >= (load.num_awaited or 0):
                    self.target.worker.end_parked(load_id)
        if is_idle:
            time.sleep(TURN_S)

    def _note_away(self) -> None:
        held = self.source.requests.items()
        self._away = {name for name, request in held if self.forwards.holds(request)}

    def note(self) -> None:
        for forward in self.forwards.forwards.values():
            if forward.state.name not in self.states[-1:]:
                self.states.append(forward.state.name)

    def run(
        self, wire: Wire | None = None, act: Callable[[Pair], object] | None = None
    ) -> dict[str, float]:
        """Until the source's requests have ended; how the forwards did. ``act`` once the message is
        on its way."""
        deadline = time.monotonic() + POLL_LIMIT_S
        while self.source.scheduler.requests:
            self.step()
            if wire is not None and wire.has_met and act is not None:
                act(self)
                act = None
            assert time.monotonic() < deadline, (self.source.counts(), self.target.counts())
        self.source.run_to_end()
        while self.target.scheduler.requests or self.guests.counts()["guests"]:
            self.step()
            assert time.monotonic() < deadline, (self.source.counts(), self.target.counts())
        return self.outcomes()

    def step_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + POLL_LIMIT_S
        while not is_so():
            self.step()
            assert time.monotonic() < deadline, (self.source.counts(), self.target.counts())

    def outcomes(self) -> dict[str, float]:
        """How many forwards ended how."""
        values = self.source.scheduler.pd.common.stats.values
        return {n.partition("/")[2]: v for n, v in values.items() if n.startswith("forwards/")}

    def expect_whole(self, num_output: int = NUM_OUTPUT) -> None:
        for name in self.source.requests:
            self.source.expect_tokens(name, num_output)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards_out, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(forwards_out, "_AGAIN_S", 1000.0)
    monkeypatch.setattr(forwards_in, "ANSWER_S", 0.1)


@pytest.fixture
def slow_signals() -> Iterator[None]:
    """Now and then the scheduler's thread gets one, whose handler takes its time."""
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.01))
    main, over = threading.get_ident(), threading.Event()

    def send() -> None:
        while not over.wait(0.015):
            signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    over.set()
    sender.join()
    signal.signal(signal.SIGUSR1, before)


def test_client_gets_what_another_engine_computes(engines: Engines, tmp_path: Path) -> None:
    pair = Pair(engines, tmp_path)
    pair.begin()
    assert pair.run() == {"ended": 1}
    pair.expect_whole()
    assert pair.states == ["ASKED", "AWAY"]
    (guest,) = pair.target.requests.values()
    assert guest.num_output_tokens == NUM_OUTPUT


def test_many_go_at_once(engines: Engines, tmp_path: Path) -> None:
    pair = Pair(engines, tmp_path, num_blocks=192)
    pair.begin(*"abcdef")
    outcomes = pair.run()
    pair.expect_whole()
    assert sum(outcomes.values()) == 6
    assert outcomes["ended"] >= 4, outcomes


def test_guest_goes_on_to_a_third_engine(engines: Engines, tmp_path: Path) -> None:
    """Where its target ends, too."""
    last = Pair(engines, tmp_path)
    first = Pair(engines, tmp_path, target=last.source)
    first.begin()
    deadline = time.monotonic() + POLL_LIMIT_S
    while first.source.scheduler.requests:
        assert time.monotonic() < deadline, [engine.counts() for engine in engines.made]
        first.step()
        last.step()
        if first.forwards.holds(first.source.requests["r"]):
            last.forwards.is_ending = lambda: True
    first.expect_whole()
    assert first.states == last.states == ["ASKED", "AWAY"]
    first.run()
    last.run()


def test_signals_do_not_hold_up_the_scheduler(
    engines: Engines, tmp_path: Path, slow_signals: None
) -> None:
    """Where nothing is left to compute here, it waits for answers for a moment."""
    pair = Pair(engines, tmp_path)
    pair.begin()
    assert pair.run() == {"ended": 1}
    pair.expect_whole()


@pytest.mark.parametrize("fate", ["lost", "twice", "late"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_whatever_becomes_of_a_message_each_token_comes_once(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fate: str,
) -> None:
    for patience in PATIENCE[-1:] if fate == "twice" else PATIENCE:
        with monkeypatch.context() as patched:
            wire = Wire(patched, kind, fate)
            times = {name: patience * value for name, value in QUICK.items()}
            pair = Pair(engines, tmp_path, times=times)
            pair.begin()
            (outcome,) = pair.run(wire)
            wire.deliver_late()
        pair.expect_whole()
        if wire.has_met:
            break
    assert wire.has_met
    if fate == "twice":
        assert outcome == "ended"
    elif kind == "go":
        assert outcome.startswith("back_")
    else:
        assert outcome != "ended"


ACTS: dict[str, Callable[[Pair], object]] = {
    "the target resets": lambda pair: pair.target.scheduler.reset_prefix_cache(),
    "the target aborts it": lambda pair: [pair.target.abort(name) for name in pair.target.requests],
    "the target has a full house": lambda pair: pair.target.add("other", prompt_of(400, 5000)),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("act", ACTS)
def test_whatever_happens_at_the_target_each_token_comes_once(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: str,
    kind: str,
) -> None:
    wire = Wire(monkeypatch, kind, "")
    pair = Pair(engines, tmp_path, times=QUICK)
    pair.begin()
    outcomes = pair.run(wire, ACTS[act])
    pair.expect_whole()
    assert sum(outcomes.values()) == 1, outcomes


@pytest.mark.parametrize("kind", ["extend", "freeze", "frozen", "ready"])
def test_target_that_was_given_up_does_not_get_it(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Though it has not heard of that, and asks on."""
    wire = Wire(monkeypatch, kind, "")
    pair = Pair(engines, tmp_path, times=SOON_SILENT)

    def give_up(pair: Pair) -> None:
        monkeypatch.setattr(pair.forwards._client, "release", lambda *named: None)
        (forward,) = pair.forwards.forwards.values()
        pair.forwards._fail(forward, "deadline", "it is late")

    pair.begin()
    (outcome,) = pair.run(wire, give_up)
    # It may be ready and away in one turn.
    assert outcome == "deadline" or (kind, outcome) == ("ready", "back_deadline")
    pair.expect_whole()
    assert not pair.source.params


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_client_leaves(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Nothing of it is left at the target, either."""
    wire = Wire(monkeypatch, kind, "")
    pair = Pair(engines, tmp_path, times=PATIENT)
    pair.begin()
    (outcome,) = pair.run(wire, lambda pair: pair.source.abort("r"))
    assert outcome in ("aborted", "not_needed")
    assert len(pair.source.tokens["r"]) < NUM_OUTPUT


@pytest.mark.parametrize("num_output", range(4, 60, 5))
def test_wherever_the_answer_ends_it_is_whole(
    engines: Engines,
    tmp_path: Path,
    num_output: int,
) -> None:
    pair = Pair(engines, tmp_path)
    pair.begin(num_output=num_output)
    assert pair.run().keys() <= {"ended", "not_needed"}
    pair.expect_whole(num_output)


def test_target_ends_what_nobody_asks_for(engines: Engines, tmp_path: Path) -> None:
    """The source has stopped without a word."""
    pair = Pair(engines, tmp_path, times=SOON_SILENT)
    pair.begin(num_output=NUM_OUTPUT)
    deadline = time.monotonic() + POLL_LIMIT_S
    while not pair.forwards.holds(pair.source.requests["r"]):
        pair.step()
        assert time.monotonic() < deadline
    while pair.guests.counts()["guests"]:
        pair.target.scheduler.pd.has_pending_work()
        assert time.monotonic() < deadline
    assert not pair.target.scheduler.requests
    (outcome,) = pair.run()
    assert outcome == "back_lease_expired"
    pair.expect_whole(NUM_OUTPUT)


def test_target_does_not_end_before_it_has_told_all(engines: Engines, tmp_path: Path) -> None:
    """Its source asks for the last tokens when it has come to that."""
    pair = Pair(engines, tmp_path)
    pair.begin()
    deadline = time.monotonic() + POLL_LIMIT_S
    while not pair.forwards.holds(pair.source.requests["r"]):
        pair.step()
        assert time.monotonic() < deadline
    pair.target.run(lambda: not pair.target.scheduler.requests)
    for _ in range(3):
        pair.target.step()
    assert pair.target.scheduler.has_requests()
    assert pair.run() == {"ended": 1}
    assert not pair.target.scheduler.has_requests()
    pair.expect_whole()


def say_instead(monkeypatch: pytest.MonkeyPatch, change: Callable[[Told], Any]) -> None:
    """Of what the target tells."""
    monkeypatch.setattr(forwards_in, "Told", lambda *fields: change(Told(*fields)))


@pytest.mark.parametrize(
    "said", [{"start": 10**6}, {"token_ids": (10**6,)}, {"token_ids": (-1,)}], ids=str
)
def test_what_is_no_token_is_not_delivered(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
) -> None:
    pair = Pair(engines, tmp_path)
    say_instead(monkeypatch, lambda told: replace(told, **said) if told.token_ids else told)
    pair.begin()
    assert pair.run() == {"back_incompatible": 1}
    pair.expect_whole()


def expect_few_calls(monkeypatch: pytest.MonkeyPatch, target: object, name: str, say: Any) -> None:
    """``say`` is called instead, and not in a loop."""
    num_calls = count()

    def call(*args: Any) -> None:
        assert next(num_calls) < 100
        say(*args)

    monkeypatch.setattr(target, name, call)


def test_target_that_answers_at_once_does_not_hold_up_the_source(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(engines, tmp_path)
    pair.begin()
    pair.step_until(lambda: pair.forwards.holds(pair.source.requests["r"]))
    with monkeypatch.context() as patched:
        expect_few_calls(
            patched,
            pair.forwards._client,
            "ask",
            lambda key, peer, more, outcomes, more_s: outcomes.put(
                OpenOutcome(key, Told(more.transfer_id, more.num_known, ()))
            ),
        )
        (forward,) = pair.forwards.forwards.values()
        pair.forwards._take(forward, Told(forward.name, 0, ()))
        for _ in range(3):
            pair.source.scheduler.pd.has_pending_work()
    pair.source.abort("r")
    pair.run()


@pytest.mark.parametrize(
    ("name", "message"),
    [("of_running", Extend("unknown", "e", 0)), ("of_guests", More("unknown", "e", 0))],
)
def test_peer_that_asks_again_at_once_does_not_hold_up_the_engine(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, name: str, message: Extend | More
) -> None:
    engine = engines.make("kv_both")
    server = engine.scheduler.pd.part(Producer).server
    asked = getattr(server, name)
    expect_few_calls(
        monkeypatch, server, "answer", lambda who, message, _: asked.put((who, message))
    )
    asked.put((b"peer", message))
    for _ in range(3):
        engine.scheduler.pd.has_pending_work()
    assert asked.qsize() == 1


@pytest.mark.parametrize(
    "other",
    [Go("of another"), Opened("of another", 16, (), "epoch", first_token_follows=True)],
    ids=["go", "opened"],
)
@pytest.mark.parametrize("is_away", [False, True], ids=["asked", "away"])
def test_answer_of_another_kind_gives_the_request_back(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: Go | Opened,
    is_away: bool,
) -> None:
    pair = Pair(engines, tmp_path)
    say_instead(monkeypatch, lambda told: other if bool(told.token_ids) is is_away else told)
    pair.begin()
    assert pair.run() == {"back_bad_params" if is_away else "bad_params": 1}
    pair.expect_whole()


@pytest.mark.parametrize(
    "said",
    [
        TokenLogprobs((5,), (-0.5,), 1 << 40),
        TokenLogprobs((5,), (-0.5,), -1),
        TokenLogprobs((5,), (), 1),
    ],
    ids=str,
)
def test_what_are_no_logprobs_is_not_delivered(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: TokenLogprobs
) -> None:
    pair = Pair(engines, tmp_path)
    say_instead(
        monkeypatch, lambda told: replace(told, logprobs=tuple(said for _ in told.token_ids))
    )
    pair.begin(logprobs=0)
    assert pair.run() == {"back_incompatible": 1}
    pair.expect_whole()


def test_logprobs_are_those_of_the_last_tokens_that_are_told(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has none of what the source has sampled since it asked for tokens."""
    pair = Pair(engines, tmp_path)

    def from_before(told: Told) -> Told:
        start, new = told.start, told.token_ids
        if not new:
            return told
        tokens = tuple(right_token(len(PROMPT) + i) for i in range(start - 2, start + len(new)))
        logprobs = tuple(TokenLogprobs((token,), (-0.5,), 1) for token in new)
        return replace(told, start=start - 2, token_ids=tokens, logprobs=logprobs)

    say_instead(monkeypatch, from_before)
    pair.begin(logprobs=0)
    assert pair.run() == {"ended": 1}
    pair.expect_whole()


MAX_RUNNING = (
    "max_num_running_reqs" if vllm.__version__.startswith("0.30.") else "max_num_active_reqs"
)
REFUSALS: dict[str, Callable[[Pair], object]] = {
    "busy": lambda pair: setattr(pair.guests, "is_ending", lambda: True),
    "busy ": lambda pair: setattr(pair.target.scheduler, MAX_RUNNING, 0),
    "wrong_role": lambda pair: setattr(pair.guests, "engine_core", lambda: None),
    "incompatible": lambda pair: setattr(forwards_in, "WIRE_VERSION", -1),
    "bad_params": lambda pair: setattr(pair.target.scheduler, "max_model_len", 200),
    "bad_params ": lambda pair: setattr(
        pair.guests,
        "engine_core",
        lambda: SimpleNamespace(
            preprocess_add_request=_not_a_request, scheduler=pair.target.scheduler
        ),
    ),
}


def _not_a_request(sent: object) -> None:
    raise ValueError("no such grammar")


@pytest.mark.parametrize("cause", REFUSALS)
def test_target_that_cannot_have_it_says_why(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
) -> None:
    monkeypatch.setattr(forwards_in, "WIRE_VERSION", forwards_in.WIRE_VERSION)  # undone in the end
    pair = Pair(engines, tmp_path)
    REFUSALS[cause](pair)
    pair.begin()
    assert pair.run() == {cause.strip(): 1}
    pair.expect_whole()
    assert pair.states == ["ASKED"]


def test_request_of_another_version_is_not_read(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields of vLLM's requests have no names, and another place in another version."""

    def misread(encoded: bytes) -> EngineCoreRequest:
        raise TransferError("not a request")

    monkeypatch.setattr(forwards_in, "read_request", misread)
    pair = Pair(engines, tmp_path)
    pair.target.scheduler.pd.identify("vllm=0.1.0")
    pair.begin()
    assert pair.run() == {"incompatible": 1}
    pair.expect_whole()
    assert pair.states == ["ASKED"]


def test_target_that_was_busy_is_asked_again(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards_out, "_AGAIN_S", 0.0)
    pair = Pair(engines, tmp_path)
    pair.guests.is_ending = lambda: True
    pair.begin()
    pair.step_until(lambda: "busy" in pair.outcomes())
    pair.guests.is_ending = lambda: False
    outcomes = pair.run()
    assert outcomes["ended"] == 1
    assert outcomes.keys() == {"busy", "ended"}
    pair.expect_whole()


def test_request_that_is_computed_again_goes_once_it_decodes(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was preempted a moment before its engine is to end."""
    monkeypatch.setattr(forwards_out, "_AGAIN_S", 1000.0)
    pair = Pair(engines, tmp_path)
    source = pair.source
    source.add("r", PROMPT, max_tokens=NUM_OUTPUT, temperature=0.0)
    source.run(lambda: len(source.tokens["r"]) >= 3)
    while source.in_flight:
        source.finish_step()
    source.scheduler.max_num_scheduled_tokens = 16  # its prompt takes several steps
    source.preempt(source.requests["r"])
    source.pool.reset_prefix_cache()
    source.step()
    pair.forwards.is_ending = lambda: True
    outcomes = pair.run()
    pair.expect_whole()
    assert outcomes == {"ended": 1}


def test_request_that_has_been_away_is_new_to_the_worker_though_it_was_preempted_before(
    engines: Engines,
) -> None:
    """To its workers it has ended: as one that is resumed they would not know it, and end."""
    engine = engines.make("kv_both")
    request, scheduler = engine.add("r", PROMPT, max_tokens=NUM_OUTPUT), engine.scheduler
    engine.run(lambda: len(engine.tokens["r"]) >= 3)
    engine.preempt(request)
    found = ScriptedSource(request, 0)
    engine.run(lambda: is_running(request) and len(engine.tokens["r"]) >= 8)
    while engine.in_flight:
        engine.finish_step()
    take_out(scheduler, request)
    give_row_back(scheduler)
    put_away(scheduler, request)
    assert found.queued_status is RequestStatus.WAITING
    engine.abort("r")


def test_request_whose_kv_a_consumer_is_told_of_ends_where_it_is(
    engines: Engines, tmp_path: Path
) -> None:
    """Its blocks would be given back, and its lease stay."""
    pair = Pair(engines, tmp_path)
    params = {"do_remote_decode": True}
    pair.source.add("r", PROMPT, params, max_tokens=NUM_OUTPUT, temperature=0.0)
    pair.source.run(lambda: len(pair.source.tokens["r"]) >= 3)
    pair.forwards.is_ending = lambda: True
    assert pair.run() == {"do_remote_decode": 1}
    pair.expect_whole()
    given = {**pair.source.params["r"], "do_remote_prefill": True, "do_remote_decode": False}
    consumer = engines.make("kv_consumer", secret_file=str(tmp_path / "secret"))
    consumer.worker.peers.append(pair.source.worker)
    consumer.add("d", PROMPT, given, max_tokens=4, temperature=0.0)
    deadline = time.monotonic() + POLL_LIMIT_S
    while consumer.scheduler.requests:
        consumer.step()
        pair.source.scheduler.pd.has_pending_work()
        for load_id in list(consumer.worker.parked):
            consumer.worker.end_parked(load_id)
        assert time.monotonic() < deadline
    consumer.expect_tokens("d", 4)


def test_target_without_the_secret_gets_none(engines: Engines, tmp_path: Path) -> None:
    pair = Pair(engines, tmp_path, secret=False)
    pair.begin()
    assert pair.run() == {"unauthenticated": 1}
    pair.expect_whole()


@pytest.mark.parametrize(
    ("feature", "sampling"),
    [("logprobs", {"logprobs": 21}), ("prompt_logprobs", {"prompt_logprobs": 1})],
)
def test_what_cannot_go_stays_and_says_why(
    engines: Engines,
    tmp_path: Path,
    feature: str,
    sampling: dict[str, Any],
) -> None:
    pair = Pair(engines, tmp_path)
    pair.source.add("0_abc", PROMPT, max_tokens=NUM_OUTPUT, temperature=0.0)
    pair.source.add("p", PROMPT, max_tokens=NUM_OUTPUT, temperature=0.0, **sampling)
    pair.source.run(lambda: all(len(tokens) >= 3 for tokens in pair.source.tokens.values()))
    pair.forwards.is_ending = lambda: True
    assert pair.run() == {"n": 1, feature: 1}
    pair.expect_whole()
    assert not pair.states


def test_engine_that_would_end_at_once_is_refused(engines: Engines) -> None:
    config = engines.config("kv_both", {})
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra |= {"forward": {"peers": ["127.0.0.1:7"]}, "security": {"secret_file": "secret"}}
    config.shutdown_timeout = 30
    check_config(config)
    config.shutdown_timeout = 0
    with pytest.raises(ConfigError, match=r"forward\.peers without --shutdown-timeout"):
        check_config(config)


@pytest.mark.parametrize("salt", [None, "a tenant|"])
def test_both_engines_hash_a_forwarded_request_alike_whatever_its_salt_says_of_weights(
    salt: str | None,
) -> None:
    contents = [Content(hasher, None) for _ in range(2)]
    for content in contents:
        content.generation = "files-1"
    params = SamplingParams(max_tokens=4)
    request = Request(
        "r", PROMPT, params, None, cache_salt=salt, block_hasher=contents[0].hash_blocks
    )
    sent = MsgpackDecoder(EngineCoreRequest).decode(encode_request(request, "away", {}))
    assert sent.cache_salt == salt
    guest = Request.from_engine_core_request(sent, contents[1].hash_blocks)
    assert guest.block_hashes == request.block_hashes != []


def test_guest_is_of_the_session_that_its_request_is_of() -> None:
    """KV events name it."""
    request = Request("r", PROMPT, SamplingParams(max_tokens=4), None, session_id="s")
    sent = read_request(encode_request(request, "away", {}))
    assert Request.from_engine_core_request(sent, hasher).session_id == "s"


def test_images_go_with_a_request_and_past_the_cache_of_the_targets_own(engines: Engines) -> None:
    item = MultiModalKwargsItem(
        {"pixels": MultiModalFieldElem(data=torch.arange(4000.0), field=MultiModalBatchedField())}
    )
    place = PlaceholderRange(offset=20, length=8)
    sent = EngineCoreRequest(
        request_id="theirs",
        prompt_token_ids=prompt_of(100, 0),
        mm_features=[MultiModalFeatureSpec(item, "image", "its hash", place)],
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request = Request.from_engine_core_request(sent, hasher)
    seen = []

    def preprocess(sent: EngineCoreRequest) -> tuple[Request, int]:
        seen.append(sent.mm_features)
        return Request.from_engine_core_request(sent, hasher), 0

    encoder = SimpleNamespace(cache_size=8)
    scheduler = SimpleNamespace(
        requests={},
        vllm_config=engines.config("kv_both", {}),
        max_model_len=200,
        max_num_encoder_input_tokens=8,
        encoder_cache_manager=encoder,
    )
    core = SimpleNamespace(preprocess_add_request=preprocess, scheduler=scheduler)
    encoded = encode_request(request, "r", {})
    guest = make_guest(core, "r", read_request(encoded), None)
    assert seen == [None]
    (feature,) = guest.mm_features
    assert (feature.identifier, feature.mm_position) == ("its hash", place)
    assert torch.equal(feature.data["pixels"].data, item["pixels"].data)
    assert guest.block_hashes == request.block_hashes
    encoder.cache_size = 7
    with pytest.raises(TransferError, match="an image of 8 tokens, and 7 can be encoded here"):
        make_guest(core, "r", read_request(encoded), None)
    shared = MultiModalKwargsItem({"address": item["pixels"]})
    for data in (None, shared):
        request.mm_features[0] = dataclasses.replace(feature, data=data)
        with pytest.raises(TransferError, match="images without their data"):
            make_guest(core, "r", read_request(encode_request(request, "r", {})), None)


def image_at(offset: int, length: int) -> list[MultiModalFeatureSpec]:
    item = MultiModalKwargsItem(
        {"pixels": MultiModalFieldElem(data=torch.zeros(4), field=MultiModalBatchedField())}
    )
    return [MultiModalFeatureSpec(item, "image", "hash", PlaceholderRange(offset, length))]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [*PROMPT[:-1], 1 << 63]},
        {"prompt_token_ids": [*PROMPT[:-1], 1 << 20]},
        {"prompt_token_ids": [-1, *PROMPT[1:]]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": None},
        {"pooling_params": PoolingParams(task="embed")},
        {"sampling_params": None},
        {"resumable": True},
        {"allowed_token_ids": [1 << 40]},
        {"logit_bias": {-5: 1.0}},
        {"max_tokens": None},
        {"max_tokens": 1 << 62},
        {"mm_features": image_at(1 << 40, 4)},
        {"mm_features": image_at(0, 1 << 60)},
        {"mm_features": image_at(-4, 4)},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_no_front_end_sends_is_no_guest(engines: Engines, changes: dict[str, Any]) -> None:
    core = Core(engines.make("kv_both"))
    sent = read_request(encode_request(Request("r", PROMPT, SamplingParams(), None), "r", {}))
    assert make_guest(core, "r", sent, None).num_prompt_tokens == len(PROMPT)
    for name, value in changes.items():
        setattr(sent if hasattr(sent, name) else sent.sampling_params, name, value)
    with pytest.raises(TransferError):
        make_guest(core, "r", sent, None)


def test_tokens_that_the_grammar_here_does_not_accept_end_the_request(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards_out, "accept_tokens", lambda scheduler, request, token_ids: False)
    pair = Pair(engines, tmp_path)
    pair.begin()
    pair.run()
    assert pair.source.requests["r"].status is RequestStatus.FINISHED_ERROR
    assert len(pair.source.tokens["r"]) < NUM_OUTPUT


def test_request_that_is_no_plain_data_stays(engines: Engines, tmp_path: Path) -> None:
    pair = Pair(engines, tmp_path)
    pair.begin()
    pair.source.requests["r"].sampling_params.extra_args = {"of a plugin": object()}
    assert pair.run() == {"bad_params": 1}
    pair.expect_whole()


def test_what_the_targets_row_has_no_room_for_is_no_guest(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source may have Model Runner V1; in a step it would end the target."""
    core = Core(engines.make("kv_both"))
    params = SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    encoded = encode_request(Request("r", PROMPT, params, None), "r", {})
    assert make_guest(core, "r", read_request(encoded), None).num_prompt_tokens == len(PROMPT)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    with pytest.raises(TransferError, match="has room for 1024"):
        make_guest(core, "r", read_request(encoded), None)


def test_request_of_the_targets_own_is_not_taken_for_a_guest(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(engines, tmp_path)
    num_output = 600  # of both, which have not ended when the message comes
    pair.target.add("own", prompt_of(40, 500), max_tokens=num_output, temperature=0.0)
    monkeypatch.setattr(forwards_out.secrets, "token_hex", lambda num_bytes: "own")
    pair.begin(num_output=num_output)
    assert pair.run() == {"bad_params": 1}
    pair.expect_whole(num_output)
    pair.target.run_to_end()
    pair.target.expect_tokens("own", num_output)


def test_request_that_fits_in_no_message_stays(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards_out, "_MAX_BYTES", 100)
    pair = Pair(engines, tmp_path)
    pair.begin()
    assert pair.run() == {"too_large": 1}
    pair.expect_whole()
    assert not pair.states
