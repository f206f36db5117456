# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.2's sparse attention in plain torch.

An indexer keeps a key of its own for each token, in fp8 and in pages of its own, and chooses the
tokens that the next ones attend to. Each token is computed by itself, so that others in the step
change nothing. Import it where vLLM's models are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

_FP8 = torch.float8_e4m3fn
_SMALLEST = 1e-4  # as in vLLM's kernels


@dataclass
class SparseStep(AttentionMetadata):
    """What a step computes, for both caches of a layer."""

    slots: torch.Tensor
    block_table: torch.Tensor
    starts: list[int]
    lengths: list[int]
    num_actual_tokens: int
    # Every token takes MLA's path for decodes.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None

    def tokens(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Each token's row in the step, its position and the blocks of its request."""
        for request, length in enumerate(self.lengths):
            first, end = self.starts[request : request + 2]
            for row in range(first, end):
                yield row, length - end + row, self.block_table[request]


class StepBuilder(AttentionMetadataBuilder[SparseStep]):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # vLLM's is abstract

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseStep:
        common = common_attn_metadata
        return SparseStep(
            slots=common.slot_mapping[: common.num_actual_tokens],
            block_table=common.block_table_tensor,
            starts=common.query_start_loc_cpu.tolist(),
            lengths=common.seq_lens[: common.num_reqs].tolist(),
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class IndexerBackend(DeepseekV32IndexerBackend):
    @classmethod
    def get_supported_kernel_block_sizes(cls, *_: Any) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_builder_cls() -> Any:
        return StepBuilder


class SparseMLABackend(CPUMLABackend):
    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_SPARSE"

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def get_supported_kernel_block_sizes(cls, *_: Any) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0

    @staticmethod
    def get_builder_cls() -> Any:
        return StepBuilder

    @staticmethod
    def get_impl_cls() -> Any:
        return SparseMLAImpl


class SparseMLAImpl(CPUMLAImpl):
    is_sparse = True
    supports_dense_mha_prefill = False
    masked_mha_available = False

    def __init__(self, *args: Any, topk_indices_buffer: torch.Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self._chosen = topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """There are no streams that wait for it."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if kv_cache.numel():
            latents = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
            _write(kv_cache, slot_mapping, latents.to(kv_cache.dtype))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        q = torch.cat(q, dim=-1)
        output = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        for row, _, blocks in attn_metadata.tokens():
            chosen = self._chosen[row]
            latents = _read(kv_c_and_k_pe_cache, blocks, chosen[chosen >= 0]).to(q.dtype)
            weights = (q[row] @ latents.T * self.scale).softmax(dim=-1)
            output[row] = weights @ latents[:, : self.kv_lora_rank]
        return output, None


def _write(pages: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Slots of padding are negative."""
    is_token = slots >= 0
    slots, values = slots[is_token], values[: len(is_token)][is_token]
    block_size = pages.shape[1]
    pages[slots // block_size, slots % block_size] = values


def _read(pages: torch.Tensor, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    block_size = pages.shape[1]
    return pages[blocks[positions // block_size].long(), positions % block_size]


def _quantize(values: torch.Tensor, group_size: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row has a scale, a power of two."""
    assert values.shape[-1] == group_size
    largest = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=_SMALLEST)
    scales = (largest / torch.finfo(_FP8).max).log2().ceil().exp2()
    return (values / scales).to(_FP8), scales


def _parts(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the indexer's pages: the values of all tokens of a block and, behind them, their scales,
    as vLLM's kernels lay them out.
    """
    num_blocks, block_size, _ = cache.shape
    pages = cache.view(num_blocks, -1)
    values, scales = pages.tensor_split([block_size * head_dim], dim=1)
    return values.view(num_blocks, block_size, head_dim), scales.view(torch.float32).unsqueeze(-1)


def _choose(
    indexer: Any, step: SparseStep, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """For each token the positions of those that it attends to, in ascending order."""
    values, scales = _parts(indexer.k_cache.kv_cache, indexer.head_dim)
    new_values, new_scales = _quantize(keys[: len(step.slots)], indexer.head_dim)
    _write(values, step.slots, new_values.view(torch.uint8))
    _write(scales, step.slots, new_scales)
    chosen: torch.Tensor = indexer.topk_indices_buffer
    chosen[: len(queries)] = -1
    for row, position, blocks in step.tokens():
        known = torch.arange(position + 1)
        read = _read(values, blocks, known).view(_FP8).float() * _read(scales, blocks, known)
        scores = (queries[row].float() @ read.T).relu().T @ weights[row].float()
        # Scores of zero are many: of equal ones the first.
        best = scores.argsort(descending=True, stable=True)[: indexer.topk_tokens]
        chosen[row, : len(best)] = best.sort().values
    return chosen


def install() -> None:
    model: Any = deepseek_v2
    if model.per_token_group_quant_fp8 is _quantize:
        return
    model.per_token_group_quant_fp8 = _quantize
    model.DeepseekV32IndexerCache.get_attn_backend = lambda self: IndexerBackend
    operation: Any = SparseAttnIndexer
    otherwise = operation.forward_cpu

    def forward_cpu(
        self: Any, hidden_states: Any, q_quant: Any, k: Any, weights: torch.Tensor
    ) -> Any:
        metadata = get_forward_context().attn_metadata
        step = metadata.get(self.k_cache.prefix) if isinstance(metadata, dict) else None
        if isinstance(step, SparseStep):
            return _choose(self, step, q_quant, k, weights)
        return otherwise(self, hidden_states, q_quant, k, weights)

    operation.forward_cpu = forward_cpu
