# SPDX-License-Identifier: Apache-2.0
"""How Mooncake is opened for NPUs: the calls, on a scripted library. No NPU, no Mooncake."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.backends.native_mooncake import NativeEngine
from vllm_ascend_pd.backends import mooncake_engine
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.transfer_engine import TransferHandle, TransferStatus
from vllm_ascend_pd.errors import BackendError

PAGE = 2 << 20


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeEngine]:
    native = NativeEngine()
    native.port = 15001
    native._move = lambda *args: 0  # type: ignore[method-assign] -- the addresses are made up
    monkeypatch.setattr(mooncake_engine, "load_mooncake", lambda protocol: lambda: native)
    yield native
    native.close()


@pytest.mark.parametrize("protocol", ["tcp", "rdma", "ascend"])
def test_protocol_is_passed_on(native: NativeEngine, protocol: str) -> None:
    engine = MooncakeTransferEngine("10.0.0.1", protocol=protocol)
    assert native.calls == [("initialize", "10.0.0.1", "P2PHANDSHAKE", protocol, "")]
    assert engine.session == "10.0.0.1:15001"


@pytest.mark.parametrize("before", [None, "0"])
def test_tcp_is_forced_since_mooncake_would_take_what_it_finds(
    native: NativeEngine, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is not None:
        monkeypatch.setenv("MC_FORCE_TCP", before)
    MooncakeTransferEngine("10.0.0.1", protocol="tcp")
    assert native.forces_tcp


@pytest.mark.parametrize("protocol", ["rdma", "ascend"])
def test_other_links_are_not_ruled_out(
    native: NativeEngine, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    MooncakeTransferEngine("10.0.0.1", protocol="tcp")
    MooncakeTransferEngine("10.0.0.1", protocol=protocol)
    assert not native.forces_tcp
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    with pytest.raises(BackendError, match=r"MC_FORCE_TCP is set.*unset it"):
        MooncakeTransferEngine("10.0.0.1", protocol=protocol)


def test_failure_to_open_names_the_protocol(native: NativeEngine) -> None:
    native.rc = -1
    with pytest.raises(BackendError, match="ascend"):
        MooncakeTransferEngine("10.0.0.1", protocol="ascend")


def test_store_is_given_the_same_engine(native: NativeEngine) -> None:
    """``MooncakeDistributedStore.setup(engine=...)``, as vllm-ascend's own backend does."""
    shared = MooncakeTransferEngine("10.0.0.1", protocol="ascend").share()
    assert (shared.native, shared.session) == ("the engine at port 15001", "10.0.0.1:15001")
    assert shared.protocol == "ascend"


def test_closed_engine_is_not_shared(native: NativeEngine) -> None:
    engine = MooncakeTransferEngine("10.0.0.1")
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        engine.share()


def test_thread_of_first_contact_has_the_device(native: NativeEngine) -> None:
    bound: list[str] = []
    engine = MooncakeTransferEngine(
        "10.0.0.1",
        protocol="ascend",
        bind_thread=lambda: bound.append(threading.current_thread().name),
    )
    engine.register(PAGE, PAGE)
    handle = engine.submit_write("10.0.0.1:15001", PAGE, PAGE + 4096, 64)
    deadline = time.monotonic() + 10
    while engine.poll(handle) is TransferStatus.RUNNING:
        assert time.monotonic() < deadline
    threads = [call[1] for call in native.calls if call[0] in ("probe", "write")]
    assert bound == ["mooncake-contact-10.0.0.1:15001"]
    assert threads == bound * 2


def test_write_that_raises_fails_and_those_that_wait_with_it_go_on(native: NativeEngine) -> None:
    failures = [RuntimeError("no memory")]
    submit, met = native.transfer_submit_write, threading.Event()

    def refuse(*write: Any) -> int:
        if failures:
            raise failures.pop()
        return submit(*write)

    def probe(session: str) -> int:
        assert met.wait(10)
        return 0

    native.transfer_submit_write = refuse  # type: ignore[method-assign]
    native.send_probe = probe  # type: ignore[method-assign]
    engine = MooncakeTransferEngine("10.0.0.1")
    engine.register(PAGE, PAGE)
    begun = [engine.submit_write("10.0.0.2:15001", PAGE, PAGE, 64) for _ in range(2)]
    met.set()
    assert [wait(engine, handle) for handle in begun] == [
        TransferStatus.FAILED,
        TransferStatus.DONE,
    ]
    failures.append(RuntimeError("no memory"))
    begun = [engine.submit_write("10.0.0.2:15001", PAGE, PAGE, 64) for _ in range(2)]
    assert wait(engine, begun[0]) is TransferStatus.FAILED
    assert wait(engine, begun[1]) is TransferStatus.DONE


@pytest.mark.parametrize(("protocol", "anew"), [("tcp", "10.0.0.2:015001"), ("rdma", "")])
def test_what_mooncake_knows_of_a_peer_is_not_used_for_one_that_has_its_port_now(
    native: NativeEngine, protocol: str, anew: str
) -> None:
    session = "10.0.0.2:15001"
    written: list[str] = []
    has_restarted = False

    def move(name: str, *_: object) -> int:
        written.append(name)
        return -1 if has_restarted and name == session else 0

    native.send_probe = lambda name: 0  # type: ignore[method-assign]
    native._move = move  # type: ignore[method-assign, assignment]
    engine = MooncakeTransferEngine("10.0.0.1", protocol=protocol)
    engine.register(PAGE, PAGE)
    begun = [engine.submit_write(session, PAGE, PAGE, 64) for _ in range(2)]
    assert [wait(engine, handle) for handle in begun] == [TransferStatus.DONE] * 2
    has_restarted = True
    # Those under way fail, too; the peer is met once more for all of them.
    begun = [engine.submit_write(session, PAGE, PAGE, 64) for _ in range(3)]
    assert [wait(engine, handle) for handle in begun] == [TransferStatus.FAILED] * 3
    for _ in range(2):
        is_done = wait(engine, engine.submit_write(session, PAGE, PAGE, 64)) is TransferStatus.DONE
        assert is_done == bool(anew)
    assert written == [session] * 5 + [anew or session] * 2


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_direct_placement_is_refused_where_bytes_land_after_a_failure(
    native: NativeEngine, protocol: str
) -> None:
    with pytest.raises(ValueError, match=f"over {protocol}"):
        MooncakeTransferEngine("10.0.0.1", protocol=protocol, direct_placement=True)
    assert not MooncakeTransferEngine("10.0.0.1").direct_placement


def test_direct_placement_is_declared_only_when_asked_for(native: NativeEngine) -> None:
    assert not MooncakeTransferEngine("10.0.0.1", protocol="ascend").direct_placement
    engine = MooncakeTransferEngine("10.0.0.1", protocol="ascend", direct_placement=True)
    assert engine.direct_placement


def test_region_that_does_not_begin_at_two_mib_is_refused(native: NativeEngine) -> None:
    engine = MooncakeTransferEngine("10.0.0.1", protocol="ascend")
    with pytest.raises(ValueError, match="multiple of 2097152"):
        engine.register(3 * PAGE + 4096, PAGE)
    engine.register(3 * PAGE, 4096)
    assert native.regions == {3 * PAGE: 4096}


def wait(engine: MooncakeTransferEngine, handle: TransferHandle) -> TransferStatus:
    deadline = time.monotonic() + 10
    while (status := engine.poll(handle)) is TransferStatus.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(1e-4)
    return status


@pytest.fixture
def direct(native: NativeEngine, bound: list[str]) -> Iterator[MooncakeTransferEngine]:
    engine = MooncakeTransferEngine(
        "10.0.0.1",
        protocol="ascend",
        direct_placement=True,
        bind_thread=lambda: bound.append(threading.current_thread().name),
    )
    engine.register(PAGE, PAGE)
    yield engine
    native.hold.set()
    engine.close()


@pytest.fixture
def bound() -> list[str]:
    return []


def submit(engine: MooncakeTransferEngine, num_pieces: int = 2) -> TransferHandle:
    pieces = range(num_pieces)
    return engine.submit_batch(
        "10.0.0.2:15002",
        [PAGE + i for i in pieces],
        [9 * PAGE + i for i in pieces],
        [1] * num_pieces,
    )


def test_batch_is_the_call_of_vllm_ascends_connector(
    native: NativeEngine, direct: MooncakeTransferEngine, bound: list[str]
) -> None:
    """``batch_transfer_sync_write`` with three lists; the thread has the device."""
    for _ in range(2):
        assert wait(direct, submit(direct)) is TransferStatus.DONE
    lists = ([PAGE, PAGE + 1], [9 * PAGE, 9 * PAGE + 1], [1, 1])
    assert [call for call in native.calls if call[0] == "batch"] == [
        ("batch", "10.0.0.2:15002", *lists)
    ] * 2
    assert bound == ["mooncake-send-10.0.0.2:15002"]


def test_batch_fails_where_its_thread_cannot_have_the_device_now(native: NativeEngine) -> None:
    errors = [RuntimeError("no memory on the device for one more context")]

    def bind() -> None:
        if errors:
            raise errors.pop()

    engine = MooncakeTransferEngine(
        "10.0.0.1", protocol="ascend", direct_placement=True, bind_thread=bind
    )
    engine.register(PAGE, PAGE)
    handles = [submit(engine) for _ in range(2)]
    assert [wait(engine, handle) for handle in handles] == [
        TransferStatus.FAILED,
        TransferStatus.DONE,
    ]
    engine.close()


def test_thread_of_a_peer_ends_when_it_is_idle_and_comes_again(
    native: NativeEngine, direct: MooncakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "_IDLE_SENDER_S", 0.01)
    for _ in range(3):
        assert wait(direct, submit(direct)) is TransferStatus.DONE
        deadline = time.monotonic() + 10
        while any("10.0.0.2" in thread.name for thread in threading.enumerate()):
            assert time.monotonic() < deadline
        assert not direct._senders


def test_batch_is_under_way_until_the_call_returns(
    native: NativeEngine, direct: MooncakeTransferEngine
) -> None:
    native.hold.clear()
    handle = submit(direct)
    while not any(call[0] == "batch" for call in native.calls):
        time.sleep(1e-3)
    assert direct.poll(handle) is TransferStatus.RUNNING
    native.hold.set()
    assert wait(direct, handle) is TransferStatus.DONE


def test_memory_stays_registered_until_what_is_being_written_has_ended(
    native: NativeEngine, direct: MooncakeTransferEngine
) -> None:
    """Who closes gives the memory back afterwards; a library that still reads it would crash."""
    native.hold.clear()
    submit(direct)
    while not any(call[0] == "batch" for call in native.calls):
        time.sleep(1e-3)
    registered = dict(native.regions)
    closing = threading.Thread(target=direct.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert native.regions == registered
    native.hold.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not native.regions


@pytest.mark.parametrize("rc", [-1, 7])
def test_any_code_but_zero_fails_the_batch(
    native: NativeEngine, direct: MooncakeTransferEngine, rc: int
) -> None:
    native.batch_rcs = [rc]
    assert wait(direct, submit(direct)) is TransferStatus.FAILED
    assert wait(direct, submit(direct)) is TransferStatus.DONE


def test_exception_of_the_library_fails_the_batch(
    native: NativeEngine, direct: MooncakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native, "batch_transfer_sync_write", None)
        assert wait(direct, submit(direct)) is TransferStatus.FAILED
    assert wait(direct, submit(direct)) is TransferStatus.DONE


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_batch_for_which_no_thread_is_left_fails_and_the_next_tries_again(
    native: NativeEngine, direct: MooncakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert direct.poll(submit(direct)) is TransferStatus.FAILED
    assert wait(direct, submit(direct)) is TransferStatus.DONE


def test_write_for_which_no_thread_is_left_fails_and_the_next_tries_again(
    native: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MooncakeTransferEngine("10.0.0.1")
    engine.register(PAGE, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        handle = engine.submit_write("10.0.0.1:15001", PAGE, PAGE + 4096, 64)
        assert engine.poll(handle) is TransferStatus.FAILED
    handle = engine.submit_write("10.0.0.1:15001", PAGE, PAGE + 4096, 64)
    assert wait(engine, handle) is TransferStatus.DONE
    engine.close()


def test_many_pieces_go_in_several_calls_and_stop_at_the_first_failure(
    native: NativeEngine, direct: MooncakeTransferEngine
) -> None:
    assert wait(direct, submit(direct, 2500)) is TransferStatus.DONE
    assert [len(call[2]) for call in native.calls if call[0] == "batch"] == [1024, 1024, 452]
    native.calls.clear()
    native.batch_rcs = [0, -1]
    assert wait(direct, submit(direct, 2500)) is TransferStatus.FAILED
    assert [len(call[2]) for call in native.calls if call[0] == "batch"] == [1024, 1024]


def test_batch_that_could_not_begin_in_time_is_not_begun(
    native: NativeEngine, direct: MooncakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process was stopped meanwhile: its peer has given the pages to somebody else."""
    native.hold.clear()
    first = submit(direct)
    while not any(call[0] == "batch" for call in native.calls):
        time.sleep(1e-3)
    second = submit(direct)
    now = time.monotonic() + MooncakeTransferEngine.LATE_WRITE_S + 1
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_engine.time, "monotonic", lambda: now)
        native.hold.set()
        while direct.poll(first) is TransferStatus.RUNNING:
            time.sleep(1e-3)
        while (status := direct.poll(second)) is TransferStatus.RUNNING:
            time.sleep(1e-3)
    assert status is TransferStatus.FAILED
    assert len([call for call in native.calls if call[0] == "batch"]) == 1


def test_batch_cannot_begin_after_close(
    native: NativeEngine, direct: MooncakeTransferEngine
) -> None:
    direct.close()
    with pytest.raises(BackendError, match="closed"):
        submit(direct)


def test_batch_that_comes_while_the_engine_closes_leaves_no_thread(
    native: NativeEngine, direct: MooncakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "check_batch", lambda *_: direct.close())
    with pytest.raises(BackendError, match="closed"):
        submit(direct)
    assert not direct._senders
