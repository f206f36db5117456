# SPDX-License-Identifier: Apache-2.0
"""What this machine has: cores, accelerators, memory, ports."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import psutil

from vllm_ascend_pd import envs
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.host_memory import available_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_FIRST_FREE_PORT = 18000
"""Above those that Mooncake takes."""
_ANSWER = aiohttp.ClientTimeout(total=30)
"""On a busy host an answer takes its time, and is one nevertheless."""
_NO_ANSWER = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""The last one: of this process itself, which may have no file descriptor left to look with."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The part of a machine that engines share."""

    device: str
    """``cpu``, ``cuda`` or ``npu``."""
    cores: tuple[int, ...]
    devices: tuple[int | str, ...]
    """By number, or as the driver names them."""
    free_memory_bytes: int
    hides_devices: str = ""
    """``NAME=VALUE`` of the environment, where that hides some of them and has no numbers."""

    @classmethod
    def this(cls) -> Machine:
        """This one, as far as this process may use it."""
        npus, gpus = _device_ids("davinci"), _device_ids("nvidia")
        device = "npu" if npus else "cuda" if gpus else "cpu"
        devices, hides_devices = npus or gpus, ""
        if device != "cpu":
            name, value = envs.visible_devices(device)
            parts = [part.strip() for part in value.split(",")] if value is not None else []
            if all(part.isdecimal() for part in parts):
                devices = tuple(map(int, parts)) or devices
            else:
                hides_devices = f"{name}={value}"
        return cls(
            device=device,
            cores=tuple(sorted(os.sched_getaffinity(0))),
            devices=devices,
            free_memory_bytes=available_memory_bytes(),
            hides_devices=hides_devices,
        )


def _device_ids(name: str, folder: Path = Path("/dev")) -> tuple[int, ...]:
    found = (re.fullmatch(rf"{name}(\d+)", path.name) for path in folder.glob(f"{name}*"))
    return tuple(sorted(int(match[1]) for match in found if match))


class FreePorts:
    """TCP ports that nobody listens on, and that the system does not give to anybody by itself.

    An engine listens seconds after its port was chosen. A port that the system hands out could be
    somebody's outgoing connection by then. No port is given twice.
    """

    def __init__(self) -> None:
        ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
        self._ports = range(_FIRST_FREE_PORT, max(int(ephemeral), _FIRST_FREE_PORT + 1000))
        self._left = iter(random.sample(self._ports, len(self._ports)))

    def __call__(self, address: str) -> int:
        """``ConfigError`` when none is left, or the address is another machine's."""
        for port in self._left:
            if can_listen(address, port):
                return port
        raise ConfigError(f"no port from {self._ports.start} to {self._ports.stop - 1} is free")


def can_listen(address: str, port: int) -> bool:
    """Whether a server could be started on this port now.

    Raises:
        ConfigError: the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as e:
            if e.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{address} is not an address of this machine") from e
            return False
        return True


def listeners(port: int) -> set[int]:
    """Process ids of who listens on ``port``, as far as this process may know."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return set()
    return {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid
    }


def answers(url: str) -> Callable[[int], Awaitable[bool]]:
    """Whether a process group, or a child of it, answers 200 there, and not a stranger on its
    port."""

    async def is_up(group: int) -> bool:
        try:
            async with aiohttp.request("GET", url, timeout=_ANSWER) as answer:
                is_well = answer.status == 200
            return is_well and await asyncio.to_thread(_listens, group, urlsplit(url).port or 80)
        except _NO_ANSWER:
            return False

    return is_up


def responds(url: str) -> Callable[[], Awaitable[bool]]:
    """Whether anybody answers there, and be it that it cannot serve now."""

    async def is_alive() -> bool:
        try:
            async with aiohttp.request("GET", url, timeout=_ANSWER):
                return True
        except _NO_ANSWER:
            return False

    return is_alive


def _listens(group: int, port: int) -> bool:
    """Also where nobody can be seen."""
    pids = listeners(port)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            listener = psutil.Process(pid)
            # A router's workers have groups of their own.
            if any(os.getpgid(one.pid) == group for one in (listener, *listener.parents())):
                return True
    return not pids


def port_owner(port: int) -> str:
    """Who listens on ``port``, e.g. ``python (pid 12)``; empty when it cannot be told."""
    for pid in sorted(listeners(port)):
        try:
            return f"{psutil.Process(pid).name()} (pid {pid})"
        except psutil.NoSuchProcess:
            return f"pid {pid}"
    return ""
