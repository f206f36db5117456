# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd pool`` against a real master."""

from __future__ import annotations

import ctypes
import mmap
import urllib.request
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from vllm_ascend_pd.backends.mooncake_master import free_port
from vllm_ascend_pd.cli import main
from vllm_ascend_pd.config import PoolConfig
from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier
from vllm_ascend_pd.pool.tier import Opening, Status, Value


@pytest.fixture(scope="module")
def backend() -> Iterator[MooncakeTier]:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    backend = MooncakeTier.open(Opening(PoolConfig(dram_size=16 << 20)))
    yield backend
    backend.close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["pool", *arguments])
    return result.exit_code, result.output


def store(backend: MooncakeTier, num_keys: int) -> None:
    memory = mmap.mmap(-1, 4096)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    backend.store.register(addr, 4096)
    values = [Value(f"pd2/feed/{i:04}", addr, 1000) for i in range(num_keys)]
    assert set(backend.put(values)) == {Status.OK}
    backend.store.unregister(addr)


def test_stats_keys_and_clear(backend: MooncakeTier) -> None:
    assert backend.master is not None
    http = f"127.0.0.1:{backend.master.http_port}"
    store(backend, 30)
    code, output = run("keys", "--http", http, "--limit", "2")
    assert code == 0
    assert output.splitlines() == [
        "pd2/feed/*  30 keys",
        "  pd2/feed/0000",
        "  pd2/feed/0001",
        "  … 28 more",
    ]
    code, output = run("stats", "--http", http)
    assert code == 0
    assert "16,777,216" in output
    code, output = run("clear", "--http", http, "--yes")
    assert code == 0
    assert '"removed_count":30' in output
    assert run("keys", "--http", http) == (0, "")


def test_proxy_of_the_environment_is_not_asked(
    backend: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers an earlier environment
    assert backend.master is not None
    assert run("keys", "--http", f"127.0.0.1:{backend.master.http_port}") == (0, "")


def test_clear_asks_first(backend: MooncakeTier) -> None:
    assert backend.master is not None
    store(backend, 1)
    http = f"127.0.0.1:{backend.master.http_port}"
    assert run("clear", "--http", http)[0] == 1
    assert '"removed_count":1' in run("clear", "--yes", "--http", http)[1]


def test_master_that_is_not_there_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    code, output = run("stats", "--http", address)
    assert code == 1
    assert f"no master answers at http://{address}" in output
