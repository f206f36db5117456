# SPDX-License-Identifier: Apache-2.0
"""Twenty requests move at once, and source, target or router dies within, or stops for a while, or
nothing comes through between source and target: each answer is whole, or as long as somebody is
there to whom it is given.

In the real schedulers with real control threads between them; workers are simulated. Who has the
tokens of an answer that nobody goes on with resumes it at a third engine, as the router does.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from tests.schedulers.harness import (
    BLOCK_SIZE,
    LONG_TURN_S,
    MANY_TURNS,
    POLL_LIMIT_S,
    SLOWLY,
    TURN_S,
    Engine,
    Engines,
    prompt_of,
    right_token,
)
from tests.schedulers.test_move_faults import (  # noqa: F401
    EACH_SHAPE,
    KINDS,
    PATIENCE,
    QUICK,
    SHAPES,
    Wire,
    coming,
    shape,
)
from vllm_ascend_pd.resume import ResumeKey
from vllm_ascend_pd.types import Cause

NUM_REQUESTS = 20
QUICKER = {name: value / 4 for name, value in QUICK.items()}
NUM_OUTPUT = 120
NUM_PROMPT = 3 * BLOCK_SIZE + 5
PROMPTS = [prompt_of(NUM_PROMPT, 1000 + 100 * i) for i in range(NUM_REQUESTS)]
RIGHT = [right_token(NUM_PROMPT + i) for i in range(NUM_OUTPUT)]


class Line(Wire):
    """Between engines: a message of one kind is met, and later nothing comes through."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str) -> None:
        super().__init__(patch, kind, "")
        self._held: list[Callable[[], None]] = []
        self.is_held = self.is_cut = False

    def _meet(self, reactor: Any, deliver: Callable[[], None], frame: bytes) -> None:
        if self.is_held:
            self._held.append(partial(reactor.submit, deliver))
        elif not self.is_cut:
            super()._meet(reactor, deliver, frame)

    def let_go(self) -> None:
        """All that was held comes now."""
        self.is_held = False
        for deliver in self._held:
            deliver()
        self._held.clear()


class Crowd:
    """Requests ``r0, r1, …`` of the source become ``t0, t1, …`` of the target."""

    def __init__(self, engines: Engines, **transfer: float) -> None:
        self._engines = engines
        fields = {"max_num_seqs": NUM_REQUESTS}
        make = partial(engines.make, "kv_both", 512, fields, **transfer)
        self.source, self.target, self.third = make(), make(), make()
        self.alive = [self.source, self.target]
        self.stopped: Engine | None = None
        self._num_turns = self._num_idle_turns = 0

    def begin(self, num_moving: int) -> None:
        for i, prompt in enumerate(PROMPTS):
            self.source.add(f"r{i}", prompt, max_tokens=NUM_OUTPUT, temperature=0)
        self.source.run(lambda: all(len(given) >= 3 for given in self.source.tokens.values()))
        self.move(range(num_moving))

    def move(self, which: Iterable[int]) -> None:
        for i in which:
            self._add(self.target, f"t{i}", i, coming(f"r{i}", self.source, PROMPTS[i]))

    def _add(self, engine: Engine, name: str, i: int, resume: dict[str, Any]) -> None:
        engine.add(name, PROMPTS[i], {"resume": resume}, max_tokens=NUM_OUTPUT, temperature=0)

    def kill(self, engine: Engine) -> None:
        self.alive.remove(engine)
        self._engines.made.remove(engine)
        engine.scheduler.shutdown()
        engine.worker.grants.clear()

    def step(self) -> None:
        """One of each engine that is alive; no step of both computes a request."""
        self._num_turns += 1
        self._num_idle_turns += 1
        for engine in self.alive:
            if engine is self.stopped:
                continue
            has_news = engine.scheduler.pd.has_pending_work()
            if engine is self.source and not has_news and self._num_turns % SLOWLY:
                continue
            if engine.scheduler.has_requests() or engine.in_flight:
                computed = engine.step().output.num_scheduled_tokens
                here = {f"r{i}" for i in range(NUM_REQUESTS) if self.target.tokens.get(f"t{i}")}
                assert engine is not self.source or not here & computed.keys()
                self._num_idle_turns *= not computed
        for load_id, load in list(self.target.worker.parked.items()):
            grant = self.target.worker.grant_of(load)
            if grant is None:
                self.target.worker.end_parked(load_id, Cause.LEASE_EXPIRED.value)
            elif grant.num_ready >= (load.num_awaited or 0):
                self.target.worker.end_parked(load_id)
        if self._num_idle_turns:
            time.sleep(LONG_TURN_S if self._num_idle_turns > MANY_TURNS else TURN_S)

    def run(self, line: Line, what: str, stop_s: float) -> None:
        """Until all have ended; this happens once the message is on its way."""
        deadline = time.monotonic() + POLL_LIMIT_S
        has_happened, goes_on_at = False, math.inf
        while goes_on_at < math.inf or any(engine.scheduler.requests for engine in self.alive):
            self.step()
            if line.has_met and not has_happened:
                has_happened = True
                self._let_happen(line, what)
                goes_on_at = time.monotonic() + stop_s
            if time.monotonic() >= goes_on_at:
                self.stopped, goes_on_at = None, math.inf
                line.let_go()
                self._end_the_routers_silence(what)
            assert time.monotonic() < deadline, [engine.counts() for engine in self.alive]
        self.step()

    def _let_happen(self, line: Line, what: str) -> None:
        if what == "router dies":  # and with it the connections of both engines
            for i in range(NUM_REQUESTS):
                self.source.abort(f"r{i}")
                self.target.abort(f"t{i}")
        elif what.endswith("dies"):
            self.kill(self.source if what == "source dies" else self.target)
        elif what in ("source stops", "target stops"):  # and does not answer
            self.stopped = self.source if what == "source stops" else self.target
            line.is_held = True
        elif what == "line is cut":
            line.is_cut = True

    def _end_the_routers_silence(self, what: str) -> None:
        """It says what it had to say, or its connections end: at one engine before the other."""
        if what == "router stops":
            self.move(range(NUM_REQUESTS // 2, NUM_REQUESTS))
        elif what == "router is gone":
            for i in range(NUM_REQUESTS):
                legs = [(self.source, f"r{i}"), (self.target, f"t{i}")]
                for engine, name in legs if i % 2 else reversed(legs):
                    engine.abort(name)
                    self.step()

    def expect_right_as_far_as_they_go(self) -> None:
        """Of answers whose router is not there any more."""
        for given in *self.source.tokens.values(), *self.target.tokens.values():
            assert given == RIGHT[: len(given)]

    def answers(self) -> list[list[int]]:
        """What the client of each request gets in the end."""
        engines = [self._engine_of(i) for i in range(NUM_REQUESTS)]
        self.third.run_to_end()
        names = {self.source: "r", self.target: "t", self.third: "u"}
        return [engine.tokens[f"{names[engine]}{i}"] for i, engine in enumerate(engines)]

    def _engine_of(self, i: int) -> Engine:
        """Whose answer to a request is the client's; the third's where it is resumed now."""
        if self.target in self.alive and "outcome" in (self._told(i) or {}):
            return self.target
        known = self.source.tokens[f"r{i}"]
        assert known == RIGHT[: len(known)]
        if len(known) == NUM_OUTPUT:
            return self.source
        has_moved = self.source.params.get(f"r{i}") == {"moved": True}
        assert has_moved or self.source not in self.alive
        resume = ResumeKey(None).sign(f"r{i}", PROMPTS[i], known)
        self._add(self.third, f"u{i}", i, resume.to_params())
        return self.third

    def _told(self, i: int) -> dict[str, str] | None:
        params = self.target.params.get(f"t{i}")
        return None if params is None else params["resume"]


@EACH_SHAPE
@pytest.mark.parametrize("what", ["source dies", "target dies", "router dies"])
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_dies_each_answer_is_whole_and_nothing_is_left(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
) -> None:
    crowd = crowd_to_which_happens(what, kind, engines, monkeypatch)
    if what == "router dies":  # without it no client is left
        crowd.expect_right_as_far_as_they_go()
    else:
        assert crowd.answers() == [RIGHT] * NUM_REQUESTS


def paired(*fates: str) -> pytest.MarkDecorator:
    """Each of them at each message; the shapes take turns."""
    shapes = itertools.cycle(SHAPES)
    cases = [(what, kind, next(shapes)) for what in fates for kind in KINDS]
    return pytest.mark.parametrize(("what", "kind", "shape"), cases, indirect=["shape"])


@paired("source stops", "target stops", "line is cut", "router stops")
@pytest.mark.usefixtures("shape")
def test_whoever_stops_for_longer_than_is_waited_each_answer_is_whole(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
) -> None:
    """What it finds when it goes on is another's, or its own still. The router has half of them
    moved then only.
    """
    crowd = crowd_to_which_happens(what, kind, engines, monkeypatch)
    assert crowd.answers() == [RIGHT] * NUM_REQUESTS


@paired("router is gone")
@pytest.mark.usefixtures("shape")
def test_router_that_never_comes_back_leaves_nothing(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
) -> None:
    """Its connections end a while later, at one engine first."""
    crowd = crowd_to_which_happens(what, kind, engines, monkeypatch)
    crowd.expect_right_as_far_as_they_go()


def crowd_to_which_happens(
    what: str,
    kind: str,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> Crowd:
    for patience in PATIENCE:
        line = Line(monkeypatch, kind)
        waits = {name: patience * value for name, value in QUICKER.items()}
        crowd = Crowd(engines, **waits)
        crowd.begin(NUM_REQUESTS // 2 if what == "router stops" else NUM_REQUESTS)
        crowd.run(line, what, 1.2 * max(waits.values()))
        if line.has_met:
            return crowd
    raise AssertionError("the message was never sent")
