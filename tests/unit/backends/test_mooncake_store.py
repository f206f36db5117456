# SPDX-License-Identifier: Apache-2.0
"""A pool's client that cannot be set up yet, or whose master is away."""

from __future__ import annotations

import logging
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
    caplog.set_level(logging.INFO)
    failures = [RuntimeError("not now"), RuntimeError("not now")]

    class Store:
        def __init__(self) -> None:
            if len(failures) > 1:
                raise failures.pop()

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
    store.close()
    store._thread.join(60)
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("the pool's master at 127.0.0.1:1 does not answer (RuntimeError(")
    assert told[1:] == ["the pool's master at 127.0.0.1:1 answers"]


def test_master_that_is_away_is_told_of_once_and_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    states = [0, 2, 2, 2, 0, 0]

    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            return 0

        def health_check(self) -> int:
            return states.pop(0)

        def batch_is_exist(self, keys: list[str]) -> list[int]:
            return [1] * len(keys)

        def close(self) -> int:
            return 0

    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    store = MooncakeStore(StoreOptions("127.0.0.1", "127.0.0.1:1", 0))
    assert store.wait_connected(60)
    assert store.exists(["a"]) == [True]
    assert store.exists(["a"]) == [False]
    assert store.put(["a"], [1], [1]) == store.get(["a"], [1], [1]) == [-900]
    assert store.is_healthy()
    assert store.exists(["a"]) == [True]
    store.close()
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("the pool's master at 127.0.0.1:1 does not answer; serving goes on")
    assert told[1:] == ["the pool's master at 127.0.0.1:1 answers again after 0 s"]


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


def test_client_that_cannot_know_the_staging_memory_is_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every save and load would fail, for no reason that anybody could see."""
    refusals: list[Any] = [-600, RuntimeError("not now")]
    closed = []
    may_connect = threading.Event()

    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            assert may_connect.wait(60)
            return 0

        def register_buffer(self, addr: int, num_bytes: int) -> int:
            assert (addr, num_bytes) == (4096, 64)
            refusal = refusals.pop(0) if refusals else 0
            if isinstance(refusal, RuntimeError):
                raise refusal
            return refusal

        def close(self) -> int:
            closed.append(self)
            return 0

    monkeypatch.setattr(mooncake_store, "_RETRY_S", 0.01)
    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    store = MooncakeStore(StoreOptions("127.0.0.1", "127.0.0.1:1", 0))
    store.register(4096, 64)
    may_connect.set()
    assert store.wait_connected(60)
    assert len(closed) == 2
    assert "does not answer (it cannot register 64 bytes: rc -600); serving goes on" in caplog.text
    store.close()


@pytest.mark.parametrize(("code", "num_closed"), [(0, 1), (-1, 0)])
def test_client_that_is_set_up_too_late_is_closed(
    code: int, num_closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_connect = threading.Event()
    closed = []

    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            assert may_connect.wait(60)
            return code

        def close(self) -> int:
            closed.append(self)
            return 0

    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    store = MooncakeStore(StoreOptions("127.0.0.1", "127.0.0.1:1", 0))
    store.close()
    may_connect.set()
    store._thread.join(60)
    assert len(closed) == num_closed
    assert store.exists(["a"]) == [False]


def test_client_is_not_closed_under_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    in_call = threading.Event()

    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            return 0

        def health_check(self) -> int:
            return 0

        def batch_is_exist(self, keys: list[str]) -> list[int]:
            in_call.set()
            assert may_answer.wait(60)
            return [1]

        def close(self) -> int:
            raise AssertionError

    monkeypatch.setattr(mooncake_store, "_CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(mooncake_store, "_abandoned", [])
    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    store = MooncakeStore(StoreOptions("127.0.0.1", "127.0.0.1:1", 0))
    assert store.wait_connected(60)
    asking = threading.Thread(target=store.exists, args=(["a"],))
    asking.start()
    assert in_call.wait(60)
    store.close()
    assert len(mooncake_store._abandoned) == 1
    may_answer.set()
    asking.join(60)
