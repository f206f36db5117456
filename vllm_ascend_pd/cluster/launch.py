# SPDX-License-Identifier: Apache-2.0
"""Runs the part of a deployment that belongs to this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import secrets
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import msgspec
import psutil
from rich.text import Text

from vllm_ascend_pd import registration
from vllm_ascend_pd.backends.mooncake_master import master_program
from vllm_ascend_pd.cluster.commands import Deployment, Programs
from vllm_ascend_pd.cluster.display import Display
from vllm_ascend_pd.cluster.doctor.findings import Verdict
from vllm_ascend_pd.cluster.doctor.host import Patches
from vllm_ascend_pd.cluster.log_rotation import Rotation
from vllm_ascend_pd.cluster.machine import answers, can_listen, port_owner, responds
from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.cluster.placement import option
from vllm_ascend_pd.cluster.restart import RollingRestart, in_turns
from vllm_ascend_pd.cluster.up_socket import (
    Scaling,
    UpSocket,
    find_socket,
    refuse_second_up,
    socket_path,
)
from vllm_ascend_pd.config import DEFAULT_KV_PORT
from vllm_ascend_pd.errors import BackendError, ConfigError
from vllm_ascend_pd.private_file import read_token, write_private
from vllm_ascend_pd.processes.child import ChildSpec, Patience, StartError
from vllm_ascend_pd.processes.supervisor import Supervisor
from vllm_ascend_pd.registration import InstanceStatus, name_of_rank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

    from rich.console import Console

    from vllm_ascend_pd.cluster.commands import Command
    from vllm_ascend_pd.cluster.topology import Topology

logger = logging.getLogger(__name__)

_ROUTER_PATIENCE_S = 180.0
_HURRY_S = 10.0
"""For a router to end its requests at once, and its workers: killed, it would leave these to end
their requests by themselves."""
_AFTER_DRAIN_S = 10.0
"""For a process to end once it has nothing more to answer."""
_LOCK = ".lock"
KEPT_SECRET = ".secret-of-pool"
"""The name of a secret that a later ``up`` needs, too."""


def find_programs() -> Programs:
    """``vllm`` and ``vllm-pd`` of this Python; ``ConfigError`` when vLLM is not installed here."""
    folder = Path(sys.executable).parent
    found: dict[str, str] = {}
    for name in ("vllm", "vllm-pd"):
        beside = folder / name
        path = str(beside) if beside.is_file() else shutil.which(name)
        if path is None:
            raise ConfigError(
                f"there is no program {name} beside {sys.executable} or on PATH; install the engine"
                " in the environment that vllm-pd is started from"
            )
        found[name] = path
    try:
        master = master_program()
    except BackendError:
        master = "mooncake_master"  # not needed without a pool
    return Programs(found["vllm"], found["vllm-pd"], master)


def find_local_host(topology: Topology, name: str | None) -> str:
    """Which of the topology's hosts this machine is; ``ConfigError`` when that is not clear."""
    if name is not None:
        if name not in topology.hosts:
            raise ConfigError(f"--host: {name!r} is not in hosts {sorted(topology.hosts)}")
        return name
    if len(topology.hosts) == 1:
        return next(iter(topology.hosts))
    mine = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    here = [name for name, host in topology.hosts.items() if host.address in mine]
    if len(here) != 1:
        raise ConfigError(
            f"this machine's addresses do not say which of {sorted(topology.hosts)} it is; say so"
            " with --host"
        )
    return here[0]


def new_log_dir(name: str) -> Path:
    """A folder of that name that nobody else has, or one with a number after it; ``ConfigError`` if
    there can be none."""
    first = folder = Path("vllm-pd-logs", name)
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = first.with_name(f"{name}-{number}")
        except OSError as e:
            raise _no_log_dir(folder, e) from e


def _no_log_dir(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"there can be no logs in {folder} ({error.strerror}): choose another folder with --log-dir"
    )


def remove_if_empty(log_dir: Path) -> None:
    """Of who was refused, so that nothing is left of it."""
    with contextlib.suppress(OSError):
        if [path.name for path in log_dir.iterdir()] == [_LOCK]:
            (log_dir / _LOCK).unlink()
        log_dir.rmdir()
        log_dir.parent.rmdir()


def with_secrets(
    topology: Topology, folder: Path, keep: bool = True
) -> tuple[Topology, list[Path]]:
    """The same with a secret of the engines and a token for the router, and which files are to be
    made for that: where all run on this machine, and the user names none.

    A pool's files are found with the secret that they were written with. So where there are any, it
    lies beside them, to ``keep``.
    """
    if len(topology.hosts) > 1:
        return topology, []
    extra, paths = dict(topology.extra_config), []
    pool_folder = _pool_folder(topology) if keep else None
    secret = folder / ".secret" if pool_folder is None else pool_folder / KEPT_SECRET
    for section, name, path in (
        ("security", "secret_file", secret),
        ("router", "token_file", folder / ".token"),
    ):
        values = extra.get(section, {})
        if isinstance(values, dict) and name not in values:
            paths.append(path)
            extra[section] = {**values, name: str(path)}
    return msgspec.structs.replace(topology, extra_config=extra), paths


def _pool_folder(topology: Topology) -> Path | None:
    """In which each engine has its own."""
    pool = topology.extra_config.get("pool")
    ssd = pool.get("ssd") if isinstance(pool, dict) else None
    path = ssd.get("path") if isinstance(ssd, dict) else None
    return Path(path) if isinstance(path, str) else None


def lock_folder(log_dir: Path) -> IO[str]:
    """For who makes secrets there, until what is returned is closed; ``ConfigError`` if another one
    has it, or nobody can."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = (log_dir / _LOCK).open("w")
    except OSError as e:
        raise _no_log_dir(log_dir, e) from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        lock.close()
        raise ConfigError(
            f"another `vllm-pd up` has its secret and its token in {log_dir}: choose another folder"
            " with --log-dir"
        ) from e
    except OSError as e:
        logger.warning("%s cannot be locked: %s", log_dir, e)
    return lock


def write_secrets(paths: Sequence[Path]) -> None:
    """New ones, which only this user may read; but for one that is to be kept, and is there."""
    for path in paths:
        try:
            if path.name != KEPT_SECRET or not path.exists():
                write_private(path, secrets.token_hex(32))
        except OSError as e:
            raise ConfigError(f"{path} cannot be written ({e})") from e


def refuse_busy_ports(commands: Sequence[Command], from_file: bool) -> None:
    """``ConfigError`` that says who has a port that a command needs, and which field of the
    topology file, or which option, chooses another one."""
    for command in commands:
        address = command.url.removeprefix("http://").rpartition(":")[0]
        for port, fix in _ports(command, from_file):
            if not can_listen(address.strip("[]"), port):
                owner = port_owner(port) or "another process"
                where = f"port {port} of {address}, for {command.name}, is used by {owner}"
                raise ConfigError(f"{where}; {fix}")


def _ports(command: Command, from_file: bool) -> list[tuple[int, str]]:
    """Each with what to do where it is taken."""
    own = int(command.url.rpartition(":")[2])
    choose = "choose another one with"
    if command.role == "router":
        return [(own, f"{choose} {'router.port in the topology' if from_file else '--port'}")]
    if command.role == "master":
        fix = "end that, or name a master that runs as extra_config.pool.master in the topology"
        rpc_port = option(list(command.argv), "--rpc-port") or own
        return [(own, fix), (int(rpc_port), fix)]
    # Where the default is taken, an engine chooses another one for its peers.
    kv_ports = [port for port in command.kv_ports if port != DEFAULT_KV_PORT]
    if not (command.is_engine and from_file):
        return [(port, "it was free a moment ago: start again") for port in (own, *kv_ports)]
    group = f"its group in {command.role} of the topology"
    return [
        (own, f"{choose} port of {group}"),
        *((port, f"{choose} kv_port of {group}") for port in kv_ports),
    ]


def refuse_second_launch(deployment: Deployment) -> None:
    """``ConfigError`` if commands could not tell it from another one of this user."""
    refuse_second_up(find_socket(_router_port(deployment)))


def _router_port(deployment: Deployment) -> int:
    return urlsplit(deployment.router_url).port or 80


async def refuse_unpatched_engine() -> None:
    """``ConfigError`` with the command that mends it, before a model is loaded for nothing."""
    for finding in await Patches().run():
        if finding.verdict is Verdict.FAIL:
            raise ConfigError(f"{finding.found}; fix: {finding.fix}")


@dataclass(frozen=True, slots=True)
class Manner:
    """How ``launch`` does it."""

    log_dir: Path
    patience: Patience = field(default_factory=Patience)
    rotation: Rotation = field(default_factory=Rotation)
    token_file: Path | None = None
    """Holds what the engines register with."""
    scaling: Scaling | None = None
    """Of a fleet, if engines come and go."""


def with_drains(patience: Patience, commands: Sequence[Command]) -> Patience:
    """No process is killed before the time is over that its own options give it to end."""
    stop_s = max([patience.stop_s, *(command.drain_s + _AFTER_DRAIN_S for command in commands)])
    return replace(patience, stop_s=stop_s, orphan_s=max(patience.orphan_s, stop_s))


async def launch(
    deployment: Deployment,
    commands: Sequence[Command],
    model: str,
    console: Console,
    manner: Manner,
) -> int:
    """Start ``commands`` and keep them up; the exit code of ``vllm-pd up``."""
    specs = [
        ChildSpec(
            one.name,
            one.argv,
            one.env,
            answers(one.asked),
            responds(one.asked),
            hurry_s=_HURRY_S if one.role == "router" else 0.0,
        )
        for one in commands
    ]
    log_dir, patience = manner.log_dir, with_drains(manner.patience, commands)
    socket = socket_path(_router_port(deployment))
    started = time.monotonic()
    urls = {command.name: command.url for command in commands}
    all_up = asyncio.Event()
    loop = asyncio.get_running_loop()
    with Display(console, urls) as display:
        supervisor = Supervisor(specs, log_dir, display.changed, all_up.set, patience)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number != signal.SIGHUP or not is_ignored:  # as it is under nohup
                loop.add_signal_handler(number, supervisor.stop)

        async def announce() -> None:
            await all_up.wait()
            if any(command.role == "router" for command in commands):
                await report_missing(deployment, display, _token(manner))
            seconds = time.monotonic() - started
            display.say(banner(deployment, commands, model, log_dir, seconds))

        async def redraw() -> None:
            while True:
                await asyncio.sleep(0.25)
                display.refresh()

        logs = [child.log for child in supervisor.children if child.log is not None]
        beside = [
            asyncio.create_task(work)
            for work in (
                announce(),
                redraw(),
                manner.rotation.keep(logs),
                _obey(socket, deployment, supervisor, manner),
            )
        ]
        try:
            await supervisor.run()
        except StartError as e:
            lines = "\n".join(f"  {line}" for line in e.child.last_lines(20))
            display.say(f"the end of {e.child.log}:\n{lines}")
            display.say(Text(str(e), "red"))
            return 1
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    return 0


async def _obey(path: Path, deployment: Deployment, supervisor: Supervisor, manner: Manner) -> None:
    """What other commands of this user ask, until cancelled."""
    here = {child.spec.name: child for child in supervisor.children}
    engines = in_turns([c for c in deployment.commands if c.is_engine and c.name in here])
    children = {command.name: here[command.name] for command in engines}
    async with RouterOperator(deployment.router_url, _token(manner)) as router:
        instances = {c.name: c.instance_ids for c in deployment.commands}
        restart = RollingRestart(supervisor, router, instances)
        up_socket = UpSocket(path, children, restart, manner.token_file, manner.scaling)
        try:
            await up_socket.start()
            await asyncio.Event().wait()
        except (ConfigError, OSError) as e:
            logger.warning("vllm-pd restart cannot reach this one: %s", e)
        finally:
            await up_socket.close()


def _token(manner: Manner) -> str | None:
    path = manner.token_file
    return read_token("router.token_file", str(path)) if path else None


async def report_missing(deployment: Deployment, display: Display, token: str | None) -> None:
    """Wait until the router sends requests to every engine; say which ones it does not."""
    missing = {
        (command.url, rank): name_of_rank(command.name, rank)
        for command in deployment.commands
        if command.is_engine
        for rank in command.ranks
    }
    end = time.monotonic() + _ROUTER_PATIENCE_S
    timeout = aiohttp.ClientTimeout(total=30)
    # /instances may want a client's key, which is not to be had here.
    url = deployment.router_url + (registration.PATH if token else "/instances")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        while missing and time.monotonic() < end:
            with contextlib.suppress(
                aiohttp.ClientError, asyncio.TimeoutError, msgspec.MsgspecError
            ):
                async with session.get(url) as response:
                    if response.status in (401, 403):
                        return
                    listed = msgspec.json.decode(await response.read(), type=list[InstanceStatus])
                for instance in listed:
                    if instance.state == "ready" and instance.healthy:
                        missing.pop((instance.url, instance.data_parallel_rank), None)
            if missing:
                await asyncio.sleep(0.5)
    if missing:
        names = ", ".join(missing.values())
        where = f"{deployment.router_url}/instances"
        text = f"the router sends no requests to {names} yet; see their logs, and {where}"
        display.say(Text(text, "red"))


def banner(
    deployment: Deployment, commands: Sequence[Command], model: str, log_dir: Path, seconds: float
) -> Text:
    """What a user can do with what is up: ``KEY`` stands for one of the clients' keys."""
    url = deployment.router_url
    body = json.dumps({"model": model, "prompt": "Hello, my name is", "max_tokens": 16})
    text = Text(f"\nup after {seconds:.0f} s: {len(commands)} processes, logs in {log_dir}\n")
    router = next((command for command in commands if command.role == "router"), None)
    if router is None:
        return text.append(f"  the router is on another host: {url}\n")
    text.append(f"  {url}/v1", "bold green")
    text.append(f" serves {model}\n\n")
    asking, examining = "-H 'Content-Type: application/json'", f"--router {url}"
    if "--api-keys-file" in router.argv:
        asking += " -H 'Authorization: Bearer KEY'"
        examining += " --api-key-file FILE_WITH_KEY"
    if key_file := option(list(router.argv), "--engine-api-key-file"):
        examining += f" --engine-api-key-file {shlex.quote(key_file)}"
    text.append(f"  curl {url}/v1/completions {asking} -d '{body}'\n  vllm-pd doctor {examining}\n")
    for command in commands:
        if command.role == "prometheus":
            text.append(f"  {command.url}/graph queries, {command.url}/alerts alerts,")
            text.append(f" {url}/ the router's page\n")
    return text
