# SPDX-License-Identifier: Apache-2.0
"""The tests of the worker side once more, with its pages on a device with asynchronous streams.

The device runs nothing before somebody waits for it, so a wait that is missing anywhere between the
pages and a peer shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import tests.engine.test_worker_step as steps
import tests.unit.transfer.test_send_receive as transfer
from tests.engine.test_worker_step import *  # noqa: F403
from tests.pages import DevicePages
from tests.unit.transfer.test_awaited_loads import *  # noqa: F403
from tests.unit.transfer.test_send_receive import *  # noqa: F403
from vllm_ascend_pd import hooks
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.fake_device import FakeDevice
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.shared_memory import SharedMapping
from vllm_ascend_pd.backends.staging import StagingPool, _abandoned
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.engine.metadata import StepMeta
from vllm_ascend_pd.engine.worker.device_step import DeviceWorkerSide, FencedStep
from vllm_ascend_pd.engine.worker.kv_caches import locate_on_device
from vllm_ascend_pd.pool.messages import Save
from vllm_ascend_pd.pool.tier import Status, Value
from vllm_ascend_pd.pool.values import HEADER_BYTES

# What these say of host memory and of its steps is said of a device below or in test_device_caches.
for name in (
    "test_cache_that_is_not_in_host_memory_is_refused_by_name",
    "test_caches_of_one_layer_that_make_one_page_are_refused_by_name_on_a_cpu",
    "test_layout_without_whole_pages_is_refused_by_name",
    "test_armed_step_is_current_only_inside",
):
    globals().pop(name, None)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture(autouse=True, params=["pinned", "not pinned"])
def on_device(
    request: pytest.FixtureRequest, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Staging is memory that the device copies itself, as on a GPU, or through a buffer."""
    copier = DeviceBlockCopier(device, PythonBlockCopier())
    if request.param == "pinned":
        pinned = partial(StagingPool, memory=partial(SharedMapping, pinning=copier))
        for module in (transfer, steps):
            monkeypatch.setattr(module, "StagingPool", pinned)
    monkeypatch.setattr(transfer, "Pages", DevicePages)
    monkeypatch.setattr(steps, "locate", locate_on_device)
    for module in (transfer, steps):
        monkeypatch.setattr(module, "PythonBlockCopier", lambda: copier)
    monkeypatch.setattr(transfer, "make_block_copier", lambda: copier)
    monkeypatch.setattr(
        steps, "WorkerSide", lambda *args, **kwargs: DeviceWorkerSide(copier, *args, **kwargs)
    )
    yield
    was_abandoned = {memory.addr for memory in _abandoned}
    assert device.pins.keys() <= was_abandoned


# What only a device can get wrong ----------------------------------------------------------------


def launch_write(device: FakeDevice, side: Any, name: str, block: int, value: int) -> None:
    """A kernel of the forward: it runs when the device gets to it."""

    def kernel() -> None:
        side.pages(name)[block] = value

    device.launch(kernel)


def run_step(side: Any, meta: StepMeta | None, device: FakeDevice, value: int) -> Any:
    """A step whose layers compute blocks 1 and 2 behind their waits."""
    side.worker.begin_step(steps.output_of(meta))
    armed = side.worker.take_armed_step(wait_all=False)
    if armed is not None:
        armed.__enter__()
    for name in reversed(steps.NAMES):
        if armed is not None:
            armed.wait_layer(name)
        for block in (1, 2):
            launch_write(device, side, name, block, value)
        if armed is not None:
            armed.save_layer(name)
    if armed is not None:
        armed.__exit__(None, None, None)
    with side.worker.step_output() as output:
        pass
    return output.kv_connector_worker_meta


def test_granted_blocks_are_served_as_the_step_computes_them(side: Any, device: FakeDevice) -> None:
    """The host grants them while the device has not begun to compute."""
    run_step(side, steps.GRANT, device, value=7)
    assert device.compute.num_done == 0
    load = steps.load_spec(side, block_ids=(6, 7))
    report = side.step(StepMeta(loads=(load,)))
    assert [result.cause for result in report.results] == [""]
    for name in steps.NAMES:
        assert (side.pages(name)[6:8].view(np.uint8) == 7).all()


def test_loaded_blocks_are_not_overwritten_by_the_step_before(
    side: Any, device: FakeDevice
) -> None:
    """Blocks 1 and 2 are freed while the device still computes into them, and are loaded anew."""
    run_step(
        side, StepMeta(grants=(steps.Grant(steps.LEASE, "e", ((3, 4),), 0, 2),)), device, value=7
    )
    source = {name: side.pages(name)[3:5].copy() for name in steps.NAMES}
    load = steps.load_spec(side, block_ids=(1, 2))
    report = side.step(StepMeta(loads=(load,)))
    assert [result.cause for result in report.results] == [""]
    device.finish()
    for name in steps.NAMES:
        np.testing.assert_array_equal(side.pages(name)[1:3], source[name])


def test_announced_blocks_are_packed_as_the_step_computes_them(
    pooled: Any, device: FakeDevice
) -> None:
    """Not as they were when a message named them before."""
    run_step(pooled, steps.GRANT, device, value=7)
    device.finish()
    run_step(pooled, StepMeta(ahead=(steps.AheadSpec(5, (1, 2)),)), device, value=9)
    with pooled.pool.ahead.take(5) as packing:
        wait_politely(lambda: packing.is_whole)
        region = packing._slot.region
        num_bytes = sum(pooled.pages(name)[1:3].nbytes for name in steps.NAMES)
        packed = np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(region.base))
        assert np.count_nonzero(packed == 9) >= num_bytes
        assert not np.count_nonzero(packed == 7)


@pytest.mark.parametrize("named_before", [False, True])
@pytest.mark.parametrize("by_step", [False, True])
def test_blocks_are_saved_as_their_last_kernels_leave_them(
    pooled: Any, device: FakeDevice, named_before: bool, by_step: bool
) -> None:
    """A step without a message fills them; its output is with the host before a drafter's layer,
    or what copies states, has run.
    """
    other = StepMeta(grants=(steps.Grant(steps.LEASE, "e", ((3, 4),), 0, 2),))
    run_step(pooled, steps.GRANT if named_before else other, device, value=7)
    device.finish()
    run_step(pooled, None, device, value=9)
    save = Save(1, (1, 2), (b"a" * 32, b"b" * 32))
    if by_step:
        pooled.worker.begin_step(steps.output_of(StepMeta(saves=(save,))))
    else:
        pooled.pool.handle(save)
    for block_hash in save.hashes:
        key = pooled.pool.values[0].key(block_hash)
        found = np.empty(pooled.pool.values[0].num_bytes, np.uint8)
        value = Value(key, found.ctypes.data, found.nbytes)
        wait_politely(lambda value=value: pooled.memory.get([value]) == [Status.OK])
        assert (found[HEADER_BYTES:] == 9).all()


def test_fenced_step_is_current_only_inside(side: Any) -> None:
    side.step(steps.GRANT)
    side.worker.begin_step(steps.output_of(StepMeta(loads=(steps.load_spec(side),))))
    armed = side.worker.take_armed_step(wait_all=False)
    assert isinstance(armed, FencedStep)
    assert hooks.current_step is None
    with armed:
        assert hooks.current_step is armed
    assert hooks.current_step is None
    assert side.worker.take_armed_step(wait_all=False) is None


def wait_politely(condition: Callable[[], bool]) -> None:
    """Without the GIL in between, which the threads of the data path need now and then."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def test_layer_is_pushed_while_later_ones_are_computed(side: Any, device: FakeDevice) -> None:
    """The producer's host is in the middle of the forward; its device has computed nothing yet."""
    load = steps.load_spec(side, block_ids=(6, 7), in_step=False, num_awaited=2)
    side.loader._push_mode = PushMode.LAYER
    side.loader.start_load(load)
    side.worker.begin_step(steps.output_of(steps.GRANT))
    armed = side.worker.take_armed_step(wait_all=False)
    names = list(reversed(steps.NAMES))  # in the order of the model
    with armed:
        for n, name in enumerate(names):
            armed.wait_layer(name)
            for block in (1, 2):
                launch_write(device, side, name, block, 7)
            armed.save_layer(name)
            if n == 1:  # the first piece: two layers of two blocks fill a slot
                wait_politely(
                    lambda: all(bool((side.pages(done)[6:8] == 7).all()) for done in names[:2])
                )
                assert not (side.pages(names[2])[6:8] == 7).all()
    with side.worker.step_output() as output:
        pass
    report = output.kv_connector_worker_meta
    results: list[Any] = [] if report is None else [*report.results]
    wait_politely(lambda: bool(results.extend(side.loader.take_results()) or results))
    assert [result.cause for result in results] == [""]
