# SPDX-License-Identifier: Apache-2.0
"""Control and data sockets with secrets: real threads, and a relay that changes what passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from tests.unit.transfer.test_control import LIMIT_S, Producer, make_open, outcome_of, wait_until
from tests.unit.transfer.test_send_receive import Pair
from vllm_ascend_pd.backends.fake_engine import FaultScript
from vllm_ascend_pd.transfer.control import ControlClient
from vllm_ascend_pd.transfer.dealers import make_dealer
from vllm_ascend_pd.transfer.seal import Seals, Secret
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import Opened, Refused, Release, encode

SECRET = Secret(b"s" * 32)
OTHER = Secret(b"o" * 32)


@pytest.fixture
def make_producer() -> Iterator[Callable[[Secret | None], tuple[Producer, Seals]]]:
    producers: list[Producer] = []

    def make(secret: Secret | None) -> tuple[Producer, Seals]:
        seals = Seals(secret)
        producers.append(Producer(seals))
        return producers[-1], seals

    yield make
    for producer in producers:
        producer.server.stop()
        assert producer.server.num_errors == 0


@pytest.fixture
def make_client() -> Iterator[Callable[..., tuple[ControlClient, Seals]]]:
    clients: list[ControlClient] = []

    def make(
        secret: Secret | None, peer_timeout_s: float = LIMIT_S, heartbeat_s: float = LIMIT_S
    ) -> tuple[ControlClient, Seals]:
        seals = Seals(secret)
        clients.append(ControlClient(peer_timeout_s, heartbeat_s, seals))
        clients[-1].start()
        return clients[-1], seals

    yield make
    for client in clients:
        client.stop()
        assert client.num_errors == 0


MakeProducer = Callable[[Secret | None], tuple[Producer, Seals]]
MakeClient = Callable[..., tuple[ControlClient, Seals]]


class Relay:
    """Between a client and a server: records, and sends on what ``change`` makes of a frame."""

    def __init__(self, server: Endpoint) -> None:
        self._context = zmq.Context()
        self._inner = make_dealer(self._context)
        self._inner.connect(f"tcp://{server}")
        self._outer = self._context.socket(zmq.ROUTER)
        self.endpoint = Endpoint("127.0.0.1", self._outer.bind_to_random_port("tcp://127.0.0.1"))
        self._client = b""
        self.up: list[bytes] = []

    def pass_up(self, change: Callable[[bytes], list[bytes]] = lambda frame: [frame]) -> None:
        assert self._outer.poll(int(LIMIT_S * 1000)), "nothing came from the client"
        self._client, frame = self._outer.recv_multipart()
        self.up.append(frame)
        for changed in change(frame):
            self._inner.send(changed)

    def pass_down(self, change: Callable[[bytes], list[bytes]] = lambda frame: [frame]) -> None:
        assert self._inner.poll(int(LIMIT_S * 1000)), "nothing came from the server"
        for changed in change(self._inner.recv()):
            self._outer.send_multipart([self._client, changed])

    def connect(self) -> None:
        """The handshake."""
        self.pass_up()
        self.pass_down()

    def close(self) -> None:
        for socket in (self._inner, self._outer):
            socket.close(0)
        self._context.term()


@pytest.fixture
def make_relay() -> Iterator[Callable[[Endpoint], Relay]]:
    relays: list[Relay] = []

    def make(server: Endpoint) -> Relay:
        relays.append(Relay(server))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()


def flip(frame: bytes) -> list[bytes]:
    return [frame[:-40] + bytes([frame[-40] ^ 1]) + frame[-39:]]


# Control.


def test_same_secret_opens_keeps_and_releases(
    make_producer: MakeProducer, make_client: MakeClient
) -> None:
    producer, server_seals = make_producer(SECRET)
    client, client_seals = make_client(SECRET, heartbeat_s=0.05)
    lease = producer.lease()
    client.open("r", producer.endpoint, make_open())
    client.open("s", producer.endpoint, make_open())
    assert {outcome_of(client).key, outcome_of(client).key} == {"r", "s"}
    client.keep(producer.endpoint, "t", "epoch")
    producer.clock.now += 1
    wait_until(lambda: lease.expires_at == producer.clock.now + 30)
    client.release(producer.endpoint, "t", "epoch")
    producer.wait_for_wake()
    assert lease.cause == "released"
    assert server_seals.take_refused() == client_seals.take_refused() == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "reason", "fix"),
    [
        (None, SECRET, "no_secret", "has a security.secret_file, and this engine has none: set it"),
        (SECRET, None, "unexpected_secret", "and this engine has: give it a copy"),
        (SECRET, OTHER, "wrong_secret", "security.secret_file must be the same there and here"),
    ],
)
def test_wrong_secrets_are_refused_at_once_and_named_on_both_sides(
    make_producer: MakeProducer,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
    ours: Secret | None,
    theirs: Secret | None,
    reason: str,
    fix: str,
) -> None:
    producer, seals = make_producer(theirs)
    producer.lease()
    client, _ = make_client(ours, peer_timeout_s=1000.0)
    for key in ("r", "s"):
        client.open(key, producer.endpoint, make_open())
        outcome = outcome_of(client)
        assert outcome.key == key
        assert isinstance(outcome.answer, Refused)
        assert outcome.answer.cause == Cause.UNAUTHENTICATED.value
        assert str(producer.endpoint) in outcome.answer.detail
        assert fix in outcome.answer.detail
    assert seals.take_refused() == {reason: 2}
    [message] = [r.getMessage() for r in caplog.records if "refused a frame of" in r.getMessage()]
    assert "127.0.0.1" in message
    assert "security.secret_file" in message
    assert len(producer.book) == 1


def test_stranger_can_neither_release_nor_open(make_producer: MakeProducer) -> None:
    producer, seals = make_producer(SECRET)
    producer.lease()
    with zmq.Context() as context, make_dealer(context) as stranger:
        stranger.connect(f"tcp://{producer.endpoint}")
        for message in (Release("t", "epoch"), make_open()):
            stranger.send(encode(message))
            assert stranger.poll(int(LIMIT_S * 1000))
            assert stranger.recv().endswith(b"Rno_secret")
    assert seals.take_refused() == {"no_secret": 2}
    assert len(producer.book) == 1


def test_release_on_its_way_is_neither_changed_nor_repeated(
    make_producer: MakeProducer, make_client: MakeClient, make_relay: Callable[[Endpoint], Relay]
) -> None:
    producer, seals = make_producer(SECRET)
    producer.lease("t")
    other = producer.lease("u")
    relay = make_relay(producer.endpoint)
    client, _ = make_client(SECRET)
    client.release(relay.endpoint, "t", "epoch")
    relay.connect()
    relay.pass_up(flip)
    wait_until(lambda: seals.take_refused() == {"forged": 1})
    assert len(producer.book) == 2
    client.release(relay.endpoint, "t", "epoch")
    relay.pass_up(lambda frame: [frame, frame])
    producer.wait_for_wake()
    wait_until(lambda: seals.take_refused() == {"replayed": 1})
    assert list(producer.book._leases.values()) == [other]


def test_changed_answer_is_dropped_and_the_open_ends(
    make_producer: MakeProducer, make_client: MakeClient, make_relay: Callable[[Endpoint], Relay]
) -> None:
    producer, _ = make_producer(SECRET)
    producer.lease()
    relay = make_relay(producer.endpoint)
    client, seals = make_client(SECRET, peer_timeout_s=2.0)
    client.open("r", relay.endpoint, make_open())
    relay.connect()
    relay.pass_up()
    relay.pass_down(flip)
    answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value
    assert seals.take_refused() == {"forged": 1}
    client.open("s", relay.endpoint, make_open())
    relay.pass_up()
    relay.pass_down()
    assert isinstance(outcome_of(client).answer, Opened)


def test_handshake_without_an_answer_ends_with_the_open(
    make_producer: MakeProducer, make_client: MakeClient, make_relay: Callable[[Endpoint], Relay]
) -> None:
    producer, _ = make_producer(SECRET)
    relay = make_relay(producer.endpoint)
    client, _ = make_client(SECRET, peer_timeout_s=0.2)
    started = time.monotonic()
    client.open("r", relay.endpoint, make_open())
    answer = outcome_of(client).answer
    assert time.monotonic() - started >= 0.2
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value


def test_restarted_producer_is_connected_again(
    make_producer: MakeProducer, make_client: MakeClient
) -> None:
    client, _ = make_client(SECRET)
    first, _ = make_producer(SECRET)
    first.lease()
    client.open("r", first.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    first.server.stop()
    second = Producer(Seals(SECRET), first.endpoint.port)
    try:
        second.lease()

        def opened_again() -> bool:
            client.open("s", second.endpoint, make_open())
            return isinstance(outcome_of(client).answer, Opened)

        wait_until(opened_again)
    finally:
        second.server.stop()


# Data.


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(ours: Secret | None, theirs: Secret | None) -> Pair:
        pairs.append(Pair(FaultScript(), seals=Seals(theirs), our_seals=Seals(ours)))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.time_passed = 1000.0
        pair.stop()


def test_same_secret_loads_pages(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(SECRET, SECRET)
    pair.grant(*range(8))
    assert pair.run(pair.spec(tuple(range(8)), tuple(range(8)))).cause == ""
    np.testing.assert_array_equal(pair.ours.bytes[:, :8], pair.theirs.bytes[:, :8])


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (None, SECRET, "no_secret"),
        (SECRET, None, "unexpected_secret"),
        (SECRET, OTHER, "wrong_secret"),
    ],
)
def test_load_with_the_wrong_secret_ends_at_once(
    make_pair: Callable[..., Pair], ours: Secret | None, theirs: Secret | None, reason: str
) -> None:
    pair = make_pair(ours, theirs)
    before = pair.ours.bytes.copy()
    pair.grant(*range(4))
    started = time.monotonic()
    result = pair.run(pair.spec((0, 1), (0, 1), in_step=True, timeout_s=1000.0))
    assert time.monotonic() - started < LIMIT_S
    assert result.cause == Cause.UNAUTHENTICATED.value
    assert set(pair.seals.take_refused()) == {reason}
    np.testing.assert_array_equal(pair.ours.bytes, before)


def test_changed_fetch_is_not_served(
    make_pair: Callable[..., Pair], make_relay: Callable[[Endpoint], Relay]
) -> None:
    pair = make_pair(SECRET, SECRET)
    pair.grant(*range(4))
    relay = make_relay(pair.server.page_server.endpoint)
    spec = pair.spec((0,), (0,), peer=relay.endpoint, timeout_s=2.0)
    pair.loader.start_load(spec)
    relay.connect()
    relay.pass_up(flip)
    pair.loader.wait_all()
    [result] = pair.loader.take_results()
    assert result.cause == Cause.DEADLINE.value
    assert pair.seals.take_refused() == {"forged": 1}
