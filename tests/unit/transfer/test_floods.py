# SPDX-License-Identifier: Apache-2.0
"""What anybody can do who reaches a port, or names one: the engine goes on, and holds little."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tests.unit.transfer.raw_peers import RawPeer, RawServer, connected, silent_server
from tests.unit.transfer.test_control import (
    Producer,
    make_client,
    make_open,
    outcome_of,
    producer,
    wait_until,
)
from tests.unit.transfer.test_send_receive import Pair, make_fetch
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.net import connection, listener, peers
from vllm_ascend_pd.transfer import control, leases, send
from vllm_ascend_pd.transfer.control import ControlClient
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import Fetched, Opened, Refused, Release, decode_data, encode

__all__ = ["make_client", "producer"]

ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


def claim_identity(number: int) -> bytes:
    """What a ZMQ peer says that wants to be known by the name a ROUTER gives next."""
    properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    properties += b"\x08Identity" + struct.pack(">I", 5) + b"\0" + struct.pack(">I", number)
    body = b"\x05READY" + properties
    return ZMTP + b"\x04" + bytes([len(body)]) + body


GARBAGE = {
    "names of a router": claim_identity(1804289383),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "half a hello": bytes.fromhex("160301020001"),
    "nothing": b"",
    "zeros": bytes(100_000),
}


def ask(server: Producer) -> Opened:
    """As a new consumer."""
    with connected(server.endpoint) as peer:
        peer.send(encode(make_open()))
        return msgspec.msgpack.decode(peer.receive(), type=Opened)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_peers_that_speak_something_else_end_nothing(producer: Producer, garbage: bytes) -> None:
    producer.lease()
    strangers = [
        socket.create_connection((producer.endpoint.host, producer.endpoint.port))
        for _ in range(50)
    ]
    for stranger in strangers:
        stranger.sendall(garbage)
    assert ask(producer).end == 34
    for stranger in strangers:
        stranger.close()
    wait_until(lambda: not len(producer.server.listener))
    assert producer.server.is_alive()


def test_silent_connections_give_way_to_others(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_HANDSHAKES", 8)
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 16)
    producer.lease()
    address = producer.endpoint.host, producer.endpoint.port
    silent = [socket.create_connection(address) for _ in range(40)]
    ask(producer)
    assert len(producer.server.listener) <= 9
    for stranger in silent:
        stranger.close()


def test_connection_that_was_silent_longest_gives_way(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 2)
    producer.lease()
    with connected(producer.endpoint) as first, connected(producer.endpoint) as second:
        for peer in (second, first):
            peer.send(encode(make_open()))
            peer.receive()
        ask(producer)
        first.send(encode(make_open()))
        first.receive()
        with pytest.raises((EOFError, OSError)):
            second.receive()


def test_frame_longer_than_any_of_an_engine_ends_its_connection(producer: Producer) -> None:
    with connected(producer.endpoint) as peer:
        peer.stream.sendall((connection.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises((EOFError, OSError)):
            peer.receive()


def test_what_peers_make_a_server_hold_is_bounded(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins a frame and does not end it."""
    monkeypatch.setattr(listener, "_MAX_HELD_BYTES", 256 << 10)
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 64)
    producer.lease()
    begun = (1 << 20).to_bytes(4, "big") + bytes(100_000)
    with (
        connected(producer.endpoint) as a,
        connected(producer.endpoint) as b,
        connected(producer.endpoint) as c,
    ):
        for peer in (a, b, c):
            peer.stream.sendall(begun)
        wait_until(lambda: len(producer.server.listener) == 2)
        assert ask(producer).end == 34


def is_cut_off(peer: RawPeer, request: bytes) -> bool:
    try:
        peer.send(*[request] * 1000)
    except OSError:
        return True
    return False


def test_peer_that_takes_no_answers_is_cut_off(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 64 << 10)
    request = encode(make_open())
    with connected(producer.endpoint) as peer:
        wait_until(lambda: is_cut_off(peer, request))
    wait_until(lambda: not len(producer.server.listener))


# Messages.


@pytest.mark.parametrize("name", ["transfer_id", "epoch"])
def test_long_names_are_not_kept(producer: Producer, name: str) -> None:
    long = msgspec.structs.replace(Release("t", ""), **{name: "x" * (1 << 20)})
    lease = producer.lease()
    with connected(producer.endpoint) as peer:
        peer.send(encode(long), encode(make_open()))
        peer.receive()
    assert producer.book.num_released_early == 0
    assert len(producer.book) == 1
    assert lease.transfer_id in producer.book


def test_number_of_releases_before_their_prompt_is_bounded(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_MAX_RELEASED_EARLY", 3)
    for number in range(10):
        producer.book.release(f"t{number}", "")
    assert producer.book.num_released_early == 3
    producer.lease("t6")  # is no longer among them


def test_number_of_hashes_that_wait_for_their_prompt_is_bounded(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_MAX_WAITING_HASHES", 5)
    early = msgspec.structs.replace(make_open("early"), epoch="")
    with connected(producer.endpoint) as peer:
        causes = []
        for _ in range(3):
            peer.send(encode(early))
            answer = control.decode_control(peer.receive())
            causes.append(getattr(answer, "cause", "waits"))
    assert causes == ["waits", "waits", Cause.NOT_ARRIVED.value]


def test_number_of_fetches_that_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "_MAX_QUEUED", 0)
    pair = Pair(FaultScript())
    pair.grant(0)
    with connected(pair.server.page_server.endpoint) as peer:
        peer.send(encode(make_fetch(pair)))
        answer = decode_data(peer.receive())
    pair.stop()
    assert isinstance(answer, Fetched)
    assert answer.cause == Cause.TRANSFER_FAILED.value


# Those that a request names.


@pytest.fixture
def silent_peers() -> Iterator[list[Endpoint]]:
    """Sockets that take connections and say nothing."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(40)]
    yield [Endpoint("127.0.0.1", s.getsockname()[1], "key") for s in sockets]
    for listening in sockets:
        listening.close()


def test_peers_that_do_not_open_give_way(
    producer: Producer,
    make_client: Callable[..., ControlClient],
    silent_peers: list[Endpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_MAX_OPENING", 8)
    producer.lease()
    client = make_client(peer_timeout_s=1000.0)
    for number, peer in enumerate(silent_peers):
        client.open(number, peer, make_open())
    refused = [outcome_of(client) for _ in range(len(silent_peers) - 8)]
    assert [outcome.key for outcome in refused] == list(range(len(refused)))
    assert len(client.peers) <= 8
    client.open("found", producer.endpoint, make_open())
    answers = {(o := outcome_of(client)).key: o.answer for _ in range(2)}
    assert isinstance(answers["found"], Opened)


def test_consumer_may_ask_hundreds_of_producers_at_once(
    make_client: Callable[..., ControlClient],
) -> None:
    """One that starts gets requests for the prompts of all of them."""
    server = Producer(host="0.0.0.0")
    try:
        server.lease()
        client, at = make_client(), server.endpoint
        hosts = [f"127.0.{number // 200}.{number % 200 + 1}" for number in range(300)]
        for host in hosts:
            client.open(host, Endpoint(host, at.port, at.key), make_open())
        answers = [outcome_of(client).answer for _ in hosts]
        assert [answer for answer in answers if not isinstance(answer, Opened)] == []
        assert len(client.peers) == len(hosts)
    finally:
        server.server.stop()


def test_peer_that_does_not_open_is_closed_in_time(
    make_client: Callable[..., ControlClient],
    silent_peers: list[Endpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "OPEN_WITHIN_S", 0.1)
    client = make_client(peer_timeout_s=1000.0)
    client.open("r", silent_peers[0], make_open())
    answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value
    assert not client.num_watched


def test_peers_that_are_not_there_hold_no_socket(make_client: Callable[..., ControlClient]) -> None:
    client = make_client(peer_timeout_s=1000.0)
    for port in range(1, 400):
        client.open(port, Endpoint("127.0.0.1", port, "key"), make_open())
    for _ in range(1, 400):
        assert isinstance(outcome_of(client).answer, Refused)
    assert not client.num_watched
    assert not len(client.peers)


def test_peer_that_was_silent_longest_gives_way_to_another(
    producer: Producer,
    make_client: Callable[..., ControlClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_MAX_CONNECTIONS", 1)
    producer.lease()
    client = make_client(peer_timeout_s=1000.0)
    with silent_server() as silent:
        client.open("lost", silent, make_open())
        wait_until(lambda: any(c.is_open for c in list(client.peers.connections.values())))
        client.open("found", producer.endpoint, make_open())
        answers = {(o := outcome_of(client)).key: o.answer for _ in range(2)}
    assert isinstance(answers["lost"], Refused)
    assert isinstance(answers["found"], Opened)


def test_flood_of_a_producer_ends_its_connection(
    make_client: Callable[..., ControlClient],
) -> None:
    client = make_client(peer_timeout_s=1000.0)
    with RawServer() as server:
        client.open("r", server.endpoint, make_open())
        server.accept().stream.sendall(b"\xff" * 4)
        answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value
