# SPDX-License-Identifier: Apache-2.0
"""The block pool: its prefix cache and its free queue. Scheduler thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm_ascend_pd.engine.vllm_api.types import (
        BlockHash,
        BlockHashWithGroupId,
        BlockPool,
        KVCacheBlock,
        Request,
        Scheduler,
    )
    from vllm_ascend_pd.kv.span import KVGroup


def block_key(block_hash: BlockHash, group: int) -> BlockHashWithGroupId:
    """Equal to the ``block_hash`` of blocks with that content, of that KV cache group."""
    return make_block_hash_with_group_id(block_hash, group)


def block_keys(hashes: Iterable[BlockHash], group: int) -> Iterator[BlockHashWithGroupId]:
    """``block_key`` of each, which appends the same to all of them."""
    suffix = make_block_hash_with_group_id(b"", group)
    keys = (block_hash + suffix for block_hash in hashes)
    return cast("Iterator[BlockHashWithGroupId]", keys)


def split_key(key: bytes) -> tuple[bytes, int]:
    """The hash of the tokens, and the KV cache group."""
    return bytes(get_block_hash(key)), get_group_id(key)


def hash_of(request: Request, index: int, group: KVGroup) -> BlockHash:
    """Of the request's block ``index``, a full one."""
    return request.block_hashes[group.last_hash(index)]


def hashes_of(request: Request, indices: Iterable[int], group: KVGroup) -> list[BlockHash]:
    """``hash_of`` of each."""
    hashes = request.block_hashes[group.last_hash(0) :: group.hashes_per_block]
    return list(map(hashes.__getitem__, indices))


def key_of(request: Request, index: int, group: KVGroup) -> BlockHashWithGroupId:
    """``block_key`` of the request's block ``index``."""
    return block_key(hash_of(request, index, group), group.id)


def cached_block(
    pool: BlockPool, request: Request, index: int, group: KVGroup
) -> KVCacheBlock | None:
    """The block of the prefix cache with what the request's block ``index`` holds."""
    return pool.cached_block_hash_to_block.get_one_block(key_of(request, index, group))


def cached_blocks(
    pool: BlockPool, request: Request, start: int, stop: int, group: KVGroup
) -> Iterator[KVCacheBlock | None]:
    """``cached_block`` of those from ``start`` to ``stop``, when each is asked for."""
    every = group.hashes_per_block
    hashes = request.block_hashes[group.last_hash(start) : stop * every : every]
    return map(pool.cached_block_hash_to_block.get_one_block, block_keys(hashes, group.id))


def enter_blocks(
    pool: BlockPool,
    request: Request,
    table: list[KVCacheBlock | None],
    start: int,
    stop: int,
    group: KVGroup,
) -> None:
    """``table[start:stop]`` into the prefix cache, as the request's blocks of those indices."""
    pool.cache_full_blocks(request, table, start, stop, group.block_size, group.id)


def next_to_evict(pool: BlockPool, most: int) -> Iterator[KVCacheBlock]:
    """The front of the free queue. The queue must not change meanwhile."""
    queue = pool.free_block_queue
    block = queue.fake_free_list_head.next_free_block
    for _ in range(min(most, queue.num_free_blocks)):
        assert block is not None
        yield block
        block = block.next_free_block


def free_to_front(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Give up a reference of each block; those that nobody else uses are evicted next."""
    unused = [block for block in blocks if block.ref_cnt == 1]
    pool.free_blocks(block for block in blocks if block.ref_cnt > 1)
    for block in unused:
        block.ref_cnt = 0
    pool.free_block_queue.prepend_n(unused)


def free_after_steps_under_way(scheduler: Scheduler) -> None:
    """Blocks that a step may still write are nobody else's before it has ended."""
    scheduler.defer_block_free = True
