# SPDX-License-Identifier: Apache-2.0
import enum

import numpy as np
from numpy.typing import NDArray

VERSION: int

class Region:
    def __init__(self, base: int, size: int) -> None: ...
    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...

def gather(
    pages: Region,
    layer_offsets: NDArray[np.int64],
    block_strides: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    page_bytes: int,
    staging: Region,
    staging_offset: int,
    seed: int,
) -> int: ...
def gather_layers(
    pages: Region,
    layer_offsets: NDArray[np.int64],
    block_strides: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    page_bytes: int,
    staging: Region,
    staging_offset: int,
    value_stride: int,
    first_layer: int,
) -> NDArray[np.uint64]: ...
def scatter(
    pages: Region,
    layer_offsets: NDArray[np.int64],
    block_strides: NDArray[np.int64],
    block_ids: NDArray[np.int64],
    page_bytes: int,
    staging: Region,
    staging_offset: int,
    seed: int,
) -> int: ...
def checksum(region: Region, offset: int, num_bytes: int, seed: int) -> int: ...

RING_MIN_BYTES: int
RING_ALIGNMENT: int

class PackStatus(enum.Enum):
    DONE = ...
    WAITING = ...
    ENDED = ...

class RingPacker:
    def __init__(
        self,
        pages: Region,
        layer_offsets: NDArray[np.int64],
        block_strides: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        page_bytes: int,
        ring: Region,
        key: int,
    ) -> None: ...
    def run(self, patience_us: int) -> PackStatus: ...
    def confirm(self) -> None: ...
    @property
    def num_bytes_left(self) -> int: ...
    @property
    def checksum(self) -> int: ...

class RingPlacer:
    def __init__(
        self,
        pages: Region,
        layer_offsets: NDArray[np.int64],
        block_strides: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        page_bytes: int,
        ring: Region,
        key: int,
    ) -> None: ...
    def wait(self, patience_us: int) -> bool: ...
    def run(self, patience_us: int) -> bool: ...
    def is_confirmed(self, patience_us: int) -> bool: ...
    def end(self) -> None: ...
    @property
    def num_bytes_left(self) -> int: ...
    @property
    def checksum(self) -> int: ...
