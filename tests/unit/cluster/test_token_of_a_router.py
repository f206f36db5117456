# SPDX-License-Identifier: Apache-2.0
"""Commands find the token of the router that a ``vllm-pd up`` of their user has started."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import cast

import pytest

from vllm_ascend_pd.cluster.restart import RollingRestart
from vllm_ascend_pd.cluster.up_socket import (
    UpSocket,
    find_socket,
    find_token_file,
    socket_path,
    token_path,
)

NO_RESTART = cast("RollingRestart", None)
ROUTER = "http://127.0.0.1:8123"


def test_token_is_found_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    token_file = tmp_path / ".token"
    token_file.write_text("x")

    async def test() -> None:
        path = socket_path(8123)
        with socket.socket(socket.AF_UNIX) as killed:  # leaves both behind
            killed.bind(str(path))
            killed.listen()
        token_path(path).symlink_to(tmp_path / "of-another-time")
        up = UpSocket(path, {}, NO_RESTART, token_file)
        await up.start()
        found = find_token_file(ROUTER)
        assert found is not None
        assert found.resolve() == token_file
        assert find_token_file("http://localhost:8123/") == found
        for other in ("http://127.0.0.1:8124", "http://127.0.0.1", "http://10.0.0.1:8123"):
            assert find_token_file(other) is None
        await up.close()
        assert find_token_file(ROUTER) is None

    asyncio.run(test())


@pytest.mark.parametrize("is_open", [False, True])
def test_what_a_service_has_started_is_found_from_a_login(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a folder that others may enter."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    token_file = tmp_path / ".token"
    token_file.write_text("x")

    async def test() -> None:
        path = socket_path(8123)
        path.parent.chmod(0o755 if is_open else 0o700)
        up = UpSocket(path, {}, NO_RESTART, token_file)
        await up.start()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "login"))
        usual = socket_path(8123)
        assert usual != path
        assert find_socket(8123) == (usual if is_open else path)
        assert find_token_file(ROUTER) == (None if is_open else token_path(path))
        await up.close()
        assert find_socket(8123) == usual

    asyncio.run(test())


def test_token_of_a_router_that_has_gone_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def test() -> None:
        up = UpSocket(socket_path(8123), {}, NO_RESTART, tmp_path / "gone")
        await up.start()
        assert find_token_file(ROUTER) is None
        await up.close()

    asyncio.run(test())
