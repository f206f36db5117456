# SPDX-License-Identifier: Apache-2.0
"""Who may talk to whom, over real sockets; nothing of it can be read or changed on its way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.transfer.raw_peers import LIMIT_S, RawServer, connected, wait_until
from tests.unit.transfer.test_control import Producer, make_open, outcome_of
from tests.unit.transfer.test_send_receive import Pair
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.trust import Secret, Trust
from vllm_ascend_pd.transfer.control import ControlClient
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import Opened, Refused

SECRET = Secret(b"s" * 32)
OTHER = Secret(b"o" * 32)

# Keys.


def test_key_comes_from_the_secret_or_is_new_at_each_start() -> None:
    assert Trust(SECRET).key == Trust(Secret(b"s" * 32)).key
    assert len({Trust(secret).key for secret in (SECRET, OTHER, None, None)}) == 4


def test_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 32 bytes, not 31; .*openssl rand"):
        Secret(b"s" * 31)


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def test_line_end_of_the_file_does_not_count(tmp_path: Path) -> None:
    assert Trust.load(write(tmp_path / "secret", b"s" * 32 + b"\r\n")).key == Trust(SECRET).key


@pytest.mark.parametrize(
    ("content", "said"), [(b"s" * 4097, "longer than 4096 bytes"), (None, "No such file")]
)
def test_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        write(path, content)
    with pytest.raises(ConfigError, match=f"security.secret_file '{path}'.*{said}"):
        Trust.load(str(path))


def test_secret_is_in_no_text() -> None:
    assert "sss" not in repr(SECRET) + str(SECRET) + repr(Trust(SECRET)) + repr(vars(Trust(SECRET)))


# Control.

MakeProducer = Callable[[Secret | None], tuple[Producer, Trust]]
MakeClient = Callable[..., tuple[ControlClient, Trust]]


@pytest.fixture
def make_producer() -> Iterator[MakeProducer]:
    producers: list[Producer] = []

    def make(secret: Secret | None) -> tuple[Producer, Trust]:
        trust = Trust(secret)
        producers.append(Producer(trust))
        producers[-1].lease()
        return producers[-1], trust

    yield make
    for producer in producers:
        producer.server.stop()
        assert producer.server.num_errors == 0


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    clients: list[ControlClient] = []

    def make(secret: Secret | None) -> tuple[ControlClient, Trust]:
        trust = Trust(secret)
        clients.append(ControlClient(1000.0, LIMIT_S, trust))
        clients[-1].start()
        return clients[-1], trust

    yield make
    for client in clients:
        client.stop()
        assert client.num_errors == 0


@pytest.mark.parametrize("secret", [SECRET, None])
def test_engines_that_know_each_other_open(
    make_producer: MakeProducer, make_client: MakeClient, secret: Secret | None
) -> None:
    producer, trust = make_producer(secret)
    client, our_trust = make_client(secret)
    client.open("r", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    assert trust.take_refused() == our_trust.take_refused() == {}


def test_with_a_secret_no_key_need_travel(
    make_producer: MakeProducer, make_client: MakeClient
) -> None:
    producer, _ = make_producer(SECRET)
    client, _ = make_client(SECRET)
    client.open("r", Endpoint("127.0.0.1", producer.endpoint.port), make_open())
    assert isinstance(outcome_of(client).answer, Opened)


@pytest.mark.parametrize(
    ("ours", "theirs", "fix"),
    [
        (None, SECRET, "has a security.secret_file, and this engine has none: set it"),
        (SECRET, None, "another secret than this engine, or none: security.secret_file must be"),
        (SECRET, OTHER, "another secret than this engine, or none: security.secret_file must be"),
    ],
)
def test_wrong_secrets_are_refused_at_once_and_named_on_both_sides(
    make_producer: MakeProducer,
    make_client: MakeClient,
    ours: Secret | None,
    theirs: Secret | None,
    fix: str,
) -> None:
    producer, trust = make_producer(theirs)
    client, our_trust = make_client(ours)
    for key in ("r", "s"):
        client.open(key, producer.endpoint, make_open())
        outcome = outcome_of(client)
        assert outcome.key == key
        assert isinstance(outcome.answer, Refused)
        assert outcome.answer.cause == Cause.UNAUTHENTICATED.value
        assert str(producer.endpoint) in outcome.answer.detail
        assert fix in outcome.answer.detail
    assert our_trust.take_refused() == {"wrong_secret": 2}
    wait_until(lambda: "wrong_secret" in trust.take_refused())
    assert len(producer.book) == 1


def test_other_process_on_the_port_is_refused(
    make_producer: MakeProducer, make_client: MakeClient
) -> None:
    """The producer was restarted, or somebody took its port: the request names another key."""
    producer, _ = make_producer(None)
    client, trust = make_client(None)
    for key in (Trust().key, ""):
        client.open("r", Endpoint("127.0.0.1", producer.endpoint.port, key), make_open())
        answer = outcome_of(client).answer
        assert isinstance(answer, Refused)
        assert answer.cause == Cause.WRONG_EPOCH.value
        assert "is not the process that was named" in answer.detail
    assert trust.take_refused() == {"wrong_key": 2}
    client.open("s", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)


def test_restarted_producer_is_connected_again(
    make_producer: MakeProducer, make_client: MakeClient
) -> None:
    client, _ = make_client(SECRET)
    first, _ = make_producer(SECRET)
    client.open("r", first.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    first.server.stop()
    second = Producer(Trust(SECRET), first.endpoint.port)
    try:
        second.lease()

        def opened_again() -> bool:
            client.open("s", second.endpoint, make_open())
            return isinstance(outcome_of(client).answer, Opened)

        wait_until(opened_again)
    finally:
        second.server.stop()


class Relay:
    """Between a consumer and its producer: keeps what passes, and may change one byte of it."""

    def __init__(self, server: Endpoint) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.endpoint = Endpoint("127.0.0.1", port, server.key)
        self.seen = b""
        self.change_next = False
        self._server = (server.host, server.port)
        self._streams: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._streams += [client, server]
            for source, target in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, target)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                if self.change_next:
                    self.change_next = False
                    data = data[:-1] + bytes([data[-1] ^ 1])
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join(LIMIT_S)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_nothing_is_read_or_changed_on_its_way(
    make_producer: MakeProducer, make_client: MakeClient, secret: Secret | None
) -> None:
    producer, trust = make_producer(secret)
    client, _ = make_client(secret)
    relay = Relay(producer.endpoint)
    try:
        client.open("r", relay.endpoint, make_open())
        assert isinstance(outcome_of(client).answer, Opened)
        assert len(relay.seen) > 200
        for plain in (b"same", b"epoch", b"transfer_id"):
            assert plain not in relay.seen
        relay.change_next = True
        client.release(relay.endpoint, "t", "epoch")
        wait_until(lambda: trust.take_refused() == {"malformed": 1})
        wait_until(lambda: not len(client.peers))
        assert len(producer.book) == 1
        client.open("s", relay.endpoint, make_open())
        assert isinstance(outcome_of(client).answer, Opened)
    finally:
        client.stop()
        producer.server.stop()
        relay.close()


# Data.


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(ours: Secret | None, theirs: Secret | None) -> Pair:
        pairs.append(Pair(FaultScript(), trust=Trust(theirs), our_trust=Trust(ours)))
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


@pytest.mark.parametrize(("ours", "theirs"), [(None, SECRET), (SECRET, None), (SECRET, OTHER)])
def test_load_with_the_wrong_secret_ends_at_once(
    make_pair: Callable[..., Pair], ours: Secret | None, theirs: Secret | None
) -> None:
    pair = make_pair(ours, theirs)
    before = pair.ours.bytes.copy()
    pair.grant(*range(4))
    result = pair.run(pair.spec((0, 1), (0, 1), in_step=True, timeout_s=1000.0))
    assert result.cause == Cause.UNAUTHENTICATED.value
    assert set(pair.our_trust.take_refused()) == {"wrong_secret"}
    np.testing.assert_array_equal(pair.ours.bytes, before)


def test_stranger_is_told_nothing_by_a_producer_with_a_secret(make_producer: MakeProducer) -> None:
    producer, _ = make_producer(SECRET)
    with pytest.raises(OSError, match="CERTIFICATE"), connected(producer.endpoint):
        pass


def test_consumer_tells_a_stranger_nothing(make_client: MakeClient) -> None:
    client, _ = make_client(None)
    with RawServer() as server:
        client.open("r", Endpoint("127.0.0.1", server.endpoint.port, Trust().key), make_open())
        with pytest.raises(EOFError):
            server.accept().receive()
