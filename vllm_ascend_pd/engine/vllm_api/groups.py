# SPDX-License-Identifier: Apache-2.0
"""KV cache groups, and what requests have in each of them. Scheduler thread, but for ``kv_groups``.

This is the one place that knows how vLLM orders groups: ``KVGroup.id`` is the index everywhere.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.vllm_api.blocks import cached_block
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.span import NO_BLOCK, GroupBlocks, KVGroup, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_ascend_pd.engine.vllm_api.config_types import KVCacheConfig, VllmConfig
    from vllm_ascend_pd.engine.vllm_api.types import (
        KVCacheBlock,
        KVCacheManager,
        Request,
    )


_ATTENTION = "vllm.model_executor.layers.attention."
"""Where the classes are whose forward calls ``hooks.StepHooks``."""

MAX_CUTS = 16
"""Of a page: each is copied by itself."""


def kv_groups(
    config: KVCacheConfig, stops_early: bool = False, hash_block_size: int = 0
) -> tuple[KVGroup, ...]:
    """Those of the engine, which hashes so many tokens at a time. For ``stops_early`` see
    ``KVGroup``.

    Raises:
        ConfigError: layers whose pages cannot be made pages of one size.
    """
    sizes_of = _layer_bytes_by_group(config)
    unit = math.lcm(*(group.kv_cache_spec.block_size for group in config.kv_cache_groups))
    whole_block = whole_block_bytes(config)
    groups: list[KVGroup] = []
    for group, sizes in zip(config.kv_cache_groups, sizes_of, strict=True):
        spec = group.kv_cache_spec
        if whole_block:
            several = tuple(sorted(set(sizes.values())))
            page_bytes, layers = whole_block, tuple(group.layer_names[:1])
        else:
            page_bytes, layers, several = _pages(sizes, spec)
        groups.append(
            KVGroup(
                id=len(groups),
                block_size=spec.block_size,
                page_bytes=page_bytes,
                layers=layers,
                window=_attribute(spec, "SlidingWindowSpec", "sliding_window")
                or _attribute(spec, "SlidingWindowMLASpec", "sliding_window"),
                chunk=_attribute(spec, "ChunkedLocalAttentionSpec", "attention_chunk_size"),
                state=_state(spec),
                stops_early=stops_early and type(spec).__name__ == "MambaSpec",
                sizes=several,
                blocks_per_unit=unit // spec.block_size,
                hashes_per_block=spec.block_size // (hash_block_size or spec.block_size),
            )
        )
    return tuple(groups)


def _pages(sizes: dict[str, int], spec: Any) -> tuple[int, tuple[str, ...], tuple[int, ...]]:
    """``page_bytes``, ``layers`` and ``sizes`` of the group that has layers with pages of these
    ``sizes``.

    Where layers have pages of several sizes, as a drafter with more KV heads than its model, they
    are cut into pages of their common divisor: such a layer counts as several. An indexer's pages
    are small beside those of its layer, and of a size that has little in common with theirs: both
    together are one page.

        the model's         [   ] [   ] [   ]         attention  [         ] [         ]
        the drafter's       [   |   |   |   ]         indexer    [  ]        [  ]
                            7 layers                             2 layers
    """
    several = tuple(sorted(set(sizes.values())))
    if len(several) <= 1:
        is_of_each = hasattr(spec, "kv_cache_specs")
        return several[0] if is_of_each else spec.page_size_bytes, tuple(sizes), ()
    unit = math.gcd(*several)
    if several[-1] // unit <= MAX_CUTS:
        cut = tuple(name for name, size in sizes.items() for _ in range(size // unit))
        return unit, cut, several
    at_place: dict[tuple[str, int], list[str]] = {}
    for name in sizes:
        at_place.setdefault(place_of(name), []).append(name)
    joined = {sum(sizes[name] for name in names) for names in at_place.values()}
    if len(joined) > 1:
        raise ConfigError(
            f"InEngine needs layers with pages of one size, or that are small multiples of one, not"
            f" of {list(several)} bytes: a drafter must have as many KV heads as its model, or a"
            " multiple, and as large ones; an indexer must be in each layer"
        )
    return joined.pop(), tuple(names[0] for names in at_place.values()), several


def whole_block_bytes(config: KVCacheConfig) -> int:
    """How large a block is where it is one page of one layer, as groups have layers with pages of
    sizes that have too little in common, side by side in a block (DeepSeek V4); 0 elsewhere.

        compressed KV       block 7  [ layer 0    | indexer | layer 1 | layer 2    | indexer ]
        windows             block 8  [ layer 0    | layer 1    | layer 2    ]
        what is compressed  block 9  [ layer 0   | layer 0, indexer | layer 2   | ... ]
    """
    groups, tensors = config.kv_cache_groups, config.kv_cache_tensors
    strides = {tensor.block_stride for tensor in tensors}
    if (
        len(groups) == 1
        or len(strides) > 1
        or any(tensor.layer_stride > tensor.block_stride for tensor in tensors)
    ):
        return 0
    try:
        pages = {
            _pages(sizes, group.kv_cache_spec)[0]
            for group, sizes in zip(groups, _layer_bytes_by_group(config), strict=True)
        }
    except ConfigError:
        pages = set()
    return strides.pop() if len(pages) != 1 else 0


def _layer_bytes_by_group(config: KVCacheConfig) -> list[dict[str, int]]:
    sizes = layer_bytes(config).items()
    return [
        {name: size for name, size in sizes if name in group.layer_names}
        for group in config.kv_cache_groups
    ]


def layer_bytes(config: KVCacheConfig) -> dict[str, int]:
    """Of a block in each layer, in the order in which they lie in memory. One of the two strides
    is a page, whatever is outermost.

    Touches:
        vllm/v1/kv_cache_interface.py:KVCacheTensor.layer_stride
        vllm/v1/kv_cache_interface.py:KVCacheTensor.block_stride
    """
    return {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for name in tensor.layers
    }


def place_of(name: str) -> tuple[str, int]:
    """``draft_model.model.layers.3.self_attn.attn`` -> ``draft_model.model.layers``, 3. What is of
    one number runs together.
    """
    words = name.split(".")
    index = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return (name, 0) if index is None else (".".join(words[:index]), int(words[index]))


def _state(spec: Any) -> str:
    """Of layers that keep a state: its kind, and shape and type of each of its parts.

    Touches:
        vllm/v1/kv_cache_interface.py:MambaSpec.shapes
        vllm/v1/kv_cache_interface.py:MambaSpec.dtypes
        vllm/v1/kv_cache_interface.py:MambaSpec.mamba_type
    """
    if type(spec).__name__ != "MambaSpec":
        return ""
    parts = (
        f"{'x'.join(map(str, shape))}-{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return "-".join([spec.mamba_type.name.lower(), *parts])


def page_slots(config: KVCacheConfig) -> tuple[str, ...]:
    """How pages are divided in each group where its attention backend packs K and V otherwise than
    a slot for each KV head; empty for a group where it does not. Such pages may be as large as
    those of another backend.

    Touches:
        vllm/v1/kv_cache_interface.py:AttentionSpec.num_head_slots
        vllm/v1/kv_cache_interface.py:AttentionSpec.state_content_size_bytes
        vllm/v1/kv_cache_interface.py:UniformTypeKVCacheSpecs.kv_cache_specs
    """
    slots: list[str] = []
    for group in config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        # As the scheduler has it: that of the first layer.
        spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        count = getattr(spec, "num_head_slots", None)
        slots.append("" if count is None else f"{count}x{spec.state_content_size_bytes}")
    return tuple(slots)


def _attribute(spec: object, kind: str, name: str) -> int:
    """Of a specification of that kind; full attention has some of them, too, for its kernels.

    Touches:
        vllm/v1/kv_cache_interface.py:SlidingWindowSpec.sliding_window
        vllm/v1/kv_cache_interface.py:ChunkedLocalAttentionSpec.attention_chunk_size
    """
    return getattr(spec, name) if type(spec).__name__ == kind else 0


def has_caches_beside(config: KVCacheConfig) -> bool:
    """Whether some layer has two caches with pages of different sizes, as one with an indexer."""
    sizes: dict[tuple[str, int], int] = {}
    return any(
        sizes.setdefault(place_of(name), num_bytes) != num_bytes
        for name, num_bytes in layer_bytes(config).items()
    )


def hooked_layers(config: KVCacheConfig) -> list[str]:
    """Whose attention calls ``hooks.StepHooks``: all but those that keep a state, and what an
    indexer keeps, whose pages are small beside those of its layer.
    """
    states = {name for group in kv_groups(config) if group.state for name in group.layers}
    sizes = {name: size for name, size in layer_bytes(config).items() if name not in states}
    largest: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        largest[place_of(name)] = max(size, largest.get(place_of(name), 0))
    return [name for name, size in sizes.items() if size == largest[place_of(name)]]


def reads_early(config: VllmConfig, layers: Iterable[str]) -> bool:
    """Whether one of these layers may read its cache where no hook waits: all but vLLM's own
    attention, as what keeps states, what an indexer keeps, or attention that a model brings along.

    Touches:
        vllm/config/compilation.py:CompilationConfig.static_forward_context
        vllm/model_executor/layers/attention/attention.py:Attention.forward
        vllm/model_executor/layers/attention/mla_attention.py:MLAAttention.forward
    """
    modules = config.compilation_config.static_forward_context
    forwards = (type(modules[name]).forward for name in layers)
    return any(not forward.__module__.startswith(_ATTENTION) for forward in forwards)


def page_bytes(config: KVCacheConfig) -> int:
    """Of a block in one layer. vLLM gives the pages of all groups one size."""
    return kv_groups(config)[0].page_bytes


def unpadded_page_bytes(config: KVCacheConfig) -> int:
    """Of a page, what holds KV; states are padded to as much.

    Touches:
        vllm/v1/kv_cache_interface.py:AttentionSpec.real_page_size_bytes
    """
    if len({*layer_bytes(config).values()}) > 1:
        return page_bytes(config)
    specs = (group.kv_cache_spec for group in config.kv_cache_groups)
    return max(getattr(spec, "real_page_size_bytes", spec.page_size_bytes) for spec in specs)


def block_table(manager: KVCacheManager, request: Request, group: KVGroup) -> list[KVCacheBlock]:
    """The blocks of a request, as they are: who changes the list changes the table. None of one
    that has ended meanwhile, of which vLLM's tables, where a look makes an entry, keep nothing.
    """
    tables = manager.coordinator.single_type_managers[group.id].req_to_blocks
    return tables.get(request.request_id, [])


def evict_uncomputed(manager: KVCacheManager, request: Request, groups: Sequence[KVGroup]) -> None:
    """Its blocks that are full only with what a step was to compute: vLLM enters those into the
    prefix cache when it schedules the request.
    """
    num_computed = request.num_computed_tokens
    tables = [block_table(manager, request, g)[num_computed // g.block_size :] for g in groups]
    manager.evict_blocks({block.block_id for block in chain(*tables) if not block.is_null})


def num_entered(manager: KVCacheManager, request: Request, group: KVGroup) -> int:
    """So many of its blocks has vLLM entered into the prefix cache, but for those of windows that
    it was asked not to.
    """
    entered = manager.coordinator.single_type_managers[group.id].num_cached_block
    return entered.get(request.request_id, 0)


def known_end(request: Request) -> int:
    """How many tokens of a request were known when it came: the end of the span that is asked for,
    leased and loaded for it. What follows is sampled.
    """
    return request.num_prompt_tokens


def block_hashes(request: Request, group: KVGroup, end: int) -> tuple[bytes, ...]:
    """Of the full units of its first ``end`` tokens."""
    every = group.hashes_per_unit
    return tuple(request.block_hashes[every - 1 : end // group.unit_size * every : every])


def block_ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [NO_BLOCK if block.is_null else block.block_id for block in blocks]


def lasting_blocks(
    manager: KVCacheManager,
    request: Request,
    group: KVGroup,
    end: int,
    is_whole: Callable[[KVCacheBlock], bool],
) -> list[KVCacheBlock]:
    """Of the first ``end`` tokens, those that the request has until the last of them is computed:
    null blocks where it may give one up before. What it has given up already counts as long as it
    is in the prefix cache and ``is_whole``.
    """
    first = group.first_kept(end)
    null = manager.block_pool.null_block
    blocks = block_table(manager, request, group)[: group.tail_index(end) + 1]
    lasting = [null] * min(first, len(blocks)) + blocks[first:]
    index = group.last_stop(end)
    if group.stops_early and 0 <= index < len(lasting) - 1:
        # Where the rest was computed in two steps, the request has given it up; a step that leaves
        # a state within it has one of other tokens in this block.
        cached = cached_block(manager.block_pool, request, index, group)
        lasting[index] = cached if cached is not None and is_whole(cached) else null
    return lasting


def movable_blocks(
    manager: KVCacheManager,
    request: Request,
    group: KVGroup,
    end: int,
    is_whole: Callable[[KVCacheBlock], bool],
) -> list[KVCacheBlock]:
    """As ``lasting_blocks``, of a request that goes on: also the state at the last boundary, which
    it has given up.
    """
    blocks = lasting_blocks(manager, request, group, end, is_whole)
    index = end // group.block_size - 1
    if group.state and index >= 0 and blocks[index].is_null:
        cached = cached_block(manager.block_pool, request, index, group)
        if cached is not None and is_whole(cached):
            blocks[index] = cached
    return blocks


def allocated_span(manager: KVCacheManager, groups: Sequence[KVGroup], request: Request) -> Span:
    """All that blocks are allocated for, without hashes."""
    tables = [block_ids(block_table(manager, request, group)) for group in groups]
    sizes = [group.block_size for group in groups]
    end = max(len(table) * size for table, size in zip(tables, sizes, strict=True))
    return Span(0, end, tuple(map(GroupBlocks, sizes))).holding(tables)
