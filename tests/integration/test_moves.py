# SPDX-License-Identifier: Apache-2.0
"""Running requests move to another engine, and every token is that of one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import BLOCK_SIZE, Answer, Engine
from tests.integration.pool_steps import delta
from tests.integration.test_resume import SAMPLING, SEED
from vllm_ascend_pd.resume import ResumeKey, Source

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

Prompt = list[int]
PromptOf = Callable[..., Prompt]
NUM_OUTPUT = 120
PATIENT = {"max_freeze_s": 60, "peer_timeout_s": 60}
"""Engines of tests share few cores, and are stepped by hand."""


def coming(
    prompt: Prompt, source: Engine, name: str = "r", only_exact: bool = True
) -> dict[str, Any]:
    """The ``kv_transfer_params`` of a request that runs at ``source`` under this name."""
    at = Source(**source.source())
    resume = ResumeKey(None).sign(name, prompt, [], only_exact, at)
    return {"resume": resume.to_params(), "return_provenance": True}


def outcome_of(answer: Answer) -> dict[str, str]:
    return answer.kv_transfer_params["resume"]


def move(
    source: Engine, target: Engine, prompt: Prompt, num_output: int = NUM_OUTPUT, **sampling: Any
) -> tuple[Answer, Answer]:
    """A request that runs at ``source`` as ``r`` moves; the two ends of its answer."""
    target.add("r", prompt, num_output, coming(prompt, source), **sampling)
    source.start_run()
    target.start_run()
    return source.join_run()["r"], target.join_run()["r"]


@pytest.fixture
def pair(engines: Engines) -> tuple[Engine, Engine]:
    return tuple(
        engines.shared("kv_both", transfer={**PATIENT, "load_timeout_s": t}) for t in (60, 61)
    )


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def either(request: pytest.FixtureRequest, engines: Engines) -> tuple[Engine, Engine]:
    return tuple(
        engines.shared(
            "kv_both", transfer={**PATIENT, "load_timeout_s": t}, runs_ahead=request.param
        )
        for t in (60, 61)
    )


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
