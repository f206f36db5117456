# SPDX-License-Identifier: Apache-2.0
"""More models and options of vLLM through P and D in both orders, against one engine.

docs/models.md is the table of all of them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.engines import Answer, EngineConfig, PromptOf
from tests.integration.pairs import ORDERS
from tests.integration.test_models import NUM_TOKENS, Three, needs_fp8, three  # noqa: F401
from vllm_ascend_pd.testing.tiny_lora import RANK, make_tiny_lora

pytestmark = pytest.mark.engine

Prompt = list[int]


def ask(engines: Three, order: str, prompt: Prompt, lora: str | None = None, **more: Any) -> Answer:
    """What the consumer answers, with the producer's KV."""
    return engines.pair.ask_in(order, prompt, 24, {"lora": lora}, lora=lora, **more)


def loaded(prompt: Prompt, num_computed: int = 0) -> tuple[int, int, int]:
    """``num_computed`` is 1 where the consumer must sample the first token itself."""
    return (0, len(prompt) - num_computed, num_computed)


# Prompts that are no tokens.


@pytest.mark.parametrize("order", ORDERS)
def test_prompt_embeddings(three: Callable[..., Three], order: str) -> None:  # noqa: F811
    """Their token ids are all equal, so it is their content that tells two prompts apart."""
    engines = three({"enable_prompt_embeds": True})
    numbers = np.random.default_rng(ORDERS.index(order)).normal(size=(NUM_TOKENS + 1, 128))
    *embeds, other = numbers.tolist()
    expected = engines.single.ask([], 24, embeds=embeds)
    if order == "prefill first":
        known = engines.producer.prefill([], embeds=embeds)
        answer = engines.consumer.ask([], 24, known, embeds=embeds)
    else:
        pair, transfer_id = engines.pair, engines.pair.new_id()
        pair.add_decode("both", [], transfer_id, 24, embeds=embeds)
        pair.add_prefill("both", [], transfer_id, embeds=embeds)
        answer = pair.run()["both"]
    assert answer.token_ids == expected.token_ids
    assert answer.sources == (0, NUM_TOKENS - 1, 1)
    for similar in ([other, *embeds[1:]], [*embeds[:-2], other, embeds[-1]]):
        expected = engines.single.ask([], 24, embeds=similar)
        known = engines.producer.prefill([], embeds=embeds)
        answer = engines.consumer.ask([], 24, known, embeds=similar)
        assert answer.token_ids == expected.token_ids


# LoRA.

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}


@pytest.fixture(scope="session")
def loras(tmp_path_factory: pytest.TempPathFactory, base_config: EngineConfig) -> list[str]:
    folder = tmp_path_factory.mktemp("loras")
    assert LORA["max_lora_rank"] >= RANK
    model = Path(base_config.model)
    return [str(make_tiny_lora(folder / name, model, seed)) for seed, name in enumerate("ab")]


@pytest.mark.parametrize("order", ORDERS)
def test_lora(
    three: Callable[..., Three],  # noqa: F811
    loras: list[str],
    prompt_of: PromptOf,
    order: str,
) -> None:
    engines = three(LORA)
    prompt = prompt_of(NUM_TOKENS)
    expected = engines.single.ask(prompt, 24, lora=loras[0])
    assert expected.token_ids != engines.single.ask(prompt, 24).token_ids
    answer = ask(engines, order, prompt, loras[0])
    assert answer.token_ids == expected.token_ids
    assert answer.sources == loaded(prompt)


@pytest.mark.parametrize("order", ORDERS)
def test_kv_of_another_lora_never_hits(
    three: Callable[..., Three],  # noqa: F811
    loras: list[str],
    prompt_of: PromptOf,
    order: str,
) -> None:
    """The same prompt, one after another: each adapter, and none, has KV of its own."""
    engines = three(LORA)
    prompt = prompt_of(NUM_TOKENS)
    answers = []
    for lora in (loras[0], None, loras[1]):
        expected = engines.single.ask(prompt, 24, lora=lora)
        answer = ask(engines, order, prompt, lora)
        assert answer.token_ids == expected.token_ids
        assert answer.sources == loaded(prompt)
        answers.append(answer.token_ids)
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_reference_to_the_kv_of_another_lora_is_refused(
    three: Callable[..., Three],  # noqa: F811
    loras: list[str],
    prompt_of: PromptOf,
) -> None:
    """A client that hands the wrong reference to the consumer."""
    engines = three(LORA)
    prompt = prompt_of(NUM_TOKENS)
    known = engines.producer.prefill(prompt, lora=loras[0])
    answer = engines.consumer.ask(prompt, 24, known, lora=loras[1])
    assert answer.token_ids == engines.single.ask(prompt, 24, lora=loras[1]).token_ids
    assert answer.sources == (0, 0, len(prompt))


def test_requests_with_and_without_lora_share_a_batch(
    three: Callable[..., Three],  # noqa: F811
    loras: list[str],
    prompt_of: PromptOf,
) -> None:
    """On one engine, and on a consumer: none gets what its neighbours ask for."""
    engines = three(LORA)
    adapters = {"first": loras[0], "none": None, "second": loras[1]}
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in adapters}
    for engine in (engines.single, engines.consumer):
        for name, lora in adapters.items():
            known = None
            if engine is engines.consumer:
                known = engines.producer.prefill(prompts[name], lora=lora)
            engine.add(name, prompts[name], 24, known, lora=lora)
        answers = engine.run()
        for name, lora in adapters.items():
            expected = engines.single.ask(prompts[name], 24, lora=lora)
            assert answers[name].token_ids == expected.token_ids, name


def test_prompt_logprobs_are_those_with_the_adapter_of_their_request(
    three: Callable[..., Three],  # noqa: F811
    loras: list[str],
    prompt_of: PromptOf,
    base_config: EngineConfig,
    tmp_path: Path,
) -> None:
    """Of what each request has said alone; the adapters are for the head, too."""
    engine = three(LORA).single
    first, second = (add_head(Path(lora), base_config.model, tmp_path) for lora in loras)
    adapters = {"first": first, "none": None, "second": second}
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in adapters}
    said = {
        name: engine.ask(prompts[name], 8, lora=lora, logprobs=2) for name, lora in adapters.items()
    }
    for name, lora in adapters.items():
        prompt = prompts[name] + said[name].token_ids
        engine.add(name, prompt, 1, lora=lora, prompt_logprobs=2)
    answers = engine.run()
    for name, expected in said.items():
        for ours, theirs in zip(
            answers[name].prompt_logprobs[NUM_TOKENS:], expected.logprobs, strict=True
        ):
            assert ours == pytest.approx(theirs, abs=1e-3), name


def add_head(lora: Path, model: str, folder: Path) -> str:
    """The same adapter, which changes what the model's head computes as well."""
    shutil.copytree(lora, folder / lora.name)
    file = folder / lora.name / "adapter_model.safetensors"
    config = json.loads((Path(model) / "config.json").read_text())
    random = np.random.default_rng(ord(lora.name[-1]))
    down = random.normal(size=(RANK, config["hidden_size"])) / config["hidden_size"] ** 0.5
    up = random.normal(size=(config["vocab_size"], RANK))
    head = {"lora_A": down.astype(np.float32), "lora_B": up.astype(np.float32)}
    weights = {f"base_model.model.lm_head.{part}.weight": w for part, w in head.items()}
    save_file(load_file(file) | weights, file)
    return str(folder / lora.name)


# What is asked of the output.

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd", "ef"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
PATTERN = "[abc]{3}-[0-9]{4}"
CHOICES = ["first", "second", "third"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
@pytest.mark.parametrize("kind", ["json", "regex", "choice"])
def test_structured_output(
    three: Callable[..., Three],  # noqa: F811
    prompt_of: PromptOf,
    kind: str,
    backend: str,
    order: str,
) -> None:
    structured = {"json": json.dumps(SCHEMA), "regex": PATTERN, "choice": CHOICES}
    config = {"backend": backend, "disable_any_whitespace": backend != "outlines"}
    engines = three({"structured_outputs_config": config})
    prompt = prompt_of(NUM_TOKENS)
    options = {"structured_outputs": {kind: structured[kind]}, "ignore_eos": False}
    expected = engines.single.ask(prompt, 24, **options)
    answer = ask(engines, order, prompt, **options)
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert answer.sources == loaded(prompt, num_computed=1)
    if kind == "regex":
        assert re.fullmatch(PATTERN, answer.text)
    elif kind == "choice":
        assert answer.text in CHOICES
    elif backend != "outlines":  # which may go on with blanks until it may not
        assert json.loads(answer.text).keys() == {"name", "ok"}


@pytest.mark.parametrize("order", ORDERS)
def test_stop_strings(
    three: Callable[..., Three],  # noqa: F811
    prompt_of: PromptOf,
    order: str,
) -> None:
    engines = three()
    prompt = prompt_of(NUM_TOKENS)
    whole = engines.single.ask(prompt, 24).text
    stop = [whole[len(whole) // 2 :][:3]]
    expected = engines.single.ask(prompt, 24, stop=stop)
    before = engines.consumer.metrics().get("prompt_tokens/peer", 0)
    answer = ask(engines, order, prompt, stop=stop)
    assert (answer.text, answer.finish_reason) == (expected.text, "stop")
    assert len(answer.text) < len(whole)
    # The front end finds the string and aborts, so the engine has no answer to put more into.
    assert engines.consumer.metrics()["prompt_tokens/peer"] - before == len(prompt)


@pytest.mark.parametrize("order", ORDERS)
def test_logprobs(
    three: Callable[..., Three],  # noqa: F811
    prompt_of: PromptOf,
    order: str,
) -> None:
    engines = three()
    prompt = prompt_of(NUM_TOKENS)
    expected = engines.single.ask(prompt, 24, logprobs=5)
    answer = ask(engines, order, prompt, logprobs=5)
    assert answer.sources == loaded(prompt, num_computed=1)
    assert len(answer.logprobs) == 24
    for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_prompt_logprobs(
    three: Callable[..., Three],  # noqa: F811
    prompt_of: PromptOf,
    order: str,
) -> None:
    """They need the whole prompt computed, so the consumer computes it."""
    engines = three()
    prompt = prompt_of(NUM_TOKENS)
    expected = engines.single.ask(prompt, 24, prompt_logprobs=2)
    answer = ask(engines, order, prompt, prompt_logprobs=2)
    assert answer.token_ids == expected.token_ids
    assert len(answer.prompt_logprobs) == len(prompt)
    for ours, theirs in zip(answer.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert answer.outcome == "not_needed"


# KV caches.


@needs_fp8
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("cache_dtype", "dtype"), [("fp8", "bfloat16"), ("fp8_e5m2", "float32")])
def test_fp8_kv(
    three: Callable[..., Three],  # noqa: F811
    prompt_of: PromptOf,
    cache_dtype: str,
    dtype: str,
    order: str,
) -> None:
    engines = three({"kv_cache_dtype": cache_dtype}, dtype=dtype)
    prompt = prompt_of(NUM_TOKENS)
    expected = engines.single.ask(prompt, 24)
    answer = ask(engines, order, prompt)
    assert answer.token_ids == expected.token_ids
    assert answer.sources == loaded(prompt)


@needs_fp8
def test_fp8_kv_is_not_mixed_with_another_dtype(
    three: Callable[..., Three],  # noqa: F811
    prompt_of: PromptOf,
) -> None:
    """Their pages are of one size, and mean different numbers."""
    prompt = prompt_of(NUM_TOKENS)
    e4m3 = three({"kv_cache_dtype": "fp8"}, dtype="bfloat16")
    e5m2 = three({"kv_cache_dtype": "fp8_e5m2"}, dtype="bfloat16")
    answer = e5m2.consumer.ask(prompt, 24, e4m3.producer.prefill(prompt))
    assert answer.token_ids == e5m2.single.ask(prompt, 24).token_ids
    assert answer.sources == (0, 0, len(prompt))
    assert answer.outcome == "incompatible"


@pytest.mark.parametrize("order", ORDERS)
def test_tied_kv_layers(
    three: Callable[..., Three],  # noqa: F811
    models: Callable[..., str],
    prompt_of: PromptOf,
    order: str,
) -> None:
    engines = three(model=models("tied"))
    prompt = prompt_of(NUM_TOKENS)
    expected = engines.single.ask(prompt, 24)
    answer = ask(engines, order, prompt)
    assert answer.token_ids == expected.token_ids
    assert answer.sources == loaded(prompt)
