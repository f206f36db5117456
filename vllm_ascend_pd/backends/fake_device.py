# SPDX-License-Identifier: Apache-2.0
"""A device whose streams do nothing until somebody waits for them.

It is as lazy as an accelerator may be: what is enqueued runs at `synchronize`, and of other streams
only what an event asks for. So a copy that nobody waited for, or that was not ordered behind the
engine's kernels, shows as wrong bytes every time and not once in a thousand runs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vllm_ascend_pd.backends.device_copy import Device, PinsMemory

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, eq=False)
class FakeStream:
    """Work in order. All fields under the device's lock."""

    work: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0

    def run_to(self, end: int) -> None:
        while self.num_done < end:
            step = self.work[self.num_done]
            self.num_done += 1
            step()


@dataclass(frozen=True, slots=True)
class FakeEvent:
    """A place in a stream."""

    stream: FakeStream
    end: int


class FakeDevice(Device, PinsMemory):
    """Device memory is host memory that only streams write. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.compute = FakeStream()
        self.pins: dict[int, int] = {}
        """Bytes of memory of others that it may copy, by address."""

    def launch(self, kernel: Callable[[], None]) -> None:
        """Enqueue a kernel on the engine's stream, as the model's forward does."""
        with self._lock:
            self.compute.work.append(kernel)

    def finish(self) -> None:
        """What a test does before it looks at what the engine computed."""
        self.synchronize(self.compute)

    def bind_thread(self) -> None:
        """Any thread may use it."""

    def new_stream(self) -> FakeStream:
        return FakeStream()

    def record(self) -> FakeEvent:
        with self._lock:
            return FakeEvent(self.compute, len(self.compute.work))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            stream.work.append(lambda: event.stream.run_to(event.end))

    def run(self, stream: FakeStream, work: Callable[[], object]) -> None:
        with self._lock:
            stream.work.append(work)

    def synchronize(self, stream: FakeStream) -> None:
        with self._lock:
            stream.run_to(len(stream.work))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def pin(self, addr: int, num_bytes: int) -> None:
        with self._lock:
            self.pins[addr] = num_bytes

    def unpin(self, addr: int) -> None:
        with self._lock:
            del self.pins[addr]

    def scratch(self, stream: FakeStream, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)
