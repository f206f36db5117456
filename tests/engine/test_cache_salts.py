# SPDX-License-Identifier: Apache-2.0
"""vLLM takes the salts that the router gives the requests of tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs

from tests.router.scripted_answers import check_salt
from vllm_ascend_pd.router.apis import CHAT, COMPLETIONS, GENERATE, RESPONSES
from vllm_ascend_pd.router.bodies import parse
from vllm_ascend_pd.router.tenants import MAX_SALTED_NAME, OTHERS, Tenants

NAMES = ("search", "a:b.c_d-e", "n" * MAX_SALTED_NAME, OTHERS)


@pytest.mark.parametrize(
    ("path", "model", "prompt"),
    [
        (COMPLETIONS, CompletionRequest, {"prompt": "x"}),
        (CHAT, ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}),
        (RESPONSES, ResponsesRequest, {"input": "x"}),
        (GENERATE, GenerateRequest, {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
    ],
)
def test_vllm_takes_every_tenants_salts(
    tmp_path: Path, path: str, model: type[BaseModel], prompt: dict[str, Any]
) -> None:
    file = tmp_path / "tenants.json"
    named: dict[str, Any] = {name: {} for name in NAMES if name != OTHERS}
    file.write_text(json.dumps({"cache_salts": True, "tenants": named}))
    file.chmod(0o600)
    tenants = Tenants(file, None)  # type: ignore[arg-type]
    for name in NAMES:
        for own in (None, "user", "|", "x" * 64, "x" * 65, "x" * 128):
            tenant = tenants.get(name)
            assert tenant is not None
            body = parse(path, json.dumps({"model": "m", "cache_salt": own, **prompt}).encode())
            tenants.add_salt(body, tenant)
            sent = json.loads(body.for_decode(None, "d0"))
            assert sent["cache_salt"].startswith(f"{name}|")
            model.model_validate(sent)


@pytest.mark.parametrize(
    "salt", [None, "", 1, "a|b", "a/b", "a@b", "a\\b", "a\0b", "x" * 128, "x" * 129]
)
def test_scripted_engines_take_the_same_salts(salt: Any) -> None:
    def takes(check: Any) -> bool:
        try:
            check(salt)
        except (ValueError, VLLMValidationError):
            return False
        return True

    assert takes(check_salt) == takes(validate_cache_salt)


def test_vllm_looks_at_no_byte_of_an_image_that_has_a_name() -> None:
    """So names of several tenants must not meet."""
    names = []
    for colour in ("red", "blue"):
        images = ImageProcessorItems([Image.new("RGB", (8, 8), colour)])
        items = MultiModalDataItems({"image": images})
        inputs = ProcessorInputs([], items, {"image": ["mine"]})
        names.append(inputs.get_mm_hashes("model", "sha256"))
    assert names == [{"image": ["mine"]}] * 2
