# SPDX-License-Identifier: Apache-2.0
"""A device with kernels that are late, and KV pages on it, for ``gpu_check.py``."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch  # noqa: TID251 - its streams are what is checked

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.device_copy import DevicePageLayout, Segment
from vllm_ascend_pd.backends.fake_device import FakeDevice
from vllm_ascend_pd.backends.shared_memory import NoPinning, SharedMapping
from vllm_ascend_pd.backends.torch_device import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.device_copy import Device, DeviceBlockCopier

DELAY_CYCLES = 400_000_000
"""Some 0.2 s of a GPU: a copy that does not wait for it is over long before."""
SHAPE = LAYERS, BLOCKS = 4, 32


class Gpu:
    """The engine's stream of CUDA."""

    name = "cuda"

    def __init__(self) -> None:
        self.where = torch.device("cuda", 0)
        self.device: Device = CudaDevice(torch.cuda, self.where)
        self.device.bind_thread()
        self._last: Any = None

    def launch(self, kernel: Callable[[], None]) -> None:
        torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
        kernel()
        self._last = self.device.record()

    def is_busy(self) -> bool:
        """Whether what was launched last has not run yet."""
        return not self._last.query()

    def finish(self) -> None:
        torch.cuda.synchronize()


class MakeBelieve:
    """The same where nothing runs before somebody waits for it."""

    name = "cpu"

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self._fake = FakeDevice()
        self.device: Device = self._fake

    def launch(self, kernel: Callable[[], None]) -> None:
        self._fake.launch(kernel)

    def is_busy(self) -> bool:
        return self._fake.compute.num_done < len(self._fake.compute.work)

    def finish(self) -> None:
        self._fake.finish()


class Without:
    """A device that leaves a call out: what must not go unnoticed."""

    def __init__(self, device: Device, name: str) -> None:
        for each in dir(device):
            if not each.startswith("_"):
                setattr(self, each, getattr(device, each))
        setattr(self, name, lambda *_: None)


class Pages:
    """KV pages: for each part of a page uint8 [layers, blocks, bytes], on the device."""

    def __init__(
        self, machine: Any, sizes: tuple[int, ...], seed: int, shape: tuple[int, int] = SHAPE
    ) -> None:
        draw = np.random.default_rng(seed)
        self.parts = [
            torch.from_numpy(draw.integers(0, 256, (*shape, size), dtype=np.uint8)).to(
                machine.where
            )
            for size in sizes
        ]
        layers, num = range(shape[0]), len(sizes)
        cuts = [
            [Segment(n + layer * num, 0, b, b) for n, b in enumerate(sizes)] for layer in layers
        ]
        self.layout = DevicePageLayout(
            region=Region(1, 1 << 60),
            layer_offsets=np.zeros(len(layers), dtype=np.int64),
            block_strides=np.full(len(layers), sizes[0], dtype=np.int64),
            page_bytes=sum(sizes),
            segments=tuple(map(tuple, cuts)),
            memories=tuple(part[layer].view(-1) for layer in layers for part in self.parts),
            num_blocks=shape[1],
        )
        machine.finish()

    def of(self, blocks: list[int]) -> NDArray[np.uint8]:
        """As they lie in staging, layer by layer."""
        return torch.cat([part[:, blocks] for part in self.parts], dim=-1).cpu().numpy().ravel()

    def fill(self, blocks: list[int], value: int) -> None:
        for part in self.parts:
            for block in blocks:  # a list for an index would have the host wait
                part[:, block].fill_(value)


class Staging:
    """Host memory for these blocks of some pages, as that of engines; pinned if told for whom. It
    goes with the last reference, if not closed before.
    """

    def __init__(
        self,
        layout: DevicePageLayout,
        blocks: list[int],
        pinned_for: DeviceBlockCopier | None = None,
    ) -> None:
        self.layout, self.ids = layout, np.array(blocks, dtype=np.int64)
        num_bytes = layout.num_bytes(len(blocks))
        memory = SharedMapping(num_bytes, pinned_for or NoPinning())
        self.close = weakref.finalize(self, memory.close)
        self.region = Region(memory.addr, num_bytes)
        self.bytes = np.ctypeslib.as_array(
            (ctypes.c_uint8 * num_bytes).from_address(self.region.base)
        )

    def gather(self, copier: DeviceBlockCopier) -> int:
        return copier.gather(self.layout, self.ids, self.region)

    def scatter(self, copier: DeviceBlockCopier, into: Pages, blocks: list[int]) -> int:
        return copier.scatter(into.layout, np.array(blocks, dtype=np.int64), self.region)
