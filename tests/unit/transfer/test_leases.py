# SPDX-License-Identifier: Apache-2.0
"""The lease book: who may read what, until when."""

from __future__ import annotations

import math
from collections.abc import ValuesView
from dataclasses import replace

import msgspec
import pytest

from tests.clock import Clock
from vllm_ascend_pd.kv.span import GroupBlocks, Span
from vllm_ascend_pd.transfer.lease_states import ProducerState
from vllm_ascend_pd.transfer.leases import Lease, LeaseBook, Tail, tail_digest
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint, Epoch, LeaseRef, TransferId
from vllm_ascend_pd.wire import WIRE_VERSION, GroupHashes, Open, Opened, Refused, Waiting

LEASE_S = 30.0
BLOCK_SIZE = 16
PAGE_SERVER = PageServer(Endpoint("127.0.0.1", 5), TicketKey())
WORKERS = (PAGE_SERVER.admit(LeaseRef("t", 1), 51),)
HASHES = (b"h0", b"h1", b"h2")
TAIL = (7, 8, 9, 10)
KEYS = b"(None,)"


def make_lease(
    hashes: tuple[bytes, ...] = HASHES, tail: tuple[int, ...] = TAIL, name: str = "t"
) -> Lease:
    num_blocks = len(hashes) + 1
    blocks = GroupBlocks(BLOCK_SIZE, tuple(range(1, num_blocks + 1)), hashes)
    end = len(hashes) * BLOCK_SIZE + len(tail)
    return Lease(TransferId(name), Span(0, end, (blocks,)), (Tail(tail, KEYS),))


def make_open(
    hashes: tuple[bytes, ...] = HASHES,
    num_tail_tokens: int = 3,
    tail: tuple[int, ...] = TAIL,
    keys: bytes = KEYS,
) -> Open:
    parent = hashes[-1] if hashes else b""
    digest = tail_digest(parent, keys, tail[:num_tail_tokens])
    end = len(hashes) * BLOCK_SIZE + num_tail_tokens
    return Open(WIRE_VERSION, "same", "t", "epoch", end, (GroupHashes(hashes, digest),))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> LeaseBook:
    book = LeaseBook(Epoch("epoch"), "same", LEASE_S, clock)
    book.page_servers = (PAGE_SERVER,)
    return book


@pytest.fixture
def lease(book: LeaseBook) -> Lease:
    lease = make_lease()
    book.grant(lease)
    assert book.finish(lease)
    return lease


def cause_of(answer: Opened | Refused) -> str:
    assert isinstance(answer, Refused)
    return answer.cause


# What a consumer's hashes match.


@pytest.mark.parametrize("num_tail_tokens", [1, 3, 4])
def test_same_prompt_gets_all_blocks_and_its_tail(num_tail_tokens: int) -> None:
    assert make_lease().match(make_open(num_tail_tokens=num_tail_tokens)) == 48 + num_tail_tokens


def test_prompt_within_one_block_gets_its_tail() -> None:
    assert make_lease(hashes=()).match(make_open(hashes=())) == 3


def test_prompt_of_whole_blocks_gets_its_last_block_as_tail() -> None:
    """The last block has a hash too, but the consumer computes its last token."""
    lease = make_lease(tail=(*TAIL, *range(BLOCK_SIZE - len(TAIL))))
    (blocks,) = lease.span.groups
    span = replace(lease.span, groups=(blocks._replace(hashes=(*HASHES, b"h3")),))
    assert replace(lease, span=span).match(make_open()) == 51


def test_token_after_the_lease_is_for_who_asks_for_no_more_and_no_less(book: LeaseBook) -> None:
    """A longer prompt may have every block of the lease, and goes on with other tokens."""
    lease = make_lease(tail=(*TAIL, *range(BLOCK_SIZE - len(TAIL))))
    (blocks,) = lease.span.groups
    lease.span = replace(lease.span, groups=(blocks._replace(hashes=(*HASHES, b"h3")),))
    lease.sampling_key = b"alike"
    book.grant(lease)
    book.finish(lease, 77)
    same = make_open(num_tail_tokens=BLOCK_SIZE, tail=lease.tails[0].token_ids)
    longer = make_open(hashes=(*HASHES, b"h3", b"h4"))
    shorter = make_open()
    tokens = []
    for request in (same, longer, shorter):
        answer = book.open(msgspec.structs.replace(request, sampling_key=b"alike"))
        assert isinstance(answer, Opened)
        tokens.append((answer.end, answer.first_token_id))
    assert tokens == [(64, 77), (64, None), (51, None)]


def test_a_tail_that_is_whole_is_matched_to_its_end_only() -> None:
    """A state behind 52 tokens is none behind 51; that at the boundary before may do."""
    lease = make_lease()
    lease.tails = (lease.tails[0]._replace(is_whole=True),)
    ends = [lease.match(make_open(num_tail_tokens=count)) for count in (1, 3, 4)]
    assert ends == [48, 48, 52]


def test_groups_of_a_span_are_matched_each_by_its_own_hashes() -> None:
    """75 tokens: two units of 32, which are blocks of one group and two each of the other."""
    tail = Tail(tuple(range(11)), KEYS)
    span = Span(
        0,
        75,
        (
            GroupBlocks(16, (), (b"h0", b"h1")),
            GroupBlocks(32, (), (b"g0", b"g1")),
        ),
    )
    lease = Lease(TransferId("t"), span, (tail, tail))

    def match(small: tuple[bytes, ...], large: tuple[bytes, ...]) -> int:
        groups = tuple(
            GroupHashes(hashes, tail_digest(hashes[-1], KEYS, tail.token_ids))
            for hashes in (small, large)
        )
        return lease.match(Open(WIRE_VERSION, "same", "t", "epoch", 75, groups))

    assert match((b"h0", b"h1"), (b"g0", b"g1")) == 75
    assert match((b"h0", b"x"), (b"g0", b"g1")) == 32
    assert match((b"h0", b"h1"), (b"g0", b"x")) == 32
    assert match((b"h0", b"h1"), (b"x", b"g1")) == 0
    assert lease.match(make_open()) == 0, "it has another number of groups"


def test_prompt_without_a_tail_gets_blocks_only() -> None:
    assert make_lease().match(make_open(num_tail_tokens=0)) == 48


def test_shorter_prompt_gets_its_blocks_but_no_tail() -> None:
    assert make_lease().match(make_open(hashes=HASHES[:2])) == 32


def test_longer_prompt_gets_the_leases_blocks_but_no_tail() -> None:
    assert make_lease().match(make_open(hashes=(*HASHES, b"h3"))) == 48


def test_blocks_after_a_different_one_do_not_match() -> None:
    assert make_lease().match(make_open(hashes=(b"h0", b"x", b"h2"))) == 16


@pytest.mark.parametrize(
    "request_",
    [
        make_open(num_tail_tokens=5, tail=(*TAIL, 11)),
        make_open(num_tail_tokens=-1),
        make_open(tail=(7, 8, 99)),
        make_open(keys=b"(('lora',),)"),
        msgspec.structs.replace(make_open(), groups=(GroupHashes(HASHES, b""),)),
    ],
    ids=["more than there is", "negative", "other tokens", "other adapter", "no digest"],
)
def test_tail_that_differs_is_not_given(request_: Open) -> None:
    assert make_lease().match(request_) == 48


def test_digest_keeps_its_parts_apart() -> None:
    digests = {
        tail_digest(b"ab", b"c", [1]),
        tail_digest(b"a", b"bc", [1]),
        tail_digest(b"ab", b"c", [1, 0]),
        tail_digest(b"", b"abc", [1]),
    }
    assert len(digests) == 4


# Opening.


def test_open_answers_where_to_read(book: LeaseBook, lease: Lease) -> None:
    assert book.open(make_open()) == Opened("t", 51, WORKERS, "epoch")


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("version", WIRE_VERSION + 1, Cause.INCOMPATIBLE),
        ("fingerprint", "other", Cause.INCOMPATIBLE),
        ("epoch", "before", Cause.WRONG_EPOCH),
        ("transfer_id", "unknown", Cause.LEASE_EXPIRED),
        ("groups", (GroupHashes((b"x", b"y", b"z"), b""),), Cause.HASH_MISMATCH),
        ("groups", (), Cause.HASH_MISMATCH),
    ],
)
def test_open_is_refused_with_its_cause(
    book: LeaseBook, lease: Lease, field: str, value: object, cause: Cause
) -> None:
    request = msgspec.structs.replace(make_open(), **{field: value})
    assert cause_of(book.open(request)) == cause.value


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("weights=a draft=eagle-1 wire=1", "weights=a wire=1", True),
        ("weights=a draft=eagle-1 wire=1", "weights=a draft=eagle-1 wire=1", True),
        ("weights=a wire=1", "weights=a draft=eagle-1 wire=1", False),
        ("weights=a draft=eagle-2 wire=1", "weights=a draft=eagle-1 wire=1", False),
        ("weights=a draft=eagle-1 wire=1", "weights=b wire=1", False),
    ],
)
def test_kv_of_an_engine_with_a_drafter_is_also_for_who_has_none(
    book: LeaseBook, lease: Lease, ours: str, theirs: str, fits: bool
) -> None:
    book.identify(ours)
    answer = book.open(msgspec.structs.replace(make_open(), fingerprint=theirs))
    if fits:
        assert isinstance(answer, Opened)
    else:
        assert cause_of(answer) == Cause.INCOMPATIBLE.value


def test_prompt_that_is_not_finished_cannot_be_opened(book: LeaseBook) -> None:
    book.grant(make_lease())
    assert cause_of(book.open(make_open())) == Cause.LEASE_EXPIRED.value


def test_open_before_the_worker_serves_is_refused(clock: Clock) -> None:
    book = LeaseBook(Epoch("epoch"), "same", LEASE_S, clock)
    lease = make_lease()
    book.grant(lease)
    book.finish(lease)
    assert cause_of(book.open(make_open())) == Cause.LEASE_EXPIRED.value


# Expiry.


@pytest.mark.parametrize(
    ("opens", "max_lease_s", "why"),
    [
        (False, math.inf, f"no consumer has come in {LEASE_S:g} s"),
        (True, math.inf, f"its consumer was not heard of for {LEASE_S:g} s"),
        (True, LEASE_S / 2, f"its consumer was not done in {LEASE_S / 2:g} s"),
    ],
)
def test_log_says_whose_lease_has_expired_and_why(
    clock: Clock, caplog: pytest.LogCaptureFixture, opens: bool, max_lease_s: float, why: str
) -> None:
    book = LeaseBook(Epoch("epoch"), "same", LEASE_S, clock, max_lease_s)
    book.page_servers = (PAGE_SERVER,)
    lease = make_lease()
    lease.request_id = "mine"
    book.grant(lease)
    assert book.finish(lease)
    if opens:
        assert isinstance(book.open(make_open()), Opened)
    clock.now += LEASE_S
    assert book.expire()[0] == 1
    assert caplog.messages == [f"request mine: transfer t expired: {why}"]


def test_lease_expires_after_its_term(book: LeaseBook, lease: Lease, clock: Clock) -> None:
    clock.now += LEASE_S - 0.1
    num_expired, next_expiry = book.expire()
    assert num_expired == 0
    assert next_expiry == pytest.approx(0.1)
    clock.now += 0.1
    assert book.expire() == (1, None)
    assert book.take_closed() == [lease]
    assert lease.cause == "expired"
    assert len(book) == 0


def test_open_does_not_revive_what_is_over(book: LeaseBook, lease: Lease, clock: Clock) -> None:
    clock.now += LEASE_S
    assert cause_of(book.open(make_open())) == Cause.LEASE_EXPIRED.value
    assert book.expire() == (1, None)
    assert book.take_closed() == [lease]


def test_open_renews_the_lease(book: LeaseBook, lease: Lease, clock: Clock) -> None:
    clock.now += LEASE_S - 1
    book.open(make_open())
    clock.now += LEASE_S - 1
    assert book.expire()[0] == 0


def test_heartbeat_renews_the_leases_it_names(book: LeaseBook, lease: Lease, clock: Clock) -> None:
    other = make_lease(name="other")
    book.grant(other)
    book.finish(other)
    assert isinstance(book.open(make_open()), Opened)
    clock.now += LEASE_S - 1
    book.heartbeat(("t", "unknown"), "epoch")
    clock.now += 1
    assert book.expire()[0] == 1
    assert book.take_closed() == [other]


def test_lease_that_nobody_has_opened_is_not_renewed(
    book: LeaseBook, lease: Lease, clock: Clock
) -> None:
    clock.now += LEASE_S - 1
    book.heartbeat(("t",), "epoch")
    assert isinstance(book.open(make_open(hashes=(b"x",) * 3)), Refused)
    clock.now += 1
    assert book.expire()[0] == 1
    assert not lease.is_opened


@pytest.mark.parametrize("opens_again", [False, True])
def test_lease_ends_at_its_greatest_age_whoever_renews_it(clock: Clock, opens_again: bool) -> None:
    book = LeaseBook(Epoch("epoch"), "same", LEASE_S, clock, max_lease_s=4 * LEASE_S)
    book.page_servers = (PAGE_SERVER,)
    book.grant(lease := make_lease())
    assert book.finish(lease)
    assert isinstance(book.open(make_open()), Opened)
    for _ in range(7):
        clock.now += LEASE_S / 2
        book.heartbeat(("t",), "epoch")
        if opens_again:
            book.open(make_open())
        assert book.expire()[0] == 0
    clock.now += LEASE_S / 2
    assert book.expire()[0] == 1
    assert (book.take_closed(), lease.cause) == ([lease], "expired")


def test_announced_lease_that_was_opened_early_is_renewed(book: LeaseBook, clock: Clock) -> None:
    lease = replace(make_lease(), announced=True)
    book.grant(lease)
    assert isinstance(book.open(msgspec.structs.replace(make_open(), epoch="")), Opened)
    assert book.finish(lease)
    clock.now += LEASE_S - 1
    book.heartbeat(("t",), "epoch")
    clock.now += LEASE_S - 1
    assert book.expire()[0] == 0


def test_heartbeat_for_another_start_is_ignored(
    book: LeaseBook, lease: Lease, clock: Clock
) -> None:
    assert isinstance(book.open(make_open()), Opened)
    clock.now += LEASE_S - 1
    book.heartbeat(("t",), "before")
    clock.now += 1
    assert book.expire()[0] == 1


def test_prompt_that_is_not_finished_does_not_expire(book: LeaseBook, clock: Clock) -> None:
    book.grant(make_lease())
    clock.now += 100 * LEASE_S
    assert book.expire() == (0, None)
    assert len(book) == 1


def test_leases_are_looked_at_when_one_may_be_over(book: LeaseBook, clock: Clock) -> None:
    begun, looks = clock.now, list[float]()

    class Looked(dict[str, Lease]):
        def values(self) -> ValuesView[Lease]:
            looks.append(clock.now)
            return super().values()

    book._leases = Looked()
    for number in range(100):
        lease = make_lease(name=f"t{number}")
        book.grant(lease)
        assert book.finish(lease)
        assert book.expire()[0] == 0
    for number in range(50):
        clock.now += 0.5
        request = msgspec.structs.replace(make_open(), transfer_id=f"t{number}")
        assert isinstance(book.open(request), Opened)
        book.heartbeat((f"t{number}",), "epoch")
        assert book.expire()[0] == 0
    assert not looks
    book.release("early", "")
    clock.now = begun + LEASE_S
    assert book.expire() == (50, pytest.approx(0.5))
    assert len(looks) == 1
    clock.now = begun + 25 + LEASE_S
    assert book.expire() == (50, None)
    assert len(book) == book.num_released_early == 0
    assert book.expire() == (0, None)
    assert len(looks) == 2


# The end, once.


def test_released_lease_is_closed_once(book: LeaseBook, lease: Lease) -> None:
    assert book.release("t", "epoch")
    assert not book.release("t", "epoch")
    assert book.take_closed() == [lease]
    assert book.take_closed() == []
    assert lease.cause == "released"


def test_release_for_another_start_is_ignored(book: LeaseBook, lease: Lease) -> None:
    assert not book.release("t", "before")
    assert len(book) == 1


def test_announced_lease_can_be_opened_and_released_before_it_is_finished(book: LeaseBook) -> None:
    early = msgspec.structs.replace(make_open(), epoch="")
    assert book.open(early) == Waiting("t")
    lease = replace(make_lease(), announced=True)
    book.grant(lease)
    assert book.open(early) == Opened("t", 51, WORKERS, "epoch", is_computed=False)
    assert book.open(make_open()).is_computed is False
    assert book.release("t", "")
    assert book.take_closed() == [lease]
    assert book.open(early) == Waiting("t")


def test_oldest_unopened_leases_give_way(book: LeaseBook) -> None:
    leases = [make_lease(name=name) for name in ("t", "a", "b", "c")]
    for lease in leases:  # of four blocks each
        book.grant(lease)
        assert book.finish(lease)
    assert isinstance(book.open(make_open()), Opened)
    assert book.make_way(12) == 0
    assert book.make_way(11) == 1
    assert book.make_way(0) == 1, "the newest one stays"
    assert book.take_closed() == leases[1:3]
    assert [lease.cause for lease in leases] == ["", "displaced", "displaced", ""]


def test_prompt_that_is_still_computed_does_not_give_way(book: LeaseBook) -> None:
    for name in ("a", "b"):
        book.grant(make_lease(name=name))
    assert book.make_way(0) == 0


def test_lease_that_was_released_before_it_came_is_not_kept(book: LeaseBook, clock: Clock) -> None:
    assert not book.release("t", "")
    lease = replace(make_lease(), announced=True)
    book.grant(lease)
    assert book.take_closed() == [lease]
    assert not book.release("t", "")
    clock.now += LEASE_S
    book.expire()
    book.grant(replace(make_lease(), announced=True))
    assert len(book) == 1


def test_open_without_an_epoch_waits_for_the_data_endpoint(book: LeaseBook) -> None:
    book.page_servers = ()
    lease = replace(make_lease(), announced=True)
    book.grant(lease)
    assert book.open(msgspec.structs.replace(make_open(), epoch="")) == Waiting("t")
    book.page_servers = (PAGE_SERVER,)
    assert book.finish(lease)
    answer = book.open(msgspec.structs.replace(make_open(), epoch=""))
    assert isinstance(answer, Opened)
    assert answer.is_computed


def test_open_without_an_epoch_is_checked_as_any_other(book: LeaseBook) -> None:
    book.grant(replace(make_lease(), announced=True))
    early = msgspec.structs.replace(make_open(hashes=(b"x",) * 3), epoch="")
    assert cause_of(book.open(early)) == Cause.HASH_MISMATCH.value
    other = msgspec.structs.replace(make_open(), epoch="", fingerprint="other")
    assert cause_of(book.open(other)) == Cause.INCOMPATIBLE.value


def test_consumer_cannot_release_what_is_not_finished(book: LeaseBook) -> None:
    book.grant(make_lease())
    assert not book.release("t", "epoch")
    assert len(book) == 1


def test_late_events_have_no_effect(book: LeaseBook, lease: Lease, clock: Clock) -> None:
    assert book.revoke(lease)
    assert not book.revoke(lease)
    assert not book.finish(lease)
    assert not book.release("t", "epoch")
    book.heartbeat(("t",), "epoch")
    clock.now += 2 * LEASE_S
    assert book.expire() == (0, None)
    assert cause_of(book.open(make_open())) == Cause.LEASE_EXPIRED.value
    assert lease.state is ProducerState.CLOSED
    assert lease.cause == "revoked"
    assert book.take_closed() == [lease]
    assert book.take_closed() == []


def test_revoke_all_ends_every_lease(book: LeaseBook, lease: Lease) -> None:
    unfinished = make_lease(name="u")
    book.grant(unfinished)
    book.revoke_all()
    assert len(book) == 0
    closed = book.take_closed()
    assert set(map(id, closed)) == {id(lease), id(unfinished)}
    assert [one.cause for one in closed] == ["revoked", "revoked"]
