# SPDX-License-Identifier: Apache-2.0
"""Engines with Model Runner V2, which GPUs and NPUs have by default, in Triton's interpreter.

With ``--triton`` all engines of these tests have it. So all tests of this folder run with either
runner, and compare tokens with one engine's; here the two runners are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import SingleEngine
from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf
from tests.integration.pairs import CHUNKED, EVERY_LAYER, Pair
from tests.integration.stress.workload import KINDS, difference

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

SAME_IN_BOTH = {kind for kind, sampling in KINDS.items() if "seed" not in sampling(Random(kind))}
"""Kinds of requests; the two runners draw differently from a seed."""


@pytest.fixture(scope="module", autouse=True)
def triton_is_there(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--triton") is None:
        pytest.skip("Triton is not there (make test-triton fetches it)")


@pytest.fixture(scope="module")
def first_runner(
    tmp_path_factory: pytest.TempPathFactory, base_config: EngineConfig
) -> Iterator[SingleEngine]:
    """One ordinary engine with Model Runner V1, of a fleet that has no Triton."""
    with Fleet(tmp_path_factory.mktemp("first-runner")) as fleet:
        yield SingleEngine(fleet.engine(base_config))


@pytest.mark.parametrize("kind", sorted(SAME_IN_BOTH))
def test_one_engine_answers_as_with_the_first_runner(
    single: SingleEngine, first_runner: SingleEngine, prompt_of: PromptOf, kind: str
) -> None:
    prompt, sampling = prompt_of(3 * BLOCK_SIZE + 5), KINDS[kind](Random(kind))
    expected = first_runner(prompt, 16, **sampling)
    assert difference(single(prompt, 16, **sampling), expected) is None


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["steps", "ahead"])
def test_both_orders_answer_as_one_engine_with_the_first_runner(
    engines: Engines, first_runner: SingleEngine, prompt_of: PromptOf, runs_ahead: bool
) -> None:
    producer = engines.shared("kv_producer", runs_ahead=runs_ahead)
    consumer = engines.shared("kv_consumer", runs_ahead=runs_ahead, transfer=EVERY_LAYER)
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    for engine in (producer, consumer):
        engine.wait_log("Using V2 Model Runner")
    for num_tokens in (BLOCK_SIZE + 1, 3 * BLOCK_SIZE, CHUNKED):
        prompt = prompt_of(num_tokens, f"prefill first {num_tokens}")
        answer = consumer.ask(prompt, 16, producer.prefill(prompt))
        assert answer.token_ids == first_runner(prompt, 16).token_ids
        assert answer.sources == (0, num_tokens, 0)
        prompt = prompt_of(num_tokens, f"decode first {num_tokens}")
        answer = pair.ask(prompt)
        assert answer.token_ids == first_runner(prompt, 16).token_ids
        assert answer.sources == (0, num_tokens, 0)
