# SPDX-License-Identifier: Apache-2.0
"""CUDA GPUs and Ascend NPUs behind `device_copy.Device`: torch gives both the same streams.

Run on one GPU by ``tools/gpu_check.py``; not yet on an NPU, for which it is checked against the
documented calls of torch.npu.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from vllm_ascend_pd.backends.block_copy import BlockCopier, make_block_copier
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger(__name__)


class TorchDevice:
    """One accelerator through ``torch.cuda`` or ``torch.npu``; implements `device_copy.Device`."""

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device

    def bind_thread(self) -> None:
        """Both keep the current device for each thread."""
        self._api.set_device(self._device)

    def new_stream(self) -> Any:
        return self._api.Stream(device=self._device)

    def record(self) -> Any:
        event = self._api.Event()
        event.record(self._api.current_stream(self._device))
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        with self._api.stream(stream):
            work()

    def synchronize(self, stream: Any) -> None:
        """By an event: torch_npu waits for a stream until its one queue of launches is empty, into
        which the model's thread goes on to put those of its step.
        """
        event = self._api.Event()
        event.record(stream)
        event.synchronize()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def scratch(self, stream: Any, num_bytes: int) -> torch.Tensor:
        """Allocated on the stream: torch gives memory that the model has let go of to its own
        stream at once, whose kernels may still use it.
        """
        with self._api.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class CudaDevice(TorchDevice):
    """A GPU, which copies also from memory that others have allocated; implements `PinsMemory`.

    torch.npu documents no way to have memory pinned that it has not allocated.
    """

    def pin(self, addr: int, num_bytes: int) -> None:
        self.bind_thread()
        if error := self._error_of(self._api.cudart().cudaHostRegister(addr, num_bytes, 0)):
            raise BackendError(f"CUDA cannot pin {num_bytes} bytes of host memory: {error}")

    def unpin(self, addr: int) -> None:
        self.bind_thread()
        if error := self._error_of(self._api.cudart().cudaHostUnregister(addr)):
            logger.warning("CUDA keeps memory of the host pinned: %s", error)

    def _error_of(self, code: Any) -> str:
        """In words, or an empty text. CUDA remembers it, and the next kernel would fail with it."""
        if not int(code):
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        return str(self._api.cudart().cudaGetErrorString(code))


def make_copier(device: torch.device, num_threads: int = 1) -> BlockCopier:
    """The copier for KV pages on this device: on a CPU the native one, without a detour.

    ``num_threads``: of one copy within host memory, for pages that are not there.

    Raises:
        BackendError: no copier for this kind of device, or torch_npu is missing.
    """
    if device.type == "cpu":
        return make_block_copier()
    if device.type == "cuda":
        return DeviceBlockCopier(CudaDevice(torch.cuda, device), make_block_copier(), num_threads)
    if device.type == "npu":
        try:
            import torch_npu  # noqa: F401 -- it puts torch.npu in place
        except ImportError as error:
            raise BackendError(f"KV caches are on an NPU, but torch_npu fails: {error}") from error
        api: Any = torch.npu  # type: ignore[attr-defined]
        return DeviceBlockCopier(TorchDevice(api, device), make_block_copier(), num_threads)
    raise BackendError(f"KV caches are on {device.type!r}; there is a copier for cpu, cuda, npu")
