# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself to a router."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import (
    KVEndpoint,
    KVEvents,
    Registration,
    check_instance_id,
    decode,
    is_loopback,
)

FULL = Registration(
    url="http://127.0.0.1:8100",
    role="prefill",
    epoch="e1",
    models=("tiny",),
    labels={"model": "p"},
    fingerprint="vllm=0.30.0",
    kv=KVEndpoint(engine_id="p0", host="127.0.0.1", port=14579, supports_concurrent=True),
    kv_events=KVEvents(endpoint="tcp://127.0.0.1:5557"),
    block_size=128,
    num_blocks=64,
)


def body(**changes: Any) -> bytes:
    return json.dumps({**json.loads(msgspec.json.encode(FULL)), **changes}).encode()


def test_registration_survives_the_wire() -> None:
    assert decode(msgspec.json.encode(FULL)) == FULL


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    assert decode(body(something="new")) == FULL


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"url": "ftp://127.0.0.1:1"}, "url"),
        ({"url": "http://127.0.0.1"}, "url"),
        ({"url": "http://user@127.0.0.1:1"}, "url"),
        ({"url": "http://127.0.0.1:1/path"}, "url"),
        ({"url": "http://127.0.0.1:99999"}, "url"),
        ({"url": "http://10.0.0..5:8000"}, "'10.0.0..5' is no name of a host"),
        ({"url": f"http://{'x' * 64}:8000"}, "is no name of a host"),
        ({"role": "king"}, "role"),
        ({"epoch": ""}, "epoch"),
        ({"state": "lost"}, "state"),
        ({"block_size": 0}, "block_size"),
        ({"kv": {"engine_id": "e", "host": "h", "port": 0}}, "kv.port"),
        ({"kv_events": {"endpoint": "ipc:///etc/passwd"}}, "kv_events"),
        ({"kv_events": {"endpoint": "tcp://[::1"}}, "kv_events"),
    ],
)
def test_wrong_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        decode(body(**changes))


@given(st.binary())
def test_any_bytes_are_a_registration_or_a_config_error(raw: bytes) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(decode(raw), Registration)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "x" * 129, "é"])
def test_bad_instance_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="instance id"):
        check_instance_id(name)


def test_loopback() -> None:
    ours = ("localhost", "127.8.0.1", "::1", "::ffff:127.0.0.1", "::ffff:7f08:1")
    assert [is_loopback(h) for h in ours] == [True] * 5
    others = ("10.0.0.1", "localhost.example.org", "", "::", "::ffff:10.0.0.1", "::ffff:0:0")
    assert [is_loopback(h) for h in others] == [False] * 6
    embedded = ("::127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::", "::ffff:0:127.0.0.1")
    assert [is_loopback(h) for h in embedded] == [False] * 4  # in ways that lead elsewhere
