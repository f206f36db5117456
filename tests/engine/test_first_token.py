# SPDX-License-Identifier: Apache-2.0
"""Which requests may take the first token of another engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.watermarking import WatermarkConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from vllm_ascend_pd.config import FirstTokenMode
from vllm_ascend_pd.engine.scheduler.first_token import (
    RULED_OUT,
    SHAPING,
    make_sampling_key,
    sampling_key,
)
from vllm_ascend_pd.engine.vllm_api.config import sampling_parts

NOT_SHAPING = {
    *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "flat_logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
    *("include_stop_str_in_output", "stream_interval", "skip_clone", "output_text_buffer_length"),
    *("_eos_token_id", "_all_stop_token_ids", "bad_words", "skip_reading_prefix_cache"),
    *("repetition_detection", "routed_experts_prompt_start"),
    *("prompt_logprob_start", "_watermarking_skipped"),
}
"""What happens to tokens afterwards, or what stands in another field too."""
HAS_SCORES = "prompt_logprob_token_ids" in SamplingParams.__struct_fields__
SINCE_031 = {"prompt_logprob_token_ids", "prompt_logprob_start", "_watermarking_skipped"}


def asked(request_id: str = "r", **sampling: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(**sampling),
        pooling_params=None,
    )


def key(request_id: str = "r", **sampling: Any) -> bytes:
    return sampling_key(asked(request_id, **sampling))


class Marking:
    """An engine's configuration, with a watermark of these options or with none."""

    def __init__(self, **options: Any) -> None:
        model: Any = SimpleNamespace(
            logits_processors=None,
            return_sampling_mask=False,
            enable_return_routed_experts=False,
            max_model_len=512,
            use_fp64_gumbel=False,
            try_get_generation_config=dict,
            get_diff_sampling_param=dict,
        )
        marks = WatermarkConfig(**options) if options else None
        self.config: Any = SimpleNamespace(
            model_config=model,
            watermark_config=marks,
            device_config=SimpleNamespace(device_type="cpu"),
            use_v2_model_runner=False,
        )

    def key(self, **sampling: Any) -> bytes:
        return make_sampling_key(self.config, FirstTokenMode.AUTO)(asked(**sampling))


def test_every_field_of_the_pinned_vllm_is_known() -> None:
    known = {*SHAPING, *RULED_OUT, *NOT_SHAPING, "logit_bias", "min_tokens"}
    fields = set(SamplingParams.__struct_fields__)
    assert fields <= known
    assert known - fields <= SINCE_031


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 1},
        {"stop": ["x"]},
        {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}},
        {"skip_special_tokens": False},
    ],
    ids=str,
)
def test_what_does_not_matter(sampling: dict[str, Any]) -> None:
    assert key() == key(**sampling) != b""


def test_a_seed_does_not_matter_where_nothing_is_drawn() -> None:
    assert key(temperature=0, seed=1) == key(temperature=0, seed=2) != b""


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"logit_bias": {3: 2.0}},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 1},
        {"min_tokens": 1, "stop_token_ids": [5]},
        {"thinking_token_budget": 5},
    ],
    ids=str,
)
def test_what_shapes_it(sampling: dict[str, Any]) -> None:
    assert b"" != key(**sampling) != key()
    assert key(**sampling) == key(**sampling, max_tokens=1)


def test_how_many_tokens_come_before_a_stop_does_not_matter() -> None:
    assert key(min_tokens=1, stop_token_ids=[5]) == key(min_tokens=7, stop_token_ids=[5])


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 5},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        *([{"prompt_logprob_token_ids": [[1], [2]]}] if HAS_SCORES else []),
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        {"extra_args": {"of a plugin": 1}},
        {"request_id": "0_r"},
    ],
    ids=str,
)
def test_what_rules_it_out(sampling: dict[str, Any]) -> None:
    assert key(**sampling) == b""


def test_watermark_decides_where_a_request_is_marked() -> None:
    engines = [
        Marking(),
        Marking(key=1),
        Marking(key=2),
        Marking(key=1, context_width=5),
        Marking(key=1, algorithm="dual_key_gumbel"),
    ]
    assert len({engine.key() for engine in engines}) == len(engines)
    assert len({engine.key(watermarking=False) for engine in engines}) == 1
    assert Marking(key=1).key() == Marking(key=1).key()
    assert Marking().key() == key()


def test_watermark_is_told_without_its_key() -> None:
    told = [sampling_parts(Marking(**options).config) for options in ({}, {"key": 1}, {"key": 2})]
    none, one, other = (parts["watermark"] for parts in told)
    assert none == "none"
    settings, of_key = one.split("-")
    assert other.split("-")[0] == settings
    assert len({of_key, other.split("-")[1]}) == 2
    assert len(of_key) == 4, "a key of 64 bits has too many candidates left"
