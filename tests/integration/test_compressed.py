# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4, whose layers attend to what stands for several tokens: KV cache groups with blocks
of 256, 64, 8 and 4 tokens, which have pages of several sizes. First one engine of it, then P/D.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import EngineConfig, Fleet, PromptOf
from tests.integration.pairs import ORDERS, Pair, Three, abort_early_and_late
from tests.integration.pool_steps import settle, store
from tests.integration.pooled import Pooled
from tests.integration.test_moves import num_bytes_of_move

pytestmark = pytest.mark.engine

UNIT = 256
FAULTY = {"staging_slot_bytes": 512 * 1024, "staging_slots": 64}


@pytest.fixture
def config(base_config: EngineConfig, models: Callable[[str], str]) -> EngineConfig:
    return replace(
        base_config,
        model=models("compressed"),
        dtype="bfloat16",
        block_size=UNIT,
        num_blocks=1200,
        llm=json.dumps({"kv_cache_memory_bytes": 256 << 20}),
    )


@pytest.fixture
def three(fleet: Fleet, config: EngineConfig) -> Iterator[Three]:
    yield from Three.of(fleet, config, FAULTY)


@pytest.fixture
def pair(three: Three, prompt_of: PromptOf) -> Pair:
    return Pair(three.producer, three.consumer, prompt_of(5, "where"))


@pytest.mark.parametrize("num_tokens", [40, UNIT, UNIT + 1, 2 * UNIT - 1, 700])
def test_prefill_first(three: Three, prompt_of: PromptOf, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    answer = three.consumer.ask(prompt, 24, three.producer.prefill(prompt))
    three.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)


@pytest.mark.parametrize("num_tokens", [UNIT + 1, 700])
def test_decode_first(three: Three, pair: Pair, prompt_of: PromptOf, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask(prompt, max_tokens=24)
    three.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_where_the_consumer_samples_the_first_token(
    three: Three, prompt_of: PromptOf, load_mode: str
) -> None:
    consumer = three.other("kv_consumer", {"load_mode": load_mode, "first_token": "compute"})
    for num_tokens in (2 * UNIT, 2 * UNIT + 131):
        prompt = prompt_of(num_tokens, str(num_tokens))
        answer = consumer.ask(prompt, 24, three.producer.prefill(prompt))
        three.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens - 1, 1)


def test_what_the_consumer_has_is_not_sent(three: Three, pair: Pair, prompt_of: PromptOf) -> None:
    prefix = prompt_of(UNIT + 70, "prefix")
    three.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(UNIT, "second")
    answer = pair.ask(prompt)
    three.assert_right(answer, prompt)
    assert answer.sources == (UNIT, UNIT + 70, 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("script", ["fail", "ok,corrupt"])
def test_failed_load_is_computed(
    three: Three, pair: Pair, prompt_of: PromptOf, script: str, order: str
) -> None:
    prompt = prompt_of(2 * UNIT + 6)
    answer = pair.ask_in(order, prompt, 24, script=f"{script},ok*")
    three.assert_right(answer, prompt)
    assert answer.sources == (0, 0, len(prompt))


def test_abort(pair: Pair, prompt_of: PromptOf) -> None:
    abort_early_and_late(pair, prompt_of)


@pytest.mark.parametrize(("num_tokens", "cut"), [(UNIT + 20, 5), (700, 21)])
def test_request_moves_while_it_runs(
    three: Three, prompt_of: PromptOf, num_tokens: int, cut: int
) -> None:
    num_bytes_of_move(three, prompt_of(num_tokens), cut)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_pool(fleet: Fleet, config: EngineConfig, prompt_of: PromptOf, load_mode: str) -> None:
    pooled = Pooled.of(fleet, config)
    engine = pooled.other(transfer={"load_mode": load_mode})
    for num_tokens in (UNIT - 1, UNIT, 700):
        prompt = prompt_of(num_tokens)
        store(engine, prompt)
        answer = pooled.ask(engine, prompt)
        num_hit = min(num_tokens // UNIT * UNIT, num_tokens - 1)
        assert answer.provenance["num_dram_tokens"] == num_hit
        settle(engine)
