# SPDX-License-Identifier: Apache-2.0
"""KV caches as vLLM on CUDA and vllm-ascend lay them out, found as runs of bytes.

The tensors are made as those runners make them (vllm-ascend 0.30.0rc2, model_runner_v1.py,
_reshape_kv_cache_tensors), in host memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier, DevicePageLayout
from vllm_ascend_pd.backends.fake_device import FakeDevice
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.engine.vllm_api.groups import has_caches_beside, hooked_layers, kv_groups
from vllm_ascend_pd.engine.worker.kv_caches import KVCaches, locate_on_device
from vllm_ascend_pd.errors import ConfigError

NUM_BLOCKS, BLOCK, HEADS, SIZE = 6, 128, 2, 16
NAMES = ["model.layers.10.self_attn.attn", "model.layers.2.self_attn.attn"]
GQA = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64 + 16, dtype=torch.bfloat16)
ALIGNMENT = 2 * 1024 * 1024


def config_of(spec: Any, names: list[str]) -> KVCacheConfig:
    return KVCacheConfig(
        NUM_BLOCKS, [KVCacheTensor(0, names, 0, 0)], [KVCacheGroupSpec(names, spec)]
    )


def aligned(num_bytes: int) -> torch.Tensor:
    """``_allocate_int8_cache_tensor`` with a KV transfer configured."""
    raw = torch.randint(-128, 128, (num_bytes + ALIGNMENT,), dtype=torch.int8)
    offset = -raw.data_ptr() % ALIGNMENT
    return raw[offset:][:num_bytes]


def combined(rows: int = NUM_BLOCKS, tokens: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """GQA's default on Ascend: row b of one allocation is K page b, then V page b."""
    shape = (2, rows, tokens, HEADS, SIZE)
    raw = aligned(math.prod(shape) * 2).view(torch.bfloat16)
    hidden = tokens * HEADS * SIZE
    cache = torch.as_strided(
        raw,
        shape,
        (hidden, 2 * hidden, HEADS * SIZE, SIZE, 1),
        storage_offset=raw.storage_offset(),
    )
    return cache[0], cache[1]


def apart(k_dim: int, v_dim: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Separate allocations: MLA's latent and RoPE parts, or K and V for paged attention."""
    made = []
    for dim in (k_dim, v_dim):
        raw = aligned(NUM_BLOCKS * BLOCK * heads * dim * 2).view(torch.bfloat16)
        made.append(raw.view(NUM_BLOCKS, BLOCK, heads, dim))
    return made[0], made[1]


def content(cache: Any, block: int, split: int = 1) -> bytes:
    """Of one block: part after part; of a block in several rows: row after row."""
    tensors = (cache,) if isinstance(cache, torch.Tensor) else cache
    return b"".join(
        t[row].contiguous().view(torch.uint8).numpy().tobytes()
        for row in range(block * split, (block + 1) * split)
        for t in tensors
    )


def gathered(found: KVCaches, name: str, *blocks: int) -> bytes:
    assert isinstance(found.layout, DevicePageLayout)
    layers = found.layers[name]
    num_bytes = found.layout.page_bytes * len(layers) * len(blocks)
    staging = np.zeros(num_bytes, dtype=np.uint8)
    DeviceBlockCopier(FakeDevice(), PythonBlockCopier()).gather(
        found.layout.for_layers(layers.start, layers.stop),
        np.array(blocks, dtype=np.int64),
        Region(staging.ctypes.data, num_bytes),
    )
    return staging.tobytes()


def check(spec: Any, caches: dict[str, Any], runs: int, split: int = 1) -> KVCaches:
    found = locate_on_device(config_of(spec, list(caches)), caches)
    assert isinstance(found.layout, DevicePageLayout)
    assert found.layout.page_bytes == spec.page_size_bytes
    for name, cache in caches.items():
        (layer,) = found.layers[name]
        assert len(found.layout.segments[layer]) == runs
        expected = b"".join(content(cache, block, split) for block in (0, 5, 3))
        assert gathered(found, name, 0, 5, 3) == expected
    return found


def test_k_and_v_in_one_allocation_are_one_run_a_block() -> None:
    found = check(GQA, {name: combined() for name in NAMES}, runs=1)
    assert isinstance(found.layout, DevicePageLayout)
    assert len(found.layout.memories) == len(NAMES)
    assert found.layers == {NAMES[0]: range(1, 2), NAMES[1]: range(1)}  # as the model runs them


def test_separate_k_and_v_are_two_runs_a_block() -> None:
    check(GQA, {name: apart(SIZE, SIZE, HEADS) for name in NAMES}, runs=2)


def test_mla_has_a_latent_and_a_rope_run_of_different_size() -> None:
    found = check(MLA, {name: apart(64, 16, 1) for name in NAMES}, runs=2)
    assert isinstance(found.layout, DevicePageLayout)
    sizes = [segment.num_bytes for segment in found.layout.segments[0]]
    assert sizes == [BLOCK * 64 * 2, BLOCK * 16 * 2]


def test_combined_and_separate_caches_have_the_same_bytes_in_staging() -> None:
    one, two = combined(), apart(SIZE, SIZE, HEADS)
    for source, target in zip(one, two, strict=True):
        target.copy_(source)
    name = NAMES[0]
    ours = locate_on_device(config_of(GQA, [name]), {name: one})
    theirs = locate_on_device(config_of(GQA, [name]), {name: two})
    assert gathered(ours, name, 4, 1) == gathered(theirs, name, 4, 1)


def test_block_that_the_kernel_divides_is_still_one_page() -> None:
    """Blocks of 128 tokens in a cache whose kernel takes 64: two rows make one."""
    check(GQA, {NAMES[0]: combined(rows=2 * NUM_BLOCKS, tokens=BLOCK // 2)}, runs=1, split=2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["LBHNC", "LBNHC"])
def test_vllms_own_caches_on_a_gpu(order: tuple[int, ...]) -> None:
    """One backing allocation, a logical view [B, H, N, C] for each layer, whatever its order."""
    sizes = (NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE)
    backing = torch.randn(len(NAMES), math.prod(sizes)).to(torch.bfloat16)
    physical = [sizes[n] for n in order]
    caches = {
        name: backing[n].view(physical).permute([order.index(d) for d in range(4)])
        for n, name in enumerate(NAMES)
    }
    found = locate_on_device(config_of(GQA, NAMES), caches)
    assert isinstance(found.layout, DevicePageLayout)
    assert len(found.layout.memories) == 1
    block = backing.view(len(NAMES), NUM_BLOCKS, -1)[1, 4]
    assert gathered(found, NAMES[1], 4) == block.view(torch.uint8).numpy().tobytes()


def vllms_own(layout: str, kernel: int, heads: int = HEADS) -> tuple[KVCacheConfig, Any]:
    """As vLLM makes the cache of one layer, whose kernels take so many tokens at once."""
    spec = replace(GQA, num_kv_heads=heads)
    page = spec.page_size_bytes
    config = config_of(spec, NAMES[:1])
    config.kv_cache_layout = layout
    config.kv_cache_tensors = [KVCacheTensor(NUM_BLOCKS * page, NAMES[:1], page, page)]
    backing = torch.zeros(NUM_BLOCKS * page, dtype=torch.int8)
    (cache,) = create_kv_cache_views(
        backing, spec, NUM_BLOCKS, KVCacheLayout[layout], config.kv_cache_tensors[0], kernel
    )
    return config, cache


@pytest.mark.parametrize(
    ("layout", "heads", "told"),
    [("LBHNC", HEADS, "64"), ("LBNHC", HEADS, ""), ("LBHNC", 1, "")],
)
def test_kernels_that_have_a_page_in_another_order_are_told(
    layout: str, heads: int, told: str
) -> None:
    """By how many tokens they take at once. Both write the same KV here."""
    pages, kernels = [], []
    for size in (BLOCK, 64):
        config, cache = vllms_own(layout, size, heads)
        for token, head in itertools.product(range(BLOCK), range(heads)):
            cache[token // size, head, token % size] = BLOCK * head + token
        found = locate_on_device(config, {NAMES[0]: cache})
        kernels.append(found.kernels)
        pages.append(gathered(found, NAMES[0], 0))
    assert kernels == ["", told]
    assert (pages[0] == pages[1]) is (told == "")


def test_layers_that_share_a_cache_are_one_layer() -> None:
    cache = combined()
    caches = {NAMES[0]: cache, "model.layers.11.self_attn.attn": cache}
    found = locate_on_device(config_of(GQA, list(caches)), caches)
    assert isinstance(found.layout, DevicePageLayout)
    assert len(found.layout.segments) == 1
    assert set(found.layers.values()) == {range(1)}


def test_page_that_is_not_one_run_is_refused_by_name() -> None:
    """VLLM_KV_CACHE_LAYOUT=LHBNC: heads outside of blocks."""
    backing = torch.zeros(HEADS, NUM_BLOCKS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=NAMES[0]):
        locate_on_device(config_of(GQA, NAMES[:1]), {NAMES[0]: backing.transpose(0, 1)})


def test_cache_with_more_than_k_and_v_is_refused_by_name() -> None:
    """C8-MXFP adds scales that the specification does not count."""
    k, v = apart(SIZE, SIZE, HEADS)
    with pytest.raises(ConfigError, match="does not know this KV cache"):
        locate_on_device(config_of(GQA, NAMES[:1]), {NAMES[0]: (k, v, k)})


def test_cache_with_too_few_blocks_is_refused() -> None:
    k, v = apart(SIZE, SIZE, HEADS)
    with pytest.raises(ConfigError, match="does not know this KV cache"):
        locate_on_device(config_of(GQA, NAMES[:1]), {NAMES[0]: (k[:4], v[:4])})


STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 8), (2, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=GQA.page_size_bytes,
    mamba_cache_mode="align",
)


def with_states() -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """One layer of each kind, at the same address, as vLLM makes their views on a GPU."""
    page = GQA.page_size_bytes
    names = ["model.layers.0.linear_attn", "model.layers.1.self_attn.attn"]
    raw = torch.randint(-128, 128, (NUM_BLOCKS * page,), dtype=torch.int8)
    tensors = [KVCacheTensor(len(raw), [name], len(raw), page) for name in names]
    config = KVCacheConfig(
        NUM_BLOCKS,
        tensors,
        [KVCacheGroupSpec([names[0]], STATE), KVCacheGroupSpec([names[1]], GQA)],
        kv_cache_layout="LBHNC",
    )
    views = {
        name: create_kv_cache_views(raw, spec, NUM_BLOCKS, KVCacheLayout.LBHNC, tensor)[0]
        for name, spec, tensor in zip(names, (STATE, GQA), tensors, strict=True)
    }
    return config, views


def test_states_are_padded_to_a_page_of_full_attention() -> None:
    config, caches = with_states()
    found = locate_on_device(config, caches)
    state, attention = caches
    for name in caches:
        assert gathered(found, name, 4, 1) == content(caches[attention], 4) + content(
            caches[attention], 1
        )
    assert content(caches[state], 4) == gathered(found, state, 4)[: STATE.real_page_size_bytes]
    assert hooked_layers(config) == [attention]


def test_states_in_several_tensors_are_refused_by_name() -> None:
    config, caches = with_states()
    state, _ = caches
    with pytest.raises(ConfigError, match="does not know these states"):
        locate_on_device(config, {**caches, state: (caches[state], caches[state])})


INDEXER = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def of_specs(specs: dict[str, Any]) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Layers of one group with pages of different sizes, as vLLM lays them out on a GPU."""
    size = NUM_BLOCKS * sum(spec.page_size_bytes for spec in specs.values())
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    tensors, offset = [], 0
    for name, spec in specs.items():
        page = spec.page_size_bytes
        tensors.append(KVCacheTensor(size, [name], page * NUM_BLOCKS, page, offset))
        offset += page * NUM_BLOCKS
    config = KVCacheConfig(
        NUM_BLOCKS,
        tensors,
        [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(BLOCK, specs))],
        kv_cache_layout="LBHNC",
    )
    views = {
        tensor.layers[0]: create_kv_cache_views(raw, spec, NUM_BLOCKS, KVCacheLayout.LBHNC, tensor)[
            0
        ]
        for spec, tensor in zip(specs.values(), tensors, strict=True)
    }
    return config, views


def test_what_an_indexer_keeps_is_of_its_layers_page() -> None:
    layers = [f"model.layers.{n}.self_attn" for n in range(2)]
    # vLLM registers an indexer before the attention of its layer.
    specs: dict[str, Any] = {f"{layer}.indexer.k_cache": INDEXER for layer in layers}
    specs |= {f"{layer}.attn": MLA for layer in layers}
    config, caches = of_specs(specs)
    found = locate_on_device(config, caches)
    (group,) = kv_groups(config)
    assert has_caches_beside(config)
    assert hooked_layers(config) == [f"{layer}.attn" for layer in layers]
    assert found.layout.page_bytes == MLA.page_size_bytes + INDEXER.page_size_bytes
    assert (group.page_bytes, len(group.layers)) == (found.layout.page_bytes, 2)
    for number, layer in enumerate(layers):
        both = f"{layer}.attn", f"{layer}.indexer.k_cache"
        assert {found.layers[name] for name in both} == {range(number, number + 1)}
        expected = [content(caches[name], block) for block in (4, 1) for name in both]
        assert gathered(found, layer + ".attn", 4, 1) == b"".join(expected)
    (pages,) = found.by_group((group,))
    assert pages.layers == (0, 1)


def test_layers_of_which_only_some_have_an_indexer_are_refused_by_name() -> None:
    names = [f"model.layers.{n}.self_attn.attn" for n in range(2)]
    specs: dict[str, Any] = {"model.layers.0.self_attn.indexer.k_cache": INDEXER}
    config, caches = of_specs(specs | dict.fromkeys(names, MLA))
    with pytest.raises(ConfigError, match=r"pages of one size.*an indexer must be in each layer"):
        locate_on_device(config, caches)


def test_page_of_a_drafter_with_more_heads_counts_as_several() -> None:
    drafter = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2 * HEADS, head_size=SIZE, dtype=torch.bfloat16
    )
    model, draft = NAMES[1], "model.layers.11.self_attn.attn"
    config, caches = of_specs({model: GQA, draft: drafter})
    found = locate_on_device(config, caches)
    assert not has_caches_beside(config)
    assert found.layout.page_bytes == GQA.page_size_bytes
    assert found.layers == {model: range(1), draft: range(1, 3)}
    assert gathered(found, model, 5) == content(caches[model], 5)
    assert gathered(found, draft, 5) == content(caches[draft], 5)


def compressed() -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Of DeepSeek V4, as vLLM makes them of what its layers ask for: one with windows only, one
    that compresses 4 tokens and has an indexer, one that compresses 128.
    """
    packed = {"alignment": 576, "model_version": "deepseek_v4"}
    kept: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}

    def whole(ratio: int, **more: Any) -> MLAAttentionSpec:
        return MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **{**kept, **more})

    def window(size: int, num_tokens: int, **more: Any) -> SlidingWindowMLASpec:
        return SlidingWindowMLASpec(block_size=size, sliding_window=num_tokens, **{**kept, **more})

    def state(size: int, num_tokens: int, width: int) -> SlidingWindowMLASpec:
        return window(size, num_tokens, head_size=width, dtype=torch.float32, alignment=576)

    specs: dict[str, Any] = {}
    for layer, ratio in enumerate((1, 4, 128)):
        name = f"model.layers.{layer}.attn"
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = whole(4, head_size=132, alignment=576)
            specs[f"{name}.indexer.compressor.state_cache"] = state(4, 8, 512)
        specs[f"{name}.swa_cache"] = window(64, 128, state_content_bytes=584, **packed)
        if ratio > 1:
            specs[name] = whole(ratio, state_content_bytes=584, **packed)
            width, size = (2048, 4) if ratio == 4 else (1024, 8)
            specs[f"{name}.compressor.state_cache"] = state(size, ratio * (1 + (ratio == 4)), width)
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        num_gpu_blocks_override=NUM_BLOCKS,
        prefix_cache_retention_interval=None,
    )
    vllm_config: Any = SimpleNamespace(
        cache_config=cache_config,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = get_kv_cache_groups(vllm_config, specs)
    config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)
    raw = torch.randint(-128, 128, (config.kv_cache_tensors[0].size,), dtype=torch.int8)
    caches = {
        name: view
        for tensor in config.kv_cache_tensors
        for name, view in zip(
            tensor.layers,
            create_kv_cache_views(
                raw, specs[tensor.layers[0]], NUM_BLOCKS, KVCacheLayout.BLHNC, tensor
            ),
            strict=True,
        )
    }
    return config, caches


def test_block_of_groups_whose_pages_have_little_in_common_is_one_page() -> None:
    config, caches = compressed()
    found = locate_on_device(config, caches)
    groups = kv_groups(config, hash_block_size=4)
    assert sorted({(g.block_size, g.blocks_per_unit, g.hashes_per_block) for g in groups}) == [
        *((4, 64, 1), (8, 32, 2), (64, 4, 16), (256, 1, 64)),
    ]
    (page,) = {group.page_bytes for group in groups}
    (stride,) = {tensor.block_stride for tensor in config.kv_cache_tensors}
    assert page == stride == found.layout.page_bytes
    assert found.whole_blocks
    raw = next(iter(caches.values())).untyped_storage()
    whole = np.frombuffer(bytes(raw), np.uint8)
    for index, group in enumerate(config.kv_cache_groups):
        assert {found.layers[name] for name in group.layer_names} == {range(index, index + 1)}
        expected = whole[2 * page : 3 * page].tobytes() + whole[5 * page : 6 * page].tobytes()
        assert gathered(found, group.layer_names[0], 2, 5) == expected
    pages = found.by_group(groups)
    assert [p.block_size for p in pages] == [group.block_size for group in groups]
    assert [list(p.layers) for p in pages] == [[i] for i in range(len(groups))]


def test_such_blocks_in_several_allocations_are_refused_by_name() -> None:
    config, caches = compressed()
    name = next(iter(caches))
    caches[name] = caches[name].clone()
    with pytest.raises(ConfigError, match="in one allocation"):
        locate_on_device(config, caches)
