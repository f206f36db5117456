# SPDX-License-Identifier: Apache-2.0
"""Twenty requests move at once, and source, target or router dies within: each answer is whole.

In the real schedulers with real control threads between them; workers are simulated. Who has the
tokens of an answer that nobody goes on with resumes it at a third engine, as the router does.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from tests.integration.test_move_faults import (  # noqa: F401
    KINDS,
    PATIENCE,
    QUICK,
    Wire,
    coming,
    shape,
)
from tests.integration.test_scheduler_hooks import (  # noqa: F401
    BLOCK_SIZE,
    POLL_LIMIT_S,
    Engine,
    Engines,
    base_config,
    engines,
    prompt_of,
    right_token,
)
from vllm_ascend_pd.resume import ResumeKey
from vllm_ascend_pd.types import Cause

NUM_REQUESTS = 20
NUM_OUTPUT = 120
NUM_PROMPT = 3 * BLOCK_SIZE + 5
PROMPTS = [prompt_of(NUM_PROMPT, 1000 + 100 * i) for i in range(NUM_REQUESTS)]
RIGHT = [right_token(NUM_PROMPT + i) for i in range(NUM_OUTPUT)]


class Crowd:
    """Requests ``r0, r1, …`` of the source become ``t0, t1, …`` of the target."""

    def __init__(self, engines: Engines, **transfer: float) -> None:  # noqa: F811
        self._engines = engines
        fields = {"max_num_seqs": NUM_REQUESTS}
        make = partial(engines.make, "kv_both", 512, fields, **transfer)
        self.source, self.target, self.third = make(), make(), make()
        self.alive = [self.source, self.target]
        self._num_turns = 0

    def begin(self) -> None:
        for i, prompt in enumerate(PROMPTS):
            self.source.add(f"r{i}", prompt, max_tokens=NUM_OUTPUT, temperature=0)
        self.source.run(lambda: all(len(given) >= 3 for given in self.source.tokens.values()))
        for i, prompt in enumerate(PROMPTS):
            self._add(self.target, f"t{i}", i, coming(f"r{i}", self.source, prompt))

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
        for engine in self.alive:
            has_news = engine.scheduler.pd.has_pending_work()
            if engine is self.source and not has_news and self._num_turns % 30:
                continue
            if engine.scheduler.has_requests() or engine.in_flight:
                computed = engine.step().output.num_scheduled_tokens
                here = {f"r{i}" for i in range(NUM_REQUESTS) if self.target.tokens.get(f"t{i}")}
                assert engine is not self.source or not here & computed.keys()
        for load_id, load in list(self.target.worker.parked.items()):
            grant = self.target.worker.grant_of(load)
            if grant is None:
                self.target.worker.end_parked(load_id, Cause.LEASE_EXPIRED.value)
            elif grant.num_ready >= (load.num_awaited or 0):
                self.target.worker.end_parked(load_id)

    def run(self, wire: Wire, who: str) -> None:
        """Until all have ended; ``who`` dies once the message is on its way."""
        deadline = time.monotonic() + POLL_LIMIT_S
        has_died = False
        while any(engine.scheduler.requests for engine in self.alive):
            self.step()
            if wire.has_met and not has_died:
                has_died = True
                self._die(who)
            assert time.monotonic() < deadline, [engine.counts() for engine in self.alive]
        self.step()

    def _die(self, who: str) -> None:
        if who == "router":  # and with it the connections of both engines
            for i in range(NUM_REQUESTS):
                self.source.abort(f"r{i}")
                self.target.abort(f"t{i}")
        else:
            self.kill(self.source if who == "source" else self.target)

    def answer(self, i: int) -> list[int]:
        """What the client of one request gets in the end."""
        if self.target in self.alive and "outcome" in (self._told(i) or {}):
            return self.target.tokens[f"t{i}"]
        known = self.source.tokens[f"r{i}"]
        assert known == RIGHT[: len(known)]
        if len(known) == NUM_OUTPUT:
            return known
        has_moved = self.source.params.get(f"r{i}") == {"moved": True}
        assert has_moved or self.source not in self.alive
        resume = ResumeKey(None).sign(f"r{i}", PROMPTS[i], known)
        self._add(self.third, f"u{i}", i, resume.to_params())
        self.third.run_to_end()
        return self.third.tokens[f"u{i}"]

    def _told(self, i: int) -> dict[str, str] | None:
        params = self.target.params.get(f"t{i}")
        return None if params is None else params["resume"]


@pytest.mark.parametrize("shape", ["full", "states"], indirect=True)
@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("who", ["source", "target", "router"])
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_dies_each_answer_is_whole_and_nothing_is_left(
    engines: Engines,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    who: str,
) -> None:
    for patience in PATIENCE:
        wire = Wire(monkeypatch, kind, "")
        crowd = Crowd(engines, **{name: patience * value for name, value in QUICK.items()})
        crowd.begin()
        crowd.run(wire, who)
        if wire.has_met:
            break
    assert wire.has_met
    if who != "router":  # without it no client is left
        assert [crowd.answer(i) for i in range(NUM_REQUESTS)] == [RIGHT] * NUM_REQUESTS
