# SPDX-License-Identifier: Apache-2.0
"""What the worker of Model Runner V2 has no room for is refused in the front end, and only that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

from vllm_ascend_pd.testing.tiny_model import make_tiny_model

VOCAB_SIZE = 4096
IN_ENGINE = KVTransferConfig(kv_connector="InEngine", kv_role="kv_both")
ASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "allowed_token_ids": (
        {"allowed_token_ids": list(range(1024))},
        {"allowed_token_ids": list(range(1025))},
    ),
    "logit_bias": (
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    "stop_token_ids": (  # with the end of the sequence
        {"min_tokens": 1, "stop_token_ids": list(range(10, 137))},
        {"min_tokens": 1, "stop_token_ids": list(range(10, 138))},
    ),
    "bad_words": (
        {"bad_words": [f"{n:02}" + "Zq9" * 4 for n in range(20)]},
        {"bad_words": [f"{n:02}" + "Zq9" * 60 for n in range(20)]},
    ),
}
"""What there is just room for, and what there is not."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    arguments = EngineArgs(
        model=str(model.path),
        max_model_len=512,
        hf_overrides={"vocab_size": VOCAB_SIZE},
        kv_transfer_config=IN_ENGINE,
    )
    return arguments.create_engine_config()


@pytest.fixture
def ask(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the worker is given of a request, or the front end's error."""

    def ask(params: SamplingParams, is_v2: bool = True, connector: str = "InEngine") -> Any:
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: is_v2))
        monkeypatch.setattr(config.kv_transfer_config, "kv_connector", connector)
        prompt = {"type": "token", "prompt_token_ids": [5, 6, 7]}
        request = InputProcessor(config).process_inputs("r", prompt, params, ("generate",))
        return request.sampling_params

    return ask


class Rows:
    """Of a worker: they take anything."""

    def __init__(self) -> None:
        self.np = np.zeros(8)

    def stage_write(self, *args: object) -> None: ...


def give_to_worker(params: SamplingParams) -> None:
    class States(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return Rows()

    states = States(use_logit_bias=np.zeros(8), prompt_len_np=np.zeros(8))
    add: Any = LogitBiasState.add_request
    length = [4] if "prompt_len" in add.__code__.co_varnames[: add.__code__.co_argcount] else []
    add(states, 0, *length, params)
    BadWordsState.add_request(states, 0, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ASKS)
def test_a_row_has_room_for_what_is_let_through(ask: Any, name: str) -> None:
    give_to_worker(ask(SamplingParams(**ASKS[name][0])))


@pytest.mark.parametrize("name", ASKS)
def test_what_has_no_room_is_refused_by_its_name(ask: Any, name: str) -> None:
    params = SamplingParams(**ASKS[name][1])
    with pytest.raises(VLLMValidationError, match=f"{name} has .*room for") as refusal:
        ask(params)
    assert refusal.value.parameter == name
    with pytest.raises(ValueError, match="Too many"):  # and it would end the engine
        give_to_worker(ask(params, is_v2=False))


@pytest.mark.parametrize("connector", ["InEngine", "ExampleConnector"])
def test_others_are_left_alone(ask: Any, connector: str) -> None:
    """Model Runner V1, which has room for as many as there are, and engines without InEngine."""
    params = SamplingParams(**ASKS["logit_bias"][1])
    ask(params, is_v2=connector != "InEngine", connector=connector)
