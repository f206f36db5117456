# SPDX-License-Identifier: Apache-2.0
"""A span of two KV cache groups is the same on both sides of the wire, and in the pool.

75 tokens: in group 0, four blocks of 16 and a tail of 11; in group 1, two of 32 and the same tail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.pages import NUM_BLOCKS, PAGE, Pages
from tests.unit.engine.test_pool_io_machine import NoRegistry
from vllm_ascend_pd.backends.block_copy import GroupPages
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.kv.span import GroupBlocks, Span
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.packed_slot import PackedSlot
from vllm_ascend_pd.pool.tier import Status, Value
from vllm_ascend_pd.pool.values import BlockValues
from vllm_ascend_pd.transfer.leases import Lease, LeaseBook, Tail, tail_digest
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey, lease_of
from vllm_ascend_pd.types import Endpoint, Epoch, TransferId
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    Fetch,
    GroupHashes,
    Open,
    Opened,
    decode_control,
    decode_data,
    encode,
)

END = 75
HASHES = ((b"a0", b"a1"), (b"b0", b"b1"))
SPAN = Span(0, END, tuple(map(GroupBlocks, (16, 32), ((), ()), HASHES)))
TAIL = Tail(tuple(range(END - 64)), b"")
SERVER = PageServer(Endpoint("127.0.0.1", 5), TicketKey())


def asked(end: int = END) -> Open:
    groups = tuple(
        GroupHashes(hashes, tail_digest(hashes[-1], b"", TAIL.token_ids[: end - 64]))
        for hashes in HASHES
    )
    message = decode_control(encode(Open(WIRE_VERSION, "same", "t", "e", end, groups)))
    assert isinstance(message, Open)
    return message


@pytest.mark.parametrize("end", [END, END - 1])
def test_span_is_recognized_from_what_its_consumer_sends(end: int) -> None:
    book = LeaseBook(Epoch("e"), "same", 30.0, itertools.count().__next__)
    book.page_servers = (SERVER,)
    lease = Lease(TransferId("t"), SPAN.holding((range(1, 6), range(6, 9))), (TAIL, TAIL))
    book.grant(lease)
    book.finish(lease)
    answer = decode_control(encode(book.open(asked(end))))
    assert isinstance(answer, Opened)
    assert answer.end == end
    (worker,) = answer.workers
    assert worker.ticket.end == end
    for group, num_blocks in ((0, 5), (1, 3)):
        fetch = Fetch(
            *(1, "t", "e", worker.ticket, group, 0, 2, tuple(range(num_blocks))),
            *({}, 4096, 1 << 20, 1),
        )
        message = decode_data(encode(fetch))
        assert message == fetch
        assert isinstance(message, Fetch)
        assert lease_of(message) == lease.ref
        assert SERVER.key.accepts("t", message.ticket)
        assert len(lease.span.groups[message.group].block_ids) == num_blocks


@pytest.fixture
def slots() -> Iterator[StagingPool]:
    slots = StagingPool(NoRegistry(), 2, 1 << 16)
    yield slots
    slots.close()


def test_groups_have_values_of_their_own_under_the_same_hash(slots: StagingPool) -> None:
    """Two groups of equal block size hash the same tokens alike."""
    pages, block_hash, tier = Pages(1), b"h" * 32, MemoryTier(1 << 20)
    values = [
        BlockValues(
            PythonBlockCopier(),
            GroupPages.of(pages.layout, 16, layers),
            KeySpace.of("model", group=group),
        )
        for group, layers in enumerate(([0, 2], [1, 3]))
    ]
    keys = [each.key(block_hash) for each in values]
    assert len(set(keys)) == 2
    before = pages.bytes.copy()
    for each, key in zip(values, keys, strict=True):
        slot = slots.acquire()
        assert slot is not None
        with PackedSlot(each, slot, [3]) as packing:
            packing.pack_all()
            value = Value(key, packing.seal(3, block_hash), each.num_bytes)
            assert tier.put([value]) == [Status.OK]
    pages.bytes[:] = 0
    slot = slots.acquire()
    assert slot is not None
    with slot:
        for group, (each, key) in enumerate(zip(values, keys, strict=True)):
            assert tier.get([Value(key, slot.addr, each.num_bytes)]) == [Status.OK]
            other = values[1 - group]
            assert other.unpack(4, block_hash, slot.region, 0) is not Status.OK
            pages.bytes[:, 4] = 0
            assert each.unpack(5 + group, block_hash, slot.region, 0) is Status.OK
    expected = np.zeros((4, NUM_BLOCKS, PAGE), dtype=np.uint8)
    expected[[0, 2], 5] = before[[0, 2], 3]
    expected[[1, 3], 6] = before[[1, 3], 3]
    np.testing.assert_array_equal(pages.bytes, expected)
