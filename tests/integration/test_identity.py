# SPDX-License-Identifier: Apache-2.0
"""KV crosses only between engines for which everything that decided it is equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import copy_with_other_tensors
from tests.integration.conftest import Engines, SingleEngine
from tests.integration.engines import BLOCK_SIZE, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.pool_steps import POOL, provenance, store
from vllm_ascend_pd.testing.tiny_lora import make_tiny_lora

pytestmark = pytest.mark.engine

NUM_TOKENS = 300
FULL = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
ASK = {"return_provenance": True}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, base_config: EngineConfig) -> str:
    """Like the tests' model, but for K and V of every layer."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    return str(copy_with_other_tensors(Path(base_config.model), folder, r"\.(k|v)_proj\."))


def test_other_k_and_v_in_every_layer_make_another_model(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf, other_model: str
) -> None:
    producer = engines.own("kv_producer", model=other_model)
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "incompatible"
    producer.wait_log("weights=")


# Weights in place.


def with_its_files(engine: Engine) -> None:
    """As the next test takes it to be. Engines that have never changed do not agree with it."""
    engine.call_workers("reload_weights", weights_path=engine.config.model)


@pytest.fixture
def pair(engines: Engines) -> Iterator[tuple[Engine, Engine]]:
    """Whose weights a test may change."""
    own = {"num_blocks": 255}
    pair = engines.shared("kv_both", **own), engines.shared("kv_both", kv_port=0, **own)
    yield pair
    for engine in pair:
        with_its_files(engine)


@pytest.fixture
def pooled(engines: Engines) -> Iterator[Engine]:
    """Whose weights a test may change."""
    engine = engines.shared("kv_both", pool=POOL, num_blocks=255)
    yield engine
    with_its_files(engine)


@pytest.fixture(scope="module")
def scaled(fleet: Fleet, base_config: EngineConfig) -> Iterator[SingleEngine]:
    """What one ordinary engine answers with the weights that ``scale_norms(3)`` makes."""
    engine = fleet.start(base_config)
    engine.scale_norms(3)
    yield SingleEngine(engine)
    fleet.retire(engine)


def test_kv_of_the_weights_before_is_neither_hit_nor_handed_over(
    pair: tuple[Engine, Engine], single: SingleEngine, scaled: SingleEngine, prompt_of: PromptOf
) -> None:
    producer, consumer = pair
    prompt = prompt_of(NUM_TOKENS)
    assert single(prompt, 16).token_ids != scaled(prompt, 16).token_ids
    early = producer.prefill(prompt)
    producer.scale_norms(3)
    assert producer.counts()["leases"] == 0
    answer = consumer.ask(prompt, 16, early)
    assert (answer.token_ids, answer.outcome) == (single(prompt, 16).token_ids, "incompatible")
    assert producer.ask(prompt, 16).token_ids == scaled(prompt, 16).token_ids
    answer = consumer.ask(prompt, 17, producer.prefill(prompt))
    assert (answer.token_ids, answer.outcome) == (single(prompt, 17).token_ids, "incompatible")


def test_a_request_that_waits_for_its_peer_is_computed_with_the_new_weights(
    pair: tuple[Engine, Engine], scaled: SingleEngine, prompt_of: PromptOf
) -> None:
    producer, consumer = pair
    prompt = prompt_of(NUM_TOKENS)
    consumer.add("r", prompt, 16, producer.prefill(prompt))
    consumer.wait_for("r", "session", "READY")
    consumer.scale_norms(3)
    answer = consumer.run()["r"]
    assert (answer.token_ids, answer.outcome) == (scaled(prompt, 16).token_ids, "incompatible")
    assert consumer.ask(prompt, 16).token_ids == scaled(prompt, 16).token_ids


def test_what_a_running_request_goes_on_to_compute_is_nobody_elses(
    pair: tuple[Engine, Engine], scaled: SingleEngine, prompt_of: PromptOf
) -> None:
    """Its KV is of both weights, and stays the prefix of no other request."""
    producer, consumer = pair
    prompt = prompt_of(NUM_TOKENS)
    producer.add("r", prompt, 100)
    producer.step_until("r", "num_output_tokens", 3)
    producer.scale_norms(3)
    longer = prompt + producer.run()["r"].token_ids
    assert producer.ask(longer, 16).token_ids == scaled(longer, 16).token_ids
    consumer.scale_norms(3)
    answer = consumer.ask(longer, 16, producer.prefill(longer))
    assert answer.token_ids == scaled(longer, 16).token_ids


def test_engines_that_reload_the_same_files_agree_again(
    engines: Engines,
    fleet: Fleet,
    base_config: EngineConfig,
    pair: tuple[Engine, Engine],
    prompt_of: PromptOf,
    other_model: str,
) -> None:
    producer, consumer = pair
    other = SingleEngine(fleet.engine(replace(base_config, model=other_model)))
    prompt = prompt_of(NUM_TOKENS)
    producer.call_workers("reload_weights", weights_path=other_model)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.outcome == "incompatible"
    consumer.call_workers("reload_weights", weights_path=other_model)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == other(prompt, 16).token_ids
    assert answer.sources == (0, NUM_TOKENS, 0)


def test_calls_that_keep_the_weights_keep_leases(
    producer: Engine, consumer: Engine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    producer.call_workers("reset_encoder_cache")
    assert consumer.ask(prompt, 16, params).sources == (0, NUM_TOKENS, 0)


# The pool.


def test_the_pool_does_not_give_kv_of_other_weights(
    pooled: Engine, single: SingleEngine, scaled: SingleEngine, prompt_of: PromptOf
) -> None:
    engine, prompt = pooled, prompt_of(NUM_TOKENS)
    assert engine.ask(prompt, 16).token_ids == single(prompt, 16).token_ids
    engine.scale_norms(3)
    assert engine.reset_prefix_cache()
    assert engine.ask(prompt, 16).token_ids == scaled(prompt, 16).token_ids
    assert engine.reset_prefix_cache()
    again = engine.ask(prompt, 16, ASK)
    assert again.token_ids == scaled(prompt, 16).token_ids
    assert again.provenance["num_dram_tokens"] > 0


def test_reset_of_the_connector_takes_the_pool_for_empty(
    pooled: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine, prompt = pooled, prompt_of(NUM_TOKENS)

    def num_from_pool() -> int:
        answer = engine.ask(prompt, 16, ASK)
        assert answer.token_ids == single(prompt, 16).token_ids
        engine.wait_count("pool_saves", 0)
        return answer.provenance["num_dram_tokens"]

    assert num_from_pool() == 0
    assert engine.reset_prefix_cache()
    assert num_from_pool() > 0
    assert engine.reset_prefix_cache(connector=True)
    assert num_from_pool() == 0
    assert engine.reset_prefix_cache()
    assert num_from_pool() > 0


# Sleep.


@pytest.mark.parametrize("way", ["sleep", "release"])
def test_sleep_revokes_leases_in_the_worker_before_it_returns(
    pair: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf, way: str
) -> None:
    """The CPU's workers unmap nothing; what is told to them, and when, is the same."""
    producer, consumer = pair
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    assert producer.counts()["worker_grants"] == 1
    if way == "release" and not producer.release_kv_cache_memory():
        pytest.skip("this vLLM releases KV caches with all the rest only")
    if way == "sleep":
        producer.sleep(1)
    counts = producer.counts()
    assert (counts["leases"], counts["worker_grants"]) == (0, 0)
    assert consumer.ask(prompt, 16, params).outcome == "lease_expired"
    producer.wake_up()
    answer = consumer.ask(prompt, 17, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 17).token_ids


def test_sleep_that_discards_the_weights_makes_another_generation(
    pair: tuple[Engine, Engine], prompt_of: PromptOf
) -> None:
    producer, consumer = pair
    prompt = prompt_of(NUM_TOKENS)
    producer.sleep(2)
    producer.wake_up()
    assert consumer.ask(prompt, 16, producer.prefill(prompt)).outcome == "incompatible"


# Adapters.

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}


@pytest.fixture
def adapters(base_config: EngineConfig, tmp_path: Path) -> tuple[Path, Path]:
    """Two of one name and other contents, each in a folder of its own."""
    model = Path(base_config.model)
    found = []
    for seed, folder in enumerate(("old", "new")):
        (tmp_path / folder).mkdir()
        found.append(make_tiny_lora(tmp_path / folder / "adapter", model, seed))
    return found[0], found[1]


@pytest.fixture
def lora_pair(engines: Engines) -> tuple[Engine, Engine]:
    options = json.dumps(LORA)
    return engines.shared("kv_producer", llm=options), engines.shared("kv_consumer", llm=options)


def test_adapters_of_one_name_and_other_contents_exchange_nothing(
    lora_pair: tuple[Engine, Engine], adapters: tuple[Path, Path], prompt_of: PromptOf
) -> None:
    producer, consumer = lora_pair
    old, new = map(str, adapters)
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt, lora=old), lora=new)
    assert answer.outcome == "hash_mismatch"
    assert producer.ask(prompt, 16, lora=new).token_ids == answer.token_ids
    other = consumer.ask(prompt, 16, producer.prefill(prompt, lora=old), lora=old)
    assert other.sources == (0, NUM_TOKENS, 0)
    assert other.token_ids != answer.token_ids


def test_an_adapter_that_is_loaded_in_place_is_not_served_from_the_prefix_cache_of_the_old_one(
    lora_pair: tuple[Engine, Engine], adapters: tuple[Path, Path], prompt_of: PromptOf
) -> None:
    engine, other = lora_pair
    old, new = adapters
    prompt = prompt_of(NUM_TOKENS)
    expected = other.ask(prompt, 16, lora=str(new)).token_ids
    before = engine.ask(prompt, 16, lora=str(old)).token_ids
    shutil.rmtree(old)
    shutil.copytree(new, old)
    assert engine.ask(prompt, 17, lora=str(old)).token_ids[:16] == before  # not asked for yet
    engine.add("r", prompt, 16, lora=str(old))  # waits while the adapter changes
    engine.add_lora(str(old), inplace=True)
    assert engine.run()["r"].token_ids == expected != before
    assert engine.ask(prompt, 16, lora=str(old)).token_ids == expected


def test_a_pool_tells_adapters_of_one_name_apart(
    engines: Engines,
    lora_pair: tuple[Engine, Engine],
    adapters: tuple[Path, Path],
    prompt_of: PromptOf,
) -> None:
    engine = engines.shared("kv_both", pool=POOL, llm=json.dumps(LORA))
    old, new = map(str, adapters)
    prompt = prompt_of(NUM_TOKENS)
    before = store(engine, prompt, 16, lora=old).token_ids
    answer = store(engine, prompt, 16, kv=ASK, lora=new)
    assert answer.token_ids == lora_pair[1].ask(prompt, 16, lora=new).token_ids != before
    assert provenance(answer) == {"computed": NUM_TOKENS}
    for folder, expected in ((old, before), (new, answer.token_ids)):
        again = store(engine, prompt, 16, kv=ASK, lora=folder)
        assert again.token_ids == expected
        assert provenance(again) == {"dram": FULL, "computed": NUM_TOKENS - FULL}
