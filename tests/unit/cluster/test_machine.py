# SPDX-License-Identifier: Apache-2.0
"""What this machine has."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import threading
from pathlib import Path

from vllm_ascend_pd.cluster.machine import (
    FreePorts,
    Machine,
    _device_ids,
    can_listen,
    port_owner,
    responds,
)


def test_this_machine() -> None:
    machine = Machine.this()
    assert set(machine.cores) == os.sched_getaffinity(0)
    assert machine.device in ("cpu", "cuda", "npu")
    assert machine.free_memory_bytes > 0


def test_devices_are_found_by_their_files(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci10", "davinci_manager", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert _device_ids("davinci", tmp_path) == (0, 10)
    assert _device_ids("nvidia", tmp_path) == (1,)


def test_free_ports_are_none_that_the_system_hands_out() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    choose = FreePorts()
    ports = {choose("127.0.0.1") for _ in range(20)}
    assert len(ports) == 20
    assert not [port for port in ports if first <= port <= last]
    assert all(can_listen("127.0.0.1", port) for port in ports)
    assert can_listen("::1", choose("::1"))


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not can_listen("127.0.0.1", port)
        assert port_owner(port).endswith(f"(pid {os.getpid()})")
    assert port_owner(port) == ""


def test_who_cannot_serve_now_responds_all_the_same() -> None:
    with http.server.HTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as server:  # which answers 501 to whatever is asked
        is_alive = responds(f"http://127.0.0.1:{server.server_port}/health")
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        assert asyncio.run(is_alive())
        server.shutdown()
    assert not asyncio.run(is_alive())
