# SPDX-License-Identifier: Apache-2.0
"""The tests of direct placement once more, K and V apart, on a device with asynchronous streams.

The network reads and writes pages by itself, outside of every stream: what the engine has launched
on them must be over before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ascend.test_worker_on_fake_device import device, on_device  # noqa: F401
from tests.unit.transfer.test_direct_placement import *  # noqa: F403
from tests.unit.transfer.test_direct_placement import DirectPair, expect_loaded
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.fake_device import FakeDevice
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier


def launch_write(npu: Any, pages: torch.Tensor, block: int, value: int) -> None:
    """A kernel that computes one block in every layer."""

    def kernel() -> None:
        pages[:, block] = value

    npu.launch(kernel)


def own_device(*parts: Any) -> tuple[FakeDevice, DeviceBlockCopier]:
    """Gives one of the two sides a device of its own: else what one waits for, the other has."""
    npu = FakeDevice()
    copier = DeviceBlockCopier(npu, PythonBlockCopier())
    for part in parts:
        part._copier = copier
    return npu, copier


def test_producer_writes_what_its_device_has_computed(
    make_pair: Callable[..., DirectPair],
) -> None:
    """The host grants blocks when their kernels are launched; the device has not begun."""
    pair = make_pair()
    npu, copier = own_device(pair.server)
    fence = copier.fence([3, 4])
    for part in pair.theirs._parts:
        for block in (3, 4):
            launch_write(npu, part, block, 7)
    fence.mark()
    pair.grant(3, 4)
    assert pair.load((0, 1), (7, 8)).cause == ""
    assert (pair.ours.bytes[:, 7:9] == 7).all()


def test_consumers_blocks_are_written_after_the_kernels_of_their_former_life(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair()
    npu, copier = own_device(pair.loader, pair.loader._live_pages)
    for part in pair.ours._parts:
        for block in (7, 8):
            launch_write(npu, part, block, 9)
    copier.fence([7, 8])
    pair.grant(3, 4)
    assert pair.load((0, 1), (7, 8)).cause == ""
    npu.finish()
    expect_loaded(pair, (3, 4), (7, 8))
