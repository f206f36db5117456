# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers of several workers, with equal and with unequal tensor parallel sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import EngineConfig, EngineError, Fleet, PromptOf
from tests.integration.pairs import (
    EVERY_LAYER,
    ORDERS,
    Pair,
    expect_abort_of_a_load,
    expect_recovery,
    expect_tokens_of_one_worker,
)

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

TWO = json.dumps({"tensor_parallel_size": 2})
ONE = "{}"


def pair_of(
    engines: Engines, sizes: tuple[int, int], prompt: list[int], faults: str = "", **options: Any
) -> Pair:
    llms = [json.dumps({"tensor_parallel_size": size}) if size > 1 else ONE for size in sizes]
    producer = engines.shared("kv_producer", llm=llms[0], faults=faults, **options)
    consumer = engines.shared("kv_consumer", llm=llms[1], transfer=EVERY_LAYER, **options)
    return Pair(producer, consumer, prompt)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=lambda s: f"p{s[0]}-d{s[1]}")
def test_tokens_are_those_of_one_worker(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, sizes: tuple[int, int]
) -> None:
    pair = pair_of(engines, sizes, prompt_of(5, "where"))
    expect_tokens_of_one_worker(pair, single, prompt_of)


@pytest.mark.parametrize("mode", ["step", "park"])
def test_many_at_once(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, mode: str
) -> None:
    pair = pair_of(engines, (2, 1), prompt_of(5, "where"))
    pair.consumer = engines.shared("kv_consumer", transfer={"load_mode": mode})
    prompts = {f"r{n}": prompt_of(n, f"{n}") for n in (5, 64, 97, 300)}
    for name, prompt in prompts.items():
        pair.consumer.add(name, prompt, 16, pair.producer.prefill(prompt))
    answers = pair.consumer.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 16).token_ids, name
        assert answers[name].outcome == "loaded", name


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=lambda s: f"p{s[0]}-d{s[1]}")
@pytest.mark.parametrize("mode", ["step", "park"])
def test_a_write_that_fails_is_recovered_from(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, sizes: tuple[int, int], mode: str
) -> None:
    """Also when only one of the workers is hit: the first write of each engine is corrupt."""
    pair = pair_of(engines, sizes, prompt_of(5, "where"), faults="ok*")
    llm = TWO if sizes[1] == 2 else ONE
    pair.consumer = engines.shared("kv_consumer", llm=llm, transfer={"load_mode": mode})
    for script in ("corrupt", "fail", "ok,corrupt", "ok,ok,fail"):
        expect_recovery(pair, single, prompt_of(300, script), script)


def test_a_load_is_aborted_on_every_worker(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    pair = pair_of(engines, (1, 2), prompt_of(5, "where"))
    expect_abort_of_a_load(pair, single, prompt_of)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("mqa", (2, 1)), ("mla", (2, 1)), ("mla", (1, 2))],
    ids=lambda v: v if isinstance(v, str) else f"p{v[0]}-d{v[1]}",
)
def test_kv_that_every_worker_holds(
    fleet: Fleet,
    base_config: EngineConfig,
    models: Callable[[str], str],
    prompt_of: PromptOf,
    model: str,
    sizes: tuple[int, int],
) -> None:
    """One KV head, or MLA's latent: the workers do not divide it."""
    base = replace(base_config, model=models(model))
    llms = [TWO if size == 2 else ONE for size in sizes]
    consumer = replace(base, role="kv_consumer", llm=llms[1]).with_transfer(**EVERY_LAYER)
    configs = (base, replace(base, role="kv_producer", llm=llms[0]), consumer)
    engines = fleet.engines(*configs)
    pair = Pair(engines[1], engines[2], prompt_of(5, "where"))
    for order in ORDERS:
        prompt = prompt_of(300, order)
        answer = pair.ask_in(order, prompt)
        assert answer.token_ids == engines[0].ask(prompt, 16).token_ids, order
        assert answer.sources == (0, 300, 0), order


def test_a_pool_too_small_for_the_workers_is_refused_by_name(
    fleet: Fleet, base_config: EngineConfig
) -> None:
    config = replace(base_config, role="kv_both", llm=TWO, pool='{"dram_size": "31MiB"}')
    message = "dram_size is divided among 2 workers and must be at least 32 MiB"
    with pytest.raises(EngineError, match=message):
        fleet.start(config)
