# SPDX-License-Identifier: Apache-2.0
"""Measures what each way of moving bytes gives on this host.

The measurement runs in a child process (``python -m vllm_ascend_pd.cluster.doctor.bandwidth``):
a library that crashes there, or prints, is a finding and not the end of the doctor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shlex
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.backends.shared_memory import SharedMapping, SharedMemoryTransferEngine
from vllm_ascend_pd.backends.transfer_engine import TransferEngine, TransferStatus
from vllm_ascend_pd.cluster.doctor.findings import Finding, fail, ok, warn
from vllm_ascend_pd.cluster.doctor.host import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_BYTES = 32 << 20
ROUNDS = 5
PIECE_BYTES = 8 << 20
_WRITE_TIMEOUT_S = 20.0
_SLOW_BYTES_PER_S = 100e6
"""Below this, computing a prompt is often faster than fetching it."""


class Bandwidth:
    """Bytes per second of each transport between two memories of this host."""

    name = "bandwidth"

    async def run(self) -> Sequence[Finding]:
        findings = []
        for transport in MEASUREMENTS:
            code, out, err = await run_command(sys.executable, "-m", __name__, transport)
            try:
                values: dict[str, Any] = json.loads(out.splitlines()[-1]) if code == 0 else {}
            except (ValueError, IndexError):
                values = {}
            if "bytes_per_s" not in values:
                reason = (err.strip().splitlines() or [f"exit code {code}"])[-1]
                findings.append(
                    fail(
                        self.name,
                        f"{transport}: {reason}",
                        f"{sys.executable} -m {__name__} {shlex.quote(transport)}",
                    )
                )
                continue
            findings.append(self.judge(transport, values["bytes_per_s"]))
        return findings

    def judge(self, transport: str, bytes_per_s: float) -> Finding:
        """Of one transport."""
        found = f"{transport}: {bytes_per_s / 1e9:.2f} GB/s"
        if bytes_per_s >= _SLOW_BYTES_PER_S:
            return ok(self.name, found, transport=transport, bytes_per_s=bytes_per_s)
        return warn(
            self.name,
            found,
            "see what else the cores do (top), and that no tool shapes loopback (tc qdisc show)",
            transport=transport,
            bytes_per_s=bytes_per_s,
        )


def measure_memory() -> float:
    """A copy within this process, as the upper bound."""
    source, target = bytearray(NUM_BYTES), bytearray(NUM_BYTES)
    return _best(lambda: target.__setitem__(slice(None), source))


def measure_tcp() -> float:
    """A plain socket on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), _WRITE_TIMEOUT_S)
        receiver, _ = server.accept()
    data, target = bytes(NUM_BYTES), memoryview(bytearray(NUM_BYTES))

    def move() -> None:
        thread = threading.Thread(target=sender.sendall, args=(data,))
        thread.start()
        receive(receiver, target)
        thread.join()

    with sender, receiver:
        return _best(move)


def receive(receiver: socket.socket, target: memoryview) -> None:
    """Fill ``target``; an error when nothing comes any more."""
    receiver.settimeout(_WRITE_TIMEOUT_S)
    got = 0
    while got < len(target):
        num_bytes = receiver.recv_into(target[got:])
        if not num_bytes:
            raise RuntimeError(f"the connection ended after {got} bytes")
        got += num_bytes


def measure_mooncake() -> float:
    """Mooncake over TCP on loopback."""
    from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine

    return _measure_engines(lambda: MooncakeTransferEngine("127.0.0.1"))


def measure_shared_memory() -> float:
    """What engines of one host and user take when both can."""
    return _measure_engines(SharedMemoryTransferEngine)


def _measure_engines(make: Callable[[], TransferEngine]) -> float:
    """One writes to the other, in pieces as engines of ours do; what arrives is compared."""
    source, target = SharedMapping(NUM_BYTES), SharedMapping(NUM_BYTES)
    pattern = (bytes(range(251)) * (NUM_BYTES // 251 + 1))[:NUM_BYTES]
    ctypes.memmove(source.addr, pattern, NUM_BYTES)
    with contextlib.closing(make()) as writer, contextlib.closing(make()) as reader:
        writer.register(source.addr, NUM_BYTES)
        reader.register(target.addr, NUM_BYTES)
        result = _best(lambda: _write(writer, reader.session, source.addr, target.addr))
    if ctypes.string_at(target.addr, NUM_BYTES) != pattern:
        raise RuntimeError("what arrived is not what was sent")
    return result


def _write(engine: TransferEngine, session: str, source: int, target: int) -> None:
    handles = [
        engine.submit_write(session, source + offset, target + offset, PIECE_BYTES)
        for offset in range(0, NUM_BYTES, PIECE_BYTES)
    ]
    end = time.monotonic() + _WRITE_TIMEOUT_S
    for handle in handles:
        while (status := engine.poll(handle)) is TransferStatus.RUNNING:
            if time.monotonic() > end:
                raise TimeoutError(f"a write did not end within {_WRITE_TIMEOUT_S:g} s")
            time.sleep(0.0002)
        if status is TransferStatus.FAILED:
            raise RuntimeError("a write failed")


def _best(move: Callable[[], None]) -> float:
    """Bytes per second of the fastest of some rounds; the first ones open connections."""
    times = []
    for _ in range(ROUNDS + 2):
        started = time.perf_counter()
        move()
        times.append(time.perf_counter() - started)
    return NUM_BYTES / min(times[2:])


MEASUREMENTS: dict[str, Callable[[], float]] = {
    "memory": measure_memory,
    "tcp": measure_tcp,
    "shared memory": measure_shared_memory,
    "mooncake": measure_mooncake,
}


if __name__ == "__main__":
    print(json.dumps({"bytes_per_s": MEASUREMENTS[sys.argv[1]]()}))
