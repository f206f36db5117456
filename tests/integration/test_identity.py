# SPDX-License-Identifier: Apache-2.0
"""KV crosses only between engines for which everything that decided it is equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import copy_with_other_tensors
from tests.integration.conftest import Engines, SingleEngine
from tests.integration.engines import Engine, EngineConfig

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory, base_config: EngineConfig) -> str:
    """Like the tests' model, but for K and V of every layer."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    return str(copy_with_other_tensors(Path(base_config.model), folder, r"\.(k|v)_proj\."))


def test_other_k_and_v_in_every_layer_make_another_model(
    engines: Engines,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: Callable[..., list[int]],
    other_model: str,
) -> None:
    producer = engines.own("kv_producer", model=other_model)
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "incompatible"
    producer.wait_log("weights=")
