# SPDX-License-Identifier: Apache-2.0
"""How another command reaches a running ``vllm-pd up``: a Unix socket of its user alone.

POST /restart    body ``RestartOrder``; answered by JSON lines, ``RestartProgress`` as it happens
POST /scale      body ``ScaleOrder``; answered with the URL that tells of it, as JSON

Beside the socket is a link to the file with the token of its router.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from vllm_ascend_pd.cluster.restart import RestartError
from vllm_ascend_pd.cluster.scaling.fleet_status import follow
from vllm_ascend_pd.cluster.scaling.target import Ratio, Target
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.private_file import read_token, write_private

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm_ascend_pd.cluster.restart import RollingRestart
    from vllm_ascend_pd.processes.child import Child


T = TypeVar("T")
_OTHERS = "where `vllm-pd up` is of another version than this command, start it again"


class RestartOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Which engines, by name (none: all of this host), and how long each may finish requests."""

    names: tuple[str, ...]
    drain_s: float


class RestartProgress(msgspec.Struct):
    """One line of an answer."""

    text: str
    failed: bool = False


class ScaleOrder(msgspec.Struct, forbid_unknown_fields=True):
    """What changes of the target; ``None``: that stays."""

    ratio: Ratio | None = None
    maximum: int | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the target of a fleet gets to who keeps it, and word of it back."""

    target_file: Path
    url: str
    """Of ``scaling.driver``, on loopback."""

    def aim(self, target: Target) -> None:
        """Whoever reads the file finds the old one or this one; ``ConfigError`` if it cannot be
        written."""
        try:
            write_private(self.target_file, msgspec.json.encode(target).decode())
        except OSError as e:
            raise ConfigError(f"the target in {self.target_file} cannot be written: {e}") from e

    def target(self) -> Target:
        """That holds now; ``ConfigError`` if it cannot be read."""
        try:
            return msgspec.json.decode(self.target_file.read_bytes(), type=Target)
        except (OSError, msgspec.MsgspecError) as e:
            raise ConfigError(f"the target in {self.target_file} cannot be read: {e}") from e

    def change(self, order: ScaleOrder) -> None:
        """``ConfigError`` says what is wrong."""
        old = self.target()
        self.aim(Target(order.ratio or old.ratio, order.maximum or old.maximum, old.generation))

    def renew(self, drain_s: float) -> None:
        """Have every engine replaced, whose requests have so long to end; until the next change."""
        old = self.target()
        self.aim(msgspec.structs.replace(old, generation=old.generation + 1, drain_s=drain_s))


def socket_path(router_port: int) -> Path:
    """Where the ``vllm-pd up`` of this user listens whose router has that port.

    Raises:
        ConfigError: somebody else owns the folder, or there can be none.
    """
    folder = _roots()[0] / f"vllm-pd-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made: {e.strerror}") from e
    if not _is_private(folder):
        raise ConfigError(f"{folder} must be a folder of this user's with mode 0700: remove it")
    return folder / f"up-{router_port}.sock"


def find_socket(router_port: int) -> Path:
    """The same, of one that may have been started with another environment, as a service is."""
    usual = socket_path(router_port)
    for root in _roots():
        path = root / usual.parent.name / usual.name
        if _is_private(path.parent) and _is_heard(path):
            return path
    return usual


def _roots() -> list[Path]:
    """The first is that of this environment."""
    login = Path("/run/user", str(os.geteuid()))
    given = os.environ.get("XDG_RUNTIME_DIR")
    return [*([Path(given)] if given else []), Path(tempfile.gettempdir()), login]


def _is_private(folder: Path) -> bool:
    """Nobody else could have put something there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & 0o077


def _is_heard(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # so many ask that one more would have to wait
        except OSError:
            return False
    return True


def refuse_second_up(path: Path) -> None:
    """``ConfigError`` if a ``vllm-pd up`` listens there."""
    if not _is_heard(path):
        return
    raise ConfigError(
        f"another `vllm-pd up` of this user listens at {path}: its router has the same port. Wait"
        " until it has ended, or give this router another port"
    )


def token_path(path: Path) -> Path:
    """The link beside a socket."""
    return path.with_suffix(".token")


def find_token_file(router_url: str) -> Path | None:
    """That of a router of this host, if a ``vllm-pd up`` of this user has started it."""
    parts = urlsplit(router_url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") or parts.port is None:
        return None
    path = token_path(find_socket(parts.port))
    return path if path.exists() else None


def operator_token(router_url: str, token_file: str | None) -> str | None:
    """What an operator's command shows that router: of ``--token-file``, or what is found."""
    path = token_file or find_token_file(router_url)
    return read_token("--token-file", str(path)) if path else None


class UpSocket:
    """The listening side, in the process of ``vllm-pd up``. Event loop thread."""

    def __init__(
        self,
        path: Path,
        engines: dict[str, Child],
        restart: RollingRestart,
        token_file: Path | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        """``token_file``: of the router, which whoever may ask here may ask, too. ``scaling``: of a
        fleet, if there is one."""
        self._path = path
        self._token_file = token_file
        self._engines = engines
        self._scaling = scaling
        self._restart = restart
        self._busy = asyncio.Lock()
        app = web.Application()
        app.router.add_post("/restart", self._on_restart)
        app.router.add_post("/scale", self._on_scale)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        self._inode: int | None = None
        """Of the socket, once there is one."""

    async def start(self) -> None:
        """``ConfigError`` if another one listens there."""
        refuse_second_up(self._path)
        await self._runner.setup()
        token = token_path(self._path)
        for path in (self._path, token):
            path.unlink(missing_ok=True)  # of one that was killed
        await web.UnixSite(self._runner, str(self._path)).start()
        self._inode = self._path.stat().st_ino
        if self._token_file is not None:
            token.symlink_to(self._token_file.absolute())

    async def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                for path in (self._path, token_path(self._path)):
                    path.unlink(missing_ok=True)
        await self._runner.cleanup()

    async def _on_restart(self, request: web.Request) -> web.StreamResponse:
        order = await _read(request, RestartOrder)
        answer = web.StreamResponse()
        await answer.prepare(request)
        async for progress in self._carry_out(order):
            with contextlib.suppress(ConnectionError):  # who asked may have left; it goes on
                await answer.write(msgspec.json.encode(progress) + b"\n")
        return answer

    async def _on_scale(self, request: web.Request) -> web.Response:
        order = await _read(request, ScaleOrder)
        try:
            if self._scaling is None:
                raise ConfigError("it was not started with --ray, so its engines are those it has")
            self._scaling.change(order)
        except ConfigError as e:
            raise web.HTTPBadRequest(text=str(e)) from e
        return web.json_response(self._scaling.url)

    async def _carry_out(self, order: RestartOrder) -> AsyncIterator[RestartProgress]:
        if self._scaling is not None:
            async for progress in self._replace_all(order):
                yield progress
            return
        if unknown := [name for name in order.names if name not in self._engines]:
            yield RestartProgress(
                f"no engines {unknown} here; there are {sorted(self._engines)}", True
            )
            return
        if self._busy.locked():
            yield RestartProgress("a restart is in progress: wait until it has ended", True)
            return
        if not self._engines:
            yield RestartProgress("this `vllm-pd up` runs no engines: ask that of their host", True)
            return
        async with self._busy:
            engines = [self._engines[name] for name in order.names or self._engines]
            try:
                async for line in self._restart.run(engines, order.drain_s):
                    yield RestartProgress(line)
            except RestartError as e:
                yield RestartProgress(str(e), True)

    async def _replace_all(self, order: RestartOrder) -> AsyncIterator[RestartProgress]:
        assert self._scaling is not None
        if order.names:
            yield RestartProgress("with --ray all engines are replaced: give --rolling", True)
            return
        try:
            self._scaling.renew(order.drain_s)
            async for line in follow(self._scaling.url, until_settled=True):
                yield RestartProgress(line)
        except ConfigError as e:
            yield RestartProgress(str(e), True)


async def _read(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as e:
        raise web.HTTPBadRequest(text=f"it does not know such an order: {e}; {_OTHERS}") from e


async def ask_to_restart(path: Path, order: RestartOrder) -> AsyncIterator[RestartProgress]:
    """What a running ``vllm-pd up`` does about it; ``ConfigError`` if there is none."""
    async with _asking(path, "restart", order) as answer:
        async for line in answer.content:
            yield msgspec.json.decode(line, type=RestartProgress)


async def ask_to_scale(path: Path, order: ScaleOrder) -> str:
    """The URL at which a running ``vllm-pd up`` tells of it; ``ConfigError`` if it refuses, or
    there is none."""
    async with _asking(path, "scale", order) as answer:
        return msgspec.json.decode(await answer.read(), type=str)


@contextlib.asynccontextmanager
async def _asking(
    path: Path, what: str, order: msgspec.Struct
) -> AsyncIterator[aiohttp.ClientResponse]:
    connector = aiohttp.UnixConnector(str(path))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:
            async with session.post(f"http://up/{what}", data=msgspec.json.encode(order)) as answer:
                if answer.status == 400:
                    raise ConfigError(await answer.text())
                if answer.status != 200:
                    raise ConfigError(f"the one at {path} answers {answer.status}; {_OTHERS}")
                yield answer
        except aiohttp.ClientConnectionError as e:
            raise ConfigError(
                f"no `vllm-pd up` of this user listens at {path} ({e}); give the port of its router"
                " with --port, and run this on its host"
            ) from e
        except aiohttp.ClientPayloadError as e:
            raise ConfigError(
                f"the `vllm-pd up` at {path} has ended before it had answered; see its logs"
            ) from e
