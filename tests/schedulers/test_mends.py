# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM's own scheduler took, and could not come to an end with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.config import LoRAConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from tests.schedulers.harness import BLOCK_SIZE, kv_cache_config_of
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

NUM_BLOCKS = 200
IMAGE = 100
"""Tokens of one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny").path)


@pytest.fixture
def config(model: str) -> VllmConfig:
    arguments = EngineArgs(
        model=model, max_model_len=2048, max_num_batched_tokens=512, block_size=BLOCK_SIZE
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.scheduler_config.async_scheduling = False
    return config


def scheduler_of(config: VllmConfig) -> Scheduler:
    init_none_hash(sha256)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config_of(NUM_BLOCKS),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def request_of(request_id: str, num_tokens: int, **more: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(100, 100 + num_tokens)),
        sampling_params=SamplingParams(max_tokens=20, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        **more,
    )


def finish(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Each request whose prompt is behind has one token more."""
    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests.get(request_id) for request_id in ids]
    told = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[
            [5] if x is None or x.num_computed_tokens >= x.num_tokens else [] for x in requests
        ],
    )
    scheduler.update_from_output(output, told)


def test_adapter_of_a_request_whose_token_is_on_its_way_is_counted(config: VllmConfig) -> None:
    """With as many batches under way as there are pipeline stages."""
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)
    config.parallel_config.pipeline_parallel_size = 2
    scheduler = scheduler_of(config)
    requests = [
        request_of("a", 30, lora_request=LoRARequest("one", 1, "/one")),
        request_of("b", 1500, lora_request=LoRARequest("two", 2, "/two")),
    ]
    scheduler.add_request(requests[0])
    under_way = deque([scheduler.schedule()])
    scheduler.add_request(requests[1])
    for _ in range(100):
        under_way.append(scheduler.schedule())
        assert len(under_way[-1].num_scheduled_tokens) <= 1
        finish(scheduler, under_way.popleft())
    assert [request.num_output_tokens for request in requests] == [20, 20]
    assert not scheduler.requests


@pytest.mark.parametrize("lookahead", [0, 1], ids=["", "drafter"])
@pytest.mark.parametrize("gap", [0, 1, 2])
def test_images_of_which_one_at_a_time_has_room_are_all_computed(
    config: VllmConfig, gap: int, lookahead: int
) -> None:
    scheduler = scheduler_of(config)
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=IMAGE)
    scheduler.max_num_encoder_input_tokens = IMAGE
    scheduler.num_prefill_lookahead = lookahead
    starts = [10, 10 + IMAGE + gap]
    images = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image {start}",
            mm_position=PlaceholderRange(offset=start, length=IMAGE),
        )
        for start in starts
    ]
    request = request_of("r", starts[1] + IMAGE + 20, mm_features=images)
    scheduler.add_request(request)
    for _ in range(40):
        output = scheduler.schedule()
        computed = output.num_scheduled_tokens.get("r", 0)
        ends = request.num_computed_tokens
        for index, start in enumerate(starts):
            if ends - computed < start + IMAGE and start < ends:
                assert scheduler.encoder_cache_manager.get_cached_input_ids(request) == {index}
        finish(scheduler, output)
        if request.is_finished():
            break
    assert request.num_output_tokens == 20
    assert not scheduler.encoder_cache_manager.cached.get("image 10")


@pytest.fixture
def compiled(model: str) -> Callable[[str], Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    config: Any = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=False, disable_additional_properties=False
        ),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
    )
    backend = GuidanceBackend(config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return lambda schema: backend.compile_grammar(StructuredOutputOptions.JSON, schema)


def test_grammar_that_guidance_refuses_ends_its_request(compiled: Callable[[str], Any]) -> None:
    refused = '{"not": {"type": "string"}}'
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=refused))
    validate_xgrammar_grammar(asked)  # which the front end asks, with the backend "auto"
    with pytest.raises(ValueError, match="Grammar error"):
        compiled(refused)
    assert compiled('{"type": "integer"}').ll_matcher.get_error() == ""
