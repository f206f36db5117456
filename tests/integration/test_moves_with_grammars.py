# SPDX-License-Identifier: Apache-2.0
"""Running requests with structured output move at each of their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind

from tests.integration import reasoning_plugin
from tests.integration.conftest import SingleEngine
from tests.integration.engines import Answer, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.moving import Moving
from tests.integration.reasoning_plugin import END
from tests.integration.test_moves import two
from tests.integration.test_resume import SCHEMA, SEED

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

NUM_OUTPUT = 26
REGEX = "(abc|abx){3}-[0-9]{4}"


def structured(**output: Any) -> dict[str, Any]:
    return {"structured_outputs": output, "ignore_eos": False}


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</call>",
    },
}
"""As tool calls are made where the model has no choice but to call."""
KINDS: dict[str, dict[str, Any]] = {
    "json": structured(json=SCHEMA),
    "regex": structured(regex=REGEX),
    "choice": structured(choice=["one of them", "another", "one or two"]),
    "grammar": structured(grammar='root ::= "a" [b-e] [x-z] ("no" | "yes")'),
    "tag": structured(structural_tag=json.dumps(TAG)),
    "seed": {**SEED, **structured(json=SCHEMA)},
    "stop string": {**structured(regex=REGEX), "stop": ["c-", "x-"], "min_tokens": 4},
    "no end": {**structured(json=SCHEMA), "ignore_eos": True},
}

KINDS_OF = {"xgrammar": [*KINDS], "guidance": [kind for kind in KINDS if kind != "tag"]}


def of_backend(backend: str, **config: Any) -> str:
    """Options of engines."""
    return json.dumps({"structured_outputs_config": {"backend": backend, **config}})


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest) -> str:
    return of_backend(request.param, disable_any_whitespace=True)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def pair(request: pytest.FixtureRequest, engines: Engines, llm: str) -> tuple[Engine, Engine]:
    return two(engines, llm=llm, runs_ahead=request.param)


@pytest.fixture(scope="module")
def one(fleet: Fleet, base_config: EngineConfig, llm: str) -> Iterator[SingleEngine]:
    with fleet.kept(replace(base_config, llm=llm)) as engine:
        yield SingleEngine(engine)


@pytest.mark.parametrize(
    ("llm", "kind"),
    [(backend, kind) for backend in KINDS_OF for kind in KINDS_OF[backend]],
    indirect=["llm"],
)
def test_it_moves_at_each_token_and_back(
    pair: tuple[Engine, Engine], one: SingleEngine, prompt_of: PromptOf, kind: str
) -> None:
    """Also at those with which its grammar ends; at the next one it moves to where it came from."""
    options, prompt = KINDS[kind], prompt_of(45)
    expected = one(prompt, NUM_OUTPUT, **options)
    num_tokens = len(expected.token_ids)
    first, second = pair
    there, back = set[int](), set[int]()
    for cut in range(1, num_tokens):
        moving = Moving(first, prompt, NUM_OUTPUT, options)
        moving.decode(cut)
        there.add(known := moving.move(second))
        if known + 1 < num_tokens:
            moving.decode(known + 1)
            back.add(moving.move(first))
        assert_same(moving.answer(), expected, cut)
        assert first.reset_prefix_cache()
        assert second.reset_prefix_cache()
    # Engines that run ahead compute a token more while they stop.
    assert there >= set(range(2, num_tokens))
    assert back >= set(range(4, num_tokens))


@pytest.mark.parametrize("kind", ["json", "regex", "no end"])
@pytest.mark.parametrize("llm", KINDS_OF, indirect=True)
def test_it_goes_on_where_it_has_stopped(
    pair: tuple[Engine, Engine], one: SingleEngine, prompt_of: PromptOf, kind: str
) -> None:
    """Nobody wants it any more, while others have gone on. Half of them move then, after all."""
    options, prompt = KINDS[kind], prompt_of(45)
    expected = one(prompt, NUM_OUTPUT, **options)
    beside = one(prompt_of(30), NUM_OUTPUT, **options)
    source, target = pair
    num_stopped = 0
    for cut in range(1, len(expected.token_ids) - 4):
        moving = Moving(source, prompt, NUM_OUTPUT, options)
        source.add("beside", prompt_of(30), NUM_OUTPUT, **options)
        moving.decode(cut)
        has_stopped = moving.stop_for(target, num_steps=3)
        if has_stopped and cut % 2:
            moving.move(target)
        num_stopped += has_stopped
        assert_same(moving.answer(), expected, cut)
        assert_same((moving.others | source.run())["beside"], beside, cut)
    assert num_stopped > cut / 2


def assert_same(answer: Answer, expected: Answer, cut: object) -> None:
    assert answer.token_ids == expected.token_ids, cut
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason), cut


AUTO = of_backend("auto")
NOT_FOR_XGRAMMAR = structured(json={"type": "integer", "multipleOf": 8, "maximum": 64})


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (of_backend("xgrammar"), of_backend("guidance")),
        (of_backend("guidance"), of_backend("guidance", disable_any_whitespace=True)),
        (AUTO, AUTO),
    ],
    ids=["backend", "whitespace", "what came first"],
)
def test_it_stays_where_others_would_make_its_masks(
    engines: Engines, prompt_of: PromptOf, here: str, there: str
) -> None:
    """Where no backend is chosen, vLLM's first request chooses that of all others. What has no
    structured output moves."""
    source, target = engines.own("kv_both", llm=here), engines.own("kv_both", llm=there)
    if here == there:
        target.ask(prompt_of(20, "first"), 4, **NOT_FOR_XGRAMMAR)
    prompt, options = prompt_of(45), KINDS["json"]
    expected = source.ask(prompt, NUM_OUTPUT, **options)
    moving = Moving(source, prompt, NUM_OUTPUT, options)
    moving.decode(3)
    assert moving.refusal_of(target) == "move_incompatible"
    assert_same(moving.answer(), expected, "stays")
    plain = source.ask(prompt, NUM_OUTPUT)
    moving = Moving(source, prompt, NUM_OUTPUT, {})
    moving.decode(3)
    moving.move(target)
    assert_same(moving.answer(), plain, "moves")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def reasoning(request: pytest.FixtureRequest, engines: Engines) -> tuple[Engine, Engine]:
    plugin = str(Path(reasoning_plugin.__file__))
    llm = of_backend("auto", reasoning_parser="second_end", reasoning_parser_plugin=plugin)
    return two(engines, llm=llm, runs_ahead=request.param)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_reasoning_moves_at_each_token_but_just_behind_its_end(
    reasoning: tuple[Engine, Engine], prompt_of: PromptOf, is_streamed: bool
) -> None:
    """The grammar begins where the reasoning has ended. Parsers may drop blanks that come at once
    with what is before them, so a stream does not move while it has no more of its answer."""
    source, target = reasoning
    options = {**structured(regex=r"\n {3}[0-9]{6}"), "logit_bias": {END: 100.0}}
    if not is_streamed:
        options["output_kind"] = RequestOutputKind.FINAL_ONLY
    prompt = [token for token in prompt_of(45) if token != END]
    expected = source.ask(prompt, NUM_OUTPUT, **options)
    assert expected.token_ids[:2] == [END, END]
    decode = AutoTokenizer.from_pretrained(source.config.model).decode
    num_blank = sum(not decode(expected.token_ids[2:end]).strip() for end in range(3, 9))
    assert num_blank
    refused = set[int]()
    for cut in range(1, len(expected.token_ids)):
        moving = Moving(source, prompt, NUM_OUTPUT, options)
        moving.decode(cut)
        known = cut + moving.state()["num_in_flight_tokens"]
        if is_streamed and 2 <= known <= 2 + num_blank:
            assert moving.refusal_of(target) == "move_behind_reasoning"
            refused.add(known)
            moving.decode(3 + num_blank)
        moving.move(target)
        assert_same(moving.answer(), expected, cut)
        for engine in reasoning:
            assert engine.reset_prefix_cache()
    assert len(refused) == (1 + num_blank) * is_streamed
