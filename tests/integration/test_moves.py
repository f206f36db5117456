# SPDX-License-Identifier: Apache-2.0
"""Running requests move to another engine, and every token is that of one engine."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import SingleEngine
from tests.integration.engines import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineConfig,
    Fleet,
    PromptOf,
    assert_no_leak,
)
from tests.integration.moving import coming
from tests.integration.pool_steps import POOL, delta, settle
from tests.integration.test_identity import LORA
from tests.integration.test_prefill_first import moved
from tests.integration.test_resume import SAMPLING, SEED, begun
from tests.integration.test_speculation import LLM as DRAFTS
from vllm_ascend_pd.testing.tiny_lora import make_tiny_lora

if TYPE_CHECKING:
    from tests.integration.conftest import Engines
    from tests.integration.pairs import Three

pytestmark = pytest.mark.engine

Prompt = list[int]
NUM_OUTPUT = 120
NUM_SHORT = 14
NUM_LOOKS = 6
"""Of the source, for each of its steps."""
PATIENT = {"max_freeze_s": 60, "peer_timeout_s": 60}
"""Engines of tests share few cores, and are stepped by hand."""


def outcome_of(answer: Answer) -> dict[str, str]:
    return answer.kv_transfer_params["resume"]


def move(
    source: Engine, target: Engine, prompt: Prompt, num_output: int = NUM_OUTPUT, **more: Any
) -> tuple[Answer, Answer]:
    """A request that runs at ``source`` as ``r`` moves; the two ends of its answer."""
    target.add("r", prompt, num_output, coming(prompt, source), **more)
    left, right = dict[str, Answer](), dict[str, Answer]()
    while "r" not in left:
        left |= source.drive(1)
        right |= look(source, target)
    while "r" not in right:
        right |= target.run()
    return left["r"], right["r"]


def look(source: Engine, target: Engine) -> dict[str, Answer]:
    """What has ended at the target meanwhile: the source decodes so slowly that nothing ends there
    before it has moved."""
    ended = dict[str, Answer]()
    for _ in range(NUM_LOOKS):
        source.counts()  # it answers, and computes nothing
        ended |= target.drive(2)
    return ended


def two(engines: Engines, **options: Any) -> tuple[Engine, Engine]:
    """Equal ones, but for what tells them apart."""
    first, second = (
        engines.shared("kv_both", transfer={**PATIENT, "load_timeout_s": load_timeout_s}, **options)
        for load_timeout_s in (60, 61)
    )
    return first, second


def num_bytes_of_move(
    three: Three, prompt: list[int], cut: int, script: str = "ok*", **options: Any
) -> tuple[int, int]:
    """A request moves from its output token ``cut`` on between engines with these options, by
    writes that go as the script says. How many of its tokens were computed then, and how many bytes
    were copied.
    """
    source, target = (
        three.other("kv_both", {**PATIENT, "load_timeout_s": n}, faults=faults, **options)
        for n, faults in ((60, "ok*"), (61, ""))
    )
    before = [(engine, engine.counts()) for engine in (source, target)]
    metrics = target.metrics()
    source.set_faults(script)
    source.add("r", prompt, NUM_OUTPUT)
    source.step_until("r", "num_output_tokens", cut)
    left, right = move(source, target, prompt)
    source.set_faults("ok*")
    three.assert_right(right, prompt)
    assert outcome_of(right) == {"outcome": "exact"}
    assert (left.finish_reason, len(right.token_ids)) == ("abort", NUM_OUTPUT)
    assert left.token_ids == right.token_ids[: len(left.token_ids)]
    num_computed = len(prompt) + len(left.token_ids) - 1
    assert right.sources == (0, num_computed, 1)
    failed = [
        delta(metrics, target.metrics(), f"loads/{cause}")
        for cause in ("checksum", "transfer_failed")
    ]
    assert any(failed) == (script != "ok*")
    for engine, counts in before:
        assert_no_leak(engine, counts)
    return num_computed, int(moved(target.metrics()) - moved(metrics))


def expect_broken_answers_to_go_on(three: Three, prompt: list[int]) -> None:
    """From what is known of their tokens, beside each other."""
    engine = three.other("kv_both", {**PATIENT, "load_timeout_s": 60}, faults="ok*")
    known = three.single.ask(prompt, 2 * BLOCK_SIZE).token_ids
    cuts = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE]
    for cut in cuts:
        engine.add(f"cut {cut}", prompt, 3 * BLOCK_SIZE, begun(prompt, known[:cut]))
    answers = engine.run()
    for cut in cuts:
        answer = answers[f"cut {cut}"]
        assert answer.token_ids[:cut] == known[:cut]
        assert (len(answer.token_ids), outcome_of(answer)) == (3 * BLOCK_SIZE, {"outcome": "exact"})
        three.assert_right(answer, prompt)


@pytest.fixture
def pair(engines: Engines) -> tuple[Engine, Engine]:
    return two(engines)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def either(request: pytest.FixtureRequest, engines: Engines) -> tuple[Engine, Engine]:
    return two(engines, runs_ahead=request.param)


@pytest.mark.parametrize("cut", [1, 2, 27, 28, 40])
def test_request_moves_while_it_runs(
    either: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf, cut: int
) -> None:
    """From its first token on, and where what is computed ends with a block."""
    source, target = either
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    expected = single(prompt, NUM_OUTPUT)
    before = source.metrics()
    source.add("r", prompt, NUM_OUTPUT)
    source.step_until("r", "num_output_tokens", cut)
    left, right = move(source, target, prompt)
    assert outcome_of(right) == {"outcome": "exact"}
    assert right.token_ids == expected.token_ids
    assert right.text == expected.text
    assert left.finish_reason == "abort"
    assert left.kv_transfer_params == {"moved": True}
    assert cut <= len(left.token_ids) < NUM_OUTPUT
    assert left.token_ids == expected.token_ids[: len(left.token_ids)]
    assert delta(before, source.metrics(), "moves/moved") == 1
    # All but the last token came from there.
    local, peer, computed = right.sources
    assert (local, computed) == (0, 1)
    assert peer == len(prompt) + len(left.token_ids) - 1


def test_each_kind_moves_at_each_token(
    either: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(BLOCK_SIZE + 20)
    text = single(prompt, NUM_SHORT).text
    stop = {"stop": [text[len(text) // 2 :][:6], "never said"]}
    kinds = {**SAMPLING, "stop string": stop}
    cuts = cuts_with_the_same_tokens(either, single, prompt, kinds)
    all_tokens = sum(len(single(prompt, NUM_SHORT, **kind).token_ids) for kind in kinds.values())
    assert sum(map(len, cuts.values())) > all_tokens / 2
    assert all(cuts.values())


def cuts_with_the_same_tokens(
    engines: tuple[Engine, Engine], single: SingleEngine, prompt: Prompt, kinds: dict[str, Any]
) -> dict[str, set[int]]:
    """Short answers of these kinds move beside each other, at each of their tokens; where they were
    cut."""
    source, target = engines
    all_expected = {name: single(prompt, NUM_SHORT, **kinds[name]) for name in kinds}
    cuts: dict[str, set[int]] = {name: set() for name in kinds}
    for cut in range(1, NUM_SHORT):
        expected = {n: one for n, one in all_expected.items() if len(one.token_ids) > cut}
        left, right = move_at(cut, source, target, prompt, {n: kinds[n] for n in expected})
        for name, one in expected.items():
            there = left[name].token_ids
            assert there == one.token_ids[: len(there)], (name, cut)
            if left[name].finish_reason != "abort":  # it has ended before
                assert len(there) == len(one.token_ids)
                continue
            assert right[name].token_ids == one.token_ids, (name, cut)
            assert (right[name].text, right[name].finish_reason) == (one.text, one.finish_reason)
            cuts[name].add(len(there))
        assert target.reset_prefix_cache()
    return cuts


def move_at(
    cut: int, source: Engine, target: Engine, prompt: Prompt, kinds: dict[str, Any]
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Each when it has so many tokens; the two ends of their answers."""
    for name, options in kinds.items():
        source.add(name, prompt, NUM_SHORT, **options)
    asked: set[str] = set()
    left, right = dict[str, Answer](), dict[str, Answer]()
    while len(left) < len(kinds):
        for name, state in source.requests().items():
            if state["num_output_tokens"] >= cut and name not in asked:
                asked.add(name)
                target.add(name, prompt, NUM_SHORT, coming(prompt, source, name), **kinds[name])
        while any(state["status"] == "WAITING_FOR_KV" for state in target.requests().values()):
            right |= look(source, target)
            left |= source.drive(1)
        left |= source.drive(1)
    return left, right | target.run()


def expect_the_same(
    engines: tuple[Engine, Engine], single: SingleEngine, prompt: Prompt, **sampling: Any
) -> None:
    source, target = engines
    expected = single(prompt, NUM_OUTPUT, **sampling)
    source.add("r", prompt, NUM_OUTPUT, **sampling)
    source.step_until("r", "num_output_tokens", 5)
    left, right = move(source, target, prompt, **sampling)
    assert left.finish_reason == "abort"
    assert right.token_ids == expected.token_ids
    assert (right.text, right.finish_reason) == (expected.text, expected.finish_reason)
    assert 5 <= len(left.token_ids) < len(expected.token_ids)


def test_drafts_go_on_from_the_known_tokens(
    fleet: Fleet, engines: Engines, base_config: EngineConfig, prompt_of: PromptOf
) -> None:
    single = SingleEngine(fleet.engine(replace(base_config, llm=DRAFTS)))
    source, target = two(engines, llm=DRAFTS)
    prompt = (prompt_of(7) * 30)[:70]
    before = target.metrics()
    expect_the_same((source, target), single, prompt)
    kinds = {"greedy": {}, "regex": SAMPLING["regex"]}
    assert all(cuts_with_the_same_tokens((source, target), single, prompt, kinds).values())
    assert delta(before, target.metrics(), "accepted_tokens")
    # Nobody knows how often the source drew from the seed.
    source.add("s", prompt, 20, **SEED)
    target.add("s", prompt, 20, coming(prompt, source, "s"), **SEED)
    assert outcome_of(target.run()["s"]) == {"refused": "not_exact"}
    source.run()


def test_adapter_and_salt_go_on(engines: Engines, prompt_of: PromptOf, tmp_path: Path) -> None:
    pair = two(engines, llm=json.dumps(LORA))
    adapter = str(make_tiny_lora(tmp_path / "adapter", Path(pair[0].config.model), 3))
    kinds = {name: {**SAMPLING[name], "lora": adapter} for name in ("greedy", "seed")}
    kinds["salt"] = {"cache_salt": "salt"}
    kinds["adapter and salt"] = {"lora": adapter, "cache_salt": "salt"}
    cuts = cuts_with_the_same_tokens(pair, SingleEngine(pair[0]), prompt_of(70), kinds)
    assert all(len(of_kind) > 4 for of_kind in cuts.values())


def test_engines_with_a_pool(engines: Engines, single: SingleEngine, prompt_of: PromptOf) -> None:
    pair = two(engines, pool=POOL)
    expect_the_same(pair, single, prompt_of(2 * BLOCK_SIZE + 5), **SEED)
    for engine in pair:
        settle(engine)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=lambda s: f"{s[0]} to {s[1]}")
def test_engines_of_several_workers(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, sizes: tuple[int, int]
) -> None:
    """As many as the other one has, or not."""
    pairs = [
        two(engines, **({"llm": json.dumps({"tensor_parallel_size": size})} if size > 1 else {}))
        for size in sizes
    ]
    source, target = pairs[0][0], pairs[1][1]
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    expect_the_same((source, target), single, prompt, **SEED)


NUM_TURNS = 20


def test_request_moves_to_and_fro(
    either: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Back to where its blocks are in the prefix cache still; and however often, nothing is left of
    a turn.
    """
    first, second = either
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    num_output = 45 * NUM_TURNS
    expected = single(prompt, num_output, **SEED)
    first.add("r0", prompt, num_output, **SEED)
    first.step_until("r0", "num_output_tokens", 5)
    answers = dict[str, Answer]()
    for turn in range(NUM_TURNS):
        source, target = (first, second) if turn % 2 == 0 else (second, first)
        name = f"r{turn + 1}"
        target.add(name, prompt, num_output, coming(prompt, source, f"r{turn}"), **SEED)
        for look in itertools.count():
            answers |= source.drive(1) if look % 4 == 0 else {}
            source.counts()  # it answers, and computes nothing
            answers |= target.drive(5)
            if f"r{turn}" in answers:
                break
        assert answers[f"r{turn}"].finish_reason == "abort"
    answers |= first.run()
    last = answers[f"r{NUM_TURNS}"]
    assert last.token_ids == expected.token_ids
    assert last.sources[1] < last.sources[0]


def test_beside_others_of_both_engines(
    either: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Several move at once; others decode on."""
    source, target = either
    prompts = {f"m{i}": prompt_of(50 + 20 * i, f"m{i}") for i in range(3)}
    others = {f"o{i}": prompt_of(40, f"o{i}") for i in range(2)}
    for name, prompt in (prompts | others).items():
        source.add(name, prompt, NUM_OUTPUT)
    target.add("t", prompt_of(60, "t"), NUM_OUTPUT)
    source.step_until("o1", "num_output_tokens", 3)
    for name, prompt in prompts.items():
        target.add(name, prompt, NUM_OUTPUT, coming(prompt, source, name))
    left, right = dict[str, Answer](), dict[str, Answer]()
    while not prompts.keys() <= left.keys():
        left |= source.drive(1)
        right |= look(source, target)
    left |= source.run()
    right |= target.run()
    for name, prompt in prompts.items():
        assert left[name].finish_reason == "abort"
        single.assert_says(right[name], prompt, NUM_OUTPUT, name)
    for name, prompt in others.items():
        single.assert_says(left[name], prompt, NUM_OUTPUT, name)
    single.assert_says(right["t"], prompt_of(60, "t"), NUM_OUTPUT)


@pytest.mark.parametrize(
    ("cause", "name"), [("not_needed", "unknown"), ("move_not_running", "waits")]
)
def test_what_does_not_run_does_not_move(
    pair: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf, cause: str, name: str
) -> None:
    source, target = pair
    prompt = prompt_of(40)
    source.add("waits", prompt, 8)
    target.add("r", prompt, 8, coming(prompt, source, name))
    answers = dict[str, Answer]()
    while "r" not in answers:
        source.counts()  # the scheduler looks, and takes no step
        answers |= target.drive(1)
    assert outcome_of(answers["r"]) == {"refused": cause}
    assert source.run()["waits"].token_ids == single(prompt, 8).token_ids


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "untold"])
def test_other_prompt_is_not_handed_over(
    pair: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf, is_told: bool
) -> None:
    """Nor one that differs within its last block only."""
    source, target = pair
    prompt = prompt_of(40)
    other = prompt_of(40, "other") if is_told else [*prompt[:-1], prompt[-1] + 1]
    source.add("r", prompt, 60)
    source.step_until("r", "num_output_tokens", 3)
    target.add("r", other, 60, coming(other if is_told else None, source))
    answers = dict[str, Answer]()
    while "r" not in answers:
        source.counts()
        answers |= target.drive(1)
    assert outcome_of(answers["r"]) == {"refused": "move_hash_mismatch"}
    assert source.run()["r"].token_ids == single(prompt, 60).token_ids


def test_other_request_of_one_name_is_not_handed_over(
    pair: tuple[Engine, Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Clients choose names. This one's successor has the same prompt, and asks for other tokens."""
    source, target = pair
    prompt = prompt_of(40)
    successor = {"temperature": 1.0, "seed": 8}
    source.add("r", prompt, 60, **successor)
    source.step_until("r", "num_output_tokens", 3)
    target.add("r", prompt, 60, coming(prompt, source), temperature=1.0, seed=7)
    answers = dict[str, Answer]()
    while "r" not in answers:
        source.counts()
        answers |= target.drive(1)
    assert outcome_of(answers["r"]) == {"refused": "not_needed"}
    assert source.run()["r"].token_ids == single(prompt, 60, **successor).token_ids


@pytest.mark.parametrize(
    ("num_steps", "num_output"), [(0, 60), (1, 60), (2, 60), (3, NUM_OUTPUT), (5, 60), (8, 60)]
)
def test_source_that_dies_leaves_no_request_waiting(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, num_steps: int, num_output: int
) -> None:
    """Requests of all kinds go on if it was given the word, else they are refused, at once, and go
    on with what their clients have."""
    target = engines.shared("kv_both", transfer={**PATIENT, "load_timeout_s": 61})
    source = engines.own("kv_both", transfer={**PATIENT, "load_timeout_s": 60})
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    for name, options in SAMPLING.items():
        source.add(name, prompt, num_output, **options)
    source.step_until("seed and regex", "num_output_tokens", 5)
    known: dict[str, list[int]] = {}

    def step() -> None:
        known.update((name, tokens[0]) for name, tokens in source.step().items())

    step()
    kinds = {name: SAMPLING[name] for name in source.requests()}  # others have ended
    for name, options in kinds.items():
        target.add(name, prompt, num_output, coming(prompt, source, name), **options)
    right = dict[str, Answer]()
    for _ in range(num_steps):
        step()
        right |= target.drive(5)
    engines.kill(source)
    right |= target.run()
    refused = [name for name in kinds if "refused" in outcome_of(right[name])]
    for name in refused:
        assert outcome_of(right[name])["refused"].startswith(("move_", "not_needed"))
        again = begun(prompt, known[name])
        target.add(f"{name} again", prompt, num_output, again, **SAMPLING[name])
    answers = target.run()
    expected = single.beside((prompt, num_output, options) for options in kinds.values())
    for name, one in zip(kinds, expected, strict=True):
        answer = answers[f"{name} again"] if name in refused else right[name]
        assert answer.token_ids == one.token_ids, name
