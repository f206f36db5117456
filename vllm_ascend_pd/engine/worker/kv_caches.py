# SPDX-License-Identifier: Apache-2.0
"""Where the pages of the engine's KV caches lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.backends.block_copy import PageLayout, Region
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

_COMPACT_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


@dataclass(frozen=True, slots=True)
class KVCaches:
    """The page layout, and the index in it of every attention layer (aliases included)."""

    layout: PageLayout
    layer_index: Mapping[str, int]


def locate(kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> KVCaches:
    """Addresses of all pages: one allocation, ``base + offset + layer * stride + block * stride``.

    Raises:
        ConfigError: a cache that is not in host memory, or a layout whose (layer, block) page is
            not one contiguous run.
    """
    first = next(iter(kv_caches.values()))
    if first.device.type != "cpu":
        raise ConfigError(
            f"InEngine transfers read and write KV caches in host memory; this worker's are on"
            f" {first.device.type!r}, for which this release has no page copy"
        )
    if kv_cache_config.kv_cache_layout not in _COMPACT_LAYOUTS:
        raise ConfigError(
            f"VLLM_KV_CACHE_LAYOUT={kv_cache_config.kv_cache_layout}: a page must be contiguous;"
            f" use one of {', '.join(_COMPACT_LAYOUTS)}"
        )
    storage = first.untyped_storage()
    names: list[str] = []
    offsets: list[int] = []
    strides = set()
    for tensor in kv_cache_config.kv_cache_tensors:
        strides.add(tensor.block_stride)
        for index, name in enumerate(tensor.layers):
            names.append(name)
            offsets.append(tensor.offset + index * tensor.layer_stride)
    assert len(strides) == 1, f"tensors of one group with block strides {strides}"
    # In the order in which the model runs its layers, so that early pieces are early layers.
    order = sorted(range(len(names)), key=lambda i: _layer_number(names[i]))
    layout = PageLayout(
        region=Region(storage.data_ptr(), storage.nbytes()),
        layer_offsets=np.array([offsets[i] for i in order], dtype=np.int64),
        block_stride=strides.pop(),
        page_bytes=kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes,
    )
    index_of = {names[i]: position for position, i in enumerate(order)}
    by_address = {kv_caches[name].data_ptr(): index for name, index in index_of.items()}
    for name, cache in kv_caches.items():
        index_of.setdefault(name, by_address[cache.data_ptr()])
    return KVCaches(layout, index_of)


def _layer_number(name: str) -> tuple[int, str]:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (numbers[0] if numbers else 0, name)
