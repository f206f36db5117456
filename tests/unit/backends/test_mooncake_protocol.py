# SPDX-License-Identifier: Apache-2.0
"""How Mooncake is opened for NPUs: the calls, on a scripted library. No NPU, no Mooncake."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from vllm_ascend_pd.backends import mooncake_engine
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
from vllm_ascend_pd.errors import BackendError


class Native:
    """``mooncake.engine.TransferEngine``: every write is done at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rc = 0

    def initialize(self, *args: str) -> int:
        self.calls.append(("initialize", *args))
        return self.rc

    def get_rpc_port(self) -> int:
        return 15001

    def get_engine(self) -> str:
        return "the engine itself"

    def register_memory(self, addr: int, num_bytes: int) -> int:
        return 0

    def unregister_memory(self, addr: int) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        self.calls.append(("probe", threading.current_thread().name))
        return 0

    def transfer_submit_write(self, *args: Any) -> int:
        self.calls.append(("write", threading.current_thread().name))
        return 1

    def transfer_check_status(self, batch_id: int) -> int:
        return 1


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    native = Native()
    monkeypatch.setattr(mooncake_engine, "_load_mooncake", lambda: lambda: native)
    return native


@pytest.mark.parametrize("protocol", ["tcp", "ascend"])
def test_protocol_is_passed_on(native: Native, protocol: str) -> None:
    engine = MooncakeTransferEngine("10.0.0.1", protocol=protocol)
    assert native.calls == [("initialize", "10.0.0.1", "P2PHANDSHAKE", protocol, "")]
    assert engine.session == "10.0.0.1:15001"


def test_failure_to_open_names_the_protocol(native: Native) -> None:
    native.rc = -1
    with pytest.raises(BackendError, match="ascend"):
        MooncakeTransferEngine("10.0.0.1", protocol="ascend")


def test_store_is_given_the_same_engine(native: Native) -> None:
    """``MooncakeDistributedStore.setup(engine=...)``, as vllm-ascend's own backend does."""
    shared = MooncakeTransferEngine("10.0.0.1", protocol="ascend").share()
    assert (shared.native, shared.session) == ("the engine itself", "10.0.0.1:15001")
    assert shared.protocol == "ascend"


def test_closed_engine_is_not_shared(native: Native) -> None:
    engine = MooncakeTransferEngine("10.0.0.1")
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        engine.share()


def test_thread_of_first_contact_has_the_device(native: Native) -> None:
    bound: list[str] = []
    engine = MooncakeTransferEngine(
        "10.0.0.1",
        protocol="ascend",
        bind_thread=lambda: bound.append(threading.current_thread().name),
    )
    engine.register(4096, 4096)
    handle = engine.submit_write("10.0.0.2:15001", 4096, 8192, 64)
    deadline = time.monotonic() + 10
    while engine.poll(handle) is TransferStatus.RUNNING:
        assert time.monotonic() < deadline
    threads = [name for word, name in native.calls[1:] if word in ("probe", "write")]
    assert bound == ["mooncake-contact-10.0.0.2:15001"]
    assert threads == bound * 2


@pytest.mark.parametrize("protocol", ["tcp", "ascend"])
def test_direct_placement_is_not_declared(native: Native, protocol: str) -> None:
    """Live KV may be a target only where no byte lands after a failure. Nobody has seen that."""
    assert not MooncakeTransferEngine("10.0.0.1", protocol=protocol).direct_placement
