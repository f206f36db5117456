# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-pd up`` does beside its processes."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.router.harness import FAST, deployed
from tests.unit.processes.test_supervisor import POLITE
from vllm_ascend_pd.cluster import log_rotation
from vllm_ascend_pd.cluster.commands import Command, Deployment
from vllm_ascend_pd.cluster.display import Display
from vllm_ascend_pd.cluster.launch import (
    Manner,
    banner,
    launch,
    lock_folder,
    new_log_dir,
    report_missing,
    with_drains,
)
from vllm_ascend_pd.cluster.log_rotation import Rotation
from vllm_ascend_pd.cluster.scaling.keeper import KeeperOrder, keep
from vllm_ascend_pd.cluster.up_socket import UpSocket, socket_path
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.private_file import write_private
from vllm_ascend_pd.processes.child import Patience
from vllm_ascend_pd.registration import Role

SAID = "x" * 3000 + "\n"
# In one call and within a page: a file is seen to grow by as much, and a log is cut behind it.
TALK = f"import os, time; os.write(1, {SAID.encode()!r}); time.sleep(600)"
TALKS = (sys.executable, "-c", TALK)
ASKED = "http://127.0.0.1:9/health"


async def until_rotated(folder: Path) -> None:
    while not (folder / "talks.log.1").exists():
        await asyncio.sleep(0.01)
    assert (folder / "talks.log.1").read_text() == SAID


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(log_rotation, "CHECK_S", 0.01)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def launch_one_that_talks(folder: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """It is told to end when its log was rotated and that is done."""

    async def test() -> None:
        command = Command("talks", "router", "localhost", TALKS, {}, ASKED.removesuffix("/health"))
        manner = Manner(folder, rotation=Rotation(1000, 1))
        deployment = Deployment((command,), command.url)
        launching = asyncio.create_task(
            launch(deployment, [command], "m", Console(quiet=True), manner)
        )
        await until_rotated(folder)
        meanwhile()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await launching == 0

    asyncio.run(asyncio.wait_for(test(), 60))


def test_logs_of_its_processes_are_rotated(tmp_path: Path) -> None:
    launch_one_that_talks(tmp_path)


def test_a_closed_terminal_does_not_end_what_was_told_to_ignore_it(tmp_path: Path) -> None:
    """As ``nohup vllm-pd up &`` is."""

    def is_ignored() -> None:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch_one_that_talks(tmp_path, is_ignored)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_stop_has_a_router_end_its_workers_itself(tmp_path: Path) -> None:
    log = tmp_path / "router.log"

    async def said(text: str) -> None:
        while not (log.exists() and log.read_text() == text):
            await asyncio.sleep(0.01)

    async def test() -> None:
        argv = (sys.executable, "-c", POLITE)
        command = Command("router", "router", "localhost", argv, {}, ASKED.removesuffix("/health"))
        manner = Manner(tmp_path, Patience(early_stop_s=60))
        launching = asyncio.create_task(
            launch(Deployment((command,), command.url), [command], "m", Console(quiet=True), manner)
        )
        await said("up\n")
        os.kill(os.getpid(), signal.SIGTERM)
        await said("up\nwas told\n")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await launching == 0
        assert log.read_text() == "up\nwas told\nhurries\n"

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EPIPE])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_processes_go_on_when_nothing_can_be_shown(
    error: int, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(error, os.strerror(error))

    async def test() -> None:
        command = Command("talks", "router", "localhost", TALKS, {}, ASKED.removesuffix("/health"))
        console = Console(file=Broken(), force_terminal=is_terminal)
        deployment, manner = Deployment((command,), command.url), Manner(tmp_path)
        launching = asyncio.create_task(launch(deployment, [command], "m", console, manner))
        log = tmp_path / "talks.log"
        while not (log.exists() and log.stat().st_size == len(SAID)):
            assert not launching.done()
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await launching == 0

    monkeypatch.setattr(os, "dup2", lambda *args: None)  # rich would close pytest's own output
    asyncio.run(asyncio.wait_for(test(), 60))


def test_end_of_a_log_is_shown_as_it_is_where_nothing_comes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "ERROR [core.py:1] no model in [/models/tiny]"

    async def test() -> None:
        ends = (sys.executable, "-c", f"print({said!r}); raise SystemExit(3)")
        command = Command("ends", "router", "localhost", ends, {}, ASKED.removesuffix("/health"))
        deployment, manner = Deployment((command,), command.url), Manner(tmp_path)
        assert await launch(deployment, [command], "m", Console(width=500), manner) == 1

    asyncio.run(asyncio.wait_for(test(), 60))
    assert f"the end of {tmp_path / 'ends.log'}:\n  {said}\n" in capsys.readouterr().out


def test_log_of_an_engine_on_ray_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, keepers = os.pipe()
    order = KeeperOrder("talks", TALKS, {}, ASKED, str(tmp_path), {}, 60, Rotation(1000, 1), False)

    async def test() -> None:
        keeping = asyncio.create_task(keep(order))
        await until_rotated(tmp_path)
        os.close(keepers)
        await keeping

    with os.fdopen(ours) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("token", ["t0ken", None])
def test_engines_of_a_router_that_wants_keys_are_not_waited_for_in_vain(
    tmp_path: Path, token: str | None
) -> None:
    keys, token_file = tmp_path / "keys", tmp_path / "token"
    write_private(keys, "sk-1")
    write_private(token_file, "t0ken")
    config = replace(FAST, api_keys_file=keys, registration_token_file=token_file)

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            commands = (
                Command("prefill-0", "prefill", "localhost", (), {}, d.prefills[0].url),
                Command("decode-0", "decode", "localhost", (), {}, d.decodes[0].url),
            )
            told = io.StringIO()
            display = Display(Console(file=told), {})
            await report_missing(Deployment(commands, d.url), display, token)
            assert not told.getvalue()

    asyncio.run(asyncio.wait_for(test(), 10))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), ["vllm-pd doctor --router http://h:1\n"]),
        (("--api-keys-file", "k"), ["-H 'Authorization: Bearer KEY'", "--api-key-file FILE_WITH"]),
        (("--engine-api-key-file", "a b"), ["http://h:1 --engine-api-key-file 'a b'\n"]),
    ],
)
def test_what_is_told_to_try_has_the_keys_that_it_needs(
    options: tuple[str, ...], told: list[str]
) -> None:
    router = Command("router", "router", "localhost", ("vllm-pd", *options), {}, "http://h:1")
    text = str(banner(Deployment((router,), router.url), [router], "m", Path("logs"), 1.0))
    assert all(words in text for words in told), text
    assert ("Authorization" in text) is ("--api-keys-file" in options)


def test_nothing_is_killed_before_its_own_options_end_it() -> None:
    def patience(*commands: tuple[Role, tuple[str, ...]]) -> Patience:
        made = [Command(role, role, "localhost", argv, {}, "http://h:1") for role, argv in commands]
        return with_drains(Patience(stop_s=60, orphan_s=60), made)

    engine: Role = "decode"
    assert patience((engine, ("--shutdown-timeout", "30"))).stop_s == 60
    told = patience((engine, ("--shutdown-timeout=300",)), ("prefill", ("--shutdown-timeout", "9")))
    assert (told.stop_s, told.orphan_s) == (310, 310)
    with pytest.raises(ConfigError, match="decode: shutdown-timeout must be seconds, not 'x'"):
        patience((engine, ("--shutdown-timeout", "x")))


def test_a_rolling_restart_takes_roles_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "prefill-0", "prefill-1", "decode-0", "decode-1"
    commands = [
        Command(name, "prefill" if "p" in name else "decode", "localhost", TALKS, {}, "")
        for name in names
    ]
    seen: list[str] = []

    async def start(socket: UpSocket) -> None:
        seen.extend(socket._engines)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(UpSocket, "start", start)
    launching = launch(
        Deployment(tuple(commands), ""), commands, "m", Console(quiet=True), Manner(tmp_path)
    )
    asyncio.run(asyncio.wait_for(launching, 60))
    assert seen == ["prefill-0", "decode-0", "prefill-1", "decode-1"]


def test_a_folder_for_logs_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm-pd-logs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    for make in (new_log_dir, lambda name: lock_folder(Path("vllm-pd-logs", name))):
        with pytest.raises(ConfigError, match=r"no logs in vllm-pd-logs/now \(.*--log-dir"):
            make("now")


def test_a_folder_for_sockets_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").write_text("a file")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"run/vllm-pd-\d+ cannot be made: Not a directory"):
        socket_path(8000)
