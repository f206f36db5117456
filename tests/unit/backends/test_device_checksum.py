# SPDX-License-Identifier: Apache-2.0
"""The checksum by kernels of torch is that of the copiers of the host."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_pd.backends import device_checksum
from vllm_ascend_pd.backends.block_copy import Region, finish_checksum
from vllm_ascend_pd.backends.device_checksum import sum_of_words
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier


def check(data: torch.Tensor) -> None:
    num_bytes = data.numel()
    expected = PythonBlockCopier().checksum(Region(data.data_ptr(), num_bytes), 0, num_bytes, 7)
    assert finish_checksum(int(sum_of_words(data)), num_bytes, 7) == expected


@pytest.mark.parametrize("num_words", [1, 2, 3, 64, 65, 1000])
def test_random_words(num_words: int) -> None:
    check(torch.randint(0, 256, (8 * num_words,), dtype=torch.uint8))


@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0xFF])
def test_words_at_the_ends_of_their_range(value: int) -> None:
    check(torch.full((8 * 100,), value, dtype=torch.uint8))


@pytest.mark.parametrize("num_words", [15, 16, 17, 47, 48])
def test_words_are_counted_across_chunks(num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checksum, "_CHUNK_WORDS", 16)
    check(torch.randint(0, 256, (8 * num_words,), dtype=torch.uint8))


def test_bytes_are_left_as_they_were() -> None:
    data = torch.randint(0, 256, (800,), dtype=torch.uint8)
    before = data.clone()
    sum_of_words(data)
    assert torch.equal(data, before)
