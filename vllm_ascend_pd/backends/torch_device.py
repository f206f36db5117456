# SPDX-License-Identifier: Apache-2.0
"""CUDA GPUs and Ascend NPUs behind `device_copy.Device`: torch gives both the same streams.

Run on one GPU by ``tools/gpu_check.py``; not yet on an NPU, for which it is checked against the
documented calls of torch.npu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_ascend_pd.backends.block_copy import BlockCopier, make_block_copier
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable


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


def make_copier(device: torch.device) -> BlockCopier:
    """The copier for KV pages on this device: on a CPU the native one, without a detour.

    Raises:
        BackendError: no copier for this kind of device, or torch_npu is missing.
    """
    if device.type == "cpu":
        return make_block_copier()
    if device.type == "cuda":
        api: Any = torch.cuda
    elif device.type == "npu":
        try:
            import torch_npu  # noqa: F401 -- it puts torch.npu in place
        except ImportError as error:
            raise BackendError(f"KV caches are on an NPU, but torch_npu fails: {error}") from error
        api = torch.npu  # type: ignore[attr-defined]
    else:
        raise BackendError(
            f"KV caches are on {device.type!r}; there is a copier for cpu, cuda, npu"
        )
    return DeviceBlockCopier(TorchDevice(api, device), make_block_copier())
