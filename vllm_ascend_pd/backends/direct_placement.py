# SPDX-License-Identifier: Apache-2.0
"""Live KV pages as targets of one-sided writes: where they lie, and which writes fill them. Pure.

    producer   layer 0   [K0|V0][K1|V1][K2|V2]            one run a block, blocks side by side
    consumer   layer 0   [K0][K1][K2]…  [V0][V1][V2]…     two runs a block

The two sides may cut a page differently. What both sides have in one run is one write, and so are
neighbouring blocks that are neighbours on both sides.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_pd.backends.device_copy import DevicePageLayout
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.wire import PageRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_ascend_pd.backends.block_copy import PageLayout

MAX_REGIONS = 256
"""What HCCL can register for one process (``MAX_HCCL_REGISTER_REGIONS`` of vllm-ascend)."""


class Writes(NamedTuple):
    """Arguments of `SupportsDirectPlacement.submit_batch`."""

    src_addrs: list[int]
    dst_addrs: list[int]
    lengths: list[int]


class _Common(NamedTuple):
    """A run of bytes that every block has in one piece on both sides."""

    src: int
    src_stride: int
    dst: int
    dst_stride: int
    num_bytes: int


def page_runs(layout: PageLayout) -> tuple[tuple[PageRun, ...], ...]:
    """The runs of every layer's pages, as addresses."""
    if isinstance(layout, DevicePageLayout):
        starts = [memory.data_ptr() for memory in layout.memories]
        return tuple(
            tuple(PageRun(starts[s.memory] + s.offset, s.stride, s.num_bytes) for s in layer)
            for layer in layout.segments
        )
    return tuple(
        (PageRun(layout.region.base + int(offset), int(stride), layout.page_bytes),)
        for offset, stride in zip(layout.layer_offsets, layout.block_strides, strict=True)
    )


def plan_writes(
    sources: Sequence[Sequence[PageRun]],
    source_ids: Sequence[int],
    targets: Sequence[Sequence[PageRun]],
    target_ids: Sequence[int],
) -> Writes:
    """The writes that bring block ``source_ids[i]`` to ``target_ids[i]``, of every layer.

    Raises:
        ValueError: layers, blocks or the bytes of a page differ between the two sides.
    """
    if len(sources) != len(targets) or len(source_ids) != len(target_ids):
        raise ValueError(
            f"{len(source_ids)} blocks of {len(sources)} layers to {len(target_ids)} blocks of"
            f" {len(targets)} layers"
        )
    writes = Writes([], [], [])
    spans = list(_spans(source_ids, target_ids))
    for source, target in zip(sources, targets, strict=True):
        for run in _common_runs(source, target):
            whole = run.num_bytes == run.src_stride == run.dst_stride
            for first_source, first_target, count in spans:
                for index in range(1 if whole else count):
                    writes.src_addrs.append(run.src + (first_source + index) * run.src_stride)
                    writes.dst_addrs.append(run.dst + (first_target + index) * run.dst_stride)
                    writes.lengths.append(run.num_bytes * (count if whole else 1))
    return writes


def _spans(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks in a row on both sides: the first one there, the first one here, how many."""
    ids = enumerate(zip(source_ids, target_ids, strict=True))
    for _, run in groupby(ids, lambda one: (one[1][0] - one[0], one[1][1] - one[0])):
        (_, (source, target)), *others = run
        yield source, target, 1 + len(others)


def _common_runs(source: Sequence[PageRun], target: Sequence[PageRun]) -> Iterator[_Common]:
    """One layer's page, cut wherever one of the two sides cuts it."""
    if sum(run.num_bytes for run in source) != sum(run.num_bytes for run in target):
        raise ValueError(f"pages of different size: {list(source)} to {list(target)}")
    left, right = list(reversed(source)), list(reversed(target))
    while left:
        ours, theirs = left.pop(), right.pop()
        num_bytes = min(ours.num_bytes, theirs.num_bytes)
        yield _Common(ours.address, ours.stride, theirs.address, theirs.stride, num_bytes)
        for rest, run in ((left, ours), (right, theirs)):
            if run.num_bytes > num_bytes:
                rest.append(PageRun(run.address + num_bytes, run.stride, run.num_bytes - num_bytes))


def page_regions(
    layout: PageLayout, num_blocks: int, layers: Mapping[str, range], alignment: int
) -> list[tuple[int, int]]:
    """What to register so that every page can be read and written: ``[(address, bytes)]``.

    One range for each allocation, from its first page to its last.

    Raises:
        ConfigError: a range does not begin at a multiple of ``alignment``, or there are more than
            can be registered; names the layer and the way out.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for index, runs in enumerate(page_runs(layout)):
        for part, run in enumerate(runs):
            memory = 0
            if isinstance(layout, DevicePageLayout):
                memory = layout.segments[index][part].memory
            start, end = run.address, run.address + (num_blocks - 1) * run.stride + run.num_bytes
            low, high = ranges.get(memory, (start, end))
            ranges[memory] = min(low, start), max(high, end)
    names = {index: name for name, indexes in layers.items() for index in indexes}
    for start, _ in ranges.values():
        if start % alignment:
            layer = next(
                index
                for index, runs in enumerate(page_runs(layout))
                if any(run.address == start for run in runs)
            )
            raise ConfigError(
                f"the KV cache of {names[layer]} begins at {start:#x}, which is not a multiple of"
                f" {alignment >> 20} MiB, as direct placement needs it: set transfer.placement to"
                " staged, and report this"
            )
    if len(ranges) > MAX_REGIONS:
        raise ConfigError(
            f"the KV caches are in {len(ranges)} allocations, and at most {MAX_REGIONS} can be"
            " registered for direct placement: set transfer.placement to staged"
        )
    return sorted((start, end - start) for start, end in ranges.values())
