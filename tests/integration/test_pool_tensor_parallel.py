# SPDX-License-Identifier: Apache-2.0
"""The pool of engines with two workers, each of which stores and loads its share of every block.

Two engines on one master: one loads in its steps, and can be scripted; the other beside them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.disk import wait_on_disk
from tests.integration.engines import BLOCK_SIZE, Answer, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.pool_steps import POOL, delta, provenance, settle, store
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

TWO = json.dumps({"tensor_parallel_size": 2})
FULL = 6 * BLOCK_SIZE
NUM_TOKENS = FULL + 9
ASK = {"return_provenance": True}
MAX_TRIES = 5
"""More busy workers than cores: one or another load or lookup comes late. Tokens are right always;
hits come in one of so many tries."""


@pytest.fixture(scope="module")
def master() -> Iterator[EmbeddedMaster]:
    master = EmbeddedMaster()
    yield master
    master.stop()


@pytest.fixture
def engine(engines: Engines, master: EmbeddedMaster) -> Engine:
    engine = engines.shared(
        "kv_both",
        llm=TWO,
        pool={**POOL, "master": master.address, "probe_interval_s": 0.2},
        transfer={"load_mode": "step"},
        pool_faults="get:ok*",
        num_blocks=56,
        max_model_len=512,
    )
    engine.set_pool_faults("")
    return engine


@pytest.fixture
def other(engines: Engines, master: EmbeddedMaster) -> Engine:
    """With memory of its own, too."""
    return engines.shared(
        "kv_both",
        llm=TWO,
        pool={**POOL, "master": master.address, "probe_interval_s": 0.2},
        transfer={"load_mode": "park"},
    )


def until_hit(attempt: Callable[[str], dict[str, int]], expected: dict[str, int]) -> None:
    """``attempt(part)`` checks its tokens and says where its prompt came from."""
    origins = []
    while expected not in origins:
        assert len(origins) < MAX_TRIES, origins
        origins.append(attempt(str(len(origins))))


@pytest.mark.parametrize("name", ["engine", "other"])
def test_what_an_engine_has_stored_comes_from_its_workers_memory(
    name: str, request: pytest.FixtureRequest, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine: Engine = request.getfixturevalue(name)

    def attempt(part: str) -> dict[str, int]:
        prompt = prompt_of(NUM_TOKENS, part)
        cold = engine.ask(prompt, 8, ASK)
        assert (cold.token_ids, provenance(cold)) == (
            single(prompt).token_ids,
            {"computed": NUM_TOKENS},
        )
        settle(engine)
        assert engine.reset_prefix_cache()
        warm = engine.ask(prompt, 8, ASK)
        assert warm.token_ids == single(prompt).token_ids
        settle(engine)
        return provenance(warm)

    until_hit(attempt, {"dram": FULL, "computed": 9})


def test_every_worker_counts(engine: Engine, single: SingleEngine, prompt_of: PromptOf) -> None:
    """Blocks once, bytes of both workers."""

    def attempt(part: str) -> dict[str, int]:
        prompt = prompt_of(NUM_TOKENS, part)
        before = engine.metrics()
        store(engine, prompt)
        answer = engine.ask(prompt, 8, ASK)
        after = engine.metrics()
        assert answer.token_ids == single(prompt).token_ids
        settle(engine)
        written = delta(before, after, "pool_put_bytes")
        if delta(before, after, "pool_put_blocks/ok") == 6 and answer.outcome == "loaded":
            # Each worker's value has a header.
            assert written == delta(before, after, "pool_load_bytes/dram") > 0
            assert written % 12 == 0
            assert answer.provenance["num_pool_bytes"] == written
        return provenance(answer)

    until_hit(attempt, {"dram": FULL, "computed": 9})


def test_a_prompt_of_full_blocks_computes_its_last_token_only(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    def attempt(part: str) -> dict[str, int]:
        prompt = prompt_of(FULL, part)
        store(engine, prompt)
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        settle(engine)
        return provenance(answer)

    until_hit(attempt, {"dram": FULL - 1, "computed": 1})


def test_a_partial_hit_is_computed_from_where_it_ends(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    def attempt(part: str) -> dict[str, int]:
        first = prompt_of(NUM_TOKENS, f"first {part}")
        store(engine, first)
        prompt = first[: 3 * BLOCK_SIZE] + prompt_of(50, f"second {part}")
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        settle(engine)
        return provenance(answer)

    until_hit(attempt, {"dram": 3 * BLOCK_SIZE, "computed": 50})


def test_the_next_turn_hits_what_was_decoded(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    stored = (NUM_TOKENS + 2 * BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE

    def attempt(part: str) -> dict[str, int]:
        prompt = prompt_of(NUM_TOKENS, part)
        first = store(engine, prompt, 2 * BLOCK_SIZE)
        turn = prompt + first.token_ids + prompt_of(5, "turn")
        answer = engine.ask(turn, 8, ASK)
        assert answer.token_ids == single(turn).token_ids
        settle(engine)
        return provenance(answer)

    num_computed = NUM_TOKENS + 2 * BLOCK_SIZE + 5 - stored
    until_hit(attempt, {"dram": stored, "computed": num_computed})


def test_preempted_requests_come_back_as_hits(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    counts = []
    while not any(num_preempted and num_loads for num_preempted, num_loads in counts):
        assert len(counts) < MAX_TRIES, counts
        prompts = {name: prompt_of(NUM_TOKENS, f"{name} {len(counts)}") for name in "abcdefgh"}
        before = engine.metrics()
        for name, prompt in prompts.items():
            engine.add(name, prompt, 3 * BLOCK_SIZE, ASK)
        answers = engine.run()
        after = engine.metrics()
        for name, prompt in prompts.items():
            assert answers[name].token_ids == single(prompt, 3 * BLOCK_SIZE).token_ids, name
        settle(engine)
        counts.append([delta(before, after, name) for name in ("preemptions", "pool_loads/ok")])


@pytest.mark.parametrize("reader", ["engine", "other"])
def test_what_another_engine_has_stored_is_a_hit(
    reader: str, engine: Engine, other: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    writer, asked = (other, engine) if reader == "engine" else (engine, other)

    def attempt(part: str) -> dict[str, int]:
        prompt = prompt_of(NUM_TOKENS, part)
        store(writer, prompt)
        answer = asked.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        settle(asked)
        return provenance(answer)

    until_hit(attempt, {"remote": FULL, "computed": 9})


def test_producer_and_consumer_share_the_pool(
    engine: Engine, other: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """The producer stores the prompt, the consumer what it decodes: the next turn has both."""

    def attempt(part: str) -> dict[str, int]:
        prompt = prompt_of(NUM_TOKENS, part)
        first = other.ask(prompt, 2 * BLOCK_SIZE, engine.prefill(prompt))
        assert first.token_ids == single(prompt, 2 * BLOCK_SIZE).token_ids
        for one in (engine, other):
            settle(one)
            assert one.reset_prefix_cache()
        turn = prompt + first.token_ids + prompt_of(5, "turn")
        before = engine.metrics()
        params = engine.prefill(turn)
        after = engine.metrics()
        second = other.ask(turn, 8, params)
        assert second.token_ids == single(turn).token_ids
        settle(engine)
        settle(other)
        if first.outcome != "loaded" or second.outcome != "loaded":
            return {}
        return {
            tier: int(delta(before, after, f"prompt_tokens/{tier}")) for tier in ("dram", "remote")
        }

    until_hit(attempt, {"dram": FULL, "remote": 2 * BLOCK_SIZE})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("script", ["corrupt", "missing", "fail"])
def test_a_share_that_one_worker_cannot_read_is_not_loaded(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf, script: str, rank: int
) -> None:
    """Its block, and those after it, are computed by all."""

    def attempt(part: str) -> dict[str, int]:
        engine.set_pool_faults("")
        prompt = prompt_of(NUM_TOKENS, part)
        store(engine, prompt)
        engine.set_pool_faults(f"get:ok*3,{script}", rank)
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        settle(engine)
        return provenance(answer)

    until_hit(attempt, {"dram": 3 * BLOCK_SIZE, "computed": NUM_TOKENS - 3 * BLOCK_SIZE})


def test_bits_that_flipped_in_one_workers_memory_are_found(
    other: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    outcomes = []
    while "checksum" not in outcomes:
        assert len(outcomes) < MAX_TRIES, outcomes
        prompt = prompt_of(NUM_TOKENS, str(len(outcomes)))
        store(other, prompt)
        assert other.flip_pool_bits(rank=1) >= 6
        answer = other.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        outcomes.append(answer.outcome)
        settle(other)
    assert provenance(answer) == {"computed": NUM_TOKENS}


def test_a_block_of_which_one_share_was_evicted_is_stored_anew(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.remove_pool_values(rank=1)
    before = engine.metrics()
    answer = store(engine, prompt, 8, kv=ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"computed": NUM_TOKENS}

    def attempt(part: str) -> dict[str, int]:
        again = store(engine, prompt, 8, kv=ASK)
        assert again.token_ids == single(prompt).token_ids
        return provenance(again)

    until_hit(attempt, {"dram": FULL, "computed": 9})
    assert delta(before, engine.metrics(), "pool_put_blocks/ok") >= 6


def test_a_worker_that_does_not_answer_a_lookup_holds_nobody_up(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.set_pool_faults("lookup:delay(3000),ok*", rank=1)
    before = engine.metrics()
    started = time.monotonic()
    answer = engine.ask(prompt, 8, ASK)
    assert time.monotonic() - started < 10
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"computed": NUM_TOKENS}
    assert delta(before, engine.metrics(), "pool_lookups/deadline") == 1
    settle(engine)


def test_each_worker_has_its_part_of_the_disk(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, tmp_path: Path
) -> None:
    block_size = 2 * BLOCK_SIZE  # a worker's share of it is as large as a block of one worker
    ssd = {"path": str(tmp_path / "ssd"), "size": "256MiB"}
    engine = engines.own(
        "kv_both", llm=TWO, pool={**POOL, "dram_size": "32MiB", "ssd": ssd}, block_size=block_size
    )
    prompts = [prompt_of(6 * block_size + 9, f"kept {part}") for part in range(MAX_TRIES)]
    for prompt in prompts:
        store(engine, prompt)
    wait_on_disk(tmp_path, 2 * len(prompts) * 6)
    for part in range(9):
        # Memory holds about 120 blocks and forgets the oldest.
        store(engine, prompt_of(30 * block_size, str(part)))
        time.sleep(0.5)

    def attempt(part: str) -> dict[str, int]:
        prompt = prompts[int(part)]
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        return provenance(answer)

    until_hit(attempt, {"ssd": 6 * block_size, "computed": 9})
    settle(engine)
    folders = {file.relative_to(tmp_path).parts[1] for file in tmp_path.rglob("*.bucket")}
    assert folders == {"worker-0", "worker-1"}


def test_workers_with_the_same_kv_head_share_a_master_of_their_own(
    fleet: Fleet,
    engines: Engines,
    base_config: EngineConfig,
    models: Callable[[str], str],
    prompt_of: PromptOf,
) -> None:
    """What both hold is stored once, and found again when their master has ended and is back."""
    base = replace(base_config, model=models("mqa"))
    reference = fleet.engine(base)
    pool = {**POOL, "probe_interval_s": 0.2, "lookup_timeout_ms": 500}
    engine = engines.own("kv_both", llm=TWO, pool=pool, model=base.model)

    def attempt(part: str) -> Answer:
        prompt = prompt_of(NUM_TOKENS, part)
        store(engine, prompt)
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == reference.ask(prompt, 8).token_ids
        settle(engine, 20)
        return answer

    before = engine.metrics()
    answers = [attempt("0")]
    while provenance(answers[-1])["computed"] != 9:
        assert len(answers) < MAX_TRIES, [provenance(answer) for answer in answers]
        before = engine.metrics()
        answers.append(attempt(str(len(answers))))
    # Of six blocks each worker has stored three, and loaded six.
    written = delta(before, engine.metrics(), "pool_put_bytes")
    assert answers[-1].provenance["num_pool_bytes"] == 2 * written

    os.kill(engine.pool_master_id(), signal.SIGKILL)
    engine.wait_log("starting it again")
    deadline = time.monotonic() + 30
    while provenance(attempt(f"killed {time.monotonic()}")).get("computed") != 9:
        assert time.monotonic() < deadline, engine.pool_breakers()
        time.sleep(0.3)
