# SPDX-License-Identifier: Apache-2.0
"""Requests that another engine has begun go on with the tokens that it would have given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration import reasoning_plugin
from tests.integration.engines import BLOCK_SIZE, Answer, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.pool_steps import POOL, delta, provenance, settle, store
from tests.integration.reasoning_plugin import END
from tests.integration.test_identity import LORA
from tests.integration.test_speculation import LLM as DRAFTS
from vllm_ascend_pd.net.trust import Secret
from vllm_ascend_pd.resume import ResumeKey
from vllm_ascend_pd.testing.tiny_lora import make_tiny_lora

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

Prompt = list[int]
NUM_OUTPUT = 14
SEED = {"temperature": 0.9, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = {"type": "regex", "pattern": "[a-c]{8,30}"}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": SEED,
    "seed and top": {**SEED, "top_p": 0.9, "top_k": 50},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5},
    "seed and penalties": {**SEED, "repetition_penalty": 1.3},
    "bad words and bias": {"bad_words": [" the", "a"], "logit_bias": {400: 2.0, 7: -5.0}},
    "min tokens": {"min_tokens": 6, "stop_token_ids": list(range(0, 2000, 3))},
    "allowed tokens": {**SEED, "allowed_token_ids": [5, 9, 11, 400]},
    "repetition": {
        **SEED,
        "allowed_token_ids": [5, 9, 11],
        "min_tokens": 11,
        "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2},
    },
    "json": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    "any json": {"structured_outputs": {"json_object": True}, **SEED},
    "grammar": {"structured_outputs": {"grammar": 'root ::= ("abc" | "abx")+ "."'}, **SEED},
    "structural tag": {
        "structured_outputs": {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {"type": "tag", "begin": "<a>", "end": "</a>", "content": REGEX},
                }
            )
        },
        **SEED,
    },
    "regex": {"structured_outputs": {"regex": "(abc|abx){20}-[0-9]{4}"}, "ignore_eos": False},
    "choice": {
        "structured_outputs": {"choice": ["one of them", "another", "one or two"]},
        "ignore_eos": False,
    },
    "seed and regex": {**SEED, "structured_outputs": {"regex": "[a-z]{90}"}, "ignore_eos": False},
}


def begun(
    prompt: Prompt,
    token_ids: list[int],
    key: ResumeKey | None = None,
    only_exact: bool = True,
    made_by: str = "",
) -> dict[str, Any]:
    """The ``kv_transfer_params`` of a request that has given these tokens elsewhere."""
    signed = (key or ResumeKey(None)).sign("cmpl-1", prompt, token_ids, only_exact, made_by=made_by)
    return {"resume": signed.to_params(), "return_provenance": True}


def expect_the_same_from_every_cut(
    engine: Engine, prompt: Prompt, expected: Answer, max_tokens: int = NUM_OUTPUT, **more: Any
) -> None:
    """All of them at once, so that they are also computed beside each other."""
    for cut in range(1, len(expected.token_ids) + 1):
        kv = begun(prompt, expected.token_ids[:cut])
        engine.add(f"cut {cut}", prompt, max_tokens, kv, **more)
    answers = engine.run()
    for cut in range(1, len(expected.token_ids) + 1):
        answer = answers[f"cut {cut}"]
        assert answer.token_ids == expected.token_ids, cut
        assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason), cut
        if "stop" not in more:  # which the front end finds, and aborts the request
            assert answer.kv_transfer_params["resume"] == {"outcome": "exact"}


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines.shared("kv_both")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def either(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    return engines.shared("kv_both", runs_ahead=request.param)


@pytest.mark.parametrize("name", SAMPLING)
def test_tokens_are_those_of_one_engine_wherever_the_answer_was_cut(
    either: Engine, single: SingleEngine, prompt_of: PromptOf, name: str
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    expected = single(prompt, NUM_OUTPUT, **SAMPLING[name])
    assert len(expected.token_ids) > 2
    expect_the_same_from_every_cut(either, prompt, expected, **SAMPLING[name])


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_stop_string_is_found_across_the_cut(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf, min_tokens: int
) -> None:
    prompt = prompt_of(40)
    text = single(prompt, NUM_OUTPUT).text
    middle = len(text) // 2
    stop = {"stop": [text[middle : middle + 6], "never said"], "min_tokens": min_tokens}
    expected = single(prompt, NUM_OUTPUT, **stop)
    assert expected.finish_reason == "stop" or min_tokens
    expect_the_same_from_every_cut(engine, prompt, expected, **stop)


def test_end_of_sequence_ends_it(engine: Engine, single: SingleEngine, prompt_of: PromptOf) -> None:
    """Where the answer would have ended, and in the middle of tokens that went on after it."""
    prompt = prompt_of(40)
    plain = single(prompt, NUM_OUTPUT).token_ids
    ends = {"stop_token_ids": [plain[5]]}
    expected = single(prompt, NUM_OUTPUT, **ends)
    assert expected.finish_reason == "stop"
    expect_the_same_from_every_cut(engine, prompt, expected, **ends)
    answer = engine.ask(prompt, NUM_OUTPUT, begun(prompt, plain), **ends)
    assert answer.token_ids == expected.token_ids
    assert answer.finish_reason == "stop"


def test_prompt_and_output_may_take_many_chunks(
    either: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """More output than a step computes, beside requests that decode."""
    prompt = prompt_of(300)
    expected = single(prompt, 320, **SEED)
    either.add("other", prompt_of(50, "other"), 60)
    for cut in (30, 299, 319):
        either.add(f"{cut}", prompt, 320, begun(prompt, expected.token_ids[:cut]), **SEED)
    answers = either.run()
    for cut in (30, 299, 319):
        assert answers[f"{cut}"].token_ids == expected.token_ids, cut
    assert answers["other"].token_ids == single(prompt_of(50, "other"), 60).token_ids


def test_first_chunk_is_all_that_is_known(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Although the prompt takes several steps to compute."""
    prompt = prompt_of(700)
    expected = single(prompt, NUM_OUTPUT).token_ids
    engine.add("r", prompt, NUM_OUTPUT, begun(prompt, expected[:9]))
    assert engine.step() == {"r": [expected[:9]]}
    assert engine.run()["r"].token_ids == expected


def test_resumed_and_resumed_again(
    either: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """The second time after all that the first engine and this one have given; both go on."""
    prompt = prompt_of(40)
    expected = single(prompt, NUM_OUTPUT, **SEED)
    either.add("first", prompt, NUM_OUTPUT, begun(prompt, expected.token_ids[:3]), **SEED)
    tokens: list[int] = []
    while len(tokens) < 8:
        tokens = either.step().get("first", [tokens])[0]
    either.add("again", prompt, NUM_OUTPUT, begun(prompt, tokens), **SEED)
    either.add("same", prompt, NUM_OUTPUT, begun(prompt, tokens), **SEED)
    answers = either.run()
    for name in ("first", "again", "same"):
        assert answers[name].token_ids == expected.token_ids, name


@pytest.mark.parametrize("when", ["before any step", "in the first step", "once it decodes"])
def test_client_that_leaves_takes_everything_along(
    either: Engine, single: SingleEngine, prompt_of: PromptOf, when: str
) -> None:
    """No leak: see ``engines``."""
    prompt = prompt_of(400)
    regex = SAMPLING["seed and regex"]
    expected = single(prompt, NUM_OUTPUT, **regex).token_ids
    either.add("gone", prompt, NUM_OUTPUT, begun(prompt, expected[:5]), **regex)
    if when == "before any step":
        either.abort("gone")
    elif when == "in the first step":
        either.abort_in_step("gone")
    else:
        either.step_until("gone", "num_output_tokens", 7)
        either.abort_in_step("gone")
    either.run()
    answer = either.ask(prompt, NUM_OUTPUT, begun(prompt, expected[:5]), **regex)
    assert answer.token_ids == expected


def test_preempted_right_after(engines: Engines, single: SingleEngine, prompt_of: PromptOf) -> None:
    """With a seed, whose numbers stay with the worker."""
    small = engines.shared("kv_both", num_blocks=24, max_model_len=512)
    names = [f"{i}" for i in range(6)]
    expected = {name: single(prompt_of(100, name), 60, **SEED).token_ids for name in names}
    before = small.metrics()
    for name, token_ids in expected.items():
        prompt = prompt_of(100, name)
        small.add(name, prompt, 60, begun(prompt, token_ids[: 10 + 3 * int(name)]), **SEED)
    answers = small.run()
    assert delta(before, small.metrics(), "preemptions")
    for name, token_ids in expected.items():
        assert answers[name].token_ids == token_ids, name


def test_drafts_from_the_known_tokens(
    fleet: Fleet, engines: Engines, base_config: EngineConfig, prompt_of: PromptOf
) -> None:
    single = fleet.engine(replace(base_config, llm=DRAFTS))
    engine = engines.shared("kv_both", llm=DRAFTS)
    prompt = (prompt_of(7) * 30)[:70]
    expected = single.ask(prompt, 40)
    before = engine.metrics()
    expect_the_same_from_every_cut(engine, prompt, expected, 40)
    assert delta(before, engine.metrics(), "accepted_tokens")
    # Nobody knows how often the first engine drew from the seed.
    tokens = single.ask(prompt, 20, **SEED).token_ids
    refused = engine.ask(prompt, 20, begun(prompt, tokens[:5]), **SEED)
    assert refused.kv_transfer_params["resume"] == {"refused": "not_exact"}
    answer = engine.ask(prompt, 20, begun(prompt, tokens[:5], only_exact=False), **SEED)
    assert answer.token_ids[:5] == tokens[:5]
    assert len(answer.token_ids) == 20
    assert answer.kv_transfer_params["resume"] == {"outcome": "sampled"}


def test_adapter(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, tmp_path: Path
) -> None:
    engine = engines.shared("kv_both", llm=json.dumps(LORA))
    adapter = str(make_tiny_lora(tmp_path / "adapter", Path(engine.config.model), 3))
    prompt = prompt_of(70)
    expected = engine.ask(prompt, NUM_OUTPUT, lora=adapter)
    assert expected.token_ids != single(prompt, NUM_OUTPUT).token_ids
    assert engine.reset_prefix_cache()
    expect_the_same_from_every_cut(engine, prompt, expected, lora=adapter)


@pytest.mark.parametrize("is_ended", [True, False])
def test_grammar_begins_where_the_reasoning_has_ended(
    engines: Engines, prompt_of: PromptOf, is_ended: bool
) -> None:
    """It ends with a token of the output, or never; the grammar accepts what comes after it."""
    plugin = str(Path(reasoning_plugin.__file__))
    config = {"reasoning_parser": "second_end", "reasoning_parser_plugin": plugin}
    engine = engines.shared("kv_both", llm=json.dumps({"structured_outputs_config": config}))
    prompt = [token for token in prompt_of(40) if token != END]
    more = {
        "structured_outputs": {"regex": "[0-9]{40}"},
        "logit_bias": {END: 100.0 if is_ended else -100.0},
    }
    expected = engine.ask(prompt, NUM_OUTPUT, **more)
    if is_ended:
        assert expected.token_ids[:2] == [END, END]
        assert END not in expected.token_ids[2:]
    free = engine.ask(prompt, NUM_OUTPUT, logit_bias=more["logit_bias"])
    assert (free.token_ids == expected.token_ids) is not is_ended
    expect_the_same_from_every_cut(engine, prompt, expected, **more)


@pytest.mark.parametrize(
    ("script", "sources"),
    [
        ("", {"dram": 2 * BLOCK_SIZE + 5}),
        ("get:ok*2,fail", {"dram": 2 * BLOCK_SIZE, "computed": 5}),
    ],
    ids=["loaded", "failed"],
)
def test_output_blocks_come_from_the_pool(
    engines: Engines,
    single: SingleEngine,
    prompt_of: PromptOf,
    script: str,
    sources: dict[str, int],
) -> None:
    """If one fails to load, what the step has drawn from the seed is undone."""
    engine = engines.shared(
        "kv_both", pool=POOL, pool_faults="get:ok*", transfer={"load_mode": "step"}
    )
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    expected = single(prompt, 100, **SEED)
    store(engine, prompt, 80, **SEED)
    before = engine.metrics()
    engine.set_pool_faults(script)
    answer = engine.ask(prompt, 100, begun(prompt, expected.token_ids[:75]), **SEED)
    assert answer.token_ids == expected.token_ids
    assert provenance(answer) == sources
    assert delta(before, engine.metrics(), "recovered_requests") == bool(script)
    settle(engine)


def test_each_kind_goes_on_from_the_pool_wherever_the_answer_was_cut(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared(
        "kv_both", pool=POOL, pool_faults="get:ok*", transfer={"load_mode": "step"}
    )
    prompt = prompt_of(2 * BLOCK_SIZE + 20)
    expected = {n: single(prompt, NUM_OUTPUT, **kind) for n, kind in SAMPLING.items()}
    for kind in SAMPLING.values():
        store(engine, prompt, NUM_OUTPUT, **kind)
    for cut in range(1, NUM_OUTPUT):
        names = [name for name in SAMPLING if len(expected[name].token_ids) > cut]
        for name in names:
            known = expected[name].token_ids[:cut]
            engine.add(name, prompt, NUM_OUTPUT, begun(prompt, known), **SAMPLING[name])
        answers = engine.run()
        for name in names:
            assert answers[name].token_ids == expected[name].token_ids, (name, cut)
            assert answers[name].kv_transfer_params["resume"] == {"outcome": "exact"}
            assert provenance(answers[name]).get("computed", 0) <= 20
        assert any("dram" in provenance(answers[name]) for name in names)
        settle(engine)
        assert engine.reset_prefix_cache()


# What is refused.


def refusals_of(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    after = engine.metrics()
    names = {name for name in after if name.startswith("resumes/")}
    return {n.split("/")[1]: after[n] - before.get(n, 0) for n in names if delta(before, after, n)}


@pytest.mark.parametrize(
    ("cause", "more"),
    [
        ("not_exact", {"temperature": 0.8}),
        ("logprobs", {"logprobs": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("n", {**SEED, "n": 2}),
        ("bad_tokens", {"max_tokens": 2}),
        ("grammar", {"structured_outputs": {"regex": "[0-9]{30}"}}),
    ],
)
def test_request_that_cannot_go_on_ends_with_its_cause(
    either: Engine, single: SingleEngine, prompt_of: PromptOf, cause: str, more: dict[str, Any]
) -> None:
    prompt = prompt_of(40)
    before = either.metrics()
    kv = begun(prompt, single(prompt, 8, structured_outputs={"regex": "[a-z]{30}"}).token_ids[:3])
    either.add("other", prompt_of(40, "other"), 8)
    either.add("refused", prompt, kv=kv, **{"max_tokens": 8, **more})
    answers = either.run()
    assert answers["other"].token_ids == single(prompt_of(40, "other"), 8).token_ids
    assert answers["refused"].finish_reason == "error"
    counted = refusals_of(either, before)
    if cause == "grammar":
        assert counted.pop("exact") == 1
    assert set(counted) == {cause}
    if cause != "n":
        assert answers["refused"].kv_transfer_params["resume"] == {"refused": cause}


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("bad_tokens", {"output_token_ids": [5, 1 << 31]}),
        ("malformed", {"output_token_ids": []}),
        ("malformed", {"output_token_ids": [-1]}),
        ("malformed", {"steer": 1}),
        ("other_prompt", {"prompt_digest": "0"}),
    ],
)
def test_what_nobody_can_have_seen_is_refused(
    engine: Engine, prompt_of: PromptOf, cause: str, changes: dict[str, Any]
) -> None:
    prompt = prompt_of(40)
    kv = begun(prompt, [5, 6])
    answer = engine.ask(prompt, 8, {"resume": {**kv["resume"], **changes}})
    assert answer.finish_reason == "error"
    assert answer.kv_transfer_params["resume"] == {"refused": cause}


def test_only_who_has_the_secret_can_have_a_request_resumed(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a secret of more than 32 bytes for tests")
    path.chmod(0o600)
    engine = engines.own("kv_both", secret_file=str(path))
    prompt = prompt_of(40)
    expected = single(prompt, 8).token_ids
    others = Secret(b"another secret of more than 32 bytes ....")
    for key in (ResumeKey(None), ResumeKey(others)):
        answer = engine.ask(prompt, 8, begun(prompt, expected[:3], key))
        assert answer.kv_transfer_params["resume"] == {"refused": "unsigned"}
    signed = begun(prompt, expected[:3], ResumeKey(Secret.load(str(path))))
    assert engine.ask(prompt, 8, signed).token_ids == expected
    steered = {"resume": {**signed["resume"], "output_token_ids": expected[:4]}}
    answer = engine.ask(prompt, 8, steered)
    assert answer.kv_transfer_params["resume"] == {"refused": "unsigned"}


def test_transfer_and_resume_exclude_each_other(engine: Engine, prompt_of: PromptOf) -> None:
    prompt = prompt_of(40)
    answer = engine.ask(prompt, 8, {**begun(prompt, [5]), "do_remote_decode": True})
    assert answer.kv_transfer_params["resume"] == {"refused": "do_remote_decode"}
