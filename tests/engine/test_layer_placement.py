# SPDX-License-Identifier: Apache-2.0
"""Which writes bring pages from one engine's KV caches into another's."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_device_caches import (
    ALIGNMENT,
    BLOCK,
    GQA,
    HEADS,
    MLA,
    NAMES,
    NUM_BLOCKS,
    SIZE,
    apart,
    combined,
    config_of,
    content,
)
from vllm_ascend_pd.backends.block_copy import PageLayout, Region
from vllm_ascend_pd.backends.direct_placement import (
    MAX_REGIONS,
    page_regions,
    page_runs,
    plan_writes,
)
from vllm_ascend_pd.engine.worker.kv_caches import KVCaches, locate_on_device
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.wire import PageRun


def locate(spec: Any, caches: dict[str, Any]) -> KVCaches:
    return locate_on_device(config_of(spec, list(caches)), caches)


def move(source: KVCaches, source_ids: list[int], target: KVCaches, target_ids: list[int]) -> int:
    """As an engine with direct placement does; the number of writes."""
    writes = plan_writes(page_runs(source.layout), source_ids, page_runs(target.layout), target_ids)
    for src, dst, length in zip(*writes, strict=True):
        ctypes.memmove(dst, src, length)
    return len(writes.lengths)


PAIRS = {
    "K and V in one allocation": (GQA, combined, combined),
    "K and V apart": (GQA, lambda: apart(SIZE, SIZE, HEADS), lambda: apart(SIZE, SIZE, HEADS)),
    "one to apart": (GQA, combined, lambda: apart(SIZE, SIZE, HEADS)),
    "apart to one": (GQA, lambda: apart(SIZE, SIZE, HEADS), combined),
    "MLA's latent and RoPE": (MLA, lambda: apart(64, 16, 1), lambda: apart(64, 16, 1)),
    "rows of half a block": (
        GQA,
        lambda: combined(rows=2 * NUM_BLOCKS, tokens=BLOCK // 2),
        lambda: combined(rows=2 * NUM_BLOCKS, tokens=BLOCK // 2),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [([0], [0]), ([1, 2, 3], [3, 4, 5]), ([5, 0, 1, 4], [0, 2, 3, 5]), ([2, 1], [1, 2])],
)
def test_pages_arrive_and_no_other_is_touched(
    name: str, source_ids: list[int], target_ids: list[int]
) -> None:
    spec, make_source, make_target = PAIRS[name]
    split = 2 if "half" in name else 1
    ours = {layer: make_source() for layer in NAMES}
    theirs = {layer: make_target() for layer in NAMES}
    before = {
        (layer, block): content(theirs[layer], block, split)
        for layer in NAMES
        for block in range(NUM_BLOCKS)
    }
    move(locate(spec, ours), source_ids, locate(spec, theirs), target_ids)
    for layer in NAMES:
        for source, target in zip(source_ids, target_ids, strict=True):
            assert content(theirs[layer], target, split) == content(ours[layer], source, split)
        for block in set(range(NUM_BLOCKS)) - set(target_ids):
            assert content(theirs[layer], block, split) == before[layer, block]


@pytest.mark.parametrize(
    ("name", "per_layer"),
    [("K and V in one allocation", 1), ("K and V apart", 2), ("MLA's latent and RoPE", 2)],
)
def test_neighbouring_blocks_are_one_write(name: str, per_layer: int) -> None:
    spec, make_source, make_target = PAIRS[name]
    ours = locate(spec, {layer: make_source() for layer in NAMES})
    theirs = locate(spec, {layer: make_target() for layer in NAMES})
    assert move(ours, [1, 2, 3], theirs, [0, 1, 2]) == per_layer * len(NAMES)
    # One of the two sides has a gap.
    assert move(ours, [1, 2, 3], theirs, [0, 1, 5]) == 2 * per_layer * len(NAMES)


def test_sides_that_cut_a_page_differently_share_writes_only_within_a_block() -> None:
    ours = locate(GQA, {NAMES[0]: combined()})
    theirs = locate(GQA, {NAMES[0]: apart(SIZE, SIZE, HEADS)})
    assert move(ours, [1, 2, 3], theirs, [0, 1, 2]) == 2 * 3


cuts = st.lists(st.integers(1, 40), min_size=1, max_size=4)
blocks = st.permutations(range(8))


@given(
    left=cuts, right=cuts, source=blocks, target=blocks, num=st.integers(1, 8), gap=st.booleans()
)
def test_any_two_cuts_of_a_page(
    left: list[int], right: list[int], source: list[int], target: list[int], num: int, gap: bool
) -> None:
    """Every byte of every page goes to its place once, whatever the runs of the two sides are."""
    total = max(sum(left), sum(right))
    memories = []
    for sizes, stretch in ((left, 3 if gap else 0), (right, 0)):
        sizes[-1] += total - sum(sizes)
        starts, end = [], 64
        for size in sizes:
            starts.append(end)
            end += 8 * (size + stretch)
        runs = [PageRun(s, n + stretch, n) for s, n in zip(starts, sizes, strict=True)]
        memories.append((runs, end))
    (src_runs, src_end), (dst_runs, dst_end) = memories
    random = np.random.default_rng(0)
    src = random.integers(1, 256, src_end, dtype=np.uint8)
    dst = np.zeros(dst_end, dtype=np.uint8)
    expected = dst.copy()

    def page(memory: np.ndarray, runs: list[PageRun], block: int) -> list[np.ndarray]:
        starts = [run.address + block * run.stride for run in runs]
        return [memory[s : s + r.num_bytes] for s, r in zip(starts, runs, strict=True)]

    for a, b in zip(source[:num], target[:num], strict=True):
        content = np.concatenate(page(src, src_runs, a))
        for part in page(expected, dst_runs, b):
            part[:] = content[: len(part)]
            content = content[len(part) :]
    writes = plan_writes([src_runs], source[:num], [dst_runs], target[:num])
    for at, to, length in zip(*writes, strict=True):
        dst[to : to + length] = src[at : at + length]
    np.testing.assert_array_equal(dst, expected)
    assert sum(writes.lengths) == num * total


@pytest.mark.parametrize(
    ("targets", "ids"),
    [([], (0,)), ([(PageRun(1, 8, 8),)], (0, 1)), ([(PageRun(1, 9, 9),)], (0,))],
    ids=["layers", "blocks", "bytes"],
)
def test_pages_that_do_not_fit_are_refused(targets: Any, ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"blocks|different size"):
        plan_writes([(PageRun(1, 8, 8),)], (0,), targets, ids)


def test_host_pages_are_one_run_a_layer() -> None:
    layout = PageLayout(Region(4096, 4096), np.array([0, 1024]), np.array([128, 256]), 96)
    assert page_runs(layout) == ((PageRun(4096, 128, 96),), (PageRun(5120, 256, 96),))
    assert page_regions(layout, 8, {"a": range(1), "b": range(1, 2)}, 4096) == [
        (4096, 1024 + 7 * 256 + 96)
    ]


def regions_of(found: KVCaches) -> list[tuple[int, int]]:
    return page_regions(found.layout, NUM_BLOCKS, found.layers, ALIGNMENT)


def test_every_allocation_is_registered_once_from_its_first_page_to_its_last() -> None:
    caches = {name: combined() for name in NAMES}
    expected = sorted((k.data_ptr(), NUM_BLOCKS * GQA.page_size_bytes) for k, _ in caches.values())
    assert regions_of(locate(GQA, caches)) == expected
    separate = {name: apart(64, 16, 1) for name in NAMES}
    expected = sorted((t.data_ptr(), t.nbytes) for pair in separate.values() for t in pair)
    assert regions_of(locate(MLA, separate)) == expected
    assert all(start % ALIGNMENT == 0 for start, _ in expected)


def test_cache_that_does_not_begin_at_two_mib_is_refused_by_name() -> None:
    """As vllm-ascend's would, were it started without a ``kv_transfer_config``."""
    k, v = apart(SIZE, SIZE, HEADS)
    raw = v.new_empty(v.numel() + ALIGNMENT)
    start = (-raw.data_ptr() % ALIGNMENT + 4096) // 2
    moved = raw[start : start + v.numel()].view(v.shape)
    found = locate(GQA, {NAMES[0]: apart(SIZE, SIZE, HEADS), NAMES[1]: (k, moved)})
    with pytest.raises(ConfigError, match=rf"{NAMES[1]}.*2 MiB.*transfer\.placement to staged"):
        regions_of(found)


def test_more_allocations_than_can_be_registered_are_refused() -> None:
    names = [f"model.layers.{i}.attn" for i in range(MAX_REGIONS // 2 + 1)]
    k, v = apart(SIZE, SIZE, HEADS)
    caches = {name: (k.clone(), v.clone()) for name in names}
    found = locate(GQA, caches)
    with pytest.raises(ConfigError, match=f"{len(names) * 2} allocations"):
        page_regions(found.layout, NUM_BLOCKS, found.layers, 1)
