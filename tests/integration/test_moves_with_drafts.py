# SPDX-License-Identifier: Apache-2.0
"""Running requests with drafts move between engines that run ahead: tokens and drafts are in flight
when one is stopped, and the scheduler knows neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf
from tests.integration.moving import Moving
from tests.integration.test_drafts import (
    NUM_ANSWER,
    Drafting,
    drafting,  # noqa: F401
    folder,  # noqa: F401
    started,  # noqa: F401
)
from tests.integration.test_moves import two
from tests.integration.test_moves_with_grammars import KINDS
from tests.integration.test_moves_with_grammars import NUM_OUTPUT as NUM_STRUCTURED

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

kinds = pytest.mark.parametrize("drafting", ["eagle", "mimo", "windows"], indirect=True)
NUM_OUTPUT = 60


@pytest.fixture
def pair(engines: Engines, drafting: Drafting) -> tuple[Engine, Engine]:  # noqa: F811
    return two(engines, **drafting.options, runs_ahead=True)


@kinds
def test_it_moves_at_several_tokens_and_back(
    pair: tuple[Engine, Engine],
    drafting: Drafting,  # noqa: F811
    started: PromptOf,  # noqa: F811
) -> None:
    """Where it comes back to, its first blocks are in the prefix cache still."""
    first, second = pair
    prompt = started(BLOCK_SIZE + 20)
    expected = drafting.single(prompt, NUM_OUTPUT)
    for cut in (1, 2, 3, 4, 5, 9, 12, 13, 28):
        moving = Moving(first, prompt, NUM_OUTPUT, {})
        moving.decode(cut)
        assert moving.state()["num_in_flight_tokens"] > 1
        known = moving.move(second)
        moving.decode(known + 1)
        assert moving.state()["num_in_flight_tokens"] > 1
        moving.move(first)
        assert moving.answer().token_ids == expected.token_ids, cut


@kinds
def test_drafts_are_accepted_as_often_where_it_goes_on(
    pair: tuple[Engine, Engine],
    drafting: Drafting,  # noqa: F811
    started: PromptOf,  # noqa: F811
) -> None:
    source, target = pair
    prompt = started(BLOCK_SIZE + 20)
    rates = drafting.rates(target)
    expected = drafting.expected(prompt, NUM_ANSWER)
    moving = Moving(source, prompt, NUM_ANSWER, {})
    moving.decode(5)
    moving.move(target)
    assert moving.answer().token_ids == expected.token_ids
    rates.assert_like_one_engine()


@kinds
def test_it_goes_on_where_it_was_beside_others_and_moves_then(
    pair: tuple[Engine, Engine],
    drafting: Drafting,  # noqa: F811
    started: PromptOf,  # noqa: F811
) -> None:
    """It stays, because nobody wants it any more when it has stopped and others have gone on. Then
    nothing of it is in flight, and so it moves at last. Each stop costs it the drafts of a step."""
    source, target = pair
    prompt, other = started(BLOCK_SIZE + 20), started(40, "other")
    rates = drafting.rates(source, least=0.92)
    expected = drafting.expected(prompt, NUM_ANSWER)
    beside = Moving(source, other, NUM_ANSWER, {})
    moving = Moving(source, prompt, NUM_ANSWER, {})
    for num_tokens in (5, 12, 20):
        moving.decode(num_tokens)
        moving.stop_for(target, num_steps=4)
        assert moving.state()["num_in_flight_tokens"] == 0
    moving.move(target)
    assert moving.answer().token_ids == expected.token_ids
    others = moving.others | source.run()
    assert others[beside.name].token_ids == drafting.expected(other, NUM_ANSWER).token_ids
    rates.assert_like_one_engine()


@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
@pytest.mark.parametrize("kind", ["json", "regex", "no end"])
def test_structured_output_moves_and_stays(
    pair: tuple[Engine, Engine],
    drafting: Drafting,  # noqa: F811
    started: PromptOf,  # noqa: F811
    kind: str,
) -> None:
    """What is drafted is held against the grammar one step later than it is sampled."""
    source, target = pair
    options, prompt = KINDS[kind], started(BLOCK_SIZE + 13)
    expected = drafting.single(prompt, NUM_STRUCTURED, **options)
    for cut in range(1, len(expected.token_ids) - 4):
        moving = Moving(source, prompt, NUM_STRUCTURED, options)
        moving.decode(cut)
        stays = not cut % 2 or moving.stop_for(target, num_steps=3)
        if stays and cut % 3:
            moving.move(target)
        assert moving.answer().token_ids == expected.token_ids, cut
