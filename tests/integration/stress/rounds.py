# SPDX-License-Identifier: Apache-2.0
"""Rounds of random operations on two engines that hand prompts to each other.

    operations ──► drain: every request ends ──► answers equal one engine's ──► counts as before

What is drawn depends on the seed alone, so a seed repeats the operations. What the processes do
with them also depends on when they do it, so a failure may need some rounds to come again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from tests.integration.engines import Answer, Engine, EngineError, assert_no_leak
from tests.integration.moving import coming
from tests.integration.stress.workload import Spec, difference
from tests.integration.test_resume import begun

PATIENCE_S = 120.0
"""As long as any request ends within it, nothing hangs. Slow hosts are busy with others."""
_ADDRESS = ("remote_engine_id", "remote_host", "remote_port", "remote_key")
"""Of an engine, in what its client hands on; our router has it from the engine's registration."""
_NEVER = ("made_otherwise", "malformed", "move_hash_mismatch")
"""Equal engines refuse no move of one prompt so."""
_NUM_LAST = 40
"""Operations that a failure tells of."""


@dataclass(frozen=True)
class Pending:
    """A request that has not ended."""

    engine: Engine
    spec: Spec
    leg: str
    num_copies: int = 0
    """Of a prompt that is computed first: how often it is decoded."""
    source: str = ""
    """The request that is to move and to go on as this one."""


class Rounds:
    """``prefiller`` and ``decoder`` are two engines with both roles, and spare no memory."""

    def __init__(
        self,
        prefiller: Engine,
        decoder: Engine,
        specs: Sequence[Spec],
        single: Callable[[Spec], Answer],
        draw: Random,
    ) -> None:
        self._prefiller = prefiller
        self._decoder = decoder
        self._engines = (prefiller, decoder)
        self._specs = specs
        self._single = single
        self._draw = draw
        self._pending: dict[str, Pending] = {}
        self._last: deque[str] = deque(maxlen=_NUM_LAST)
        self._wrong: list[str] = []
        self._num_requests = 0
        self._moved: set[str] = set()
        """Requests of this round that have ended because they have moved."""
        self._went_on: Counter[str] = Counter()
        """How often each of them did so."""
        self._aborted: set[str] = set()
        """And those that were to go on as one that was aborted."""
        known = prefiller.prefill([7, 7])
        decoder.ask([7, 7], 1, known)
        self._where = {name: known[name] for name in _ADDRESS}
        prefiller.reset_prefix_cache()
        prefiller.ask([7, 7], 1)
        self._before = {engine: engine.counts() for engine in self._engines}
        self.seen: Counter[str] = Counter()
        """What has happened, and how often."""

    def run(self) -> None:
        """One round."""
        operations = OPERATIONS | MOVES
        num_drawn = self._draw.randrange(10, 60)
        for name in self._draw.choices(list(operations), operations.values(), k=num_drawn):
            # A source of its own: what an operation draws may depend on what has ended by now.
            getattr(self, f"_{name}")(Random(self._draw.getrandbits(64)))
        self._drain()
        self._check_moves()
        if self._wrong:
            self._fail("\n".join(self._wrong))
        self._check_counts()

    # Operations.

    def _prefill_first(self, draw: Random) -> None:
        self._prefill(draw, draw.choice(self._specs))

    def _burst_of_prefills(self, draw: Random) -> None:
        """Of one prompt, as when many clients ask the same."""
        spec = draw.choice(self._specs)
        for _ in range(draw.randrange(2, 12)):
            self._prefill(draw, spec)

    def _prefill(self, draw: Random, spec: Spec) -> None:
        num_copies = draw.choice([1, 1, 1, 1, 2, 4])
        self._ask_prefiller(draw, spec, {"do_remote_decode": True}, "prefill", num_copies)

    def _decode_first(self, draw: Random) -> None:
        """The two requests in any order; sometimes the prefiller never hears of it."""
        spec = draw.choice(self._specs)
        transfer_id = f"random-{draw.getrandbits(64):x}"
        asked = ["prefiller", "decoder"][:: draw.choice([1, -1])]
        if draw.random() < 0.05:
            asked.remove("prefiller")
        for name in asked:
            if name == "prefiller":
                kv = {"do_remote_decode": True, "transfer_id": transfer_id}
                self._ask_prefiller(draw, spec, kv, "announced")
            else:
                kv = {"do_remote_prefill": True, "transfer_id": transfer_id, **self._where}
                self._ask(self._decoder, spec, kv, "decode first")
            if draw.random() < 0.4:
                self._drive(draw.choice(self._engines), draw.choice([1, 2, 3]))

    def _move(self, draw: Random) -> None:
        """Mostly one that runs. It may end first, or be moved twice at once, or be on its way."""
        able = [
            name
            for name, pending in self._pending.items()
            if pending.leg not in ("prefill", "announced") and pending.spec.can_move
        ]
        if not able:
            return
        name = draw.choice([name for name in able if self._runs(name)] or able)
        pending = self._pending[name]
        source = pending.engine
        target = self._engines[source is self._prefiller]
        kv = coming(list(pending.spec.prompt), source, name)
        self._note(f"{name} is to move")
        self._ask(target, pending.spec, kv, "move", source=name)
        for _ in range(draw.choice([0, 1, 3, 6])):
            self._drive(target, draw.choice([1, 2, 8]))
            source.counts()  # it answers, and computes nothing
            if draw.random() < 0.5:
                self._drive(source, 1)

    def _runs(self, name: str) -> bool:
        return bool(self._pending[name].engine.requests().get(name, {}).get("is_scheduled"))

    def _resume(self, draw: Random) -> None:
        """An answer that has broken off elsewhere behind any of its tokens."""
        spec = draw.choice([spec for spec in self._specs if spec.can_move])
        known = self._single(spec).token_ids
        kv = begun(list(spec.prompt), known[: draw.randrange(1, len(known) + 1)])
        self._ask(draw.choice(self._engines), spec, kv, "resume")

    def _alone(self, draw: Random) -> None:
        self._ask(draw.choice(self._engines), draw.choice(self._specs), {}, "alone")

    def _reset(self, draw: Random) -> None:
        engine = draw.choice(self._engines)
        connector, running = draw.random() < 0.3, draw.random() < 0.3
        if engine.config.runs_ahead and any(
            pending.engine is engine and "seed" in pending.spec.sampling
            for pending in self._pending.values()
        ):
            running = False  # vLLM would drop what is in flight, which has drawn from the seed
        self._note(f"reset {engine.name}, {connector=}, {running=}")
        try:
            engine.reset_prefix_cache(connector, running)
        except EngineError as e:
            # So does vLLM where it cannot: requests in a step under way, or whose KV is loaded.
            if not running or "Failed to reset KV cache" not in str(e):
                raise

    def _abort(self, draw: Random) -> None:
        if not self._pending:
            return
        request_id = draw.choice(list(self._pending))
        pending = self._pending.pop(request_id)
        self._note(f"abort {request_id}")
        self.seen["aborted"] += 1
        self._aborted |= {request_id, pending.source}
        if draw.random() < 0.3:
            pending.engine.abort_in_step(request_id)
        else:
            pending.engine.abort(request_id)

    def _step_prefiller(self, draw: Random) -> None:
        self._drive(self._prefiller, draw.choice([1, 1, 2, 5, 20]))

    def _step_decoder(self, draw: Random) -> None:
        self._drive(self._decoder, draw.choice([1, 1, 2, 5, 20]))

    # Requests.

    def _ask_prefiller(
        self, draw: Random, spec: Spec, kv: dict[str, Any], leg: str, num_copies: int = 0
    ) -> None:
        """As our router asks, or as one that sends what the client sent, and cuts it short."""
        sampling = spec.for_prefill
        if draw.random() < 0.2 and "n" in spec.sampling:
            sampling = {**sampling, "n": spec.sampling["n"]}
        self._ask(self._prefiller, spec, kv, leg, num_copies, max_tokens=1, sampling=sampling)

    def _ask(
        self,
        engine: Engine,
        spec: Spec,
        kv: dict[str, Any],
        leg: str,
        num_copies: int = 0,
        source: str = "",
        **instead: Any,
    ) -> None:
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        self._note(
            f"{request_id} to {engine.name}: {leg}, {spec.kind}, {spec.lora or 'no adapter'},"
            f" {len(spec.prompt)} tokens,"
            f" {kv.get('transfer_id', '')}"
        )
        engine.add(
            request_id,
            list(spec.prompt),
            instead.get("max_tokens", spec.max_tokens),
            {**kv, "return_provenance": True},
            cache_salt=spec.salt,
            priority=spec.priority,
            lora=spec.lora,
            **instead.get("sampling", spec.sampling),
        )
        self._pending[request_id] = Pending(engine, spec, leg, num_copies, source)

    def _drive(self, engine: Engine, num_steps: int) -> int:
        """How many requests have ended."""
        self._note(f"drive {engine.name} {num_steps}")
        answers = engine.drive(num_steps)
        for request_id, answer in answers.items():
            # One that has ended in the step before it was aborted is not asked for any more.
            if pending := self._pending.pop(request_id, None):
                self._settle(request_id, pending, answer)
        return len(answers)

    def _settle(self, request_id: str, pending: Pending, answer: Answer) -> None:
        self._note(f"{request_id} has ended")
        kv = dict(answer.kv_transfer_params)
        outcome = kv.pop("provenance", {}).get("outcome", "none")
        if pending.leg == "move":
            outcome = kv.get("resume", {}).get("refused", "exact")
            if answer.finish_reason == "error":
                self.seen[f"move: {outcome}"] += 1
                if outcome in _NEVER:
                    self._wrong.append(f"{request_id} does not move: {outcome}")
                return
            self._went_on[pending.source] += 1
        if answer.finish_reason == "abort" and kv.get("moved"):
            self.seen[f"{pending.leg}: moved"] += 1
            self._moved.add(request_id)
            return
        self.seen[f"{pending.leg}: {outcome}"] += 1
        if pending.leg == "announced":
            return
        if pending.leg == "prefill":
            for _ in range(pending.num_copies):
                self._ask(self._decoder, pending.spec, kv, "prefill first")
            return
        if wrong := difference(answer, self._single(pending.spec)):
            self._wrong.append(
                f"{request_id} on {pending.engine.name}, {pending.leg}: {wrong}\n"
                f"  {pending.spec}\n  {answer.kv_transfer_params}"
            )

    # The end of a round.

    def _drain(self) -> None:
        last_end = time.monotonic()
        while self._pending:
            if sum([self._drive(engine, 30) for engine in self._engines]):
                last_end = time.monotonic()
            elif time.monotonic() - last_end > PATIENCE_S:
                requests = {engine.name: engine.requests() for engine in self._engines}
                self._fail(f"nothing ends any more: {self._pending}\n{requests}")

    def _check_moves(self) -> None:
        """What has moved went on, once; what has not moved did not."""
        for name in (self._moved | set(self._went_on)) - self._aborted:
            if (times := self._went_on[name]) != (name in self._moved):
                self._wrong.append(f"{name}: moved {name in self._moved}, went on {times} times")
        for known in (self._moved, self._went_on, self._aborted):
            known.clear()

    def _check_counts(self) -> None:
        for engine in self._engines:
            engine.run(PATIENCE_S)
            engine.reset_prefix_cache()  # leases that nobody came for are given up
        for engine in self._engines:
            engine.ask([7, 7], 1)  # a step tells the worker
            try:
                assert_no_leak(engine, self._before[engine], PATIENCE_S)
            except pytest.fail.Exception as e:
                self._fail(str(e))

    def _note(self, operation: str) -> None:
        self._last.append(operation)

    def _fail(self, what: str) -> None:
        pytest.fail("\n".join([what, "the last operations:", *self._last]), pytrace=False)


OPERATIONS = {
    "prefill_first": 18,
    "decode_first": 16,
    "alone": 6,
    "reset": 2,
    "abort": 6,
    "burst_of_prefills": 2,
    "step_prefiller": 22,
    "step_decoder": 28,
}
"""The names of operations, and how often each is drawn."""

MOVES = {"move": 12, "resume": 4}
"""And of these, beside them."""
