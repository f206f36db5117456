# SPDX-License-Identifier: Apache-2.0
"""Messages between engines, and the fields that a client carries between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.wire import (
    ControlMessage,
    DataMessage,
    Extend,
    Extended,
    Fetch,
    Fetched,
    Go,
    GroupHashes,
    Heartbeat,
    Open,
    Opened,
    Progress,
    Ready,
    Refused,
    Release,
    RemotePrefill,
    Ticket,
    Waiting,
    Watch,
    Worker,
    decode_control,
    decode_data,
    encode,
)

TICKET = Ticket(7, 3, b"\xff" * 16)
CONTROL = [
    Open(1, "same", "t", "e", 35, (GroupHashes((b"\x00" * 32, b"\xff" * 32), b"digest"),)),
    Open(1, "same", "t", "", 64, (GroupHashes((b"a", b"b"), b"c"), GroupHashes((b"d",), b"e"))),
    Opened("t", 35, (Worker("127.0.0.1", 5, TICKET, "key"),), "e", False, 4),
    Waiting("t", 4),
    Refused("t", "lease_expired", "no such lease"),
    Heartbeat(("t", "u"), "e"),
    Release("t", "e"),
    Extend("t", "e", 7, True, 4),
    Extended("t", "e", (5, 6), 35, (0, 2), (Worker("127.0.0.1", 5, TICKET, "key"),), True, 4),
    Ready("t", "e", 5),
    Go("t", 5),
]
DATA = [
    Fetch(1, "t", "e", TICKET, 2, 0, 4, (0, 1, 5), {"shm": "a"}, 1 << 47, 4096, (1 << 63) - 1),
    Fetched(1, (1 << 64) - 1),
    Fetched(1, 0, "bad_params", "mooncake"),
    Watch("t", "e", TICKET, True),
    Progress("t", 1, 3, 2),
    Progress("t", 0, 0, 0, "lease_expired"),
]
GOOD = RemotePrefill(
    remote_engine_id="engine",
    remote_host="127.0.0.1",
    remote_port=5,
    remote_block_ids=(1, 2),
    transfer_id="t",
    remote_epoch="e",
    remote_num_tokens=20,
)


@pytest.mark.parametrize("message", CONTROL, ids=lambda m: type(m).__name__)
def test_control_message_comes_back_equal(message: ControlMessage) -> None:
    assert decode_control(encode(message)) == message


@pytest.mark.parametrize("message", DATA, ids=lambda m: type(m).__name__)
def test_data_message_comes_back_equal(message: DataMessage) -> None:
    assert decode_data(encode(message)) == message


@pytest.mark.parametrize("message", DATA, ids=lambda m: type(m).__name__)
def test_data_message_is_no_control_message(message: DataMessage) -> None:
    with pytest.raises(TransferError, match="not a control message"):
        decode_control(encode(message))


@pytest.mark.parametrize("message", CONTROL, ids=lambda m: type(m).__name__)
def test_control_message_is_no_data_message(message: ControlMessage) -> None:
    with pytest.raises(TransferError, match="not a data message"):
        decode_data(encode(message))


@pytest.mark.parametrize("kind", ["x" * 1_000_000, "x\n2030-01-01 a line of its own"])
@pytest.mark.parametrize("decode", [decode_control, decode_data])
def test_what_is_said_of_no_message_is_a_short_line(
    decode: Callable[[bytes], object], kind: str
) -> None:
    """A peer has chosen its words, and a log takes it."""
    with pytest.raises(TransferError) as raised:
        decode(msgspec.msgpack.encode({"type": kind}))
    assert "Invalid value 'x" in str(raised.value)
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


def test_open_of_another_version_is_understood_so_far_that_it_can_be_refused() -> None:
    fields = {"type": "open", "version": 7, "fingerprint": "f", "transfer_id": "t", "epoch": ""}
    fields |= {"block_hashes": [b"a"], "num_tail_tokens": 3, "tail_digest": b"b"}
    got = decode_control(msgspec.msgpack.encode(fields))
    assert isinstance(got, Open)
    assert (got.version, got.transfer_id) == (7, "t")


def decode_or_refuse(frame: bytes) -> int:
    """How many decoders took it; anything but a message or ``TransferError`` is raised."""
    num_decoded = 0
    for decode in (decode_control, decode_data):
        try:
            assert isinstance(decode(frame), msgspec.Struct)
        except TransferError:
            continue
        num_decoded += 1
    return num_decoded


@given(st.binary(max_size=200))
@example(b"\x82\xa4type\xa7release\xabtransfer_id\xa1\xff")
def test_any_bytes_are_a_message_or_a_transfer_error(frame: bytes) -> None:
    assert decode_or_refuse(frame) in (0, 1)


@pytest.mark.parametrize("decode", [decode_control, decode_data])
@pytest.mark.parametrize("tag", [b"release", b"fetched"])
def test_deep_nesting_is_a_transfer_error(
    decode: Callable[[bytes], msgspec.Struct], tag: bytes
) -> None:
    """In a field that is not known, so it is skipped."""
    frame = b"\x82\xa4type\xa7" + tag + b"\xa1x" + b"\x91" * 20_000
    with pytest.raises(TransferError):
        decode(frame)


@given(st.sampled_from(CONTROL + DATA), st.data())
def test_any_change_of_a_message_is_a_message_or_a_transfer_error(
    message: ControlMessage | DataMessage, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert decode_or_refuse(bytes(frame)) in (0, 1)


# What travels through the client.


def test_params_are_plain_json_and_come_back_equal() -> None:
    params = json.loads(json.dumps(GOOD.to_params()))
    back = RemotePrefill.from_params(params)
    assert back == msgspec.structs.replace(GOOD, remote_block_ids=None)


def test_params_have_upstreams_names() -> None:
    assert set(GOOD.to_params()) >= {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "tp_size",
    }


def test_block_ids_of_a_client_are_not_read() -> None:
    params = {**GOOD.to_params(), "remote_block_ids": "anything"}
    assert RemotePrefill.from_params(params).remote_block_ids is None


def test_unknown_params_are_left_to_others() -> None:
    params = {**GOOD.to_params(), "return_provenance": True, "x": object()}
    assert RemotePrefill.from_params(params).transfer_id == "t"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_port", "5"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", None),
        ("remote_port", 5.5),
        ("remote_host", ""),
        ("remote_host", 5),
        ("remote_host", "x" * 257),
        ("remote_engine_id", ""),
        ("transfer_id", ""),
        ("transfer_id", ["t"]),
        ("transfer_id", "x" * 257),
        ("transfer_id", "\ud800"),
        ("transfer_id", "t\n2026-01-01 00:00:00 all is well"),
        ("transfer_id", "t\x1b[2J"),
        ("remote_epoch", "\ud800"),
        ("remote_key", 5),
        ("remote_key", "x" * 257),
        ("remote_num_tokens", "many"),
        ("tp_size", "one"),
    ],
    ids=ascii,
)
def test_wrong_param_is_named(field: str, value: object) -> None:
    with pytest.raises(TransferError, match=rf"kv_transfer_params.*{field}"):
        RemotePrefill.from_params({**GOOD.to_params(), field: value})


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_host", "remote_port", "transfer_id"])
def test_missing_param_is_named(field: str) -> None:
    params = GOOD.to_params()
    del params[field]
    with pytest.raises(TransferError, match=field):
        RemotePrefill.from_params(params)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(GOOD.to_params())), _JSON))
def test_any_params_are_accepted_or_a_transfer_error(changes: dict[str, Any]) -> None:
    message = ""
    try:
        port = RemotePrefill.from_params({**GOOD.to_params(), **changes}).remote_port
    except TransferError as error:
        message = str(error)
    assert "kv_transfer_params" in message if message else 0 < port <= 65535


@pytest.mark.parametrize(
    "message",
    [
        Release("x" * 257, "e"),
        Release("t\nall is well", "e"),
        Heartbeat(("t\x1b[2J",), "e"),
        Refused("t", "bad_params", "one line\nanother"),
        Refused("t", "a cause of its own", ""),
        Opened("t", 1, (Worker("h" * 257, 5, TICKET, ""),), "e"),
        Opened("t", 1, (Worker("h", 65536, TICKET, ""),), "e"),
        Opened("t", 1, (Worker("h", 0, TICKET, ""),), "e"),
        Open(8, "f", "t", "e", 0, (GroupHashes((b"x" * 65,), b""),)),
        Open(8, "f", "t", "e", 0, (GroupHashes((b"",) * ((1 << 18) + 1), b""),)),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_message_beyond_what_an_engine_sends_is_refused(message: ControlMessage) -> None:
    with pytest.raises(TransferError):
        decode_control(encode(message))
