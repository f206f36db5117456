# SPDX-License-Identifier: Apache-2.0
"""The patched methods of vllm-ascend's Model Runner V1, each run on what it reads of a runner."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_ascend.worker import model_runner_v1
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from vllm_ascend_pd import hooks

# _update_states ---------------------------------------------------------------------------------


@dataclass
class Output:
    """The fields of ``SchedulerOutput`` that ``_update_states`` reads."""

    kv_cache_block_copies: list[Any] = field(default_factory=lambda: [(1, 2)])
    new_block_ids_to_zero: list[int] = field(default_factory=lambda: [3])
    scheduled_cached_reqs: Any = None
    pd_metadata: Any = "metadata"


def test_step_begins_before_a_block_is_zeroed_or_copied(
    worker: Any, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = NPUModelRunner.__new__(NPUModelRunner)
    runner.use_async_scheduling = False
    runner.kv_caches, runner.kv_cache_config = [], SimpleNamespace(num_blocks=4)
    runner._apply_pp_sampled_tokens_from_scheduler_output = lambda output: None
    runner._track_tmp_encoder_cache_refs = lambda output: None
    runner._zero_block_ids = lambda ids: events.append("zero")
    monkeypatch.setattr(
        model_runner_v1, "copy_kv_cache_blocks_inplace", lambda *args: events.append("copy")
    )
    seen = []
    monkeypatch.setattr(GPUModelRunner, "_update_states", lambda self, output: seen.append(output))
    runner._update_states(Output())
    assert events == ["begin", "zero", "copy"]
    # The parent arms the same step again with a changed copy of the output: it is told apart by
    # the message, which both carry.
    (output,) = seen
    assert output.pd_metadata == "metadata"
    assert output.kv_cache_block_copies == []


# execute_model ----------------------------------------------------------------------------------


def run_without_tokens(monkeypatch: pytest.MonkeyPatch, total: int) -> Any:
    monkeypatch.setattr(
        model_runner_v1, "get_pp_group", lambda: SimpleNamespace(world_size=1, is_last_rank=True)
    )
    runner = MagicMock()
    runner.execute_model_state = runner.speculative_config = None
    runner.use_async_scheduling = False
    runner.synchronize_input_prep = nullcontext
    runner.cache_config.kv_sharing_fast_prefill = False
    runner.input_batch.req_ids = []
    output = SimpleNamespace(total_num_scheduled_tokens=total, num_scheduled_tokens={})
    return NPUModelRunner.execute_model(runner, output)


@pytest.mark.parametrize("total", [0, 3], ids=["nothing scheduled", "no request in the batch"])
def test_step_without_tokens_still_reports(
    worker: Any, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    assert run_without_tokens(monkeypatch, total) == "report of a step without tokens"


@pytest.mark.parametrize("total", [0, 3])
def test_step_without_tokens_is_as_released_without_a_worker_side(
    monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    assert not hooks.active()
    assert run_without_tokens(monkeypatch, total) is EMPTY_MODEL_RUNNER_OUTPUT


# The graph of one step --------------------------------------------------------------------------


def dispatch(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, cascade: bool = False
) -> set[CUDAGraphMode] | None:
    """The graph modes that are ruled out for a batch of two decodes."""
    monkeypatch.setattr(model_runner_v1, "enable_sp", lambda config: False)
    runner = MagicMock()
    runner._pad_for_sequence_parallelism = lambda num_tokens: num_tokens
    runner.input_batch.num_computed_tokens_cpu = np.array([7, 7])
    runner.use_dcp, runner.model_config.is_hybrid = False, False
    runner.model_config.is_encoder_decoder = False
    runner.uniform_decode_query_len = 1
    runner.input_batch.lora_id_to_lora_request = {}
    runner.compilation_config.cudagraph_mode = mode
    runner.vllm_config.parallel_config.data_parallel_size = 1
    runner.vllm_config.observability_config.cudagraph_metrics = False
    asked: list[Any] = []

    def decide(**kwargs: Any) -> tuple[CUDAGraphMode, BatchDescriptor]:
        asked.append(kwargs)
        return CUDAGraphMode.NONE, BatchDescriptor(kwargs["num_tokens"])

    runner.cudagraph_dispatcher.dispatch = decide
    NPUModelRunner._determine_batch_execution_and_padding(
        runner,
        num_tokens=2,
        num_reqs=2,
        num_scheduled_tokens_np=np.array([1, 1]),
        max_num_scheduled_tokens=1,
        use_cascade_attn=cascade,
    )
    (kwargs,) = asked
    assert kwargs["uniform_decode"]
    return kwargs["invalid_modes"]


def test_step_whose_kv_is_under_way_gets_no_full_graph(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.has_loads_under_way = True
    assert dispatch(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE) == {CUDAGraphMode.FULL}


def test_full_graph_stays_where_only_eager_would_be_left(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.has_loads_under_way = True
    assert dispatch(monkeypatch, CUDAGraphMode.FULL_DECODE_ONLY) is None


def test_full_graph_stays_when_all_kv_has_landed(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dispatch(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE) is None


def test_full_graph_stays_without_a_worker_side(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE) is None
    assert dispatch(monkeypatch, CUDAGraphMode.FULL, cascade=True) == {CUDAGraphMode.FULL}


# _sample and _bookkeeping_sync ------------------------------------------------------------------


@dataclass
class Metadata:
    """The field of ``SamplingMetadata`` that decides who draws."""

    generators: dict[int, torch.Generator]


def draws(monkeypatch: pytest.MonkeyPatch, discarded: list[bool]) -> list[float]:
    """What a request with a seed draws in steps whose sample is discarded or not, in the second row
    of a batch; a CPU's generator has no offset to rewind.
    """
    monkeypatch.setattr(model_runner_v1, "lmhead_tp_enable", lambda: False)
    batch = SimpleNamespace(
        req_ids=["free", "seeded"],
        req_id_to_index={"free": 0, "seeded": 1},
        generators={1: torch.Generator().manual_seed(11)},
        update_async_output_token_ids=lambda: None,
        num_tokens=np.zeros(2, dtype=np.int32),
        num_tokens_no_spec=np.zeros(2, dtype=np.int32),
        token_ids_cpu=np.zeros((2, 8), dtype=np.int32),
        is_token_ids=np.zeros((2, 8), dtype=bool),
    )
    batch.sampling_metadata = Metadata(batch.generators)
    runner = MagicMock()
    runner.input_batch, runner.max_model_len, runner.use_async_scheduling = batch, 8, False
    runner.requests = {name: SimpleNamespace(output_token_ids=[]) for name in batch.req_ids}
    runner._to_list = lambda tokens: tokens.tolist()
    drawn: list[float] = []

    def sampler(logits: None, sampling_metadata: Metadata) -> Any:
        for generator in sampling_metadata.generators.values():
            drawn.append(torch.rand(1, generator=generator).item())
        return SimpleNamespace(sampled_token_ids=torch.ones(2, 1), logprobs_tensors=None)

    runner.sampler = sampler
    for is_discarded in discarded:
        runner.discard_request_mask.np = np.array([False, is_discarded])
        runner.discard_request_indices.np = np.array([1])
        runner.num_discarded_requests = int(is_discarded)
        sampled = NPUModelRunner._sample(runner, None, None)
        tokens = NPUModelRunner._bookkeeping_sync(
            runner, MagicMock(), sampled, None, MagicMock(), 2, None
        )[3]
        assert tokens == [[1], [] if is_discarded else [1]]
    return drawn


def test_chunks_of_a_prompt_draw_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second) = draws(monkeypatch, [False, False])
    assert first != second
    assert draws(monkeypatch, [True, True, False, False]) == [first, second]
    assert draws(monkeypatch, [False, True, False]) == [first, second]


# initialize_kv_cache ----------------------------------------------------------------------------


def test_worker_side_is_made_from_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[Any] = []
    monkeypatch.setattr(hooks, "install_worker", lambda *args: handed_over.append(args))
    for name in ("apply_layerwise_kv_cache_plan", "prepare_kernel_block_sizes", "KVPPRuntime"):
        monkeypatch.setattr(model_runner_v1, name, MagicMock())
    plan = ModuleType("vllm_ascend.ops.kda_state_copy_plan")
    plan.initialize_kda_state_copy = lambda *args: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plan.__name__, plan)
    caches = {"model.layers.0.attn": ("K", "V")}
    runner = MagicMock()
    runner.sparse_kv_offload_enabled, runner.speculative_config = False, None
    runner.initialize_kv_cache_tensors.return_value = caches
    config = SimpleNamespace(kv_cache_groups=[], has_mamba_layers=False)
    NPUModelRunner.initialize_kv_cache(runner, config)
    assert handed_over == [(runner.vllm_config, config, caches)]
