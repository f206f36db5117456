# SPDX-License-Identifier: Apache-2.0
"""How many drafts were accepted, for layers that keep a state: each request's own count, whenever a
copy to the host ends that the runner has not waited for, also of one that a step has left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.patches.test_input_batch import add, batch, end_update

__all__ = ["batch", "expect_states_behind_what_was_accepted"]

REPO = Path(__file__).parents[2]

MAX_TOKENS = 32
ENDED, KEPT = 2, 3
"""Tokens that were accepted in the last step."""


class _Read(Exception):
    """The counts are what is tested, so a step goes no further."""


class _Counts(CpuGpuBuffer):
    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        raise _Read


def buffer(dtype: torch.dtype = torch.int64) -> CpuGpuBuffer:
    return CpuGpuBuffer(MAX_TOKENS, dtype=dtype, device=torch.device("cpu"))


class Steps:
    """Steps of a runner, and the copies between them. Where it does not run ahead, a copy has ended
    when the next step begins.
    """

    def __init__(
        self,
        batch: InputBatch,
        monkeypatch: pytest.MonkeyPatch,
        ahead: bool,
        cache_mode: str = "align",
    ) -> None:
        self._batch = batch
        self._copies: list[Callable[[], Any]] = []
        monkeypatch.setattr(mamba_utils, "postprocess_mamba_align_gpu", self._begin_copy)
        self._runner: Any = object.__new__(GPUModelRunner)
        self._runner.__dict__.update(
            input_batch=batch,
            requests={},
            speculative_config=object(),
            model_config=SimpleNamespace(is_hybrid=True),
            cache_config=SimpleNamespace(mamba_cache_mode=cache_mode),
            kv_cache_config=None,
            compilation_config=SimpleNamespace(static_forward_context={}),
            use_async_scheduling=ahead,
            num_accepted_tokens_event=SimpleNamespace(
                record=lambda: None, synchronize=self.end_copy
            ),
            num_accepted_tokens=_Counts(4, dtype=torch.int32, device=torch.device("cpu")),
            arange_np=np.arange(MAX_TOKENS),
            query_pos=buffer(),
            input_ids=buffer(torch.int32),
            query_start_loc=buffer(torch.int32),
            optimistic_seq_lens_cpu=torch.zeros(MAX_TOKENS, dtype=torch.int32),
            prev_positions=buffer(),
            discard_request_mask=buffer(torch.bool),
            uses_mrope=False,
            enable_prompt_embeds=False,
            _get_mamba_bufs=lambda: None,
            _get_mamba_state_copy_funcs=lambda: None,
        )

    def _begin_copy(
        self,
        *,
        num_reqs: int,
        num_accepted_tokens_gpu: torch.Tensor,
        num_accepted_tokens_cpu_tensor: torch.Tensor,
        **_: Any,
    ) -> None:
        counts = num_accepted_tokens_gpu[:num_reqs].clone()
        target = num_accepted_tokens_cpu_tensor[:num_reqs]
        self._copies.append(lambda: target.copy_(counts))

    def end_copy(self) -> None:
        while self._copies:
            self._copies.pop()()

    def sample(self, accepted: dict[str, int], copy_ends: str = "before") -> None:
        width = max(accepted.values())
        sampled = [[7] * num + [-1] * (width - num) for num in accepted.values()]
        assert self._batch.req_ids == list(accepted)
        self._runner._update_states_after_model_execute(torch.tensor(sampled), None)
        if self._runner.use_async_scheduling:
            self._batch.prev_req_id_to_index = dict(self._batch.req_id_to_index)
        if copy_ends == "before":
            self.end_copy()

    def read(
        self, *, new: Sequence[str] = (), resumed: Sequence[str] = (), left_out: Sequence[str] = ()
    ) -> dict[str, int]:
        """What the next step takes for accepted, of each request in the batch. In the worker, but
        not in the batch, are those that are ``left_out``.
        """
        ids = self._batch.req_ids
        self._runner.requests = dict.fromkeys([*ids, *left_out], SimpleNamespace(num_tokens=2))
        scheduled = np.full(len(ids), 2, dtype=np.int32)
        output = SimpleNamespace(
            total_num_scheduled_tokens=int(scheduled.sum()),
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        )
        with pytest.raises(_Read):
            self._runner._prepare_inputs(output, scheduled)
        counts = self._runner.num_accepted_tokens.np[: len(ids)].tolist()
        assert self._batch.num_accepted_tokens_cpu[: len(ids)].tolist() == counts
        return dict(zip(ids, counts, strict=True))

    def leave_out(self, name: str) -> None:
        self._batch.remove_request(name)
        end_update(self._batch)

    def take(self, name: str) -> None:
        add(self._batch, name)
        end_update(self._batch)


whenever_it_ends = pytest.mark.parametrize("copy_ends", ["before", "after"])
"""The copy: before the batch is arranged for the next step, or after that."""


def replace_one(batch: InputBatch) -> None:
    """A new request gets the row of one that has ended. Backends want rows of prompts last."""
    batch.remove_request("ended")
    add(batch, "new")
    batch.condense()
    batch.swap_states(0, 1)
    batch.refresh_metadata()


@whenever_it_ends
def test_request_that_moves_in_its_batch_keeps_its_count(
    batch: InputBatch,
    monkeypatch: pytest.MonkeyPatch,
    copy_ends: str,
) -> None:
    steps = Steps(batch, monkeypatch, ahead=True)
    add(batch, "ended")
    add(batch, "kept")
    steps.read(new=["ended", "kept"])
    steps.sample({"ended": ENDED, "kept": KEPT}, copy_ends)
    replace_one(batch)
    assert steps.read(new=["new"]) == {"kept": KEPT, "new": 1}


@whenever_it_ends
def test_request_in_an_empty_batch_has_no_count_of_one_that_has_ended(
    batch: InputBatch,
    monkeypatch: pytest.MonkeyPatch,
    copy_ends: str,
) -> None:
    steps = Steps(batch, monkeypatch, ahead=True)
    add(batch, "ended")
    steps.read(new=["ended"])
    steps.sample({"ended": ENDED}, copy_ends)
    batch.remove_request("ended")
    add(batch, "new")
    batch.refresh_metadata()
    assert steps.read(new=["new"]) == {"new": 1}


@pytest.mark.parametrize("cache_mode", ["align", "none"])
def test_counts_move_with_their_rows_where_each_step_waits_for_the_last(
    batch: InputBatch, monkeypatch: pytest.MonkeyPatch, cache_mode: str
) -> None:
    steps = Steps(batch, monkeypatch, ahead=False, cache_mode=cache_mode)
    add(batch, "ended")
    add(batch, "kept")
    steps.read(new=["ended", "kept"])
    steps.sample({"ended": ENDED, "kept": KEPT})
    replace_one(batch)
    assert steps.read(new=["new"]) == {"kept": KEPT, "new": 1}


AHEAD = [
    pytest.param((True, "after"), id="ahead-late"),
    pytest.param((True, "before"), id="ahead-early"),
    pytest.param((False, "before"), id="steps"),
]


@pytest.fixture(params=AHEAD)
def beside_another(
    request: pytest.FixtureRequest, batch: InputBatch, monkeypatch: pytest.MonkeyPatch
) -> Steps:
    """A step has sampled for "other" and "one"; the next one leaves "one" out."""
    ahead, copy_ends = request.param
    steps = Steps(batch, monkeypatch, ahead)
    steps.take("other")
    steps.take("one")
    steps.read(new=["other", "one"])
    steps.sample({"other": ENDED, "one": KEPT}, copy_ends)
    steps.leave_out("one")
    return steps


def test_request_that_a_step_leaves_out_keeps_its_count(beside_another: Steps) -> None:
    steps = beside_another
    assert steps.read(left_out=["one"]) == {"other": ENDED}
    steps.sample({"other": 4})
    steps.take("one")
    assert steps.read() == {"other": 4, "one": KEPT}
    steps.sample({"other": 1, "one": 2})
    assert steps.read() == {"other": 1, "one": 2}


def test_request_that_two_steps_leave_out_keeps_its_count(beside_another: Steps) -> None:
    steps = beside_another
    for accepted in (4, 1):
        steps.read(left_out=["one"])
        steps.sample({"other": accepted})
    steps.leave_out("other")
    steps.take("one")
    assert steps.read(left_out=["other"]) == {"one": KEPT}


def test_request_that_an_empty_step_leaves_out_keeps_its_count(beside_another: Steps) -> None:
    """An empty step reads no counts."""
    beside_another.take("one")
    assert beside_another.read() == {"other": ENDED, "one": KEPT}


def test_request_that_is_resumed_from_preemption_has_no_count(beside_another: Steps) -> None:
    steps = beside_another
    steps.read(left_out=["one"])
    steps.sample({"other": 1})
    steps.take("one")
    assert steps.read(resumed=["one"]) == {"other": 1, "one": 1}
    steps.sample({"other": 1, "one": 1})
    assert steps.read() == {"other": 1, "one": 1}


def test_request_that_is_preempted_and_resumed_at_once_has_no_count(
    beside_another: Steps,
) -> None:
    """As when the prefix cache is reset: it was in the last step."""
    beside_another.take("one")
    assert beside_another.read(resumed=["one"]) == {"other": ENDED, "one": 1}


def test_new_request_has_no_count_of_one_of_its_name_that_was_left_out(
    beside_another: Steps,
) -> None:
    steps = beside_another
    steps.read(left_out=["one"])
    steps.sample({"other": 1})
    assert steps.read() == {"other": 1}, "it has ended"
    steps.sample({"other": 1})
    steps.take("one")
    assert steps.read(new=["one"]) == {"other": 1, "one": 1}


def test_new_request_has_no_count_of_one_of_its_name_in_the_last_step(
    beside_another: Steps,
) -> None:
    beside_another.take("one")
    assert beside_another.read(new=["one"]) == {"other": ENDED, "one": 1}


def test_runner_that_arranges_its_counts_itself_finds_them_where_vllm_puts_them(
    batch: InputBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vllm-ascend's does, which reads them in rows of its batch."""
    steps = Steps(batch, monkeypatch, ahead=False)
    steps.take("one")
    steps.take("other")
    steps.sample({"one": ENDED, "other": KEPT})
    assert batch.num_accepted_tokens_cpu[:2].tolist() == [ENDED, KEPT]


@pytest.mark.parametrize("drafts", [None, [2, 0, 0, 0]])
def test_model_runner_v2_looks_for_states_behind_what_was_accepted(
    monkeypatch: pytest.MonkeyPatch, drafts: list[int] | None
) -> None:
    """Of each decoding request, also of one that has no draft; not of a prompt's last token."""
    built: dict[str, Any] = {}
    monkeypatch.setattr(mamba_hybrid, "build_attn_metadata", lambda **given: built.update(given))
    scheduled = np.array([3 if drafts else 1, 1, 1, 5])
    num_reqs = len(scheduled)
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    rows: Any = SimpleNamespace(
        num_reqs=num_reqs,
        num_tokens=int(scheduled.sum()),
        num_scheduled_tokens=scheduled,
        num_draft_tokens_per_req=drafts and np.array(drafts),
        is_prefilling_np=np.array([False, False, True, True]),
        prefill_runs_as_decode_np=np.zeros(num_reqs, dtype=bool),
        idx_mapping=torch.arange(num_reqs),
        query_start_loc_np=starts,
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.full((num_reqs,), 9),
        seq_lens_cpu_upper_bound=torch.full((num_reqs,), 9),
        dcp_local_seq_lens=None,
        positions=None,
        prompt_lens=None,
        max_query_len=5,
    )
    state: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(num_speculative_tokens=2),
        num_accepted_tokens_gpu=torch.tensor([3, 2, 1, 1]),
        _align_mode=False,
        recoverssm=None,
        _model_aligned_reader=None,
    )
    mamba_hybrid.MambaHybridModelState.prepare_attn(
        state, rows, CUDAGraphMode.NONE, (), torch.empty(0), [], SimpleNamespace()
    )
    told = built["model_specific_attn_metadata"]
    assert told.num_decode_draft_tokens_cpu.tolist() == [2 if drafts else 0, 0, -1, -1]
    assert told.num_accepted_tokens.tolist() == [3, 2, 1, 1]


def expect_states_behind_what_was_accepted(builder: type[Any]) -> None:
    """In a step of two decoding requests without any draft."""
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1, 2], [50, 43]))
    metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=50,
        block_table_tensor=torch.arange(6, dtype=torch.int32).view(2, 3),
        slot_mapping=torch.zeros(2, dtype=torch.int64),
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=torch.zeros(2, dtype=torch.bool),
    )
    made = object.__new__(builder)
    made.__dict__.update(
        use_spec_decode=True,
        num_spec=2,
        spec_state_slots=3,
        kv_cache_spec=MambaSpec(
            block_size=64,
            shapes=((4,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="none",
            num_speculative_blocks=2,
        ),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(mamba_cache_mode="none"), use_v2_model_runner=False
        ),
        use_full_cuda_graph=False,
        decode_cudagraph_max_bs=8,
        use_recoverssm=False,
        use_flashinfer_prefill=False,
        recoverssm_num_accepted_tokens=None,
        checkpoint_builder=SimpleNamespace(build=lambda *_: None),
    )
    counts = torch.tensor([3, 1], dtype=torch.int32)
    built = made.build(0, metadata, counts, torch.zeros(2, dtype=torch.int32))
    assert (built.num_spec_decodes, built.num_decodes) == (2, 0)
    assert built.num_accepted_tokens.tolist() == [3, 1]
    assert built.spec_state_indices_tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_gdn_looks_for_states_behind_what_was_accepted_also_without_any_draft() -> None:
    expect_states_behind_what_was_accepted(gdn_attn.GDNAttentionMetadataBuilder)


def test_so_does_kimi_k3() -> None:
    """Its module brings numba along, at which vLLM 0.32.0's search for CPU kernels ends."""
    code = (
        "from tests.patches.test_accepted_counts import *\n"
        "from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder as builder\n"
        "expect_states_behind_what_was_accepted(builder)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=600)
