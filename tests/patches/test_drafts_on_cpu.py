# SPDX-License-Identifier: Apache-2.0
"""vLLM's drafts and their verification, with the kernels of its CPU runner without Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.rejection_sampler import (
    apply_sampling_constraints,
    expand_batch_to_tokens,
    rejection_sample,
)
from vllm.v1.spec_decode.utils import (
    PADDING_SLOT_ID,
    eagle_step_update_slot_mapping_and_metadata,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

pytestmark = pytest.mark.skipif(HAS_TRITON, reason="with Triton its own kernels are used")

VOCAB_SIZE = 8
LAST = VOCAB_SIZE - 1
BONUS = 5
NONE = -1
"""Of a draft: padding. Of an output: nothing sampled there."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """What every CPU engine does at its start."""
    current_platform.import_kernels()
    if hasattr(CPUModelRunner, "_postprocess_triton"):  # up to 0.30
        CPUModelRunner._postprocess_triton(SimpleNamespace())
    else:
        current_platform.register_triton_kernel_overrides()


def verify(
    drafts: list[list[int]], likely: list[list[int]], temperatures: list[float]
) -> list[list[int]]:
    """What is sampled for each request; ``likely`` are the model's tokens, certain ones, at the
    positions of the drafts. After them, it is ``BONUS``.
    """
    num_drafts = [len(of_request) for of_request in drafts]
    flat = torch.tensor([token for of_request in likely for token in of_request])
    logits = torch.full((len(flat), VOCAB_SIZE), -1e4)
    logits[torch.arange(len(flat)), flat] = 1e4
    all_greedy = not any(temperatures)
    sampling: Any = SimpleNamespace(
        all_greedy=all_greedy,
        all_random=all(temperatures),
        temperature=None if all_greedy else torch.tensor(temperatures),
        generators={},
    )
    sampled = rejection_sample(
        torch.tensor([token for of_request in drafts for token in of_request], dtype=torch.int32),
        num_drafts,
        max(num_drafts),
        torch.tensor(num_drafts, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        None,
        logits,
        torch.full((len(drafts), 1), BONUS),
        sampling,
    )
    return sampled.tolist()


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.7, 1.0, 2.0), (0.0, 1.0, 0.0)])
def test_drafts_count_up_to_the_first_wrong_one(temperatures: tuple[float, ...]) -> None:
    sampled = verify(
        drafts=[[1, 2, 3], [1, 2], [4]],
        likely=[[1, 2, 3], [1, 3], [6]],
        temperatures=list(temperatures),
    )
    assert sampled == [[1, 2, 3, BONUS], [1, 3, NONE, NONE], [6, NONE, NONE, NONE]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_drafts_are_never_accepted(temperature: float) -> None:
    """The number before a position's probabilities belongs to the position before it."""
    sampled = verify([[LAST, NONE]], [[LAST, 3]], [temperature])
    assert sampled == [[LAST, 3, NONE]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_parameters_of_requests_become_those_of_their_drafts(dtype: torch.dtype) -> None:
    given = torch.tensor([0.75, 0.0, 3.25], dtype=torch.float32).to(dtype)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = expand_batch_to_tokens(given, ends, 5, replace_from=0, replace_to=1)
    expected = given.where(given != 0, 1)[[0, 0, 2, 2, 2]]
    assert expanded.dtype is dtype
    assert expanded.equal(expected)


def test_a_greedy_request_between_others_keeps_its_temperature() -> None:
    """Its zero becomes a one, by which its logits may be divided."""
    ends = torch.tensor([1, 3], dtype=torch.int32)
    given = torch.tensor([0.5, 0.0])
    assert expand_batch_to_tokens(given, ends, 3, 0, 1).tolist() == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("draft", [0, 1, 2, NONE])
def test_what_is_sampled_instead_of_a_draft_follows_the_model(draft: int) -> None:
    """Whatever was drafted: the squares of these, since the temperature is a half."""
    num_requests = 4000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(num_requests, 1)
    ends = torch.arange(1, num_requests + 1, dtype=torch.int32)
    temperature = torch.full((num_requests,), 0.5)
    sampling: Any = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=temperature,
        top_k=None,
        top_p=None,
        generators={},
    )
    torch.manual_seed(0)
    sampled = rejection_sample(
        torch.full((num_requests,), draft, dtype=torch.int32),
        [1] * num_requests,
        1,
        ends,
        None,
        apply_sampling_constraints(logits, ends, sampling),
        torch.full((num_requests, 1), BONUS),
        sampling,
    )
    shares = sampled[:, 0].bincount(minlength=3) / num_requests
    expected = torch.tensor([0.25, 0.09, 0.04]) / 0.38
    assert shares.tolist() == pytest.approx(expected.tolist(), abs=0.03)
    assert sampled[:, 1].eq(BONUS).equal(sampled[:, 0].eq(draft))


def test_drafter_moves_on_by_a_token() -> None:
    """Into the next block, too; at the end of what the model may see it writes nothing."""
    positions = torch.tensor([3, 15, 31])
    seq_lens = torch.tensor([4, 16, 32], dtype=torch.int32)
    slots, moved = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    eagle_step_update_slot_mapping_and_metadata(
        positions_1d=positions,
        block_table_tensor=torch.tensor([[5, 6], [7, 8], [1, 2]], dtype=torch.int32),
        seq_lens=seq_lens,
        block_size=16,
        max_model_len=32,
        out_clamped_positions=moved,
        out_slot_mapping=slots,
    )
    assert moved.tolist() == [4, 16, 0]
    assert slots.tolist() == [5 * 16 + 4, 8 * 16, PADDING_SLOT_ID]
    assert seq_lens.tolist() == [5, 17, 1]
