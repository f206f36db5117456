# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind, and how two answers to one of them may differ: not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Any

from tests.integration.engines import BLOCK_SIZE, Answer

VOCABULARY = range(300, 2000)
MAX_LENGTH = 14 * BLOCK_SIZE
"""Tokens of a prompt and its answer: a third of the small engines' blocks."""
_NUM_STEMS = 6
_TOLERANCE = 2e-3
"""Of a log probability: the same prompt may be computed in other chunks."""

_PAIRS = [a + b for a in ascii_lowercase for b in ascii_lowercase]
"""Of letters. Most tokens of the tiny model's hold one, and many are one."""

_INTEGER_OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Spec:
    """A request, as a client would send it."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: dict[str, Any]
    salt: str | None
    priority: int
    lora: str | None = None
    """The folder of its adapter."""

    @property
    def can_move(self) -> bool:
        """Logprobs of tokens that another engine has given are not known."""
        return not {"n", "logprobs", "prompt_logprobs"} & set(self.sampling)

    @property
    def for_prefill(self) -> dict[str, Any]:
        """What a router sends to the engine that computes the prompt: one token of one sample."""
        return {k: v for k, v in self.sampling.items() if k not in ("n", "min_tokens")}


def _token(draw: Random) -> int:
    return draw.choice(VOCABULARY)


def _seeded(draw: Random) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": draw.randrange(1000)}


def _structured(**constraint: Any) -> dict[str, Any]:
    return {"structured_outputs": constraint, "ignore_eos": False}


KINDS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "greedy": lambda draw: {},
    "seed": lambda draw: _seeded(draw),
    "samples": lambda draw: {**_seeded(draw), "n": draw.choice([2, 3])},
    "top p": lambda draw: {**_seeded(draw), "top_p": draw.choice([0.3, 0.9])},
    "min p": lambda draw: {**_seeded(draw), "min_p": draw.choice([0.05, 0.5])},
    "equal samples": lambda draw: {"temperature": 0.9, "top_k": 1, "n": 2},
    "logprobs": lambda draw: {"logprobs": 2},
    "prompt logprobs": lambda draw: {"prompt_logprobs": 1},
    "penalties": lambda draw: {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
    },
    "bias": lambda draw: {"logit_bias": {_token(draw): 8.0, _token(draw): -50.0}},
    "min tokens": lambda draw: {
        "ignore_eos": False,
        "min_tokens": draw.choice([1, 3, 8]),
        "stop_token_ids": draw.sample(VOCABULARY, 120),  # more are too many for Model Runner V2
    },
    "bad words": lambda draw: {"bad_words": draw.sample(_PAIRS, 60)},
    "stop strings": lambda draw: {"stop": draw.sample(_PAIRS, 40)},
    "stop": lambda draw: {"stop_token_ids": draw.sample(VOCABULARY, 800)},
    "allowed": lambda draw: {"allowed_token_ids": sorted(draw.sample(VOCABULARY, 5))},
    "regex": lambda draw: _structured(regex="[a-c]{3,9}"),
    "json": lambda draw: _structured(json=_INTEGER_OBJECT),
    "choice": lambda draw: _structured(choice=["yes", "no", "maybe"]),
}
"""Sampling parameters by the name of what is special about them."""


DRAFTED = ["greedy", "stop", "regex", "json", "choice"]
"""What engines with drafts answer token by token as one does: not those that vLLM ignores beside
drafts, nor where its front end finds the end, behind all tokens of a step.
"""


def make_specs(
    draw: Random,
    num_specs: int,
    loras: Sequence[str | None] = (None,),
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Spec]:
    """Prompts of a few stems, so that they share blocks; lengths around the edges of blocks."""
    stems = [draw.choices(VOCABULARY, k=MAX_LENGTH) for _ in range(_NUM_STEMS)]
    # With adapters, vLLM's layer for logits takes one position of each request only.
    names = [kind for kind in kinds if None in loras or kind != "prompt logprobs"]
    # Each kind once, then more of the plain ones.
    drawn = names + draw.choices(names, [len(names), *[1] * (len(names) - 1)], k=num_specs)
    return [
        _make_spec(draw, kind, draw.choice(stems), draw.choice(loras)) for kind in drawn[:num_specs]
    ]


def _make_spec(draw: Random, kind: str, stem: list[int], lora: str | None) -> Spec:
    length = _draw_length(draw)
    shared = draw.choice([length, length, draw.randrange(length + 1)])
    own = draw.choices(VOCABULARY, k=length - shared)
    sampling = KINDS[kind](draw)
    max_tokens = min(draw.choice([1, 1, 2, 5, 9, 17, 40, 80]), MAX_LENGTH - length)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], max_tokens)
    return Spec(
        kind=kind,
        prompt=(*stem[:shared], *own),
        max_tokens=max_tokens,
        sampling=sampling,
        salt=draw.choice([None, None, None, "a", "b"]),
        priority=draw.choice([0, 0, 1]),
        lora=lora,
    )


def _draw_length(draw: Random) -> int:
    full = draw.randrange(1, MAX_LENGTH // BLOCK_SIZE) * BLOCK_SIZE
    return draw.choice(
        [1, 2, BLOCK_SIZE - 1, full - 1, full, full, full + 1, draw.randrange(1, MAX_LENGTH - 20)]
    )


def difference(found: Answer, expected: Answer) -> str | None:
    """What an answer has that it should not have, or the other way round."""
    if (found.samples, found.finish_reason) != (expected.samples, expected.finish_reason):
        return (
            f"got {found.samples} ({found.finish_reason}),"
            f" should be {expected.samples} ({expected.finish_reason})"
        )
    for name in ("logprobs", "prompt_logprobs"):
        found_ones, expected_ones = getattr(found, name), getattr(expected, name)
        if len(found_ones) != len(expected_ones):
            return f"got {len(found_ones)} {name}, should be {len(expected_ones)}"
        if not all(map(_are_near, found_ones, expected_ones)):
            return f"got {name} {found_ones}, should be {expected_ones}"
    return None


def _are_near(found: dict[int, float], expected: dict[int, float]) -> bool:
    """Of one position. The sampled token comes first; what follows may be another at a tie."""
    for token_id in list(expected)[:1]:
        if abs(found.get(token_id, float("inf")) - expected[token_id]) > _TOLERANCE:
            return False
    return True
