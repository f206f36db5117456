# SPDX-License-Identifier: Apache-2.0
"""KV pages of one engine for tests of what moves them."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ascend_pd.backends.block_copy import GroupPages, PageLayout, Region
from vllm_ascend_pd.backends.device_copy import DevicePageLayout, Segment

NUM_LAYERS = 4
NUM_BLOCKS = 32
PAGE = 256
K_BYTES, V_BYTES = 192, 64
assert K_BYTES + V_BYTES == PAGE


def one_group(layout: PageLayout, block_size: int = 1) -> tuple[GroupPages, ...]:
    """All layers in one group; by default a block has one token."""
    return (GroupPages.of(layout, block_size, range(len(layout.layer_offsets))),)


class Pages:
    """KV pages of one engine: ``uint8 [NUM_LAYERS, NUM_BLOCKS, PAGE]`` in host memory."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.bytes = random.integers(0, 256, (NUM_LAYERS, NUM_BLOCKS, PAGE), dtype=np.uint8)
        self.layout = PageLayout.packed(
            region=Region(self.bytes.ctypes.data, self.bytes.nbytes),
            layer_offsets=np.arange(NUM_LAYERS, dtype=np.int64) * NUM_BLOCKS * PAGE,
            page_bytes=PAGE,
        )


class DevicePages:
    """The same on a device: K and V apart and of different size, as MLA has them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_LAYERS, NUM_BLOCKS)
        self._parts = [
            torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
            for size in (K_BYTES, V_BYTES)
        ]
        memories = tuple(part[layer].view(-1) for layer in range(shape[0]) for part in self._parts)
        self.layout = DevicePageLayout(
            region=Region(1, 1 << 60),
            layer_offsets=np.zeros(shape[0], dtype=np.int64),
            block_strides=np.full(shape[0], K_BYTES, dtype=np.int64),
            page_bytes=PAGE,
            segments=tuple(
                (
                    Segment(2 * layer, 0, K_BYTES, K_BYTES),
                    Segment(2 * layer + 1, 0, V_BYTES, V_BYTES),
                )
                for layer in range(shape[0])
            ),
            memories=memories,
            num_blocks=shape[1],
        )

    @property
    def bytes(self) -> np.ndarray:
        return torch.cat(self._parts, dim=-1).numpy()
