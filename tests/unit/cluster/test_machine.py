# SPDX-License-Identifier: Apache-2.0
"""What this machine has."""

from __future__ import annotations

import asyncio
import errno
import http.server
import os
import socket
import threading
from pathlib import Path

import pytest

from vllm_ascend_pd import envs
from vllm_ascend_pd.cluster import machine
from vllm_ascend_pd.cluster.machine import (
    FreePorts,
    Machine,
    _device_ids,
    answers,
    can_listen,
    port_owner,
    responds,
)
from vllm_ascend_pd.errors import ConfigError


def test_this_machine() -> None:
    found = Machine.this()
    assert set(found.cores) == os.sched_getaffinity(0)
    assert found.device in ("cpu", "cuda", "npu")
    assert found.free_memory_bytes > 0


def test_devices_are_found_by_their_files(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci10", "davinci_manager", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert _device_ids("davinci", tmp_path) == (0, 10)
    assert _device_ids("nvidia", tmp_path) == (1,)


@pytest.mark.parametrize(
    ("device", "variable"),
    [("nvidia", "CUDA_VISIBLE_DEVICES"), ("davinci", "ASCEND_RT_VISIBLE_DEVICES")],
)
@pytest.mark.parametrize(
    ("value", "devices", "hides"),
    [
        (None, (0, 1, 2, 3), False),
        ("2,3", (2, 3), False),
        (" 3, 1 ", (3, 1), False),
        ("", (0, 1, 2, 3), True),
        ("-1", (0, 1, 2, 3), True),
        ("GPU-8932f937,MIG-4711", (0, 1, 2, 3), True),
    ],
)
def test_of_the_devices_those_count_that_the_environment_names(
    device: str,
    variable: str,
    value: str | None,
    devices: tuple[int, ...],
    hides: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_device_ids", lambda name: (0, 1, 2, 3) if name == device else ())
    for name in envs.VISIBLE_DEVICES.values():
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    found = Machine.this()
    assert found.devices == devices
    assert found.hides_devices == (f"{variable}={value}" if hides else "")


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


def test_an_address_of_another_machine_is_named() -> None:
    for ask in (lambda: can_listen("203.0.113.1", 8000), lambda: FreePorts()("203.0.113.1")):
        with pytest.raises(ConfigError, match=r"203.0.113.1 is not an address of this machine"):
            ask()


def test_who_cannot_serve_now_responds_all_the_same() -> None:
    with http.server.HTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as server:  # which answers 501 to whatever is asked
        is_alive = responds(f"http://127.0.0.1:{server.server_port}/health")
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        assert asyncio.run(is_alive())
        server.shutdown()
    assert not asyncio.run(is_alive())


def test_who_has_no_file_descriptor_left_to_look_with_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error would be taken for the end of waiting: a child that nobody saw answer was up."""

    class Well(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    def none_left(kind: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with http.server.HTTPServer(("127.0.0.1", 0), Well) as server:
        is_up = answers(f"http://127.0.0.1:{server.server_port}/")
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            assert asyncio.run(is_up(os.getpgid(0)))
            monkeypatch.setattr("psutil.net_connections", none_left)
            assert not asyncio.run(is_up(os.getpgid(0)))
        finally:
            server.shutdown()
