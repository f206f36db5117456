# SPDX-License-Identifier: Apache-2.0
"""The pool in real engines: tokens are a single engine's, whatever tier the KV came from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.checkpoints import copy_with_other_tensors
from tests.disk import wait_on_disk
from tests.integration.engines import BLOCK_SIZE, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.pool_steps import POOL, delta, provenance, settle, store
from tests.integration.test_models_more import LORA, loras  # noqa: F401
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

NUM_BLOCKS = 6
FULL = NUM_BLOCKS * BLOCK_SIZE
NUM_TOKENS = FULL + 9
ASK = {"return_provenance": True}


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines.shared("kv_both", pool=POOL)


@pytest.fixture(scope="module")
def master() -> Iterator[EmbeddedMaster]:
    master = EmbeddedMaster()
    yield master
    master.stop()


def test_cold_prompt_is_computed(engine: Engine, single: SingleEngine, prompt_of: PromptOf) -> None:
    prompt = prompt_of(NUM_TOKENS)
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert (answer.outcome, provenance(answer)) == ("computed", {"computed": NUM_TOKENS})
    settle(engine)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_warm_prompt_comes_from_dram(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, load_mode: str
) -> None:
    engine = engines.shared("kv_both", pool=POOL, transfer={"load_mode": load_mode})
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert (answer.outcome, provenance(answer)) == ("loaded", {"dram": FULL, "computed": 9})
    assert answer.provenance["num_pool_bytes"] > 0


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_prompt_of_full_blocks_computes_its_last_token_only(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, load_mode: str
) -> None:
    engine = engines.shared("kv_both", pool=POOL, transfer={"load_mode": load_mode})
    prompt = prompt_of(FULL)
    store(engine, prompt)
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"dram": FULL - 1, "computed": 1}
    # What is cached here lacks the last block, as a lookup never hits all of a prompt.
    again = engine.ask(prompt, 8, ASK)
    assert again.token_ids == answer.token_ids
    assert provenance(again) == {
        "local": FULL - BLOCK_SIZE,
        "dram": BLOCK_SIZE - 1,
        "computed": 1,
    }
    settle(engine)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_warm_prompt_comes_from_another_process(
    engines: Engines,
    single: SingleEngine,
    prompt_of: PromptOf,
    master: EmbeddedMaster,
    load_mode: str,
) -> None:
    owner = engines.shared("kv_both", pool={**POOL, "master": master.address})
    guest = engines.shared(
        "kv_both",
        pool={**POOL, "master": master.address, "dram_size": 0},
        transfer={"load_mode": load_mode},
    )
    prompt = prompt_of(NUM_TOKENS)
    store(owner, prompt)
    answer = guest.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"remote": FULL, "computed": 9}


def test_warm_prompt_comes_from_ssd(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, tmp_path: Path
) -> None:
    ssd = {"path": str(tmp_path / "ssd"), "size": "256MiB"}
    engine = engines.own("kv_both", pool={**POOL, "dram_size": "16MiB", "ssd": ssd})
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    wait_on_disk(tmp_path, FULL // BLOCK_SIZE)
    for part in range(20):
        # Memory holds about 120 blocks and forgets the oldest, which a put protects for 5 s.
        store(engine, prompt_of(40 * BLOCK_SIZE, str(part)))
        time.sleep(0.5)
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"ssd": FULL, "computed": 9}


def test_only_what_is_missing_comes_from_the_pool(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.ask(prompt[: 2 * BLOCK_SIZE + 1])
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {
        "local": 2 * BLOCK_SIZE,
        "dram": FULL - 2 * BLOCK_SIZE,
        "computed": 9,
    }
    settle(engine)


def test_partial_hit_is_computed_from_where_it_ends(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    first, second = prompt_of(NUM_TOKENS, "first"), prompt_of(NUM_TOKENS, "second")
    store(engine, first)
    prompt = first[: 3 * BLOCK_SIZE] + second
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"dram": 3 * BLOCK_SIZE, "computed": NUM_TOKENS}
    settle(engine)


def test_missing_middle_block_is_filled_and_later_local_ones_stay(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    engine.add("first", prompt, 2)
    engine.step_until("first", "num_output_tokens", 1)
    blocks = engine.block_ids("first")
    engine.run()
    settle(engine)
    engine.evict_blocks([blocks[2]])
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {
        "local": FULL - BLOCK_SIZE,
        "dram": BLOCK_SIZE,
        "computed": 9,
    }


def test_decoded_blocks_are_hits_of_the_next_turn(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    first = store(engine, prompt, 3 * BLOCK_SIZE)
    turn = prompt + first.token_ids + prompt_of(5, "turn")
    answer = engine.ask(turn, 8, ASK)
    assert answer.token_ids == single(turn).token_ids
    # The last generated token was never computed on.
    stored = (NUM_TOKENS + 3 * BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert provenance(answer) == {"dram": stored, "computed": len(turn) - stored}
    settle(engine)


def test_decoded_blocks_are_not_stored_when_switched_off(
    engines: Engines, prompt_of: PromptOf
) -> None:
    engine = engines.shared("kv_both", pool={**POOL, "put_decoded": False})
    prompt = prompt_of(NUM_TOKENS)
    first = store(engine, prompt, 3 * BLOCK_SIZE)
    answer = engine.ask(prompt + first.token_ids, 8, ASK)
    assert provenance(answer)["dram"] == FULL
    settle(engine)


def test_chunked_prefill_stores_and_loads_every_chunk(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(20 * BLOCK_SIZE + 3)
    store(engine, prompt)
    longer = prompt + prompt_of(15 * BLOCK_SIZE, "more")
    answer = engine.ask(longer, 8, ASK)
    assert answer.token_ids == single(longer).token_ids
    assert provenance(answer)["dram"] == 20 * BLOCK_SIZE
    settle(engine)


def test_two_requests_with_one_prefix_in_one_step_cause_one_load(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    shared = prompt_of(FULL, "shared")
    store(engine, [*shared, 300])
    prompts = {name: shared + prompt_of(7, name) for name in ("a", "b")}
    before = engine.metrics()
    for name, prompt in prompts.items():
        engine.add(name, prompt, 8, ASK)
    answers = engine.run()
    after = engine.metrics()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt).token_ids, name
    assert delta(before, after, "pool_loads/ok") == 1
    origins = [provenance(answer) for answer in answers.values()]
    assert sorted(origins, key=str) == [
        {"dram": FULL, "computed": 7},
        {"local": FULL, "computed": 7},
    ]


def test_preempted_request_comes_back_as_a_hit(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared("kv_both", pool=POOL, num_blocks=25, max_model_len=512)
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in ("a", "b", "c")}
    before = engine.metrics()
    for name, prompt in prompts.items():
        engine.add(name, prompt, 3 * BLOCK_SIZE, ASK)
    answers = engine.run()
    after = engine.metrics()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 3 * BLOCK_SIZE).token_ids, name
    assert delta(before, after, "preemptions") > 0
    assert delta(before, after, "pool_loads/ok") > 0
    settle(engine)


def test_queued_request_is_loaded_while_others_run(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    running = {f"running-{i}": prompt_of(10, str(i)) for i in range(16)}  # max_num_seqs
    for name, other in running.items():
        engine.add(name, other, 60)
    engine.step_until("running-15", "status", "RUNNING")
    before = engine.metrics()
    engine.add("queued", prompt, 8, ASK)
    for _ in range(40):
        engine.step()
        if delta(before, engine.metrics(), "pool_loads/ok"):
            break
    assert delta(before, engine.metrics(), "pool_loads/ok") == 1
    states = engine.requests()
    assert states["queued"]["status"] != "RUNNING"
    assert len(states) == 17
    answer = engine.run()["queued"]
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"dram": FULL, "computed": 9}
    settle(engine)


def test_queued_request_gets_what_others_have_stored_meanwhile(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, master: EmbeddedMaster
) -> None:
    shared = {**POOL, "master": master.address}
    owner = engines.shared("kv_both", pool=shared)
    guest = engines.shared("kv_both", pool={**shared, "dram_size": 0})
    prompt = prompt_of(NUM_TOKENS)
    for i in range(16):  # max_num_seqs
        guest.add(f"running-{i}", prompt_of(10, str(i)), 2000)
    guest.step_until("running-15", "status", "RUNNING")
    guest.add("queued", prompt, 8, ASK)
    before = guest.metrics()
    guest.step_until("queued", "status", "WAITING")
    assert delta(before, guest.metrics(), "pool_lookups/miss") == 1
    store(owner, prompt)
    time.sleep(1)  # so long a lookup counts as new
    guest.step_until("queued", "status", "WAITING_FOR_KV")
    for i in range(16):
        guest.abort(f"running-{i}")
    answer = guest.run()["queued"]
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"remote": FULL, "computed": 9}
    settle(guest)


def test_other_salt_never_hits(engine: Engine, prompt_of: PromptOf) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    answer = engine.ask(prompt, 8, ASK, cache_salt="another tenant")
    assert provenance(answer) == {"computed": NUM_TOKENS}
    settle(engine)


def test_kv_of_another_lora_or_tenant_never_hits(
    fleet: Fleet,
    engines: Engines,
    base_config: EngineConfig,
    loras: list[str],  # noqa: F811
    prompt_of: PromptOf,
) -> None:
    """The same prompt under each adapter, under none, and for another tenant."""
    llm = json.dumps(LORA)
    reference = fleet.engine(replace(base_config, llm=llm))
    engine = engines.shared("kv_both", pool=POOL, llm=llm)
    prompt = prompt_of(NUM_TOKENS)
    kinds: list[dict[str, Any]] = [
        {"lora": loras[0]},
        {"lora": loras[1]},
        {},
        {"cache_salt": "another tenant"},
        {"lora": loras[0], "cache_salt": "another tenant"},
    ]
    expected = [reference.ask(prompt, 24, **kind).token_ids for kind in kinds]
    assert expected[0] != expected[1] != expected[2] != expected[0]
    for kind, token_ids in zip(kinds, expected, strict=True):
        answer = store(engine, prompt, 24, kv=ASK, **kind)
        assert (answer.token_ids, provenance(answer)) == (token_ids, {"computed": NUM_TOKENS}), kind
    for kind, token_ids in zip(kinds, expected, strict=True):
        answer = store(engine, prompt, 24, kv=ASK, **kind)
        origin = {"dram": FULL, "computed": 9}
        assert (answer.token_ids, provenance(answer)) == (token_ids, origin), kind


def test_prompt_embeddings(
    fleet: Fleet, engines: Engines, base_config: EngineConfig, prompt_of: PromptOf
) -> None:
    """Their token ids are all equal: blocks are stored, and found, by what they embed."""
    llm = json.dumps({"enable_prompt_embeds": True})
    reference = fleet.engine(replace(base_config, llm=llm))
    engine = engines.shared("kv_both", pool=POOL, llm=llm)
    *embeds, other = np.random.default_rng(7).normal(size=(NUM_TOKENS + 1, 128)).tolist()
    similar = [*embeds[: 2 * BLOCK_SIZE], other, *embeds[2 * BLOCK_SIZE + 1 :]]
    expected = [reference.ask([], 24, embeds=one).token_ids for one in (embeds, similar)]
    assert expected[0] != expected[1]
    first = store(engine, [], 24, kv=ASK, embeds=embeds)
    assert (first.token_ids, provenance(first)) == (expected[0], {"computed": NUM_TOKENS})
    for prompt, token_ids, num_found in (
        (embeds, expected[0], FULL),
        (similar, expected[1], 2 * BLOCK_SIZE),
        (similar, expected[1], FULL),
    ):
        answer = store(engine, [], 24, kv=ASK, embeds=prompt)
        origin = {"dram": num_found, "computed": NUM_TOKENS - num_found}
        assert (answer.token_ids, provenance(answer)) == (token_ids, origin)
    tokens = prompt_of(NUM_TOKENS)  # mixed with requests of tokens
    assert provenance(engine.ask(tokens, 8, ASK)) == {"computed": NUM_TOKENS}
    settle(engine)


def test_mla(
    fleet: Fleet,
    engines: Engines,
    base_config: EngineConfig,
    models: Callable[[str], str],
    prompt_of: PromptOf,
) -> None:
    reference = fleet.engine(replace(base_config, model=models("mla")))
    engine = engines.shared("kv_both", pool=POOL, model=models("mla"))
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt, 24)
    answer = engine.ask(prompt, 24, ASK)
    assert answer.token_ids == reference.ask(prompt, 24).token_ids
    assert provenance(answer) == {"dram": FULL, "computed": 9}
    settle(engine)


@pytest.mark.parametrize("differs", ["dtype", "weights"])
def test_engines_that_differ_share_no_block(
    engines: Engines,
    prompt_of: PromptOf,
    master: EmbeddedMaster,
    base_config: EngineConfig,
    tmp_path: Path,
    differs: str,
) -> None:
    """In ``weights``: of one shape, with other values in K and V."""
    owner = engines.shared("kv_both", pool={**POOL, "master": master.address})
    options = {"dtype": "bfloat16"}
    if differs == "weights":
        model = copy_with_other_tensors(Path(base_config.model), tmp_path / "m", r"\.(k|v)_proj\.")
        options = {"model": str(model)}
    other = engines.own("kv_both", pool={**POOL, "master": master.address}, **options)
    prompt = prompt_of(NUM_TOKENS)
    store(owner, prompt)
    assert provenance(other.ask(prompt, 8, ASK)) == {"computed": NUM_TOKENS}
    settle(other)


def test_what_the_pool_has_is_not_stored_again(engine: Engine, prompt_of: PromptOf) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    before = engine.metrics()
    engine.ask(prompt)
    settle(engine)
    assert delta(before, engine.metrics(), "pool_put_blocks/ok") == 0


def test_producer_stores_and_consumer_stores_what_it_decodes(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, master: EmbeddedMaster
) -> None:
    pool = {**POOL, "master": master.address}
    producer = engines.shared("kv_producer", pool=pool)
    consumer = engines.shared("kv_consumer", pool=pool)
    prompt = prompt_of(NUM_TOKENS)
    first = consumer.ask(prompt, 3 * BLOCK_SIZE, producer.prefill(prompt))
    assert first.token_ids == single(prompt, 3 * BLOCK_SIZE).token_ids
    assert provenance(first) == {"peer": NUM_TOKENS}
    settle(producer)
    settle(consumer)
    assert producer.reset_prefix_cache()
    turn = prompt + first.token_ids + prompt_of(5, "turn")
    params = producer.prefill(turn)
    assert delta({}, producer.metrics(), "prompt_tokens/remote") >= 2 * BLOCK_SIZE
    assert consumer.reset_prefix_cache()
    second = consumer.ask(turn, 8, params)
    assert second.token_ids == single(turn).token_ids
    settle(producer)
    settle(consumer)


def test_auto_loads_and_says_what_it_decided(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared("kv_both", pool={**POOL, "load": "auto"})
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    before = engine.metrics()
    answer = engine.ask(prompt, 8, ASK)
    after = engine.metrics()
    assert answer.token_ids == single(prompt).token_ids
    decisions = [delta(before, after, f"pool_decisions/{x}") for x in ("all", "part", "none")]
    assert sum(decisions) == 1
    settle(engine)


def test_load_none_computes(engines: Engines, prompt_of: PromptOf) -> None:
    engine = engines.shared("kv_both", pool={**POOL, "load": "none"})
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    assert provenance(engine.ask(prompt, 8, ASK)) == {"computed": NUM_TOKENS}
    settle(engine)


def test_on_eviction_what_left_memory_is_a_hit(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.own(
        "kv_both", pool={**POOL, "save": "eviction"}, num_blocks=64, max_model_len=512
    )
    prompt = prompt_of(NUM_TOKENS)
    before = engine.metrics()
    first = engine.ask(prompt, 3 * BLOCK_SIZE)
    for part in range(12):
        # Memory holds ten of these; the engine keeps stepping while blocks are saved.
        engine.ask(prompt_of(NUM_TOKENS, str(part)), 3)
    settle(engine)
    after = engine.metrics()
    num_stored = delta(before, after, "pool_put_blocks/ok")
    assert 0 < num_stored < 12 * NUM_BLOCKS  # and not what is still in memory
    turn = prompt + first.token_ids + prompt_of(5, "turn")
    answer = engine.ask(turn, 8, ASK)
    assert answer.token_ids == single(turn).token_ids
    origin = provenance(answer)
    assert origin.get("dram", 0) >= NUM_TOKENS // 2, origin
    settle(engine)


def test_on_eviction_preempted_requests_lose_nothing(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared(
        "kv_both", pool={**POOL, "save": "eviction"}, num_blocks=25, max_model_len=512
    )
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in ("a", "b", "c")}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 3 * BLOCK_SIZE)
    answers = engine.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 3 * BLOCK_SIZE).token_ids, name
    settle(engine)


def test_block_that_is_evicted_while_its_save_hangs_is_not_held_back(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Memory goes to requests, whatever the pool does."""
    engine = engines.shared(
        "kv_both",
        pool={**POOL, "save": "eviction", "breaker_slow_ms": 300},
        pool_faults="put:ok*",
        num_blocks=32,
        max_model_len=512,
    )
    engine.set_pool_faults("put:delay(400)*")
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(8)]
    for prompt in prompts:
        assert engine.ask(prompt).token_ids == single(prompt).token_ids
    engine.set_pool_faults("")
    settle(engine, 20)


def test_request_without_a_lookup_is_not_overtaken(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    running = {f"running-{i}": prompt_of(10, str(i)) for i in range(16)}  # max_num_seqs
    for i, (name, prompt) in enumerate(running.items()):
        engine.add(name, prompt, 6 + 4 * i)
    engine.step_until("running-15", "status", "RUNNING")
    short = prompt_of(10, "short")
    engine.add("short", short, 40)
    late = [f"late-{i}" for i in range(4)]
    for name in late:
        engine.add(name, prompt_of(NUM_TOKENS, name), 40)
    engine.step()  # those that wait for a lookup are put before the others, once
    states = engine.step_until("short", "status", "RUNNING")
    assert states["status"] == "RUNNING"
    started = [name for name in late if engine.requests()[name]["status"] == "RUNNING"]
    assert started == []
    assert engine.run()["short"].token_ids == single(short, 40).token_ids
    settle(engine)
