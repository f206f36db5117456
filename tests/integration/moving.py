# SPDX-License-Identifier: Apache-2.0
"""A running request that moves to another engine at a token that a test has chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.integration.engines import BLOCK_SIZE, Answer, Engine
from vllm_ascend_pd.resume import ResumeKey, RunningAt

_numbers = count()


def coming(
    prompt: list[int] | None, source: Engine, name: str = "r", only_exact: bool = True
) -> dict[str, Any]:
    """The ``kv_transfer_params`` of a request that runs at ``source`` under this name; only that
    knows its prompt if none is told."""
    at = RunningAt(**source.source())
    resume = ResumeKey(None).sign(name, prompt, [], only_exact, at)
    return {"resume": resume.to_params(), "return_provenance": True}


@dataclass
class Moving:
    """A request, from engine to engine, with the same options at each."""

    engine: Engine
    """That computes it."""
    prompt: list[int]
    max_tokens: int
    options: dict[str, Any]
    others: dict[str, Answer] = field(default_factory=dict)
    """What has ended at its engines meanwhile, by name."""

    def __post_init__(self) -> None:
        self.name = f"moving-{next(_numbers)}"
        self.engine.add(self.name, self.prompt, self.max_tokens, **self.options)

    def decode(self, num_tokens: int) -> None:
        """Until so many are known, or a few more where a step may give several."""
        enough = range(num_tokens, self.max_tokens + 1)
        self.engine.step_until(self.name, "num_output_tokens", *enough)

    def state(self) -> dict[str, Any]:
        """Empty when it has ended."""
        return self.engine.requests().get(self.name, {})

    def move(self, target: Engine) -> int:
        """How many of its tokens are known where it goes on. What is in flight is delivered before
        it stops, and may end it, so that it stays."""
        source, name, there = self.engine, self.name, self._ask(target)
        while target.requests().get(there, {}).get("status") == "WAITING_FOR_KV":
            self._go_on_with(target)
        while name not in self.others:
            self.others |= source.drive(1)
        self._follow(target, there)
        return len(self.others[name].token_ids)

    def refusal_of(self, target: Engine) -> str:
        """Why it does not move there."""
        there = self._ask(target)
        while there not in self.others:
            self._go_on_with(target)
        self._wait_until_scheduled()
        return str(self.others[there].kv_transfer_params["resume"]["refused"])

    def stop_for(self, target: Engine, num_steps: int) -> bool:
        """It stops for a move, which ends before it has moved. Its engine takes these steps while
        it stands. Whether that was so: what is in flight may end it, and the target be sooner."""
        there = self._ask(target)
        while self.state().get("is_scheduled"):
            self._go_on_with(target)
        for _ in range(num_steps):
            self.others |= self.engine.drive(1)
        if not self.state():
            self._follow(target, there)
            return False
        target.abort(there)
        target.drive(1)
        self._wait_until_scheduled()
        return True

    def _follow(self, target: Engine, there: str) -> None:
        """It has ended where it was."""
        if self.others[self.name].finish_reason == "abort":
            self.engine, self.name = target, there

    def _ask(self, target: Engine) -> str:
        """Its name there."""
        num_tokens = len(self.prompt) + self.state()["num_output_tokens"]
        assert num_tokens < 3 * BLOCK_SIZE, "two full blocks at most, so it stops at once"
        kv, there = coming(self.prompt, self.engine, self.name), f"moving-{next(_numbers)}"
        target.add(there, self.prompt, self.max_tokens, kv, **self.options)
        return there

    def _go_on_with(self, target: Engine) -> None:
        """Its engine only answers until it has stopped."""
        if self.state().get("is_scheduled"):
            self.engine.counts()
        else:
            self.others |= self.engine.drive(1)
        self.others |= target.drive(1)

    def _wait_until_scheduled(self) -> None:
        while not self.state()["is_scheduled"]:
            self.engine.counts()  # it hears that nobody wants it

    def answer(self) -> Answer:
        self.others |= self.engine.run()
        return self.others[self.name]
