# SPDX-License-Identifier: Apache-2.0
"""What torch's streams are asked for, on a scripted ``torch.cuda`` / ``torch.npu``; no device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.device_copy import (
    DeviceBlockCopier,
    DevicePageLayout,
    PinsMemory,
    Segment,
)
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.torch_device import CudaDevice, TorchDevice
from vllm_ascend_pd.errors import BackendError

DEVICE = torch.device("cuda", 3)


class Api:
    """The part of ``torch.cuda`` that is used; ``torch.npu`` has the same."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.streams: list[Any] = []
        self.inside: Any = None
        api = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                api.calls.append(f"stream on {device}")

            def wait_event(self, event: Any) -> None:
                api.calls.append("wait")

        class Event:
            def record(self, stream: Any = None) -> None:
                of = stream if stream == "the engine's" else "its own"
                api.calls.append(f"record {of}")

            def synchronize(self) -> None:
                api.calls.append("synchronize event")

        self.Stream, self.Event = Stream, Event
        self.error = 0

    def cudart(self) -> Any:
        def call(name: str) -> Any:
            def note(*args: int) -> int:
                self.calls.append(f"{name} {args}")
                return self.error

            return note

        return SimpleNamespace(
            cudaHostRegister=call("register"),
            cudaHostUnregister=call("unregister"),
            cudaGetErrorString=lambda error: f"error {error}",
        )

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set {device}")

    def current_stream(self, device: torch.device | None = None) -> Any:
        assert device == DEVICE
        return "the engine's"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append("on stream")
        self.streams.append(stream)
        yield


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def copier(api: Api, monkeypatch: pytest.MonkeyPatch) -> DeviceBlockCopier:
    device = TorchDevice(api, DEVICE)
    monkeypatch.setattr(device, "pinned", lambda n: torch.zeros(n, dtype=torch.uint8))
    monkeypatch.setattr(device, "scratch", lambda _, n: torch.zeros(n, dtype=torch.uint8))
    return DeviceBlockCopier(device, PythonBlockCopier())


def layout() -> DevicePageLayout:
    memory = torch.arange(64, dtype=torch.uint8)
    return DevicePageLayout(
        region=Region(1, 1 << 60),
        layer_offsets=np.zeros(1, dtype=np.int64),
        block_strides=np.full(1, 16, dtype=np.int64),
        page_bytes=16,
        segments=((Segment(0, 0, 16, 16),),),
        memories=(memory,),
        num_blocks=4,
    )


def test_copies_run_on_their_own_stream_behind_the_fence(
    api: Api, copier: DeviceBlockCopier
) -> None:
    """And are waited for by an event: torch_npu, asked for a stream, waits for one queue of all
    launches to be empty, those of the model's thread included, which come without an end.
    """
    copier.fence([1])
    assert api.calls == ["record the engine's"]
    api.calls.clear()
    copying = ["wait", "on stream", "record its own", "synchronize event"]
    staging = np.zeros(16, dtype=np.uint8)
    region = Region(staging.ctypes.data, 16)
    copier.gather(layout(), np.array([1], dtype=np.int64), region)
    assert api.calls == ["set cuda:3", "stream on cuda:3", *copying]
    assert staging.tolist() == list(range(16, 32))
    api.calls.clear()
    copier.scatter(layout(), np.array([1], dtype=np.int64), region)
    assert api.calls == copying


def test_memory_of_copies_is_allocated_on_their_stream(api: Api) -> None:
    """What is allocated on the model's may be in use by kernels that have not run yet."""
    device = TorchDevice(api, torch.device("cpu"))
    assert device.scratch("copies", 8).numel() == 8
    assert api.streams == ["copies"]


def test_cuda_pins_memory_of_others(api: Api) -> None:
    device = CudaDevice(api, DEVICE)
    assert isinstance(device, PinsMemory)
    device.pin(4096, 100)
    device.unpin(4096)
    assert api.calls == [
        "set cuda:3",
        "register (4096, 100, 0)",
        "set cuda:3",
        "unregister (4096,)",
    ]


def test_cuda_forgets_that_it_cannot_pin(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel's launch reports the error of the call before, and would fail with it."""
    launched = []

    def launch(*_: Any, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch, "ones", launch)
    api.error = 2
    device = CudaDevice(api, DEVICE)
    with pytest.raises(BackendError, match="cannot pin 100 bytes of host memory: error 2"):
        device.pin(4096, 100)
    device.unpin(4096)
    assert "error 2" in caplog.text
    assert launched == [DEVICE, DEVICE]


def test_npu_pins_nothing(api: Api) -> None:
    assert not isinstance(TorchDevice(api, DEVICE), PinsMemory)


def test_torch_cuda_has_what_is_used() -> None:
    """``torch.npu`` is checked against the calls of vllm-ascend, see tests/ascend."""
    cuda = torch.cuda
    inspect.signature(cuda.Stream.wait_event).bind(None, object())
    inspect.signature(cuda.Event.synchronize).bind(None)
    inspect.signature(cuda.Event.record).bind(None, object())
    inspect.signature(cuda.set_device).bind(DEVICE)
    inspect.signature(cuda.current_stream).bind(DEVICE)
    inspect.signature(cuda.stream).bind(object())
    assert "device" in inspect.signature(cuda.Stream.__new__).parameters
