# SPDX-License-Identifier: Apache-2.0
"""Phantom blocks in a real block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tests.engine.scripted_source import ScriptedSource
from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks, _runs
from vllm_ascend_pd.engine.scheduler.sources import BlockSource
from vllm_ascend_pd.kv.span import KVGroup, Wanted

BLOCK_SIZE = 16
init_none_hash(sha256)


def make_request(num_tokens: int = 100, start: int = 0) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=list(range(start, start + num_tokens)),
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def source_of(num_blocks: int, *args: Any, **options: Any) -> BlockSource:
    return ScriptedSource(make_request(), num_blocks, *args, **options)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=BLOCK_SIZE)


@pytest.fixture
def phantoms(pool: BlockPool) -> PhantomBlocks:
    return PhantomBlocks(pool, (KVGroup(0, BLOCK_SIZE, 1, ("layer",)),))


def cached(pool: BlockPool, request: Request) -> list[int | None]:
    """The block id of each of the request's blocks, ``None`` for those not in the cache."""
    ids: list[int | None] = []
    for block_hash in request.block_hashes:
        blocks = pool.get_cached_block(block_hash, [0])
        ids.append(blocks[0].block_id if blocks else None)
    return ids


def publish(
    pool: BlockPool, phantoms: PhantomBlocks, request: Request, source: BlockSource
) -> None:
    """As the lookup does: what is cached first, then what the source has."""
    hits = []
    for block_hash in request.block_hashes:
        blocks = pool.get_cached_block(block_hash, [0])
        if not blocks:
            break
        hits.append(blocks[0])
    phantoms.publish(request, [hits], source, 0)


def hits_of(pool: BlockPool, request: Request) -> list[Any]:
    return [pool.blocks[i] for i in cached(pool, request) if i is not None]


def fill(pool: BlockPool, phantoms: PhantomBlocks, request: Request, *indices: int) -> list[int]:
    """Blocks that are computed here."""
    blocks = pool.get_new_blocks(len(indices))
    phantoms.cache(request, [Wanted(index) for index in indices], blocks)
    pool.free_blocks(reversed(blocks))
    return [block.block_id for block in blocks]


def test_published_blocks_are_found_and_hold_no_memory(
    pool: BlockPool, phantoms: PhantomBlocks
) -> None:
    request = make_request()
    publish(pool, phantoms, request, source_of(6))
    assert None not in cached(pool, request)
    assert len(phantoms) == 6
    assert pool.get_num_free_blocks() == 19
    assert all(block.ref_cnt == 0 for block in hits_of(pool, request))


def test_publishing_again_changes_nothing(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request, source = make_request(), source_of(6)
    publish(pool, phantoms, request, source)
    before = cached(pool, request)
    publish(pool, phantoms, request, source)
    assert cached(pool, request) == before
    assert len(phantoms) == 6


def test_only_holes_are_published(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request = make_request()
    local = fill(pool, phantoms, request, 0, 3, 4)
    publish(pool, phantoms, request, source_of(6))
    ids = cached(pool, request)
    assert [ids[0], ids[3], ids[4]] == local
    assert None not in ids
    claimed = phantoms.claim(hits_of(pool, request))
    assert [phantom.place.block_index for phantom in claimed] == [1, 2, 5]


def test_last_block_with_the_last_token_is_not_published(
    pool: BlockPool, phantoms: PhantomBlocks
) -> None:
    request = make_request(num_tokens=96)
    publish(pool, phantoms, request, source_of(6))
    assert len(phantoms) == 5
    assert cached(pool, request)[5] is None


@pytest.mark.parametrize("parked_only", [False, True])
def test_a_hit_that_was_given_up_for_a_drafter_counts_where_the_source_goes_on(
    pool: BlockPool, phantoms: PhantomBlocks, parked_only: bool
) -> None:
    """Behind it is published what may be loaded in a step."""
    request = make_request()
    local = fill(pool, phantoms, request, 0, 1, 2)
    hits = hits_of(pool, request)[:-1]
    (found,) = phantoms.publish(request, [hits], source_of(5, parked_only=parked_only), 0)
    assert [block.block_id for block in found[:3]] == local
    assert len(found) == (3 if parked_only else 5)
    assert len(phantoms) == (0 if parked_only else 2)
    assert pool.get_num_free_blocks() == 19


def test_no_more_is_published_than_the_source_has(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request = make_request()
    publish(pool, phantoms, request, source_of(2))
    assert [block_id is None for block_id in cached(pool, request)] == [False] * 2 + [True] * 4


def test_hits_are_not_evicted_to_make_room(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request = make_request(num_tokens=19 * BLOCK_SIZE + 4)
    local = fill(pool, phantoms, request, *range(10))
    held = pool.get_new_blocks(5)
    publish(pool, phantoms, request, source_of(19))
    ids = cached(pool, request)
    assert ids[:10] == local
    assert [block_id is None for block_id in ids[10:]] == [False] * 4 + [True] * 5
    assert len(phantoms) == 4
    pool.free_blocks(held)


def test_full_pool_publishes_nothing(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    held = pool.get_new_blocks(19)
    publish(pool, phantoms, make_request(), source_of(6))
    assert len(phantoms) == 0
    pool.free_blocks(held)
    assert pool.get_num_free_blocks() == 19


def test_phantom_is_claimed_once(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request, source = make_request(), source_of(6)
    publish(pool, phantoms, request, source)
    blocks = hits_of(pool, request)
    claimed = phantoms.claim(blocks)
    assert [phantom.place.block_index for phantom in claimed] == list(range(6))
    assert all(phantom.source is source for phantom in claimed)
    assert phantoms.claim(blocks) == []
    assert len(phantoms) == 0


def test_evicted_phantom_is_not_claimed(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request = make_request()
    publish(pool, phantoms, request, source_of(6))
    blocks = hits_of(pool, request)
    pool.evict_blocks({blocks[2].block_id})
    assert [phantom.place.block_index for phantom in phantoms.claim(blocks)] == [0, 1, 3, 4, 5]


def test_phantom_cached_again_by_a_computation_is_not_claimed(
    pool: BlockPool, phantoms: PhantomBlocks
) -> None:
    """The same tokens in the same block, but computed here: nothing is to be loaded."""
    request = make_request()
    publish(pool, phantoms, request, source_of(6))
    blocks = hits_of(pool, request)
    pool.evict_blocks({block.block_id for block in blocks})
    pool.touch(blocks)
    phantoms.cache(request, [Wanted(index) for index in range(6)], blocks)
    assert phantoms.claim(blocks) == []
    pool.free_blocks(reversed(blocks))


def test_withdrawn_source_leaves_nothing_cached(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request, other = make_request(), make_request(start=500)
    source = source_of(6)
    publish(pool, phantoms, request, source)
    publish(pool, phantoms, other, source_of(6))
    phantoms.withdraw(source)
    assert cached(pool, request) == [None] * 6
    assert None not in cached(pool, other)
    assert len(phantoms) == 6


def test_withdrawing_leaves_claimed_blocks_cached(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request, source = make_request(), source_of(6)
    publish(pool, phantoms, request, source)
    phantoms.claim(hits_of(pool, request)[:2])
    phantoms.withdraw(source)
    assert [block_id is None for block_id in cached(pool, request)] == [False] * 2 + [True] * 4


def test_withdraw_all_leaves_nothing(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request = make_request()
    publish(pool, phantoms, request, source_of(6))
    phantoms.withdraw_all()
    assert cached(pool, request) == [None] * 6
    assert len(phantoms) == 0


def test_find_missing_names_what_is_not_cached(pool: BlockPool, phantoms: PhantomBlocks) -> None:
    request = make_request()
    fill(pool, phantoms, request, 1, 2)
    assert phantoms.find_missing(request, source_of(6)) == [(0, 0), (3, 0), (4, 0), (5, 0)]
    assert phantoms.find_missing(request, source_of(4)) == [(0, 0), (3, 0)]


def test_find_missing_ends_at_a_block_that_nobody_has(
    pool: BlockPool, phantoms: PhantomBlocks
) -> None:
    request = make_request()
    publish(pool, phantoms, request, source_of(2))
    assert phantoms.find_missing(request, source_of(6, lambda index, group: index != 3)) == [(2, 0)]


def test_publish_fills_a_hole_and_ends_at_a_block_that_nobody_has(
    pool: BlockPool, phantoms: PhantomBlocks
) -> None:
    request = make_request()
    assert (
        len(phantoms.publish(request, [[]], source_of(6, lambda index, group: index != 4), 0)[0])
        == 4
    )


WINDOW = 40
"""Of tokens: a request that goes on behind six blocks reads the last three of them."""


@pytest.fixture
def both(pool: BlockPool) -> PhantomBlocks:
    """Of an engine with full attention, and windows."""
    groups = (
        KVGroup(0, BLOCK_SIZE, 1, ("layer",)),
        KVGroup(1, BLOCK_SIZE, 1, ("window",), window=WINDOW),
    )
    return PhantomBlocks(pool, groups)


def windows_from(first: int) -> BlockSource:
    """It has what goes on behind its end, of windows."""
    return source_of(6, lambda index, group: group == 0 or index >= first)


def test_of_windows_only_the_last_blocks_are_published(
    pool: BlockPool, both: PhantomBlocks
) -> None:
    request = make_request()
    source = windows_from(3)
    assert both.find_missing(request, source) == [
        *((0, 0), (1, 0), (2, 0)),
        *((3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)),
    ]
    full, windows = both.publish(request, [[], []], source, 0)
    assert len(full) == len(windows) == 6
    assert [block.is_null for block in windows] == [True] * 3 + [False] * 3
    assert len(both) == 9
    assert pool.get_num_free_blocks() == 19
    assert [p.place for p in both.claim(windows)] == [(3, 1), (4, 1), (5, 1)]


def test_with_a_tail_the_window_begins_later(pool: BlockPool, both: PhantomBlocks) -> None:
    _, windows = both.publish(make_request(112), [[], []], windows_from(4), 15)
    assert [block.is_null for block in windows] == [True] * 4 + [False] * 2


def test_hits_end_where_every_group_goes_on(pool: BlockPool, both: PhantomBlocks) -> None:
    """The source has not the window of any end but its own, and of that end a block is lost."""
    request = make_request()
    assert both.publish(request, [[], []], windows_from(4), 0) == ([], [])
    assert both.find_missing(request, windows_from(4)) == []
    blocks = pool.get_new_blocks(2)
    both.cache(request, [Wanted(0, 1), Wanted(1, 1)], blocks)
    assert both.find_missing(request, windows_from(4)) == [(0, 0), (1, 0)]
    assert len(both.publish(request, [[], []], windows_from(4), 0)[0]) == 2
    pool.free_blocks(blocks)


def test_windows_that_do_not_fit_end_the_hits_earlier(pool: BlockPool, both: PhantomBlocks) -> None:
    held = pool.get_new_blocks(15)
    full, windows = both.publish(make_request(), [[], []], source_of(6), 0)
    assert len(full) == len(windows) == 2
    assert len(both) == 4
    pool.free_blocks(held)
    assert pool.get_num_free_blocks() == 19


# The rule, against vLLM's own.


def coordinator_of(groups: Sequence[KVGroup]) -> KVCacheCoordinator:
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs: list[Any] = [
        SlidingWindowSpec(**shape, sliding_window=group.window)
        if group.window
        else ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.chunk)
        if group.chunk
        else FullAttentionSpec(**shape)
        for group in groups
    ]
    config = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec) for spec in specs])
    return get_kv_cache_coordinator(
        config, 2048, 2048, False, True, False, 1, 1, BLOCK_SIZE, BLOCK_SIZE
    )


@settings(max_examples=150)
@given(st.data())
def test_hits_end_where_those_of_vllm_would_with_all_blocks_here(data: Any) -> None:
    reaches = [{}, *data.draw(st.lists(st.sampled_from(_REACHES), min_size=1, max_size=3))]
    groups = [KVGroup(i, BLOCK_SIZE, 1, ("l",), **reach) for i, reach in enumerate(reaches)]
    num_tokens = data.draw(st.integers(1, 12 * BLOCK_SIZE))
    request = make_request(num_tokens)
    places = [Wanted(i, g.id) for g in groups for i in range(len(request.block_hashes))]
    kinds = data.draw(
        st.lists(st.sampled_from("hhhpppx"), min_size=len(places), max_size=len(places))
    )
    here = [place for place, kind in zip(places, kinds, strict=True) if kind == "h"]
    there = {p for p, kind in zip(places, kinds, strict=True) if kind == "p"}
    num_there = max((index + 1 for index, _ in there), default=0)
    source = source_of(num_there, lambda index, group: (index, group) in there)

    def enter(coordinator: KVCacheCoordinator, wanted: list[Wanted]) -> PhantomBlocks:
        phantoms = PhantomBlocks(coordinator.block_pool, groups)
        wanted = sorted(wanted)
        if wanted:
            blocks = coordinator.block_pool.get_new_blocks(len(wanted))
            phantoms.cache(request, wanted, blocks)
            coordinator.block_pool.free_blocks(blocks)
        return phantoms

    stop = num_tokens - 1
    ours, theirs = coordinator_of(groups), coordinator_of(groups)
    phantoms = enter(ours, here)
    enter(theirs, [*here, *there])
    expected, num_expected, _ = theirs.find_longest_cache_hit(request.block_hashes, stop)
    hits, num_local, _ = ours.find_longest_cache_hit(request.block_hashes, stop)
    num_leading = phantoms.num_leading_hits(request, stop // BLOCK_SIZE)
    assert num_leading * BLOCK_SIZE == num_local
    missing = phantoms.find_missing(request, source)
    found = phantoms.publish(request, hits, source, 0)
    assert {len(table) * BLOCK_SIZE for table in found} == {num_expected}
    assert [p.place for table in found for p in phantoms.claim(table)] == sorted(
        missing, key=lambda place: (place.group, place.block_index)
    )
    assert set(missing) <= there
    for mine, other in zip(found, expected, strict=True):
        # Behind the window vLLM's lookup may name more than is needed.
        assert all(a.is_null or not b.is_null for a, b in zip(mine, other, strict=True))


_REACHES = [{"window": 17}, {"window": 32}, {"window": 40}, {"chunk": 32}, {"chunk": 48}]


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        ([], []),
        ([4], [(4, 5)]),
        ([2, 3, 7], [(2, 4), (7, 8)]),
        ([0, 1, 2], [(0, 3)]),
        ([0, 2, 4], [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_runs_of_indices(indices: list[int], runs: list[tuple[int, int]]) -> None:
    assert _runs(indices) == runs
