# SPDX-License-Identifier: Apache-2.0
"""A step whose KV is on its way does without a FULL graph, for that one step.

Model Runner V1's own method and vLLM's own dispatcher run; only the runner around them is made up.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_ascend_pd import hooks

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
NUM_REQS = 2


class Worker:
    def __init__(self, has_loads_under_way: bool) -> None:
        self.has_loads_under_way = has_loads_under_way

    def loads_under_way(self) -> bool:
        return self.has_loads_under_way


def dispatcher(mode: CUDAGraphMode) -> CudagraphDispatcher:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            max_cudagraph_capture_size=4,
            cudagraph_capture_sizes=[1, 2, 4],
            cudagraph_specialize_lora=False,
            pass_config=SimpleNamespace(enable_sp=False),
            compile_sizes=[],
            is_attention_compiled_piecewise=lambda: True,
        ),
        speculative_config=None,
        num_speculative_tokens=0,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    made = CudagraphDispatcher(config)  # type: ignore[arg-type]
    made.initialize_cudagraph_keys(mode, uniform_decode_query_len=1)
    return made


def graph_of_a_decode_batch(mode: CUDAGraphMode) -> CUDAGraphMode:
    """A batch of one new token a request: also what a fully loaded prompt looks like."""
    runner = MagicMock()
    runner.cudagraph_dispatcher = dispatcher(mode)
    runner.compilation_config.cudagraph_mode = mode
    runner.compilation_config.pass_config.enable_sp = False
    runner.uniform_decode_query_len = 1
    runner._is_uniform_decode = lambda **kwargs: GPUModelRunner._is_uniform_decode(**kwargs)
    runner._pad_for_sequence_parallelism = lambda num_tokens: num_tokens
    runner.model_config.is_encoder_decoder = False
    runner.input_batch.lora_id_to_lora_request = {}
    runner.vllm_config.parallel_config.data_parallel_size = 1
    runner.parallel_config.data_parallel_size = 1
    runner.vllm_config.observability_config.cudagraph_metrics = False
    chosen, *_ = GPUModelRunner._determine_batch_execution_and_padding(
        runner,
        num_tokens=NUM_REQS,
        num_reqs=NUM_REQS,
        num_scheduled_tokens_np=np.ones(NUM_REQS, dtype=np.int32),
        max_num_scheduled_tokens=1,
        use_cascade_attn=False,
    )
    return chosen


@pytest.mark.parametrize(
    ("mode", "idle", "loading"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, FULL, PIECEWISE),
        (CUDAGraphMode.FULL_DECODE_ONLY, FULL, FULL),  # else it would be eager: the step waits
        (CUDAGraphMode.FULL, FULL, FULL),
        (CUDAGraphMode.PIECEWISE, PIECEWISE, PIECEWISE),
        (CUDAGraphMode.NONE, NONE, NONE),
    ],
    ids=str,
)
def test_graph_of_one_step(
    monkeypatch: pytest.MonkeyPatch,
    mode: CUDAGraphMode,
    idle: CUDAGraphMode,
    loading: CUDAGraphMode,
) -> None:
    assert graph_of_a_decode_batch(mode) is idle  # no worker side
    monkeypatch.setattr(hooks, "worker", Worker(False))
    assert graph_of_a_decode_batch(mode) is idle
    monkeypatch.setattr(hooks, "worker", Worker(True))
    assert graph_of_a_decode_batch(mode) is loading
    monkeypatch.setattr(hooks, "worker", Worker(False))
    assert graph_of_a_decode_batch(mode) is idle  # the next step is as before


def tokens_of_a_uniform_decode_in_runner_v2() -> int | None:
    """Of two loaded prompts, whose last token is to be computed. ``None``: no FULL graph."""
    runner = MagicMock()
    runner.decode_query_len = 1
    runner.use_pp = False
    runner.adaptive_verification = runner.pcp_manager = None
    runner.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    runner.req_states.req_id_to_index = {"a": 0, "b": 1}
    runner.req_states.prefill_len.np = np.full(2, 5)
    runner.req_states.num_computed_prefill_tokens = np.full(2, 4)
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 1},
        total_num_scheduled_tokens=2,
        scheduled_spec_decode_tokens={},
    )
    _, num_tokens = v2.GPUModelRunner.gather_batch_req_state(runner, output, False)  # type: ignore[arg-type]
    return num_tokens


def test_model_runner_v2_has_no_full_graph_for_a_prompt_that_is_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 0.30 without a patch: the last token of a prompt is a prefill there."""
    monkeypatch.setattr(hooks, "worker", Worker(True))
    assert tokens_of_a_uniform_decode_in_runner_v2() is None
    monkeypatch.setattr(hooks, "worker", Worker(False))
    is_patched = "overlaps_loads" in inspect.getsource(v2.GPUModelRunner.gather_batch_req_state)
    assert tokens_of_a_uniform_decode_in_runner_v2() == (1 if is_patched else None)


def calls_in_order(function: Any) -> list[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call.func) for call in sorted(calls, key=lambda call: call.lineno)]


def test_step_is_armed_before_its_graph_is_chosen() -> None:
    for runner, arms, chooses in (
        (GPUModelRunner, "self._update_states", "self._determine_batch_execution_and_padding"),
        (v2.GPUModelRunner, "pd_hooks.begin_step", "dispatch_cg_and_sync_dp"),
    ):
        calls = calls_in_order(runner.execute_model)
        assert calls.index(arms) < calls.index(chooses)


def test_model_runner_v2_begins_the_step_before_it_touches_a_block() -> None:
    calls = calls_in_order(v2.GPUModelRunner.execute_model)
    begins = calls.index("pd_hooks.begin_step")
    for later in ("self.add_requests", "self.update_requests", "self.kv_connector.no_forward"):
        assert begins < calls.index(later), later
    zeroing = calls_in_order(v2.GPUModelRunner.update_requests)
    assert "self.kv_block_zeroer.zero_block_ids" in zeroing
    assert "copy_kv_cache_blocks_inplace" in zeroing
