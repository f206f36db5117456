# SPDX-License-Identifier: Apache-2.0
"""What is stored for a block: a header, then its pages.

    | magic 8 | version 4 | 0 4 | num_bytes 8 | checksum 8 | block hash 32 |  pages, layer-major  |
    |<------------------------- 64 bytes -------------------------------->|<---- num_bytes ----->|

The checksum covers the pages, starts from the key space's seed and the block hash, and is computed
in the same pass that copies them; with a secret it is signed. It is checked on every read, whatever
the tier.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.backends.block_copy import Values, finish_checksum
from vllm_ascend_pd.pool.keys import FORMAT_VERSION
from vllm_ascend_pd.pool.tier import Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.block_copy import BlockCopier, GroupPages, Ids, Region
    from vllm_ascend_pd.pool.keys import KeySpace

_MAGIC = b"PDKVPOOL"
_HEADER = struct.Struct("<8sIIQQ32s")
HEADER_BYTES = _HEADER.size
_MASK = (1 << 63) - 1


class BlockValues:
    """Packs blocks of one KV cache group into values, and back. Stateless, any thread."""

    def __init__(self, copier: BlockCopier, pages: GroupPages, space: KeySpace) -> None:
        self._copier = copier
        self._layout = pages.layout
        self._space = space
        self._page_bytes = pages.layout.num_bytes(1)
        self.key = space.key
        self.num_among = pages.num_among

    @property
    def num_bytes(self) -> int:
        """Of one value."""
        return HEADER_BYTES + self._page_bytes

    @property
    def num_layers(self) -> int:
        return len(self._layout.layer_offsets)

    def pack_layers(
        self, start: int, stop: int, block_ids: Ids, staging: Region
    ) -> NDArray[np.uint64]:
        """Write layers [start, stop) of blocks whose values lie side by side in ``staging``; what
        they add to the sum of each value that ``seal`` wants.
        """
        values = Values(staging, HEADER_BYTES, self.num_bytes)
        return self._copier.gather_layers(self._layout, start, stop, block_ids, values)

    def seal(self, total: int, block_hash: bytes, staging: Region, offset: int) -> None:
        """Complete the value at ``staging[offset:]``, of which all layers have been packed."""
        checksum = finish_checksum(total, self._page_bytes, self._seed_of(block_hash))
        checksum = self._space.sign(checksum, block_hash)
        header = _HEADER.pack(
            _MAGIC, FORMAT_VERSION, 0, self._page_bytes, checksum, block_hash[:32].ljust(32, b"\0")
        )
        ctypes.memmove(staging.base + offset, header, HEADER_BYTES)

    def unpack(self, block_id: int, block_hash: bytes, staging: Region, offset: int) -> Status:
        """Put the value at ``staging[offset:]`` into the pages of a block.

        Anything but ``OK`` means that the pages must not be used: they may hold part of a value
        that turned out to be wrong.
        """
        header = ctypes.string_at(staging.base + offset, HEADER_BYTES)
        magic, version, _, num_bytes, expected, stored_hash = _HEADER.unpack(header)
        if (
            magic != _MAGIC
            or version != FORMAT_VERSION
            or num_bytes != self._page_bytes
            or stored_hash != block_hash[:32].ljust(32, b"\0")
        ):
            return Status.DAMAGED
        ids = np.array([block_id], dtype=np.int64)
        checksum = self._copier.scatter(
            self._layout, ids, staging, offset + HEADER_BYTES, self._seed_of(block_hash)
        )
        return Status.OK if self._space.sign(checksum, block_hash) == expected else Status.DAMAGED

    def _seed_of(self, block_hash: bytes) -> int:
        return (self._space.seed ^ int.from_bytes(block_hash[:8], "little")) & _MASK
