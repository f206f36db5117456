# SPDX-License-Identifier: Apache-2.0
"""What lies in the pool under which key, and that nothing else is ever taken for it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.pages import one_group
from vllm_ascend_pd.backends.block_copy import PageLayout, Region
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.pool.keys import KeySpace, PoolNames
from vllm_ascend_pd.pool.tier import Status
from vllm_ascend_pd.pool.values import HEADER_BYTES, BlockValues

PAGE = 512
NUM_LAYERS, NUM_BLOCKS = 3, 4
HASH = bytes(range(32))
SPACE = KeySpace.of("model=a dtype=float32")


class Memory:
    """Pages ``uint8 [layer, block, byte]`` and staging."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.pages = rng.integers(0, 255, (NUM_LAYERS, NUM_BLOCKS, PAGE), dtype=np.uint8)
        self.map = mmap.mmap(-1, 1 << 16)
        self.staging = Region(ctypes.addressof(ctypes.c_char.from_buffer(self.map)), 1 << 16)
        offsets = np.arange(NUM_LAYERS, dtype=np.int64) * NUM_BLOCKS * PAGE
        region = Region(self.pages.ctypes.data, self.pages.nbytes)
        self.layout = PageLayout.packed(region, offsets, PAGE)

    def values(self, space: KeySpace = SPACE) -> BlockValues:
        return BlockValues(PythonBlockCopier(), one_group(self.layout)[0], space)

    def pack(self, values: BlockValues, offset: int = 0) -> None:
        """The value of block 1."""
        ids = np.array([1], dtype=np.int64)
        staging = Region(self.staging.base + offset, self.staging.size - offset)
        (total,) = values.pack_layers(0, NUM_LAYERS, ids, staging)
        values.seal(int(total), HASH, staging, 0)


@pytest.fixture
def memory() -> Iterator[Memory]:
    return Memory()


def test_value_fills_another_block_with_the_same_bytes(memory: Memory) -> None:
    values = memory.values()
    memory.pack(values, 128)
    assert values.unpack(3, HASH, memory.staging, 128) is Status.OK
    assert (memory.pages[:, 3] == memory.pages[:, 1]).all()


def test_value_is_a_header_and_the_pages(memory: Memory) -> None:
    assert memory.values().num_bytes == HEADER_BYTES + NUM_LAYERS * PAGE


@pytest.mark.parametrize("position", [0, 9, 20, 40, HEADER_BYTES, HEADER_BYTES + 700, -1])
def test_every_flipped_bit_is_found(memory: Memory, position: int) -> None:
    values = memory.values()
    memory.pack(values)
    memory.map[position % values.num_bytes] ^= 4
    assert values.unpack(3, HASH, memory.staging, 0) is Status.DAMAGED


def test_value_of_another_block_is_not_taken(memory: Memory) -> None:
    values = memory.values()
    memory.pack(values)
    assert values.unpack(3, bytes(32), memory.staging, 0) is Status.DAMAGED


def test_value_of_another_key_space_is_not_taken(memory: Memory) -> None:
    memory.pack(memory.values())
    other = memory.values(KeySpace.of("model=b dtype=float32"))
    assert other.unpack(3, HASH, memory.staging, 0) is Status.DAMAGED


def test_value_is_signed_with_the_secret(memory: Memory) -> None:
    """Who knows the key space can compute the checksum of pages, and not what shows it."""
    fingerprint = "model=a dtype=float32"
    ours = KeySpace.of(fingerprint, secret=b"s" * 32)
    memory.pack(memory.values(ours))
    assert memory.values(ours).unpack(3, HASH, memory.staging, 0) is Status.OK
    forged = replace(ours, _secret=b"")
    memory.pack(memory.values(forged))
    assert memory.values(ours).unpack(3, HASH, memory.staging, 0) is Status.DAMAGED
    spaces = [ours, KeySpace.of(fingerprint, secret=b"o" * 32), KeySpace.of(fingerprint)]
    assert len({space.key(HASH) for space in spaces}) == 3
    assert "sss" not in repr(ours)


def test_damaged_header_leaves_the_pages_alone(memory: Memory) -> None:
    values = memory.values()
    memory.pack(values)
    before = memory.pages.copy()
    memory.map[0] ^= 1
    values.unpack(3, HASH, memory.staging, 0)
    assert (memory.pages == before).all()


@pytest.mark.parametrize(
    ("fingerprint", "share", "num_shares"),
    [("model=b", 0, 1), ("model=a", 1, 2), ("model=a", 0, 2)],
)
def test_engines_that_differ_share_no_key(fingerprint: str, share: int, num_shares: int) -> None:
    mine = KeySpace.of("model=a", 0, 1)
    other = KeySpace.of(fingerprint, share, num_shares)
    assert mine.key(HASH) != other.key(HASH)
    assert mine.seed != other.seed


def test_engines_that_are_equal_share_every_key() -> None:
    assert KeySpace.of("model=a").key(HASH) == KeySpace.of("model=a").key(HASH)


def test_what_was_stored_before_the_pool_is_forgotten_has_another_name() -> None:
    names, others = PoolNames(), PoolNames()
    block_hash = bytes(range(32))
    assert names.name(block_hash) == block_hash
    names.forget()
    first = names.name(block_hash)
    assert len(first) == 32
    assert first not in (block_hash, others.name(block_hash))
    others.forget()
    assert others.name(block_hash) == first
    names.forget()
    assert names.name(block_hash) not in (block_hash, first)


def test_what_a_private_pool_has_forgotten_is_not_found_by_the_next_start() -> None:
    block_hash = bytes(range(32))
    names, next_start = PoolNames(is_shared=False), PoolNames(is_shared=False)
    assert names.name(block_hash) == next_start.name(block_hash) == block_hash
    names.forget()
    next_start.forget()
    assert len({block_hash, names.name(block_hash), next_start.name(block_hash)}) == 3
    assert names.name(block_hash) == names.name(block_hash)
