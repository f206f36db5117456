# SPDX-License-Identifier: Apache-2.0
"""What a row of Model Runner V2 has no room for. Any process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig


def check(config: VllmConfig, params: Any) -> None:
    """Refuse it: the worker's ``ValueError`` would end the engine, and each other one that is asked
    the same.

    Args:
        params: of one request, with the tokens of its bad words.

    Raises:
        VLLMValidationError: 400, with the field's name.

    Touches:
        vllm/config/vllm.py:VllmConfig.use_v2_model_runner
        vllm/envs.py:VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        vllm/exceptions.py:VLLMValidationError
        vllm/sampling_params.py:SamplingParams.all_stop_token_ids
        vllm/sampling_params.py:SamplingParams.allowed_token_ids
        vllm/sampling_params.py:SamplingParams.bad_words_token_ids
        vllm/sampling_params.py:SamplingParams.logit_bias
        vllm/sampling_params.py:SamplingParams.min_tokens
        vllm/v1/worker/gpu/sample/logit_bias.py:MAX_NUM_ALLOWED_TOKEN_IDS
        vllm/v1/worker/gpu/sample/logit_bias.py:MAX_NUM_LOGIT_BIAS_TOKENS
        vllm/v1/worker/gpu/sample/logit_bias.py:MAX_NUM_STOP_TOKEN_IDS
    """
    allowed, bias, bad_words = (
        params.allowed_token_ids,
        params.logit_bias,
        params.bad_words_token_ids,
    )
    if not (allowed or bias or bad_words or params.min_tokens):
        return
    any_version: Any = config
    if not any_version.use_v2_model_runner:
        return
    from vllm import envs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias

    stops = params.all_stop_token_ids if params.min_tokens else ()
    limits = {
        "allowed_token_ids": (len(allowed or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        "logit_bias": (len(bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        "stop_token_ids": (len(stops), logit_bias.MAX_NUM_STOP_TOKEN_IDS),
        "bad_words": (sum(map(len, bad_words or ())), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    }
    for name, (count, most) in limits.items():
        if count > most:
            raise VLLMValidationError(
                f"{name} has {count} token ids; Model Runner V2 has room for {most}",
                parameter=name,
                value=count,
            )
