# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import mmap
import threading

import pytest

from vllm_ascend_pd.backends.fake_engine import (
    FakeTransferEngine,
    FaultyTransferEngine,
    InMemoryEngine,
)
from vllm_ascend_pd.backends.fault_script import Fault, FaultKind, FaultScript, WriteRequest
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
from vllm_ascend_pd.errors import ConfigError

DONE, RUNNING, FAILED = TransferStatus.DONE, TransferStatus.RUNNING, TransferStatus.FAILED
NUM_BYTES = 1001
SOURCE = bytes(i % 255 + 1 for i in range(NUM_BYTES))


class Link:
    """A scripted sender and a receiver with one region each."""

    def __init__(self, script: str | FaultScript) -> None:
        if isinstance(script, str):
            script = FaultScript.parse(script)
        self.sender = FakeTransferEngine(script)
        self.receiver = FakeTransferEngine()
        self.source = mmap.mmap(-1, NUM_BYTES)
        self.target = mmap.mmap(-1, NUM_BYTES)
        self.source[:] = SOURCE
        self.source_addr = ctypes.addressof(ctypes.c_char.from_buffer(self.source))
        self.target_addr = ctypes.addressof(ctypes.c_char.from_buffer(self.target))
        self.sender.register(self.source_addr, NUM_BYTES)
        self.receiver.register(self.target_addr, NUM_BYTES)

    def submit(self, num_bytes: int = NUM_BYTES):
        return self.sender.submit_write(
            self.receiver.session, self.source_addr, self.target_addr, num_bytes
        )

    def write(self) -> TransferStatus:
        """A write into a zeroed target, polled once."""
        self.target[:] = bytes(NUM_BYTES)
        return self.sender.poll(self.submit())

    @property
    def landed(self) -> bytes:
        return self.target[:]


@pytest.fixture
def make_link():
    links: list[Link] = []

    def make(script: str | FaultScript) -> Link:
        links.append(Link(script))
        return links[-1]

    yield make
    for link in links:
        link.sender.close()
        link.receiver.close()


def test_nothing_lands_before_the_sender_polls(make_link):
    link = make_link("ok")
    handle = link.submit()
    assert link.landed == bytes(NUM_BYTES)
    assert link.sender.poll(handle) is DONE
    assert link.landed == SOURCE


def test_fail_writes_nothing(make_link):
    link = make_link("fail")
    assert link.write() is FAILED
    assert link.landed == bytes(NUM_BYTES)


def test_drop_claims_to_be_done_and_writes_nothing(make_link):
    link = make_link("drop")
    assert link.write() is DONE
    assert link.landed == bytes(NUM_BYTES)


def test_short_writes_the_first_half_only(make_link):
    link = make_link("short")
    assert link.write() is DONE
    assert link.landed == SOURCE[:500] + bytes(501)


def test_short_of_a_single_byte_writes_nothing(make_link):
    link = make_link("short")
    assert link.sender.poll(link.submit(1)) is DONE
    assert link.landed == bytes(NUM_BYTES)


def test_corrupt_changes_one_bit_and_not_the_source(make_link):
    link = make_link("corrupt")
    assert link.write() is DONE
    differing = [i for i in range(NUM_BYTES) if link.landed[i] != SOURCE[i]]
    assert differing == [500]
    assert (link.landed[500] ^ SOURCE[500]).bit_count() == 1
    assert link.source[:] == SOURCE
    assert link.sender.num_regions() == 1


def test_corrupt_does_not_show_up_as_a_region_while_it_runs(make_link):
    link = make_link("corrupt")
    handle = link.submit()
    assert link.sender.num_regions() == 1
    link.sender.poll(handle)
    assert link.sender.num_regions() == 1


def test_delay_is_running_for_its_polls_then_lands(make_link):
    link = make_link("delay(2)")
    handle = link.submit()
    assert [link.sender.poll(handle) for _ in range(2)] == [RUNNING, RUNNING]
    assert link.landed == bytes(NUM_BYTES)
    assert link.sender.poll(handle) is DONE
    assert link.landed == SOURCE


def test_never_is_running_for_ever(make_link):
    link = make_link("never")
    handle = link.submit()
    assert {link.sender.poll(handle) for _ in range(1000)} == {RUNNING}
    assert link.landed == bytes(NUM_BYTES)


@pytest.mark.parametrize("script", ["never", "drop", "delay(5)", "ok"])
def test_a_write_pending_at_close_is_failed(make_link, script):
    link = make_link(script)
    handle = link.submit()
    link.sender.close()
    assert link.sender.poll(handle) is FAILED
    assert link.landed == bytes(NUM_BYTES)


def test_late_fails_and_lands_when_told_to(make_link):
    link = make_link("late")
    assert link.write() is FAILED
    assert link.landed == bytes(NUM_BYTES)
    assert link.sender.land_late_writes() == 1
    assert link.landed == SOURCE
    assert link.sender.land_late_writes() == 0


def test_late_bytes_do_not_reach_a_region_that_is_gone(make_link):
    link = make_link("late")
    assert link.write() is FAILED
    link.receiver.unregister(link.target_addr)
    assert link.sender.land_late_writes() == 0
    assert link.landed == bytes(NUM_BYTES)


def test_a_script_is_used_up_in_order_of_submission(make_link):
    link = make_link("ok,fail*2,drop")
    assert [link.write() for _ in range(6)] == [DONE, FAILED, FAILED, DONE, DONE, DONE]
    assert link.landed == SOURCE
    assert link.sender.num_writes == 6


def test_a_last_star_goes_on_for_ever(make_link):
    link = make_link("ok*2, fail*")
    assert [link.write() for _ in range(50)] == [DONE] * 2 + [FAILED] * 48


def test_a_predicate_sees_each_write(make_link):
    seen: list[WriteRequest] = []

    def choose(write: WriteRequest) -> Fault:
        seen.append(write)
        return Fault(FaultKind.FAIL if write.index == 1 else FaultKind.OK)

    link = make_link(FaultScript(choose=choose))
    assert [link.write() for _ in range(3)] == [DONE, FAILED, DONE]
    assert [write.index for write in seen] == [0, 1, 2]
    assert seen[0].session == link.receiver.session
    assert (seen[0].src_addr, seen[0].dst_addr) == (link.source_addr, link.target_addr)
    assert seen[0].num_bytes == NUM_BYTES


@pytest.mark.parametrize("text", ["", "ok*"])
def test_a_script_without_faults_is_all_ok(make_link, text):
    link = make_link(text)
    assert {link.write() for _ in range(5)} == {DONE}


@pytest.mark.parametrize(
    "text",
    [
        "boom",
        "ok,,fail",
        "ok*,fail",
        "delay",
        "ok(3)",
        "ok*x",
        "delay(-1)",
        "ok fail",
        "OK",
        "ok**",
    ],
)
def test_a_bad_script_is_a_config_error(text):
    with pytest.raises(ConfigError, match="fault script"):
        FaultScript.parse(text)


@pytest.mark.parametrize("kind", sorted(kind.value for kind in FaultKind))
def test_every_fault_can_be_scripted_around_another_engine(kind):
    inner = InMemoryEngine()
    engine = FaultyTransferEngine(inner, FaultScript.parse("delay(1)" if kind == "delay" else kind))
    memory = mmap.mmap(-1, 8192)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine.register(addr, 8192)
    handle = engine.submit_write(engine.session, addr, addr + 4096, 4096)
    statuses = [engine.poll(handle)]
    while statuses[-1] is RUNNING and len(statuses) < 5:
        statuses.append(engine.poll(handle))
    expected = {
        "ok": [DONE],
        "drop": [DONE],
        "short": [DONE],
        "corrupt": [DONE],
        "garbage": [DONE],
        "fail": [FAILED],
        "late": [FAILED],
        "delay": [RUNNING, DONE],
        "never": [RUNNING] * 5,
    }
    assert statuses == expected[kind]
    assert inner.num_regions() == 1
    engine.close()


def test_threads_may_write_at_the_same_time(make_link):
    link = make_link("ok*")
    statuses: list[TransferStatus] = []

    def work() -> None:
        statuses.extend(link.sender.poll(link.submit(8)) for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [DONE] * 800
