# SPDX-License-Identifier: Apache-2.0
"""Every KV head reaches every worker that needs it, from a worker that has it, once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.transfer.shares import PageSource, Sharding, Share
from vllm_ascend_pd.types import Layers


def heads_of(rank: int, num_workers: int, num_kv_heads: int) -> list[int]:
    """As vLLM's ``QKVParallelLinear`` places them."""
    if num_workers >= num_kv_heads:
        return [rank // (num_workers // num_kv_heads)]
    count = num_kv_heads // num_workers
    return list(range(rank * count, (rank + 1) * count))


def part(heads: list[int], share: Share) -> slice:
    size, rest = divmod(len(heads), share.count)
    assert not rest
    return slice(share.index * size, (share.index + 1) * size)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize("num_peers", [1, 2, 4, 8])
def test_each_head_comes_from_a_worker_that_has_it(
    num_workers: int, num_peers: int, num_kv_heads: int
) -> None:
    for rank in range(num_workers):
        ours = heads_of(rank, num_workers, num_kv_heads)
        loaded: list[int | None] = [None] * len(ours)
        for source in Sharding(rank, num_workers, num_kv_heads).sources(num_peers):
            theirs = heads_of(source.rank, num_peers, num_kv_heads)
            place = part(ours, source.ours)
            assert loaded[place] == [None] * len(loaded[place])
            loaded[place] = theirs[part(theirs, source.theirs)]
        assert loaded == ours


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_workers_with_the_same_heads_have_the_same_share(
    num_workers: int, num_kv_heads: int
) -> None:
    workers = [Sharding(rank, num_workers, num_kv_heads) for rank in range(num_workers)]
    heads = [heads_of(w.rank, num_workers, num_kv_heads) for w in workers]
    for one, its_heads in zip(workers, heads, strict=True):
        assert list(range(num_kv_heads))[part(list(range(num_kv_heads)), one.share)] == its_heads
        same = [w for w, h in zip(workers, heads, strict=True) if h == its_heads]
        assert {w.share for w in same} == {one.share}
        assert [w.replica for w in same] == list(range(one.num_replicas))


def test_replicas_share_the_load() -> None:
    ranks = [Sharding(rank, 4, 1).sources(4)[0].rank for rank in range(4)]
    assert ranks == [0, 1, 2, 3]


def test_equal_engines_move_whole_pages() -> None:
    assert Sharding(1, 2, 8).sources(2) == (PageSource(1),)


@pytest.mark.parametrize(("num_workers", "num_peers"), [(2, 3), (3, 2), (1, 0)])
def test_what_does_not_divide_is_an_error(num_workers: int, num_peers: int) -> None:
    with pytest.raises(TransferError, match="tensor parallel sizes"):
        Sharding(0, num_workers, 6).sources(num_peers)


def stages_of(*num_layers: int, tp_size: int = 1) -> list[Layers | None]:
    """The workers of an engine, by rank."""
    if len(num_layers) == 1:
        return [None] * tp_size
    ends = list(accumulate(num_layers, initial=0))
    return [Layers(*both) for both in pairwise(ends) for _ in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("theirs", [(6,), (3, 3), (1, 3, 2), (2, 2, 1, 1)])
@pytest.mark.parametrize("ours", [(6,), (3, 3), (2, 3, 1), (1,) * 6])
def test_each_layer_comes_from_the_stage_that_has_it(
    ours: tuple[int, ...], theirs: tuple[int, ...], tp_size: int
) -> None:
    peers = stages_of(*theirs, tp_size=tp_size)
    for rank, own in enumerate(stages_of(*ours)):
        layers = own or Layers(0, 6)
        loaded: list[list[int]] = [[] for _ in range(*layers)]
        sources = Sharding(rank, 1, 2, len(ours)).loads_from(layers, peers)
        for source in sources:
            assert source.layers is not None
            there = peers[source.rank] or Layers(0, 6)
            for index, layer in enumerate(range(*source.layers)):
                assert layers.first + layer == there.first + source.skip + index
                loaded[layer].append(source.ours.index)
        assert loaded == [list(range(tp_size))] * len(loaded)


@pytest.mark.parametrize(
    "peers",
    [
        [],
        stages_of(3, 2),
        [Layers(1, 6)],
        [Layers(0, 3), Layers(4, 6)],
        [Layers(0, 4), Layers(3, 6)],
        [Layers(0, 2), Layers(1, 3), Layers(2, 6)],
        [Layers(3, 6), Layers(0, 3)],
    ],
    ids=["none", "fewer", "not the first", "a gap", "twice", "twice within", "not in order"],
)
def test_stages_that_have_not_each_layer_once_are_an_error(peers: list[Layers | None]) -> None:
    with pytest.raises(TransferError, match="pipeline stages"):
        Sharding().loads_from(Layers(0, 6), peers)
