# SPDX-License-Identifier: Apache-2.0
"""A pool's client that cannot be set up yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_ascend_pd.backends import mooncake_store
from vllm_ascend_pd.backends.mooncake_store import MooncakeStore, StoreOptions


def test_client_whose_setup_raises_is_set_up_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [RuntimeError("not now"), RuntimeError("not now")]

    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            if failures:
                raise failures.pop()
            return 0

        def close(self) -> int:
            return 0

    monkeypatch.setattr(mooncake_store, "_RETRY_S", 0.01)
    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    store = MooncakeStore(StoreOptions("127.0.0.1", "127.0.0.1:1", 0))
    assert store.wait_connected(10)
    assert caplog.text.count("not now") == 1
    store.close()


def test_memory_that_is_registered_while_the_client_connects_is_registered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_connect = threading.Event()
    registered = []

    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            assert may_connect.wait(60)
            return 0

        def register_buffer(self, addr: int, num_bytes: int) -> int:
            registered.append((addr, num_bytes))
            return -600 if len(registered) > 1 else 0

        def close(self) -> int:
            return 0

    class ConnectsBetween(MooncakeStore):
        @contextmanager
        def _use(self) -> Iterator[Any]:
            may_connect.set()
            assert self.wait_connected(60)
            with super()._use() as store:
                yield store

    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    store = ConnectsBetween(StoreOptions("127.0.0.1", "127.0.0.1:1", 0))
    store.register(4096, 64)
    may_connect.set()
    assert store.wait_connected(60)
    assert registered == [(4096, 64)]
    store.close()
