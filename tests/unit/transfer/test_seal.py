# SPDX-License-Identifier: Apache-2.0
"""Sealed frames: what counts, what does not, and how one-sided secrets are told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.transfer import seal
from vllm_ascend_pd.transfer.seal import (
    MAGIC,
    Channel,
    ClientSeal,
    PlainClient,
    PlainServer,
    Reason,
    Received,
    SealedClient,
    SealedServer,
    Seals,
    Secret,
    ServerSeal,
    explain,
)
from vllm_ascend_pd.types import Cause
from vllm_ascend_pd.wire import Heartbeat, Release, encode

SECRET = Secret(b"s" * 32)
KEY = SECRET.derive(Channel.CONTROL)
OTHER_KEY = Secret(b"o" * 32).derive(Channel.CONTROL)
ID = b"\0id"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """Both ends of one connection, established; frames are handed over by the test."""

    def __init__(self, key: bytes = KEY, identity: bytes = ID) -> None:
        self.identity = identity
        self.server = SealedServer(key)
        self.client = SealedClient(key)
        [hello] = self.client.send(b"first") or []
        [self.welcome] = self.server.receive(identity, hello).answers
        [self.first] = self.client.receive(self.welcome).answers
        assert self.server.receive(identity, self.first) == Received(payload=b"first")

    def up(self, payload: bytes) -> bytes:
        [frame] = self.client.send(payload) or []
        return frame

    def down(self, payload: bytes) -> bytes:
        frame = self.server.send(self.identity, payload)
        assert frame is not None
        return frame

    def at_server(self, frame: bytes) -> Received:
        return self.server.receive(self.identity, frame)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def refused(reason: Reason) -> Received:
    return Received(refused=reason)


# What counts.


def test_payloads_arrive_in_both_directions(pair: Pair) -> None:
    for payload in (b"", b"one", b"x" * 100_000):
        assert pair.at_server(pair.up(payload)) == Received(payload=payload)
        assert pair.client.receive(pair.down(payload)) == Received(payload=payload)


def test_what_is_sent_before_the_welcome_follows_it_in_order() -> None:
    server, client = SealedServer(KEY), SealedClient(KEY)
    [hello] = client.send(b"1") or []
    assert client.send(b"2") == []
    [welcome] = server.receive(ID, hello).answers
    frames = client.receive(welcome).answers
    assert [server.receive(ID, frame).payload for frame in frames] == [b"1", b"2"]


def test_too_many_that_wait_are_said_to_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "_MAX_WAITING_FRAMES", 2)
    client = SealedClient(KEY)
    assert [client.send(b"x") is None for _ in range(3)] == [False, False, True]


def test_lost_frames_leave_a_gap_that_is_allowed(pair: Pair) -> None:
    pair.up(b"lost")
    pair.down(b"lost")
    assert pair.at_server(pair.up(b"next")).payload == b"next"
    assert pair.client.receive(pair.down(b"next")).payload == b"next"


def test_payload_is_not_secret_but_the_secret_is(pair: Pair) -> None:
    assert b"payload" in pair.up(b"payload")
    assert b"ssss" not in pair.up(b"payload")


# What does not.


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_frame_is_refused_and_the_right_one_still_counts(data: st.DataObject) -> None:
    pair = Pair()
    upwards = data.draw(st.booleans())
    frame = pair.up(b"payload") if upwards else pair.down(b"payload")
    receive = pair.at_server if upwards else pair.client.receive
    place = data.draw(st.integers(len(MAGIC) + 1, len(frame) - 1))
    changed = bytearray(frame)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert receive(bytes(changed)) == refused(Reason.FORGED)
    assert receive(frame).payload == b"payload"


@settings(max_examples=200, deadline=None)
@given(length=st.integers(0, 58), more=st.binary(min_size=1, max_size=40), upwards=st.booleans())
def test_shorter_and_longer_frames_are_refused(length: int, more: bytes, upwards: bool) -> None:
    pair = Pair()
    frame = pair.up(b"payload" * 2) if upwards else pair.down(b"payload" * 2)
    receive = pair.at_server if upwards else pair.client.receive
    for changed in (frame[:length], frame + more):
        received = receive(changed)
        assert received.payload is None
        assert received.refused is not None
    assert receive(frame).payload == b"payload" * 2


@settings(max_examples=200, deadline=None)
@given(frame=st.binary(max_size=80), sealed=st.booleans(), fresh=st.booleans())
def test_garbage_is_refused_by_every_end(frame: bytes, sealed: bool, fresh: bool) -> None:
    frame = MAGIC + frame if sealed else frame
    pair = Pair()
    identity = b"new" if fresh else ID
    at_server = pair.server.receive(identity, frame)
    at_client = (SealedClient(KEY) if fresh else pair.client).receive(frame)
    for received in (at_server, at_client):
        assert received.payload is None
        assert received.refused or received.lost


def test_replayed_frame_is_refused(pair: Pair) -> None:
    for frame, receive in (
        (pair.up(b"again"), pair.at_server),
        (pair.down(b"again"), pair.client.receive),
    ):
        assert receive(frame).payload == b"again"
        assert receive(frame) == refused(Reason.REPLAYED)


def test_frame_that_comes_after_a_later_one_is_refused(pair: Pair) -> None:
    early, late = pair.up(b"early"), pair.up(b"late")
    assert pair.at_server(late).payload == b"late"
    assert pair.at_server(early) == refused(Reason.REPLAYED)


def test_frame_that_is_sent_back_is_refused(pair: Pair) -> None:
    up, down = pair.up(b"x"), pair.down(b"x")
    assert pair.client.receive(up) == refused(Reason.FORGED)
    assert pair.at_server(down) == refused(Reason.FORGED)


def test_frame_of_another_connection_is_refused(pair: Pair) -> None:
    other = SealedClient(KEY)
    [hello] = other.send(b"x") or []
    [welcome] = pair.server.receive(b"other", hello).answers
    [frame] = other.receive(welcome).answers
    assert pair.at_server(frame) == refused(Reason.FORGED)
    assert pair.server.receive(b"other", pair.up(b"y")) == refused(Reason.FORGED)
    assert pair.server.receive(b"other", frame).payload == b"x"
    assert other.receive(pair.down(b"z")) == refused(Reason.FORGED)


def test_recorded_connection_cannot_be_played_again(pair: Pair) -> None:
    """Neither to the same process nor to one that was started again."""
    client = SealedClient(KEY)
    [hello] = client.send(b"release") or []
    [welcome] = pair.server.receive(b"a", hello).answers
    [frame] = client.receive(welcome).answers
    for server in (pair.server, SealedServer(KEY)):
        assert len(server.receive(b"b", hello).answers) == 1
        assert server.receive(b"b", frame) == refused(Reason.FORGED)


def test_recorded_welcome_convinces_no_other_client(pair: Pair) -> None:
    client = SealedClient(KEY)
    client.send(b"x")
    assert client.receive(pair.welcome) == refused(Reason.FORGED)
    assert pair.client.receive(pair.welcome) == refused(Reason.MALFORMED)


def test_hello_cannot_be_repeated_on_its_connection(pair: Pair) -> None:
    [hello] = SealedClient(KEY).send(b"x") or []
    assert pair.at_server(hello) == refused(Reason.REPLAYED)
    assert pair.at_server(pair.up(b"still")).payload == b"still"


def test_frame_of_another_kind_of_socket_is_refused() -> None:
    """A connection to the control socket cannot be passed on to the data socket."""
    [hello] = SealedClient(KEY).send(b"x") or []
    received = SealedServer(SECRET.derive(Channel.DATA)).receive(ID, hello)
    assert received.refused is Reason.WRONG_SECRET


# A secret on one side only, or two of them.


class Network:
    """Hands every frame over until nothing is under way; what each side made of it."""

    def __init__(self, client: ClientSeal, server: ServerSeal) -> None:
        self.at_client: list[Received] = []
        self.at_server: list[Received] = []
        up = client.send(encode(Heartbeat(("t",), "epoch"))) or []
        for _ in range(10):
            for frame in up:
                self.at_server.append(server.receive(ID, frame))
            down = [answer for received in self.at_server for answer in received.answers]
            down = down[len(self.at_client) :]
            received = [client.receive(frame) for frame in down]
            self.at_client += received
            up = [answer for one in received for answer in one.answers]
        assert not up


@pytest.mark.parametrize(
    ("client", "server", "reason", "text"),
    [
        (PlainClient(), SealedServer(KEY), Reason.NO_SECRET, "this engine has none: set it"),
        (SealedClient(KEY), PlainServer(), Reason.UNEXPECTED_SECRET, "give it a copy"),
        (SealedClient(KEY), SealedServer(OTHER_KEY), Reason.WRONG_SECRET, "must be the same"),
    ],
)
def test_both_sides_learn_what_is_wrong(
    client: ClientSeal, server: ServerSeal, reason: Reason, text: str
) -> None:
    network = Network(client, server)
    assert [received.refused for received in network.at_server] == [reason]
    assert network.at_client == [Received(lost=reason)]
    cause, explanation = explain(reason)
    assert cause is Cause.UNAUTHENTICATED
    assert "security.secret_file" in explanation
    assert text in explanation


def test_without_secrets_payloads_travel_as_they_are() -> None:
    payload = encode(Release("t", "epoch"))
    assert PlainClient().send(payload) == [payload]
    assert PlainServer().send(ID, payload) == payload
    for received in (PlainClient().receive(payload), PlainServer().receive(ID, payload)):
        assert received == Received(payload=payload)


def test_server_with_another_secret_convinces_no_client() -> None:
    client = SealedClient(KEY)
    client.send(b"x")
    [hello] = SealedClient(OTHER_KEY).send(b"x") or []
    [welcome] = SealedServer(OTHER_KEY).receive(ID, hello).answers
    assert client.receive(welcome) == refused(Reason.FORGED)


def test_only_what_a_server_says_is_taken_for_a_refusal() -> None:
    client = SealedClient(KEY)
    client.send(b"x")
    assert client.receive(MAGIC + b"Rforged") == refused(Reason.MALFORMED)
    assert client.receive(MAGIC + b"Rwrong_secret") == Received(lost=Reason.WRONG_SECRET)


# What the server remembers.


def test_forgotten_connection_is_told_to_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    server = SealedServer(KEY, clock)
    frames = {}
    for name in (b"old", b"new"):
        client = SealedClient(KEY)
        [hello] = client.send(b"x") or []
        [welcome] = server.receive(name, hello).answers
        [frame] = client.receive(welcome).answers
        assert server.receive(name, frame).payload == b"x"
        frames[name] = (client.send(b"y") or [])[0]
        clock.now += seal._FORGET_AFTER_S / 2 + 1
    assert server.receive(b"new", frames[b"new"]).payload == b"y"
    assert len(server) == 1
    late = server.receive(b"old", frames[b"old"])
    assert late.refused is Reason.UNKNOWN_CONNECTION
    assert server.send(b"old", b"z") is None
    [answer] = late.answers
    assert client.receive(answer).lost is Reason.UNKNOWN_CONNECTION
    assert explain(Reason.UNKNOWN_CONNECTION)[0] is Cause.PEER_UNREACHABLE


def test_hellos_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "_MAX_HANDSHAKES", 4)
    pair = Pair()
    [hello] = SealedClient(KEY).send(b"x") or []
    for number in range(100):
        pair.server.receive(b"%d" % number, hello)
    assert len(pair.server) == 5
    assert pair.at_server(pair.up(b"established")).payload == b"established"


# The secret.


def write(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_secret_is_read_without_its_newline(tmp_path: Path) -> None:
    plain = Secret.load(write(tmp_path / "a", b"k" * 40, 0o400))
    lines = Secret.load(write(tmp_path / "b", b"k" * 40 + b"\r\n"))
    assert plain.derive(Channel.DATA) == lines.derive(Channel.DATA)
    assert plain.derive(Channel.DATA) != plain.derive(Channel.CONTROL)


def test_secret_may_be_a_link_to_a_file(tmp_path: Path) -> None:
    """As Kubernetes mounts them."""
    write(tmp_path / "real", b"k" * 40)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Secret.load(str(tmp_path / "link"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_secret_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "secret", b"k" * 40, mode)
    with pytest.raises(ConfigError, match=rf"{path}.*mode {mode:04o}.*chmod 600"):
        Secret.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least 32 bytes, not 0; make one with: openssl rand -hex 32"),
        (b"k" * 31 + b"\n", "at least 32 bytes, not 31"),
        (b"k" * 5000, "longer than 4096 bytes; is it the right file"),
    ],
)
def test_secret_of_the_wrong_length_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Secret.load(write(tmp_path / "secret", content))
    assert "kkk" not in str(caught.value)


def test_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret_file .*missing.*No such file"):
        Secret.load(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"secret_file .*Is a directory"):
        Secret.load(str(tmp_path))


def test_secret_is_in_no_repr() -> None:
    for value in (SECRET, Seals(SECRET), SealedClient(KEY), Pair().client):
        assert "ssss" not in repr(value)
        assert repr(KEY) not in repr(value)


# Counting.


def test_refused_frames_are_counted_and_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seals = Seals()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            seals.note_refused(Reason.NO_SECRET, "192.0.2.7")
        seals.note_refused(Reason.FORGED, "192.0.2.7")
    assert seals.take_refused() == {"no_secret": 3, "forged": 1}
    assert seals.take_refused() == {}
    assert [record.args[:2] for record in caplog.records] == [
        ("192.0.2.7", "no_secret"),
        ("192.0.2.7", "forged"),
    ]
    assert "give it a copy" in caplog.text


def test_every_reason_has_a_text() -> None:
    seals = Seals()
    for reason in Reason:
        seals.note_refused(reason, "peer")
    assert set(seals.take_refused()) == {reason.value for reason in Reason}
