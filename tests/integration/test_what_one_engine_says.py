# SPDX-License-Identifier: Apache-2.0
"""What other tests rely on: an engine tells in one step what it would decode in many."""

from __future__ import annotations

import pytest

from tests.integration.engines import EngineConfig, Fleet, PromptOf

pytestmark = pytest.mark.engine

NUM_OUTPUT = 60


def test_it_would_say_what_it_says_and_nothing_else(
    fleet: Fleet, base_config: EngineConfig, prompt_of: PromptOf
) -> None:
    engine = fleet.engine(base_config)
    prompt = prompt_of(base_config.max_num_batched_tokens + 9)
    said = engine.ask(prompt, NUM_OUTPUT).token_ids
    assert engine.would_say(said, prompt)
    engine.assert_says(said, prompt)
    for place in (0, NUM_OUTPUT // 2, NUM_OUTPUT - 1):
        other = [*said[:place], said[place] ^ 1, *said[place + 1 :]]
        assert not engine.would_say(other, prompt), place
        with pytest.raises(AssertionError):
            engine.assert_says(other, prompt)
    assert not engine.would_say(said, prompt_of(len(prompt), "other"))
