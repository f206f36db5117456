# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, through P and D in both orders and through a pool, against one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.integration.architectures import IMAGE_TOKEN
from tests.integration.engines import Answer, Engine, Fleet, PromptOf
from tests.integration.pairs import ORDERS
from tests.integration.pool_steps import POOL, provenance, settle
from tests.integration.test_models import Three, three  # noqa: F401

pytestmark = pytest.mark.engine

Prompt = list[int]
Color = tuple[int, int, int]
TWO_IMAGES = {"limit_mm_per_prompt": {"image": 2}}


@pytest.fixture
def engines(three: Callable[..., Three], models: Callable[[str], str]) -> Three:  # noqa: F811
    return three(TWO_IMAGES, model=models("images"), faults="ok*")


@pytest.fixture
def prompt(prompt_of: PromptOf) -> Prompt:
    """Two images, between texts of more than a block each."""
    texts = [prompt_of(40, part) for part in "abc"]
    return [*texts[0], IMAGE_TOKEN, *texts[1], IMAGE_TOKEN, *texts[2]]


def colors(number: int) -> tuple[Color, Color, Color]:
    """Of images that no other test has: what is encoded is told by their hashes."""
    return (200, number, 0), (0, number, 200), (0, 200, number)


def encoded(engine: Engine, ask: Callable[[], Answer]) -> tuple[Answer, int]:
    """The answer, and how many images were encoded for it."""
    before = set(engine.encoded_images())
    answer = ask()
    return answer, len(set(engine.encoded_images()) - before)


@pytest.mark.parametrize("order", ORDERS)
def test_images_are_encoded_by_the_producer_alone(
    engines: Three, prompt: Prompt, order: str
) -> None:
    images = colors(ORDERS.index(order))[:2]
    expected = engines.single.ask(prompt, 24, images=images)

    def ask() -> Answer:
        return engines.pair.ask_in(order, prompt, 24, {"images": images}, images=images)

    answer, num_encoded = encoded(engines.consumer, ask)
    num_tokens = answer.provenance["num_prompt_tokens"]
    assert answer.token_ids == expected.token_ids
    assert answer.sources == (0, num_tokens, 0)
    assert num_encoded == 0
    known = engines.producer.prefill(prompt, images=images)
    again = engines.consumer.ask(prompt, 24, known, images=images)
    assert again.token_ids == expected.token_ids
    assert again.sources == (num_tokens // 32 * 32, num_tokens % 32, 0)


def test_same_text_with_another_image_gets_none_of_its_kv(engines: Three, prompt: Prompt) -> None:
    first, second, third = colors(2)
    answers = {}
    for images in ((first, second), (first, third), (third, second)):
        answers[images] = engines.single.ask(prompt, 24, images=images).token_ids
    assert len(set(map(tuple, answers.values()))) == 3
    known = engines.producer.prefill(prompt, images=(first, second))
    for images, shared in (((first, third), 160), ((third, second), 32)):
        answer = engines.consumer.ask(prompt, 24, known, images=images)
        assert answer.token_ids == answers[images]
        assert sum(answer.sources[:2]) == shared
    answer = engines.consumer.ask(prompt, 24, known, images=(first, second))
    assert answer.token_ids == answers[first, second]


@pytest.mark.parametrize("script", ["fail", "ok,corrupt"])
def test_images_whose_kv_is_lost_are_encoded_by_the_consumer(
    engines: Three, prompt: Prompt, script: str
) -> None:
    images = colors(["fail", "ok,corrupt"].index(script) + 3)[:2]
    known = engines.producer.prefill(prompt, images=images)
    engines.producer.set_faults(script)
    ask = lambda: engines.consumer.ask(prompt, 24, known, images=images)  # noqa: E731
    answer, num_encoded = encoded(engines.consumer, ask)
    engines.producer.set_faults("ok*")
    assert answer.token_ids == engines.single.ask(prompt, 24, images=images).token_ids
    assert num_encoded > 0


def test_pool_tells_images_apart(engines: Three, fleet: Fleet, prompt: Prompt) -> None:
    first, second, third = colors(5)
    config = replace(engines.single.config, role="kv_both", pool=json.dumps(POOL))
    engine = fleet.engine(config)
    engine.ask(prompt, images=[first, second])
    for images, shared in (((first, second), 288), ((first, third), 160), ((third, second), 32)):
        settle(engine)
        assert engine.reset_prefix_cache()
        answer = engine.ask(prompt, 24, {"return_provenance": True}, images=images)
        assert answer.token_ids == engines.single.ask(prompt, 24, images=images).token_ids
        assert provenance(answer)["dram"] == shared
    settle(engine)


def test_images_are_encoded_anew_with_other_weights(
    engines: Three, fleet: Fleet, prompt: Prompt
) -> None:
    """Also one of which a running request has computed a part: the second one, in a step of 256."""
    images = colors(6)[:2]
    config = replace(engines.single.config, role="kv_both")
    engine, fresh = fleet.start(config), fleet.start(engines.single.config)
    before = engine.ask(prompt, 24, images=images).token_ids
    assert before == engines.single.ask(prompt, 24, images=images).token_ids
    engine.add("runs", [*prompt[:7], *prompt], 24, images=images)
    assert engine.drive(1) == {}
    for one in (engine, fresh):
        one.scale_norms(3)
    engine.run()
    after = engine.ask(prompt, 24, images=images).token_ids
    assert after == fresh.ask(prompt, 24, images=images).token_ids != before
    fleet.retire(engine)
    fleet.retire(fresh)
