# SPDX-License-Identifier: Apache-2.0
"""Who was not admitted by the producer's scheduler gets nothing from its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from tests.unit.transfer.raw_peers import connected, wait_until
from tests.unit.transfer.test_send_receive import NUM_SLOTS, Pair, make_fetch
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, LeaseRef
from vllm_ascend_pd.wire import (
    Fetch,
    Fetched,
    Progress,
    Ticket,
    Watch,
    Worker,
    decode_data,
    encode,
)

LEASE = LeaseRef("t", 7)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(FaultScript())
    pair.grant(3, 4, 5)
    yield pair
    pair.time_passed = 1000.0
    pair.stop()
    assert (pair.server.num_errors, pair.loader.num_errors) == (0, 0)


def changed(ticket: Ticket, **changes: object) -> Ticket:
    return msgspec.structs.replace(ticket, **changes)


def test_ticket_is_accepted_for_what_it_was_issued_for() -> None:
    key = TicketKey()
    ticket = key.issue(LEASE, 3)
    assert (ticket.generation, ticket.end) == (7, 3)
    assert key.accepts("t", ticket)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 8},
        {"generation": 6},
        {"generation": -7},
        {"end": 4},
        {"end": 2},
        {"end": -1},
        {"end": 1 << 62},
        {"mac": b""},
        {"mac": b"\0" * 16},
    ],
    ids=str,
)
def test_changed_ticket_is_not_accepted(changes: dict[str, object]) -> None:
    key = TicketKey()
    assert not key.accepts("t", changed(key.issue(LEASE, 3), **changes))


def test_truncated_ticket_is_not_accepted() -> None:
    key = TicketKey()
    ticket = key.issue(LEASE, 3)
    assert not any(key.accepts("t", changed(ticket, mac=ticket.mac[:n])) for n in range(16))
    assert not key.accepts("t", changed(ticket, mac=ticket.mac + b"\0"))


@pytest.mark.parametrize("transfer_id", ["", "u", "tt", "3 t", "t\0"])
def test_ticket_of_another_transfer_is_not_accepted(transfer_id: str) -> None:
    key = TicketKey()
    assert not key.accepts(transfer_id, key.issue(LEASE, 3))


def test_numbers_and_name_are_not_mistaken_for_each_other() -> None:
    key = TicketKey()
    ticket = key.issue(LeaseRef("2 t", 1), 3)
    assert not key.accepts("t", changed(ticket, generation=13, end=2))
    assert not key.accepts("t", changed(ticket, generation=1, end=32))


def test_each_worker_and_each_start_has_a_key_of_its_own() -> None:
    assert not TicketKey().accepts("t", TicketKey().issue(LEASE, 3))


def test_key_is_in_no_text(pair: Pair) -> None:
    server: PageServer = pair.server.page_server
    assert repr(server.key._bytes) not in repr(server)
    assert "bytes" not in repr(server)
    worker = server.admit(LEASE, 3)
    assert repr(worker.ticket) == "Ticket(7, 3)"
    assert repr(worker.ticket.mac) not in repr(worker)


# At the worker.


def forge(pair: Pair) -> dict[str, Worker]:
    admitted = pair.admit(end=2)
    ticket = admitted.ticket
    return {
        "forged": msgspec.structs.replace(admitted, ticket=changed(ticket, mac=b"x" * 16)),
        "raised": msgspec.structs.replace(admitted, ticket=changed(ticket, end=3)),
        "of another transfer": pair.admit("u", 3),
        "of another worker": PageServer(pair.server.page_server.endpoint, TicketKey()).admit(
            pair.lease(), 3
        ),
        "for fewer blocks": admitted,
    }


@pytest.mark.parametrize(
    "kind", ["forged", "raised", "of another transfer", "of another worker", "for fewer blocks"]
)
@pytest.mark.parametrize("in_step", [False, True])
def test_load_without_its_ticket_is_refused_counted_and_leaves_nothing(
    pair: Pair, kind: str, in_step: bool
) -> None:
    before = pair.ours.bytes.copy()
    spec = pair.spec((2,), (8,), admitted=forge(pair)[kind], in_step=in_step)
    pair.loader.start_load(spec)
    results: list[object] = []
    wait_until(lambda: bool(results.extend(pair.loader.take_results()) or results))
    assert [r.cause for r in results] == [Cause.NO_TICKET.value]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(pair.ours.bytes, before)
    assert pair.trust.take_refused()["no_ticket"] >= 1
    wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))
    assert pair.run(pair.spec((2,), (8,), admitted=pair.admit(end=3))).cause == ""


def test_ticket_of_an_earlier_lease_of_the_same_name_reads_nothing_of_the_next(pair: Pair) -> None:
    stale = pair.admit()
    pair.grants.discard([pair.lease()])
    pair.generation = 2
    pair.grant(10, 11, 12)
    before = pair.ours.bytes.copy()
    assert pair.run(pair.spec((0,), (8,), admitted=stale)).cause == Cause.LEASE_EXPIRED.value
    np.testing.assert_array_equal(pair.ours.bytes, before)
    assert not pair.trust.take_refused(), "late, and not forged"
    assert pair.run(pair.spec((0,), (8,))).cause == ""


def ask(pair: Pair, message: Fetch | Watch) -> Fetched | Progress:
    with connected(pair.server.page_server.endpoint) as peer:
        peer.send(encode(message))
        answer = decode_data(peer.receive())
    assert isinstance(answer, Fetched | Progress)
    return answer


def watch_with(ticket: Ticket) -> Watch:
    return Watch("t", "e", ticket, True)


def fetch_with(pair: Pair, ticket: Ticket) -> Fetch:
    return msgspec.structs.replace(make_fetch(pair), ticket=ticket)


@pytest.mark.parametrize("message", [watch_with, fetch_with], ids=["watch", "fetch"])
def test_forged_message_is_answered_with_the_cause_and_remembered_nowhere(
    pair: Pair, message: Callable[..., Fetch | Watch]
) -> None:
    ticket = changed(pair.admit().ticket, mac=b"")
    made = message(ticket) if message is watch_with else message(pair, ticket)
    assert ask(pair, made).cause == Cause.NO_TICKET.value
    assert pair.trust.take_refused() == {"no_ticket": 1}
    assert not any(pair.server.counts().values())


def test_prompt_is_watched_before_its_lease_is_granted_and_an_old_one_tells_nothing(
    pair: Pair,
) -> None:
    """The worker has not heard yet that the earlier lease of this name is over."""
    pair.generation = 2
    answer = ask(pair, watch_with(pair.admit().ticket))
    assert answer == Progress("t", 0, 0, 0)
    pair.grants.discard([LeaseRef("t", 1)])
    assert ask(pair, watch_with(pair.admit().ticket)) == Progress("t", 0, 0, 0)
    pair.grant(10, 11)
    assert ask(pair, watch_with(pair.admit().ticket)) == Progress("t", 2, 2, 0)
