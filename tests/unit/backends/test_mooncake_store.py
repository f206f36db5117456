# SPDX-License-Identifier: Apache-2.0
"""A pool's client that cannot be set up yet."""

from __future__ import annotations

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
