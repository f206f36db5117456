# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU build lacks for experts that data parallel ranks share: whoever imports it has
it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def _all_gatherv(
    group: CpuCommunicator, input_: Any, dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """What all ranks have, by rank so many rows, of a tensor or of each of several."""
    assert dim == 0
    if isinstance(input_, list):
        return [_all_gatherv(group, one, dim, sizes) for one in input_]
    sizes = sizes or [len(input_)] * group.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    of_each = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(of_each, padded, group=group.device_group)
    return torch.cat([rows[:size] for rows, size in zip(of_each, sizes, strict=True)])


def _reduce_scatterv(
    group: CpuCommunicator, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """The sum of what all ranks have for the rows of this one."""
    assert dim == 0
    sizes = sizes or [len(input_) // group.world_size] * group.world_size
    total = input_.contiguous()
    dist.all_reduce(total, group=group.device_group)
    return total.split(sizes)[group.rank_in_group].clone()


_compute = CPUUnquantizedExperts.apply


def _compute_own_experts(
    experts: CPUUnquantizedExperts,
    *,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    **options: Any,
) -> None:
    """vLLM's kernel takes the numbers of all experts for those of the ones that a rank has."""
    if expert_map is not None:
        own = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(own < 0, 0.0)
        topk_ids = own.clamp(min=0).to(topk_ids.dtype)
    options |= {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": None}
    _compute(experts, **options)


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
CPUUnquantizedExperts.apply = _compute_own_experts
