# SPDX-License-Identifier: Apache-2.0
"""What only a peer in another process can show: real Mooncake, dying and stopped peers."""

from __future__ import annotations

import builtins
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from vllm_ascend_pd.backends import mooncake_library
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.rdma_cards import port_states, usable_ports
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
from vllm_ascend_pd.errors import BackendError

pytestmark = pytest.mark.slow

DONE, RUNNING, FAILED = TransferStatus.DONE, TransferStatus.RUNNING, TransferStatus.FAILED
NUM_BYTES = 64 << 20
CONTACT_TIMEOUT_S = 0.5

PEER = """
import ctypes, mmap, sys
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
engine = MooncakeTransferEngine("127.0.0.1")
memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
engine.register(addr, len(memory))
print(engine.session, addr, flush=True)
sys.stdin.read()
"""

# Two of them in one process, which know nothing of each other.
TWO = """
import ctypes, mmap, sys, time
host = sys.argv[1]
memory = mmap.mmap(-1, 8192)
addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory[:5] = b"hello"
"""
TRANSFER = """
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
source, target = MooncakeTransferEngine(host), MooncakeTransferEngine(host)
source.register(addr, 4096)
target.register(addr + 4096, 4096)
write = source.submit_write(target.session, addr, addr + 4096, 4096)
while source.poll(write) is TransferStatus.RUNNING:
    time.sleep(0.001)
print(memory[4096:4101].decode())
"""
STORE = """
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.backends.mooncake_store import MooncakeStore, StoreOptions, prepare_store_env
prepare_store_env(0)
master = EmbeddedMaster()
first, second = (MooncakeStore(StoreOptions(host, master.address, n)) for n in (64 << 20, 0))
assert first.wait_connected(10) and second.wait_connected(10)
first.register(addr, 4096)
second.register(addr + 4096, 4096)
first.put(["key"], [addr], [4096])
second.get(["key"], [addr + 4096], [4096])
print(memory[4096:4101].decode())
first.close()
second.close()
master.stop()
"""


@pytest.fixture(scope="module", autouse=True)
def mooncake():
    return pytest.importorskip("mooncake.engine", exc_type=ImportError)


class Peer:
    """A process with one registered region, whose memory this process sees too."""

    def __init__(self) -> None:
        fd = os.memfd_create("peer")
        os.ftruncate(fd, NUM_BYTES)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(fd), str(NUM_BYTES)],
            pass_fds=(fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.memory = mmap.mmap(fd, NUM_BYTES)
        os.close(fd)
        self.session, addr = self.process.stdout.readline().decode().split()
        self.addr = int(addr)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.end()


class Sender:
    def __init__(self) -> None:
        self.engine = MooncakeTransferEngine("127.0.0.1", contact_timeout_s=CONTACT_TIMEOUT_S)
        self.memory = mmap.mmap(-1, NUM_BYTES)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.engine.register(self.addr, NUM_BYTES)

    def submit(self, peer: Peer, num_bytes: int):
        return self.engine.submit_write(peer.session, self.addr, peer.addr, num_bytes)

    def wait(self, handle, limit_s: float = 20.0) -> TransferStatus:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            status = self.engine.poll(handle)
            if status is not RUNNING:
                return status
        raise AssertionError(f"still running after {limit_s} s")


@pytest.fixture(scope="module")
def sender(mooncake):
    sender = Sender()
    yield sender
    sender.engine.close()


def test_done_means_that_another_process_has_every_byte(sender, peer):
    for i in range(300):
        num_bytes = (1, 4096, 65_537, 3 << 20)[i % 4]
        sender.memory[:num_bytes] = bytes([i % 255 + 1]) * num_bytes
        assert sender.wait(sender.submit(peer, num_bytes)) is DONE
        assert peer.memory[:num_bytes] == sender.memory[:num_bytes]


def test_a_peer_that_dies_during_a_write_fails_it(sender, peer):
    assert sender.wait(sender.submit(peer, 8)) is DONE
    handle = sender.submit(peer, NUM_BYTES)
    assert sender.engine.poll(handle) is RUNNING
    peer.end()
    assert sender.wait(handle) is FAILED
    assert sender.wait(sender.submit(peer, 8)) is FAILED


def test_after_a_failed_write_its_peer_is_met_anew(sender, peer):
    """Under a spelling of its address that Mooncake has not seen, and takes."""
    for num_failures in (1, 2):
        handle = sender.engine.submit_write(peer.session, sender.addr, peer.addr + NUM_BYTES, 8)
        assert sender.wait(handle) is FAILED
        sender.memory[:8] = bytes([num_failures]) * 8
        assert sender.wait(sender.submit(peer, 8)) is DONE
        assert peer.memory[:8] == sender.memory[:8]


def test_first_contact_with_a_stopped_peer_neither_blocks_nor_lands_later(sender, peer):
    peer.stop()
    started = time.monotonic()
    handles = [sender.submit(peer, 8) for _ in range(3)]
    submitted = time.monotonic()
    sender.memory[:8] = b"too late"
    assert [sender.wait(handle, CONTACT_TIMEOUT_S + 2) for handle in handles] == [FAILED] * 3
    assert submitted - started < CONTACT_TIMEOUT_S
    # The peer goes on and is met at last: what has been given up is not sent any more.
    peer.process.send_signal(signal.SIGCONT)
    status = FAILED
    while status is FAILED:
        status = sender.wait(
            sender.engine.submit_write(peer.session, sender.addr + 8, peer.addr + 8, 8)
        )
    assert status is DONE
    assert peer.memory[:8] == bytes(8)


def test_a_peer_that_stops_fails_its_writes_in_bounded_time(sender, peer):
    assert sender.wait(sender.submit(peer, 8)) is DONE
    peer.stop()
    assert sender.wait(sender.submit(peer, NUM_BYTES), limit_s=10.0) is FAILED
    peer.process.send_signal(signal.SIGCONT)
    assert sender.wait(sender.submit(peer, 8)) is DONE


def test_the_environment_of_the_user_wins(monkeypatch, mooncake):
    for name in mooncake_library.ENV_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "77")
    mooncake_library.set_mooncake_env("tcp", "127.0.0.1")
    expected = {**mooncake_library.ENV_DEFAULTS, "MC_TRANSFER_TIMEOUT": "77"}
    assert {name: os.environ[name] for name in expected} == expected


@pytest.mark.parametrize(("host", "before"), [("127.0.0.1", "1"), ("::1", None)])
@pytest.mark.parametrize("code", [TRANSFER, STORE], ids=["transfer", "store"])
def test_peers_reach_each_other_by_either_version_of_ip(
    monkeypatch, code: str, host: str, before: str | None
) -> None:
    """Mooncake has one for all, by a variable that it reads when it is loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no {host}")
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    if before is not None:
        monkeypatch.setenv("MC_USE_IPV6", before)
    said = subprocess.run(
        [sys.executable, "-c", TWO + code, host], capture_output=True, text=True, check=True
    )
    assert said.stdout == "hello\n"


def test_tcp_is_what_mooncake_uses_whatever_the_host_has() -> None:
    code = PEER.partition("memory =")[0]
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MC_LOG_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "using TCP transport only" in said.stderr


def test_links_of_npus_are_refused_without_mooncakes_build_for_them(monkeypatch) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    with pytest.raises(BackendError, match="not the build for NPUs: install"):
        MooncakeTransferEngine("127.0.0.1", protocol="ascend")


def test_rdma_is_refused_where_mooncake_would_go_over_tcp(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(mooncake_library, "usable_ports", lambda: usable_ports(tmp_path, tmp_path))
    with pytest.raises(BackendError, match=r"would go over TCP: .* no card with an active port"):
        MooncakeTransferEngine("127.0.0.1", protocol="rdma")


def make_port(root, name: str, state: str) -> None:
    port = root / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text("Ethernet\n")


def test_cards_with_an_active_port_can_be_used_if_they_may_be_opened(tmp_path) -> None:
    cards, verbs = tmp_path / "cards", tmp_path / "verbs"
    verbs.mkdir()
    make_port(cards, "mlx5_0", "4: ACTIVE")
    make_port(cards, "mlx5_1", "1: DOWN")
    assert port_states(cards) == {"mlx5_0/1": "ACTIVE, Ethernet", "mlx5_1/1": "DOWN, Ethernet"}
    assert usable_ports(cards, verbs) == []
    (verbs / "uverbs0").touch()
    assert usable_ports(cards, verbs) == ["mlx5_0/1"]


def test_a_missing_library_is_explained(monkeypatch):
    real_import = builtins.__import__

    def fail(name, *args, **kwargs):
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=r"libibverbs\.so\.1.*\[cpu\].*apt-get install"):
        MooncakeTransferEngine("127.0.0.1")
