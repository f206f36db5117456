# SPDX-License-Identifier: Apache-2.0
"""The checksum of `block_copy` by kernels of the device that holds the bytes."""

from __future__ import annotations

import torch

from vllm_ascend_pd.backends.block_copy import GOLDEN

WORD_BYTES = 8
_CHUNK_WORDS = 1 << 20  # bounds the temporaries, of which there are two
_LOW_HALF = 0xFFFFFFFF
_SIGNED_GOLDEN = GOLDEN - (1 << 64)  # torch has no arithmetic on uint64; that on int64 wraps alike


def sum_of_words(data: torch.Tensor) -> torch.Tensor:
    """The inner sum, for `finish_checksum`, once the kernels that this enqueues have run.

    Args:
        data: uint8 [a multiple of 8] on any device, 8-byte aligned.

    Returns:
        int64 [], modulo 2**64, on the same device.
    """
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(words), _CHUNK_WORDS):
        total += _terms(words[start : start + _CHUNK_WORDS], start).sum()
    # Of rot32(w) the upper half of all words together; `_terms` has the lower one.
    return total + (words.sum() << 32)


def _terms(words: torch.Tensor, first: int) -> torch.Tensor:
    """int64, the shape of ``words``, the first of which has index ``first``."""
    last = first + len(words)
    terms = torch.arange(first + 1, last + 1, dtype=torch.int64, device=words.device)
    terms *= _SIGNED_GOLDEN
    terms ^= words
    upper = terms >> 32
    upper &= _LOW_HALF
    terms &= _LOW_HALF
    terms *= upper
    torch.bitwise_right_shift(words, 32, out=upper)
    upper &= _LOW_HALF
    terms += upper
    return terms
