# SPDX-License-Identifier: Apache-2.0
"""Where the pages of the engine's KV caches lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch  # noqa: TID251 - tensors of the engine

from vllm_ascend_pd.backends.block_copy import GroupPages, PageLayout, Region
from vllm_ascend_pd.backends.device_copy import DevicePageLayout, Segment
from vllm_ascend_pd.engine.sharding import HEADS_OUTERMOST
from vllm_ascend_pd.engine.vllm_api.groups import (
    kv_groups,
    layer_bytes,
    page_bytes,
    place_of,
    unpadded_page_bytes,
    whole_block_bytes,
)
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm_ascend_pd.engine.vllm_api.config_types import KVCacheConfig
    from vllm_ascend_pd.kv.span import KVGroup

_DEVICES = ("cuda", "npu")
_COMPACT_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")

Cache: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""What the engine hands over for one layer; dimension 0 counts blocks."""


@dataclass(frozen=True, slots=True)
class KVCaches:
    """The page layout, and the indexes in it of every attention layer (aliases included): of one
    with large pages several.
    """

    layout: PageLayout
    layers: Mapping[str, range]
    device: torch.device
    kernels: str = ""
    """See `kernel_blocks`."""
    whole_blocks: bool = False
    """See `groups.whole_block_bytes`."""

    def by_group(self, groups: Sequence[KVGroup]) -> tuple[GroupPages, ...]:
        return tuple(
            GroupPages.of(
                self.layout,
                group.block_size,
                sorted({index for name in group.layers for index in self.layers[name]}),
                states=bool(group.state),
            )
            for group in groups
        )


def locate(kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache]) -> KVCaches:
    """Addresses of all pages, in host memory or in that of a device.

    A cache is one tensor, or on Ascend a tuple: K and V, or MLA's latent and RoPE parts.

    Raises:
        ConfigError: a layout whose pages cannot be addressed; names it and the fix.
    """
    first = parts(next(iter(kv_caches.values())))[0]
    if first.device.type == "cpu":
        return _locate_on_host(kv_cache_config, kv_caches, first)
    if first.device.type not in _DEVICES:
        raise ConfigError(
            f"InEngine transfers know KV caches on cpu, {' and '.join(_DEVICES)}; this worker's"
            f" are on {first.device.type!r}"
        )
    return locate_on_device(kv_cache_config, kv_caches)


def _locate_whole_blocks(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache], on_device: bool = False
) -> KVCaches:
    """Each group has one layer, see ``groups.whole_block_bytes``: they are at the same addresses,
    in different blocks.
    """
    caches = [part for cache in kv_caches.values() for part in parts(cache)]
    storage, num_blocks = caches[0].untyped_storage(), kv_cache_config.num_blocks
    page, groups = whole_block_bytes(kv_cache_config), kv_cache_config.kv_cache_groups
    if (
        any(cache.untyped_storage().data_ptr() != storage.data_ptr() for cache in caches)
        or storage.nbytes() < page * num_blocks
    ):
        raise ConfigError(
            "InEngine needs the pages of a block, of different sizes, in one allocation of"
            f" {num_blocks} blocks of {page} bytes"
        )
    region = Region(storage.data_ptr(), storage.nbytes())
    zeros, strides = np.zeros(len(groups), np.int64), np.full(len(groups), page, np.int64)
    layers = {
        name: range(index, index + 1)
        for index, group in enumerate(groups)
        for name in group.layer_names
        if name in kv_caches
    }
    layout = PageLayout(region, zeros, strides, page)
    if on_device:
        flat = torch.as_strided(caches[0].view(torch.uint8), (storage.nbytes(),), (1,), 0)
        segments = ((Segment(0, 0, page, page),),) * len(groups)
        layout = DevicePageLayout(region, zeros, strides, page, segments, (flat,), num_blocks)
    kernels = kernel_blocks(kv_cache_config, kv_caches)
    return KVCaches(layout, layers, caches[0].device, kernels, whole_blocks=True)


def _locate_on_host(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache], first: torch.Tensor
) -> KVCaches:
    """One allocation: ``base + offset + layer * stride + block * stride``."""
    if whole_block_bytes(kv_cache_config):
        return _locate_whole_blocks(kv_cache_config, kv_caches)
    if kv_cache_config.kv_cache_layout not in _COMPACT_LAYOUTS:
        raise ConfigError(
            f"VLLM_KV_CACHE_LAYOUT={kv_cache_config.kv_cache_layout}: a page must be contiguous;"
            f" use one of {', '.join(_COMPACT_LAYOUTS)}"
        )
    storage = first.untyped_storage()
    starts: dict[str, int] = {}
    stride_of: dict[str, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            starts[name] = tensor.offset + index * tensor.layer_stride
            stride_of[name] = tensor.block_stride
    sizes, page = layer_bytes(kv_cache_config), page_bytes(kv_cache_config)
    if len(set(sizes.values())) > 1 and any(size % page for size in sizes.values()):
        raise ConfigError(
            f"on a CPU InEngine needs layers with pages of one size, or of small multiples of one,"
            f" not of {sorted(set(sizes.values()))} bytes"
        )
    offsets: list[int] = []
    strides: list[int] = []
    layers: dict[str, range] = {}
    for name in run_order(kv_cache_config, starts):
        cuts = range(starts[name], starts[name] + max(page, sizes[name]), page)
        layers[name] = range(len(offsets), len(offsets) + len(cuts))
        offsets += cuts
        strides += [stride_of[name]] * len(cuts)
    layout = PageLayout(
        region=Region(storage.data_ptr(), storage.nbytes()),
        layer_offsets=np.array(offsets, dtype=np.int64),
        block_strides=np.array(strides, dtype=np.int64),
        page_bytes=page,
    )
    by_address = {data_ptr(kv_caches[name]): found for name, found in layers.items()}
    for name, cache in kv_caches.items():
        layers.setdefault(name, by_address[data_ptr(cache)])
    return KVCaches(layout, layers, first.device)


def run_order(kv_cache_config: KVCacheConfig, names: Iterable[str]) -> list[str]:
    """As the layers run in a step, so that early pieces are early layers: the model's by their
    numbers, then a drafter's. vLLM registers these behind the model's, with names that begin
    otherwise or with numbers that go on. Where layers run otherwise, ``SavedLayers`` sees to it.
    """
    names = list(names)
    known = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    beginnings = list(dict.fromkeys(place_of(name)[0] for name in (*known, *names)))

    def place(name: str) -> tuple[int, int, str]:
        beginning, number = place_of(name)
        return beginnings.index(beginning), number, name

    return sorted(names, key=place)


def parts(cache: Cache) -> tuple[torch.Tensor, ...]:
    """The tensors of one layer, in the order in which the engine names them."""
    return (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)


def data_ptr(cache: Cache) -> int:
    """Tells layers that share a cache: the address of its first tensor."""
    return parts(cache)[0].data_ptr()


def locate_on_device(kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache]) -> KVCaches:
    """Pages as runs of bytes in the allocations of one device."""
    if whole_block_bytes(kv_cache_config):
        return _locate_whole_blocks(kv_cache_config, kv_caches, on_device=True)
    num_bytes, sizes = unpadded_page_bytes(kv_cache_config), layer_bytes(kv_cache_config)
    if len(set(sizes.values())) == 1:
        sizes = dict.fromkeys(sizes, num_bytes)
    states = {name for group in kv_groups(kv_cache_config) if group.state for name in group.layers}
    memories: list[torch.Tensor] = []
    memory_of: dict[int, int] = {}
    segments: list[tuple[Segment, ...]] = []
    layers: dict[str, range] = {}
    by_address: dict[int, str] = {}
    at_place: dict[tuple[str, int], str] = {}
    group_of = {
        name: index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    for name in run_order(kv_cache_config, kv_caches):
        cache = kv_caches[name]
        # Layers of two groups are at one address, too, in different blocks.
        same = by_address.setdefault(data_ptr(cache), name)
        if same != name and group_of.get(name, group_of.get(same)) == group_of.get(same):
            layers[name] = layers[same]
            continue
        for tensor in parts(cache):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in memory_of:
                memory_of[storage.data_ptr()] = len(memories)
                flat = tensor.view(torch.uint8)
                memories.append(torch.as_strided(flat, (storage.nbytes(),), (1,), 0))
        size = sizes.get(name, num_bytes)  # an alias of another group's layer has none
        if name in states:
            found = _state_page(name, cache, memory_of, num_bytes)
        else:
            found = _segments(name, cache, memory_of, size, kv_cache_config.num_blocks)
        if size < num_bytes and (beside := at_place.get(place_of(name))) is not None:
            layers[name] = layers[beside]
            segments[layers[name].start] += found
            continue
        at_place[place_of(name)] = name
        pages = _cut(found, num_bytes) if size > num_bytes else [found]
        layers[name] = range(len(segments), len(segments) + len(pages))
        segments += pages
    starts = [memories[layer[0].memory].data_ptr() + layer[0].offset for layer in segments]
    low = min(memory.data_ptr() for memory in memories)
    high = max(memory.data_ptr() + memory.numel() for memory in memories)
    layout = DevicePageLayout(
        region=Region(low, high - low),
        layer_offsets=np.array([start - low for start in starts], dtype=np.int64),
        block_strides=np.array([layer[0].stride for layer in segments], dtype=np.int64),
        page_bytes=num_bytes,
        segments=tuple(segments),
        memories=tuple(memories),
        num_blocks=kv_cache_config.num_blocks,
    )
    return KVCaches(layout, layers, memories[0].device, kernel_blocks(kv_cache_config, kv_caches))


def kernel_blocks(kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, Cache]) -> str:
    """How many tokens of a block the kernels take at once, in each group, where that decides in
    which order a page has them; empty where it does not.

    A page that has heads outside of tokens has them so in each part that a kernel takes:

        whole      [head 0: tokens 0 to 127 | head 1: tokens 0 to 127]
        in two     [head 0: 0 to 63 | head 1: 0 to 63] [head 0: 64 to 127 | head 1: 64 to 127]
    """
    if str(kv_cache_config.kv_cache_layout) not in HEADS_OUTERMOST:
        return ""
    found: list[str] = []
    for group in kv_cache_config.kv_cache_groups:
        first = parts(kv_caches[group.layer_names[0]])[0]
        split = len(first) // kv_cache_config.num_blocks
        counts = split > 1 and first.dim() == 4 and first.shape[1] > 1  # heads
        found.append(str(group.kv_cache_spec.block_size // split) if counts else "whole")
    return ",".join(found) if any(one != "whole" for one in found) else ""


def _cut(page: tuple[Segment, ...], num_bytes: int) -> list[tuple[Segment, ...]]:
    """A large page as several of so many bytes."""
    cuts: list[tuple[Segment, ...]] = []
    room = 0
    for segment in page:
        at, end = segment.offset, segment.offset + segment.num_bytes
        while at < end:
            if not room:
                cuts.append(())
                room = num_bytes
            size = min(room, end - at)
            cuts[-1] += (replace(segment, offset=at, num_bytes=size),)
            at, room = at + size, room - size
    return cuts


def _state_page(
    name: str, cache: Cache, memory_of: Mapping[int, int], page_bytes: int
) -> tuple[Segment, ...]:
    """The run of bytes that a state has, with what pads it to a page of full attention."""
    tensor = parts(cache)[0]
    stride = _row_stride(tensor)
    if len(parts(cache)) > 1 or not _run_bytes(name, tensor) <= page_bytes <= stride:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts(cache))
        raise ConfigError(
            f"InEngine does not know these states: {name} has {shapes} every {stride} bytes, where"
            f" full attention has pages of {page_bytes} bytes"
        )
    offset = int(tensor.storage_offset()) * tensor.element_size()
    memory = memory_of[tensor.untyped_storage().data_ptr()]
    return (Segment(memory, offset, stride, page_bytes),)


def _segments(
    name: str, cache: Cache, memory_of: Mapping[int, int], page_bytes: int, num_blocks: int
) -> tuple[Segment, ...]:
    """The runs of bytes that make a page; neighbours in memory are one run.

    A kernel may divide a block: then ``split`` rows of dimension 0 make one block.

        K and V in one allocation     row 0: [K|V] row 1: [K|V] …      one run a block
        K and V apart                 K: [K] [K] …     V: [V] [V] …    two runs a block
    """
    found: list[Segment] = []
    row_bytes = sum(_run_bytes(name, tensor) for tensor in parts(cache))
    split, rest = divmod(page_bytes, row_bytes)
    if rest or not split or any(len(t) < split * num_blocks for t in parts(cache)):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in parts(cache))
        raise ConfigError(
            f"InEngine does not know this KV cache: {name} has {shapes} of {row_bytes} bytes a row,"
            f" where its specification says {num_blocks} blocks of {page_bytes} bytes"
        )
    rows = [
        Segment(
            memory_of[tensor.untyped_storage().data_ptr()],
            int(tensor.storage_offset()) * tensor.element_size() + row * _row_stride(tensor),
            split * _row_stride(tensor),
            _run_bytes(name, tensor),
        )
        for row in range(split)
        for tensor in parts(cache)
    ]
    for segment in rows:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.memory, last.stride) == (segment.memory, segment.stride)
            and last.offset + last.num_bytes == segment.offset
        ):
            found[-1] = replace(last, num_bytes=last.num_bytes + segment.num_bytes)
        else:
            found.append(segment)
    return tuple(found)


def _row_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _run_bytes(name: str, tensor: torch.Tensor) -> int:
    """Bytes of one row of dimension 0, which must be one run, in whatever order of dimensions."""
    row = tensor[0]
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(row.shape, row.stride(), strict=True)
    )
    if extent != row.numel():
        raise ConfigError(
            f"InEngine needs a page in one run: {name} has strides {tensor.stride()} for shape"
            f" {tuple(tensor.shape)}"
        )
    return row.numel() * tensor.element_size()
