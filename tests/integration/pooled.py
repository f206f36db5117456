# SPDX-License-Identifier: Apache-2.0
"""An engine with a pool beside one without, and what is tried with models of several KV groups."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.integration.engines import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineConfig,
    Fleet,
    PromptOf,
    assert_no_leak,
)
from tests.integration.pool_steps import POOL, delta, provenance, settle, store

if TYPE_CHECKING:
    from typing_extensions import Self

ASK = {"return_provenance": True}


@dataclass
class Pooled:
    """``engine`` has a pool, ``single`` is an ordinary one."""

    fleet: Fleet
    config: EngineConfig
    single: Engine
    engine: Engine

    @classmethod
    def of(cls, fleet: Fleet, config: EngineConfig) -> Self:
        pooled = cls(fleet, config, fleet.engine(config), None)  # type: ignore[arg-type]
        pooled.engine = pooled.other()
        pooled.engine.set_pool_faults("")
        return pooled

    @classmethod
    def for_fixture(cls, fleet: Fleet, config: EngineConfig) -> Iterator[Self]:
        """Nothing is left in the engine in the end."""
        pooled = cls.of(fleet, config)
        before = pooled.engine.counts()
        yield pooled
        settle(pooled.engine)
        assert_no_leak(pooled.engine, before)

    def other(self, pool: dict[str, Any] | None = None, **options: Any) -> Engine:
        options = {"role": "kv_both", "pool_faults": "get:ok*", **options}
        transfer = options.pop("transfer", {})
        pool_options = json.dumps({**POOL, **(pool or {})}, sort_keys=True)
        config = replace(self.config, pool=pool_options, **options)
        return self.fleet.engine(config.with_transfer(**transfer))

    def assert_right(self, answer: Answer, prompt: list[int]) -> None:
        self.single.assert_says(answer.token_ids, prompt)

    # Scenarios; every answer of theirs is right.

    def ask(
        self, engine: Engine, prompt: list[int], max_tokens: int = 24, kv: dict[str, Any] = ASK
    ) -> Answer:
        answer = engine.ask(prompt, max_tokens, kv)
        self.assert_right(answer, prompt)
        return answer

    def add(self, engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Under their numbers."""
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, max_tokens, ASK)

    def run(self, engine: Engine, prompts: Sequence[list[int]]) -> list[dict[str, int]]:
        """What has been added; where these prompts came from."""
        answers = engine.run()
        origins = []
        for number, prompt in enumerate(prompts):
            answer = answers[str(number)]
            self.assert_right(answer, prompt)
            origins.append(provenance(answer))
            assert sum(origins[-1].values()) == len(prompt)
        settle(engine)
        return origins

    def run_ahead(self, prompts: Sequence[list[int]]) -> list[dict[str, int]]:
        """Stored, and then loaded, by an engine that does."""
        engine = self.other(runs_ahead=True)
        for prompt in prompts:
            store(engine, prompt, 40)
        self.add(engine, prompts, 40)
        return self.run(engine, prompts)

    def fail_loads(
        self, engine: Engine, prompt: list[int], num_local: int, script: str, other: list[int]
    ) -> dict[str, int]:
        """Of two requests at a time, beside one that loads nothing: where the first one's prompt
        came from. So many tokens are in the prefix cache.
        """
        store(engine, prompt)
        engine.ask(prompt[: num_local + 1])
        engine.set_pool_faults(f"get:{script}")
        self.add(engine, [prompt] * 2, 24)
        engine.add("other", other, 24)
        answers = engine.run()
        engine.set_pool_faults("")
        for number in range(2):
            answer = answers[str(number)]
            self.assert_right(answer, prompt)
            assert sum(provenance(answer).values()) == len(prompt)
        self.assert_right(answers["other"], other)
        settle(engine)
        return provenance(answers["0"])

    def preempt(self, engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Some of them, whose blocks have to come from the pool then: how many loads there were."""
        before = engine.metrics()
        self.add(engine, prompts, max_tokens)
        while all(request["status"] != "PREEMPTED" for request in engine.requests().values()):
            engine.step()
        engine.evict_blocks(list(range(1, engine.config.num_blocks)))
        self.run(engine, prompts)
        after = engine.metrics()
        assert delta(before, after, "preemptions") > 0
        return delta(before, after, "pool_loads/ok")

    def go_on(self, prompt: list[int], first: Answer, ends: Sequence[int], said: PromptOf) -> None:
        """With so many tokens of the answer; the pool has every full block of them."""
        for end in ends:
            turn = prompt + first.token_ids[:end] + said(5, f"turn {end}")
            answer = self.ask(self.engine, turn)
            num_hit = (len(prompt) + end) // BLOCK_SIZE * BLOCK_SIZE
            assert provenance(answer) == {"dram": num_hit, "computed": len(turn) - num_hit}
            settle(self.engine)
            assert self.engine.reset_prefix_cache()

    def fill(
        self, engine: Engine, prompts: Sequence[list[int]], max_tokens: int
    ) -> list[dict[str, int]]:
        """With more than it has memory for: where the first three came from when they are asked
        again.
        """
        for prompt in prompts:
            engine.ask(prompt, max_tokens)
        settle(engine)
        origins = []
        for prompt in prompts[:3]:
            origins.append(provenance(self.ask(engine, prompt)))
            settle(engine)
        return origins

    def take_turn(
        self, producer: Engine, consumer: Engine, prompt: list[int], num_stored: int
    ) -> Answer:
        """Whose leading tokens are stored: the producer takes those from the pool, the consumer
        what it lacks from the producer, and then from the pool, when nobody has it.
        """
        for engine in (producer, consumer):
            settle(engine)
        assert producer.reset_prefix_cache()
        before = producer.metrics()
        params = producer.prefill(prompt)
        after = producer.metrics()
        loaded = [delta(before, after, f"prompt_tokens/{tier}") for tier in ("dram", "remote")]
        assert sum(loaded) == num_stored
        answer = self.ask(consumer, prompt, 24, params)
        for engine in (producer, consumer):
            settle(engine)
        assert consumer.reset_prefix_cache()
        alone = self.ask(consumer, prompt, 24, {**params, "transfer_id": "nobody's"})
        assert provenance(alone)["computed"] == len(prompt) % BLOCK_SIZE
        settle(consumer)
        return answer
