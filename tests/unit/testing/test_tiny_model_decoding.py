# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of the test model tells right KV from wrong KV: a reference run in torch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.testing.tiny_model import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny").path
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def decode(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The tokens, and for each the distance between the best logit and the second."""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = [logits[0].topk(2).values.tolist() for logits in generated.logits]
    return generated.sequences[0, len(prompt) :].tolist(), [
        first - second for first, second in best_two
    ]


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.mark.parametrize("num_prompt_tokens", [3, 40, 400])
def test_greedy_decoding_neither_stops_nor_gets_stuck(model: Any, num_prompt_tokens: int) -> None:
    tokens, gaps = decode(model, random_prompt(num_prompt_tokens, num_prompt_tokens))
    assert len(tokens) == NUM_TOKENS
    assert len(set(tokens)) > NUM_TOKENS // 2
    assert sum(a == b for a, b in itertools.pairwise(tokens)) <= 3
    assert sorted(gaps)[NUM_TOKENS // 2] > 0.3


@pytest.mark.parametrize("position", [0, 100, 399])
def test_one_changed_prompt_token_changes_the_output(model: Any, position: int) -> None:
    prompt = random_prompt(7, 400)
    changed = list(prompt)
    changed[position] = 3 if prompt[position] != 3 else 4
    assert decode(model, prompt)[0] != decode(model, changed)[0]
