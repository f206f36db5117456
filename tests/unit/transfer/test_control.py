# SPDX-License-Identifier: Apache-2.0
"""Control server and client over loopback, with their real threads."""

from __future__ import annotations

import dataclasses
import errno
import queue
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.clock import Clock
from tests.unit.transfer.raw_peers import (
    LIMIT_S,
    RawServer,
    connected,
    silent_server,
    wait_until,
)
from vllm_ascend_pd.config import DEFAULT_KV_PORT
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.span import GroupBlocks, Span
from vllm_ascend_pd.net import names, peers
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer import control
from vllm_ascend_pd.transfer.control import (
    ControlClient,
    ControlServer,
    OpenOutcome,
)
from vllm_ascend_pd.transfer.leases import _MAX_ASKERS, Lease, LeaseBook, Tail, tail_digest
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint, Epoch, LeaseRef, TransferId
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    GroupHashes,
    Heartbeat,
    Open,
    Opened,
    Refused,
    Waiting,
    decode_control,
    encode,
)

LEASE_S = 30.0
PAGE_SERVER = PageServer(Endpoint("127.0.0.1", 5), TicketKey())
NOBODY = Endpoint("127.0.0.1", 9)


class Producer:
    """A lease book behind a control server."""

    def __init__(
        self,
        trust: Trust | None = None,
        port: int = 0,
        arrival_timeout_s: float = 5.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.clock = Clock()
        self.book = LeaseBook(Epoch("epoch"), "same", LEASE_S, self.clock)
        self.book.page_servers = (PAGE_SERVER,)
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.trust = trust or Trust()
        self.server = ControlServer(self.book, self.wake, self.trust, arrival_timeout_s)
        self.endpoint = self.server.listen(host, port)
        self.server.start()

    def wake(self) -> None:
        self.wakes.put(None)

    def lease(self, name: str = "t", hashes: tuple[bytes, ...] = (b"h0", b"h1")) -> Lease:
        ids = tuple(range(1, len(hashes) + 2))
        span = Span(0, 35, (GroupBlocks(16, ids, hashes),))
        lease = Lease(TransferId(name), span, (Tail((1, 2, 3), b""),))
        self.book.grant(lease)
        assert self.book.finish(lease)
        return lease

    def wait_for_wake(self) -> None:
        self.wakes.get(timeout=LIMIT_S)


def make_open(name: str = "t", hashes: tuple[bytes, ...] = (b"h0", b"h1")) -> Open:
    digest = tail_digest(hashes[-1], b"", [1, 2])
    end = 16 * len(hashes) + 2
    return Open(WIRE_VERSION, "same", name, "epoch", end, (GroupHashes(hashes, digest),))


@pytest.fixture
def producer() -> Iterator[Producer]:
    producer = Producer()
    yield producer
    producer.server.stop()
    assert not producer.server.is_alive()
    assert producer.server.num_errors == 0


@pytest.fixture
def make_client() -> Iterator[Callable[..., ControlClient]]:
    clients: list[ControlClient] = []

    def make(
        peer_timeout_s: float = LIMIT_S,
        heartbeat_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> ControlClient:
        clients.append(ControlClient(peer_timeout_s, heartbeat_s, Trust(), clock=clock))
        clients[-1].start()
        return clients[-1]

    yield make
    for client in clients:
        client.stop()
        assert not client.is_alive()


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """A peer that takes everything and answers nothing."""
    with silent_server() as endpoint:
        yield endpoint


def outcome_of(client: ControlClient) -> OpenOutcome:
    return client.outcomes.get(timeout=LIMIT_S)


# Opening.


def test_open_is_answered(producer: Producer, make_client: Callable[..., ControlClient]) -> None:
    producer.lease()
    client = make_client()
    client.open("r", producer.endpoint, make_open())
    assert outcome_of(client) == OpenOutcome(
        "r", Opened("t", 34, (PAGE_SERVER.admit(LeaseRef("t", 1), 34),), "epoch", open_id=1)
    )


def test_refusal_is_answered(producer: Producer, make_client: Callable[..., ControlClient]) -> None:
    client = make_client()
    client.open("r", producer.endpoint, make_open("unknown"))
    outcome = outcome_of(client)
    assert outcome.key == "r"
    assert isinstance(outcome.answer, Refused)
    assert outcome.answer.cause == Cause.LEASE_EXPIRED.value


def test_every_request_of_one_lease_is_answered(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    producer.lease()
    client = make_client()
    for key in ("r", "s"):
        client.open(key, producer.endpoint, make_open())
    outcomes = [outcome_of(client), outcome_of(client)]
    assert {outcome.key for outcome in outcomes} == {"r", "s"}
    assert all(isinstance(outcome.answer, Opened) for outcome in outcomes)
    assert client.outcomes.empty()


def test_each_open_gets_its_own_answer(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    """Two requests refer to one lease, and only the first one's prompt is the lease's."""
    producer.lease()
    client = make_client()
    client.open("same", producer.endpoint, make_open())
    client.open("other", producer.endpoint, make_open(hashes=(b"x", b"y")))
    answers = {outcome.key: outcome.answer for outcome in (outcome_of(client), outcome_of(client))}
    assert isinstance(answers["same"], Opened)
    assert isinstance(answers["other"], Refused)
    assert answers["other"].cause == Cause.HASH_MISMATCH.value


@pytest.fixture
def silent_peer() -> Iterator[Endpoint]:
    """A socket that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])


def test_peer_that_is_gone_is_unreachable_at_once(
    make_client: Callable[..., ControlClient],
) -> None:
    client = make_client(peer_timeout_s=1000.0)
    client.open("r", NOBODY, make_open())
    answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value


@pytest.mark.parametrize("host", ["prefill..svc", "préfill..svc"])
def test_peer_of_a_name_that_nobody_has_is_unreachable_at_once(
    host: str, make_client: Callable[..., ControlClient]
) -> None:
    client = make_client(peer_timeout_s=1000.0)
    client.open("r", Endpoint(host, 9), make_open())
    answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value
    assert client.num_errors == 0


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """That answers once it is set."""
    answers = threading.Event()

    def look_up(host: str, port: int, *_: object) -> list[Any]:
        assert answers.wait(LIMIT_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield answers
    answers.set()


def test_name_that_takes_long_to_look_up_holds_up_nobody_else(
    producer: Producer,
    make_client: Callable[..., ControlClient],
    name_server: threading.Event,
) -> None:
    producer.lease()
    client = make_client()
    by_name = dataclasses.replace(producer.endpoint, host="prefill.svc")
    client.open("by name", by_name, make_open())
    client.open("by address", producer.endpoint, make_open())
    outcome = outcome_of(client)
    assert outcome.key == "by address"
    assert isinstance(outcome.answer, Opened)
    name_server.set()
    outcome = outcome_of(client)
    assert outcome.key == "by name"
    assert isinstance(outcome.answer, Opened)


def test_peer_whose_name_is_not_found_in_time_is_unreachable(
    make_client: Callable[..., ControlClient], name_server: threading.Event
) -> None:
    client = make_client(peer_timeout_s=0.2)
    client.open("r", Endpoint("prefill.svc", 9), make_open())
    answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value
    assert not name_server.is_set()


def test_name_that_would_wait_for_too_many_others_is_unreachable_at_once(
    make_client: Callable[..., ControlClient],
    name_server: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_MAX_WAITING", 0)
    client = make_client(peer_timeout_s=1000.0)
    client.open("r", Endpoint("prefill.svc", 9), make_open())
    assert isinstance(outcome_of(client).answer, Refused)


def test_peer_for_which_no_descriptor_is_left_is_unreachable_at_once(
    producer: Producer, make_client: Callable[..., ControlClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def want(stream: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client = make_client(peer_timeout_s=1000.0)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "set_options", want)
        client.open("r", producer.endpoint, make_open())
        answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value
    producer.lease()
    client.open("r", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)


def test_peer_that_does_not_answer_is_unreachable(
    silent: Endpoint, make_client: Callable[..., ControlClient]
) -> None:
    client = make_client(peer_timeout_s=0.2)
    started = time.monotonic()
    client.open("r", silent, make_open())
    outcome = outcome_of(client)
    assert time.monotonic() - started >= 0.2
    assert isinstance(outcome.answer, Refused)
    assert outcome.answer.cause == Cause.PEER_UNREACHABLE.value
    assert outcome.key == "r"


def test_question_that_is_too_long_to_be_asked_is_refused_at_once(
    silent: Endpoint, make_client: Callable[..., ControlClient]
) -> None:
    """So is that of a million tokens in blocks of 16, of four groups; and one too many before a
    peer takes any.
    """
    client = make_client(peer_timeout_s=2 * LIMIT_S)
    blocks = GroupHashes((bytes(32),) * 63_000, b"")
    client.open("long", silent, msgspec.structs.replace(make_open(), groups=(blocks,) * 4))
    for i in range(17):
        client.open(i, silent, msgspec.structs.replace(make_open(), groups=(blocks,)))
    refused = [outcome_of(client), outcome_of(client)]
    assert [outcome.key for outcome in refused] == ["long", 15]
    for outcome in refused:
        assert isinstance(outcome.answer, Refused)
        assert outcome.answer.cause == Cause.PEER_UNREACHABLE.value


def test_peer_that_goes_away_is_noticed_at_once(
    make_client: Callable[..., ControlClient],
) -> None:
    client = make_client(peer_timeout_s=2 * LIMIT_S)
    with RawServer() as server:
        client.open("r", server.endpoint, make_open())
        server.accept()
    outcome = outcome_of(client)
    assert isinstance(outcome.answer, Refused)
    assert outcome.answer.cause == Cause.PEER_UNREACHABLE.value


def test_answer_that_came_in_time_counts_however_late_it_is_read(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    """The thread had no turn: the interpreter was busy with something else."""
    producer.lease()
    skipped = [0.0]
    client = make_client(clock=lambda: time.monotonic() + sum(skipped))
    both_queued = threading.Event()

    def get_no_turn() -> None:
        (connection,) = client.peers.connections.values()
        answer = select.poll()  # its descriptor may be beyond what select() takes
        answer.register(connection.stream, select.POLLIN)
        assert answer.poll(LIMIT_S * 1000)
        skipped.append(2 * LIMIT_S)

    client.open("connects", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    client.submit(lambda: bool(both_queued.wait(LIMIT_S)))
    client.open("r", producer.endpoint, make_open())
    client.submit(get_no_turn)
    both_queued.set()
    assert isinstance(outcome_of(client).answer, Opened)
    assert client.num_errors == 0


def test_silent_peer_does_not_hold_up_another(
    producer: Producer, silent: Endpoint, make_client: Callable[..., ControlClient]
) -> None:
    producer.lease()
    client = make_client(peer_timeout_s=2.0)
    client.open("lost", silent, make_open())
    client.open("found", producer.endpoint, make_open())
    assert outcome_of(client).key == "found"
    assert outcome_of(client).key == "lost"


def test_open_without_an_answer_ends_once(
    silent: Endpoint, make_client: Callable[..., ControlClient]
) -> None:
    client = make_client(peer_timeout_s=0.1)
    client.open("r", silent, make_open())
    client.open("s", silent, make_open())
    assert {outcome_of(client).key, outcome_of(client).key} == {"r", "s"}
    client.open("last", silent, make_open())
    assert outcome_of(client).key == "last"
    assert client.outcomes.empty()


def test_late_answer_is_not_taken_for_a_later_open(
    make_client: Callable[..., ControlClient],
) -> None:
    """The first open is given up; its answer comes when the same lease is asked for again."""
    client = make_client(peer_timeout_s=0.2)
    with RawServer() as server:
        client.open("first", server.endpoint, make_open())
        slow = server.accept()
        first = decode_control(slow.receive())
        assert isinstance(first, Open)
        assert isinstance(outcome_of(client).answer, Refused)
        client.open("second", server.endpoint, make_open(hashes=(b"x", b"y")))
        slow.receive()
        late = Opened(
            "t", 34, (PAGE_SERVER.admit(LeaseRef("t", 1), 34),), "epoch", open_id=first.open_id
        )
        slow.send(encode(late))
        outcome = outcome_of(client)
    assert outcome.key == "second"
    assert isinstance(outcome.answer, Refused)


# Garbage.


def test_server_refuses_garbage_and_answers_the_next(producer: Producer) -> None:
    producer.lease()
    good = encode(make_open())
    bad_text = good.replace(b"\xa5epoch", b"\xa5epoc\xff")
    garbage = (b"", b"\xc1", b"garbage", b"\x91" * 5000, bad_text)
    with connected(producer.endpoint) as peer:
        peer.send(*garbage, encode(Heartbeat((), "")), good)
        answer = decode_control(peer.receive())
    assert isinstance(answer, Opened)
    assert producer.trust.take_refused() == {"malformed": len(garbage)}


def test_client_survives_garbage_from_a_producer(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    producer.lease()
    client = make_client(peer_timeout_s=2.0)
    with RawServer() as server:
        client.open("lied to", server.endpoint, make_open())
        liar = server.accept()
        liar.receive()
        liar.send(b"", b"\xc1", encode(make_open()), encode(Opened("else", 1, (), "epoch")))
        outcome = outcome_of(client)
        assert outcome.key == "lied to"
        assert isinstance(outcome.answer, Refused)
        assert outcome.answer.cause == Cause.PEER_UNREACHABLE.value
    client.open("r", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)


# Keeping and releasing.


def test_kept_lease_is_renewed(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    lease = producer.lease()
    assert isinstance(producer.book.open(make_open()), Opened)
    client = make_client(heartbeat_s=0.05)
    client.keep(producer.endpoint, "t", "epoch")
    for _ in range(3):
        producer.clock.now += LEASE_S / 2
        wait_until(lambda: lease.expires_at == producer.clock.now + LEASE_S)
    assert len(producer.book) == 1


def test_lease_is_renewed_beside_one_whose_producer_cannot_be_connected_to(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    lease = producer.lease()
    assert isinstance(producer.book.open(make_open()), Opened)
    client = make_client(heartbeat_s=0.05)
    client.keep(Endpoint("prefill..svc", 9), "t", "epoch")
    client.keep(producer.endpoint, "t", "epoch")
    for _ in range(3):
        producer.clock.now += LEASE_S / 2
        wait_until(lambda: lease.expires_at == producer.clock.now + LEASE_S)


def test_lease_without_a_heartbeat_expires_and_wakes_the_scheduler(producer: Producer) -> None:
    lease = producer.lease()
    producer.clock.now += LEASE_S
    producer.wait_for_wake()
    assert producer.book.take_closed() == [lease]
    assert lease.cause == "expired"


def test_release_closes_the_lease_and_wakes_the_scheduler(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    lease = producer.lease()
    client = make_client()
    client.release(producer.endpoint, "t", "epoch")
    producer.wait_for_wake()
    assert producer.book.take_closed() == [lease]
    assert lease.cause == "released"


def test_open_of_a_prompt_that_another_request_gives_back_is_answered(
    silent: Endpoint, make_client: Callable[..., ControlClient]
) -> None:
    client = make_client()
    client.open("r", silent, make_open())
    client.release(silent, "t", "epoch")
    outcome = outcome_of(client)
    assert outcome.key == "r"
    assert isinstance(outcome.answer, Refused)
    assert outcome.answer.cause == Cause.CANCELLED.value


def test_released_lease_is_not_renewed(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    kept, released = producer.lease("kept"), producer.lease("released")
    client = make_client(heartbeat_s=0.05)
    for lease in (kept, released):
        assert isinstance(producer.book.open(make_open(lease.transfer_id)), Opened)
        client.keep(producer.endpoint, lease.transfer_id, "epoch")
    # To another start of the engine, so the lease stays and only the heartbeat for it can end.
    client.release(producer.endpoint, "released", "epoch")
    producer.wait_for_wake()
    old = released.expires_at
    producer.clock.now += LEASE_S / 2
    wait_until(lambda: kept.expires_at == producer.clock.now + LEASE_S)
    assert released.expires_at == old


def test_stop_sends_what_was_asked_for(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    lease = producer.lease()
    client = make_client()
    client.open("r", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    client.release(producer.endpoint, "t", "epoch")
    client.stop()
    producer.wait_for_wake()
    assert lease.cause == "released"


# Being idle.


# The first token.


def announced(producer: Producer, sampling_key: bytes = b"alike", name: str = "t") -> Lease:
    span = Span(0, 35, (GroupBlocks(16, (), (b"h0", b"h1")),))
    lease = Lease(TransferId(name), span, (Tail((1, 2, 3), b""),), announced=True)
    lease.sampling_key = sampling_key
    producer.book.grant(lease)
    return lease


def ask_for_token(sampling_key: bytes = b"alike", num_tail_tokens: int = 3) -> Open:
    digest = tail_digest(b"h1", b"", [1, 2, 3][:num_tail_tokens])
    return msgspec.structs.replace(
        make_open(),
        end=32 + num_tail_tokens,
        groups=(GroupHashes((b"h0", b"h1"), digest),),
        sampling_key=sampling_key,
    )


def opened(client: ControlClient) -> Opened:
    answer = outcome_of(client).answer
    assert isinstance(answer, Opened)
    return answer


def test_token_of_a_computed_prompt_comes_with_the_answer(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    producer.book.finish(announced(producer), 77)
    client = make_client()
    client.open("a", producer.endpoint, ask_for_token())
    answer = opened(client)
    assert (answer.first_token_id, answer.first_token_follows) == (77, False)


def test_everybody_who_asked_is_told_once(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    lease = announced(producer)
    clients = [make_client(), make_client()]
    for client in clients:
        for key in ("a", "b"):
            client.open(key, producer.endpoint, ask_for_token())
        for _ in "ab":
            answer = opened(client)
            assert (answer.first_token_id, answer.first_token_follows) == (None, True)
    producer.book.finish(lease, 77)
    producer.server.tell_first_token(lease)
    producer.server.tell_first_token(lease)
    for client in clients:
        told = [outcome_of(client) for _ in "ab"]
        assert sorted(str(outcome.key) for outcome in told) == ["a", "b"]
        assert [outcome.answer.token_id for outcome in told] == [77, 77]
        client.open("last", producer.endpoint, ask_for_token())
        assert opened(client).first_token_id == 77, "nothing comes between"


@pytest.mark.parametrize(
    ("lease_key", "request_"),
    [
        pytest.param(b"alike", ask_for_token(b"other"), id="sampled otherwise"),
        pytest.param(b"alike", ask_for_token(b""), id="not wanted"),
        pytest.param(b"", ask_for_token(b""), id="not given"),
        pytest.param(b"alike", ask_for_token(num_tail_tokens=2), id="a shorter prompt"),
    ],
)
@pytest.mark.parametrize("is_computed", [True, False])
def test_token_that_is_not_the_consumers_is_not_promised(
    producer: Producer,
    make_client: Callable[..., ControlClient],
    lease_key: bytes,
    request_: Open,
    is_computed: bool,
) -> None:
    lease = announced(producer, lease_key)
    if is_computed:
        producer.book.finish(lease, 77)
    client = make_client()
    client.open("a", producer.endpoint, request_)
    answer = opened(client)
    assert (answer.first_token_id, answer.first_token_follows) == (None, False)
    assert not lease.askers


def test_released_consumer_is_told_that_no_token_comes(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    lease = announced(producer)
    client = make_client()
    for key in ("a", "b"):
        client.open(key, producer.endpoint, ask_for_token())
        assert opened(client).first_token_follows
    client.release(producer.endpoint, "another", "epoch")
    client.open("d", producer.endpoint, make_open("unknown"))
    assert outcome_of(client).key == "d"
    client.release(producer.endpoint, "t", "epoch")
    producer.wait_for_wake()
    assert [outcome_of(client) for _ in "ab"] == [OpenOutcome("a", None), OpenOutcome("b", None)]
    lease.first_token_id = 77
    producer.server.tell_first_token(lease)
    producer.lease("u")
    client.open("c", producer.endpoint, make_open("u"))
    assert outcome_of(client).key == "c"


def test_producer_that_goes_away_takes_its_promise_back(
    producer: Producer, make_client: Callable[..., ControlClient]
) -> None:
    announced(producer)
    client = make_client()
    client.open("a", producer.endpoint, ask_for_token())
    assert opened(client).first_token_follows
    producer.server.stop()
    assert outcome_of(client) == OpenOutcome("a", None)


def test_lease_promises_its_token_to_so_many_only(producer: Producer) -> None:
    announced(producer)
    answers = [producer.book.open(ask_for_token(), b"x") for _ in range(_MAX_ASKERS + 1)]
    follows = [isinstance(a, Opened) and a.first_token_follows for a in answers]
    assert follows == [True] * _MAX_ASKERS + [False]


def test_open_whose_prompt_nobody_brings_is_refused_when_its_time_is_over(
    make_client: Callable[..., ControlClient],
) -> None:
    """And not at the server's next turn, which may be a second later."""
    clock = Clock()
    book = LeaseBook(Epoch("epoch"), "same", LEASE_S, clock)
    server = ControlServer(book, lambda: None, Trust(), arrival_timeout_s=0.25, clock=clock)
    endpoint = server.listen("127.0.0.1", 0)
    server.start()
    try:
        client = make_client()
        client.open("r", endpoint, msgspec.structs.replace(make_open(), epoch=""))
        wait_until(lambda: server.num_waiting == 1)
        assert server.on_tick() == 0.25
        clock.now += 0.25
        answer = outcome_of(client).answer
        assert isinstance(answer, Refused)
        assert answer.cause == Cause.NOT_ARRIVED.value
    finally:
        server.stop()


def test_producer_that_only_says_that_it_waits_is_given_up(
    make_client: Callable[..., ControlClient],
) -> None:
    clock = Clock()
    client = make_client(peer_timeout_s=10.0, clock=clock)
    with RawServer() as server:
        client.open("r", server.endpoint, msgspec.structs.replace(make_open(), epoch=""))
        peer = server.accept()
        asked = decode_control(peer.receive())
        assert isinstance(asked, Open)
        connection = client.peers.connections[server.endpoint]
        for num_opens in (1, 1, 0):  # it is given up, but not in 10 s
            used_at = connection.used_at
            peer.send(encode(Waiting("t", asked.open_id)))
            wait_until(lambda before=used_at: connection.used_at > before)
            clock.now += 6.0
            for _ in range(2):  # the second turn begins when the first is over
                turn = threading.Event()
                client.submit(turn.set)
                assert turn.wait(LIMIT_S)
            assert client.counts()["opens"] == num_opens
        answer = outcome_of(client).answer
    assert isinstance(answer, Refused)
    assert answer.cause == Cause.PEER_UNREACHABLE.value


def test_open_that_comes_just_as_its_prompt_is_announced_is_answered_once(
    make_client: Callable[..., ControlClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control thread loses its turn between its look at the book and its note of who waits."""
    producer = Producer(arrival_timeout_s=1000.0)
    ask, asked = LeaseBook.open, []

    def announce_meanwhile(book: LeaseBook, request: Open, identity: bytes) -> object:
        answer = ask(book, request, identity)
        asked.append(answer)
        if len(asked) == 1:
            announced(producer)
            producer.server.answer_waiting()
        return answer

    monkeypatch.setattr(LeaseBook, "open", announce_meanwhile)
    try:
        client = make_client()
        client.open("r", producer.endpoint, msgspec.structs.replace(ask_for_token(), epoch=""))
        assert opened(client).first_token_follows
        assert [type(answer) for answer in asked] == [Waiting, Opened]
        assert producer.server.num_waiting == 0
    finally:
        producer.server.stop()


def test_prompt_that_comes_is_compared_with_the_opens_that_wait_for_it(
    make_client: Callable[..., ControlClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, num_opens = Producer(arrival_timeout_s=1000.0), 50
    ask, asked = LeaseBook.open, Counter[str]()

    def counted(book: LeaseBook, request: Open, identity: bytes) -> object:
        asked[request.transfer_id] += 1
        return ask(book, request, identity)

    monkeypatch.setattr(LeaseBook, "open", counted)
    try:
        client = make_client()
        names = [f"t{number}" for number in range(num_opens)]
        for name in names:
            request = msgspec.structs.replace(make_open(name), epoch="")
            client.open(name, producer.endpoint, request)
        wait_until(lambda: producer.server.num_waiting == num_opens)
        client.release(producer.endpoint, names.pop(), "")
        wait_until(lambda: producer.server.num_waiting == num_opens - 1)
        for num_left, name in zip(range(len(names) - 1, -1, -1), names, strict=True):
            announced(producer, name=name)
            producer.server.answer_waiting(name)
            wait_until(lambda left=num_left: producer.server.num_waiting == left)
        found = {(o := outcome_of(client)).key: o.answer for _ in range(num_opens)}
        assert [name for name in names if not isinstance(found[name], Opened)] == []
        assert producer.server.num_waiting == 0
        assert max(asked.values()) <= 3
    finally:
        producer.server.stop()


def test_idle_client_asks_for_no_turn() -> None:
    client = ControlClient(peer_timeout_s=1.0, heartbeat_s=1.0, trust=Trust())
    assert client.on_tick() is None
    client.start()
    client.stop()
    assert not client.is_alive()


def test_idle_connection_is_closed_and_opened_again(
    producer: Producer, make_client: Callable[..., ControlClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.lease()
    client = make_client(heartbeat_s=0.05)
    client.open("r", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "IDLE_CONNECTION_S", 0.0)
        wait_until(lambda: not client.num_watched)
    client.open("s", producer.endpoint, make_open())
    assert isinstance(outcome_of(client).answer, Opened)
    assert client.num_errors == 0


# Ports.


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def server() -> Iterator[ControlServer]:
    """One that has not been started."""
    book = LeaseBook(Epoch("epoch"), "same", LEASE_S, Clock())
    server = ControlServer(book, lambda: None, Trust())
    yield server
    server.stop()


def test_port_that_is_taken_is_an_error_that_names_it(
    taken_port: int, server: ControlServer
) -> None:
    with pytest.raises(ConfigError, match=rf"kv_port {taken_port} .*another kv_port"):
        server.listen("127.0.0.1", taken_port)


def test_address_that_is_not_ours_is_an_error_that_names_it(server: ControlServer) -> None:
    with pytest.raises(ConfigError, match=r"kv_ip 192\.0\.2\.1"):
        server.listen("192.0.2.1", 0)


def test_default_port_gives_way_to_a_free_one(
    taken_port: int, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DEFAULT_KV_PORT", taken_port)
    endpoint = server.listen("127.0.0.1", taken_port)
    assert endpoint.port not in (0, taken_port, DEFAULT_KV_PORT)
