# SPDX-License-Identifier: Apache-2.0
"""A producer writes right into a consumer's pages: parked loads on an engine that declares it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.unit.transfer.raw_peers import RawServer, connected
from tests.unit.transfer.test_awaited_loads import Prompt
from tests.unit.transfer.test_send_receive import (
    LIMIT_S,
    NUM_BLOCKS,
    NUM_LAYERS,
    NUM_SLOTS,
    PAGE,
    Pair,
    expect_loaded,
    wait_until,
)
from vllm_ascend_pd.backends.fault_script import Fault, FaultKind, FaultScript, WriteRequest
from vllm_ascend_pd.backends.transfer_engine import TransferEngine
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.transfer.live_pages import DirectPlacement
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause
from vllm_ascend_pd.wire import Fetch, Fetched, LivePages, PageRun, decode_data, encode

REST_S = 100.0
FOREVER = Fault(FaultKind.DELAY, 1 << 60)


@pytest.fixture(autouse=True)
def short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferEngine, "LATE_WRITE_S", REST_S)


class Script(FaultScript):
    """Keeps what was written, and lets a test end a delay."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults)
        self.requests: list[WriteRequest] = []
        self.on_write: Callable[[], None] = lambda: None

    def next_fault(self, write: WriteRequest) -> Fault:
        self.requests.append(write)
        self.on_write()
        return super().next_fault(write)


class DirectPair(Pair):
    def __init__(self, script: Script, verify: bool = False, **loader: Any) -> None:
        self.script = script
        super().__init__(script, placement=DirectPlacement(verify), **loader)

    def start(self, indices: tuple[int, ...], to: tuple[int, ...], **options: Any) -> LoadSpec:
        spec = self.spec(indices, to, in_step=False, **options)
        self.loader.start_load(spec)
        return spec

    def result(self) -> LoadResult:
        results: list[LoadResult] = []
        wait_until(lambda: bool(results.extend(self.loader.take_results()) or results))
        return results[0]

    def load(self, indices: tuple[int, ...], to: tuple[int, ...], **options: Any) -> LoadResult:
        self.start(indices, to, **options)
        return self.result()

    def wait_rested(self, spec: LoadSpec) -> None:
        """While time passes."""
        rested: list[int] = []

        def is_over() -> bool:
            self.pass_time(REST_S / 10)
            rested.extend(self.loader.take_rested())
            return bool(rested)

        wait_until(is_over)
        assert rested == [spec.load_id]

    def wait_written(self, num_writes: int) -> None:
        wait_until(lambda: self.engine.num_writes >= num_writes)


@pytest.fixture
def make_pair() -> Iterator[Callable[..., DirectPair]]:
    pairs: list[DirectPair] = []

    def make(*faults: Fault | FaultKind, verify: bool = False, **loader: Any) -> DirectPair:
        script = Script(*(Fault(f) if isinstance(f, FaultKind) else f for f in faults))
        pairs.append(DirectPair(script, verify, **loader))
        return pairs[-1]

    yield make
    for pair in pairs:
        num_errors = pair.server.num_errors, pair.loader.num_errors
        pair.time_passed = 1000.0
        pair.stop()
        assert num_errors == (0, 0)
        assert pair.engine.num_regions() == pair.our_engine.num_regions() == 0


def staged_bytes(pair: Pair) -> bytes:
    return b"".join(
        ctypes.string_at(pool.region.base, pool.region.size)
        for pool in (pair.send_pool, pair.receive_pool)
    )


# Data.


@pytest.mark.parametrize("num_blocks", [1, 4, 13])
@pytest.mark.parametrize("verify", [False, True])
def test_pages_arrive_and_no_other_is_touched(
    make_pair: Callable[..., DirectPair], num_blocks: int, verify: bool
) -> None:
    pair = make_pair(verify=verify)
    theirs, ours = tuple(range(9, 9 + num_blocks)), tuple(range(17, 17 - num_blocks, -1))
    before = pair.ours.bytes.copy()
    pair.grant(*theirs)
    result = pair.load(tuple(range(num_blocks)), ours)
    assert (result.cause, result.num_bytes) == ("", num_blocks * NUM_LAYERS * PAGE)
    assert (result.transport, result.num_resting) == ("fake", 0)
    expect_loaded(pair, theirs, ours)
    others = sorted(set(range(NUM_BLOCKS)) - set(ours))
    np.testing.assert_array_equal(pair.ours.bytes[:, others], before[:, others])
    wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))
    assert pair.loader.take_rested() == []


def test_nothing_passes_through_staging_memory(make_pair: Callable[..., DirectPair]) -> None:
    pair = make_pair()
    pair.grant(3, 4, 5)
    assert pair.load((0, 1, 2), (7, 8, 9)).cause == ""
    assert not any(staged_bytes(pair))
    assert pair.script.requests
    assert all(request.pieces for request in pair.script.requests)


def test_blocks_in_a_row_on_both_sides_are_written_at_once(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair()
    pair.grant(3, 4, 5)
    pair.load((0, 1, 2), (7, 8, 9))
    runs = len(pair.script.requests[0].pieces)
    assert sum(len(request.pieces) for request in pair.script.requests) == runs * NUM_LAYERS
    pair.script.requests.clear()
    pair.load((0, 1, 2), (7, 9, 8))
    assert sum(len(request.pieces) for request in pair.script.requests) == 3 * runs * NUM_LAYERS


def test_loads_of_a_step_and_tails_are_still_verified_in_staging(
    make_pair: Callable[..., DirectPair],
) -> None:
    """Requests hold those blocks already; what fails there must not be written any more."""
    pair = make_pair(FaultKind.CORRUPT)
    pair.grant(3, 4)
    assert pair.run(pair.spec((0, 1), (7, 8), has_tail=True)).cause == Cause.CHECKSUM.value
    assert pair.run(pair.spec((0, 1), (7, 8), has_tail=True)).cause == ""
    expect_loaded(pair, (3, 4), (7, 8))
    assert not any(request.pieces for request in pair.script.requests)


def test_layers_are_pushed_while_the_next_are_computed(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair(push_mode=PushMode.LAYER)
    prompt = Prompt(pair)
    prompt.load()
    prompt.begin_step(0, 2)
    for layer in range(NUM_LAYERS):
        prompt.layer(layer)
        wait_until(lambda layer=layer: prompt.has(layer, 2))
    prompt.end_step()
    prompt.begin_step(2, 4)
    prompt.end_step()
    assert prompt.result().cause == ""
    assert all(prompt.has(layer, 3) for layer in range(NUM_LAYERS))
    assert not any(staged_bytes(pair))


# Verification, for a new installation.


@pytest.mark.parametrize("fault", [FaultKind.CORRUPT, FaultKind.DROP, FaultKind.SHORT])
def test_pages_that_are_read_back_must_be_what_was_sent(
    make_pair: Callable[..., DirectPair], fault: FaultKind
) -> None:
    pair = make_pair(fault, verify=True)
    pair.grant(3, 4)
    assert pair.load((0,), (7,)).cause == Cause.CHECKSUM.value
    assert pair.load((0, 1), (7, 8)).cause == ""
    expect_loaded(pair, (3, 4), (7, 8))


# Failure: blocks rest until nobody writes into them.


@pytest.mark.parametrize("is_revoked", [False, True])
def test_blocks_of_a_failed_write_rest(
    make_pair: Callable[..., DirectPair], is_revoked: bool
) -> None:
    pair = make_pair(FaultKind.FAIL)
    pair.grant(3)
    if is_revoked:
        pair.script.on_write = lambda: pair.grants.discard([pair.lease()])
    began = pair.clock()
    spec = pair.start((0,), (7,))
    result = pair.result()
    assert (result.cause, result.num_resting) == (Cause.TRANSFER_FAILED.value, 1)
    pair.wait_rested(spec)
    assert pair.clock() - began >= REST_S
    assert pair.num_free() == (NUM_SLOTS, NUM_SLOTS)


def test_bytes_that_come_late_find_their_blocks_at_rest(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair(FaultKind.LATE)
    pair.grant(3)
    spec = pair.start((0,), (7,))
    assert pair.result().num_resting == 1
    assert pair.engine.land_late_writes() == 1
    assert pair.loader.take_rested() == []
    pair.wait_rested(spec)


def test_blocks_of_a_cancelled_load_rest_until_the_write_is_over(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair(FOREVER)
    pair.grant(3)
    spec = pair.start((0,), (7,))
    pair.wait_written(1)
    pair.loader.cancel(spec.load_id)
    result = pair.result()
    assert (result.cause, result.num_resting) == (Cause.CANCELLED.value, 1)
    pair.pass_time(REST_S * 1.5)
    assert pair.loader.take_rested() == []
    pair.engine.end_delays()
    pair.wait_rested(spec)
    assert pair.num_free() == (NUM_SLOTS, NUM_SLOTS)


def test_blocks_rest_while_a_peer_that_is_not_gone_says_nothing(
    make_pair: Callable[..., DirectPair],
) -> None:
    """As when its process is stopped: nobody knows what it writes when it goes on."""
    pair = make_pair(FOREVER)
    pair.grant(3)
    spec = pair.start((0,), (7,))
    pair.wait_written(1)
    pair.pass_time(LIMIT_S)
    result = pair.result()
    assert (result.cause, result.num_resting) == (Cause.DEADLINE.value, 1)
    assert pair.receive_pool.num_free == NUM_SLOTS
    pair.pass_time(REST_S * 1.5)
    assert pair.loader.take_rested() == []
    pair.engine.end_delays()
    pair.wait_rested(spec)


@pytest.mark.parametrize("given_up", [True, False])
def test_blocks_rest_a_while_after_a_peer_has_gone(
    make_pair: Callable[..., DirectPair], given_up: bool
) -> None:
    """Whether the load was given up before that, or because of it."""
    pair = make_pair(FOREVER, write_timeout_s=1000.0)
    pair.grant(3)
    spec = pair.start((0,), (7,))
    pair.wait_written(1)
    if given_up:
        pair.pass_time(LIMIT_S)
        pair.result()
    pair.server.stop()
    began = pair.clock()
    if not given_up:
        result = pair.result()
        assert (result.cause, result.num_resting) == (Cause.PEER_UNREACHABLE.value, 1)
    pair.wait_rested(spec)
    assert pair.clock() - began >= REST_S
    with _held_slot(pair):
        """It goes back."""


def _held_slot(pair: Pair) -> Any:
    """That of the write that the stopped server has under way."""
    (write,) = pair.server._writes
    return write.slot


def test_load_that_ends_before_its_fetch_leaves_is_written_by_nobody(
    make_pair: Callable[..., DirectPair],
) -> None:
    """Cancelled by the main thread while the loader waits for the device."""
    pair = make_pair()
    pair.grant(3)
    spec = pair.spec((0,), (7,), in_step=False)
    before = pair.ours.bytes.copy()
    copier = pair.loader._copier
    pair.loader._live_pages._copier = _Settling(copier, lambda: pair.loader.cancel(spec.load_id))
    pair.loader.start_load(spec)
    result = pair.result()
    assert (result.cause, result.num_resting) == (Cause.CANCELLED.value, 0)
    wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))
    assert pair.script.requests == []
    np.testing.assert_array_equal(pair.ours.bytes, before)


def test_pages_are_written_when_nothing_launched_uses_them_on_either_side(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair, settled = make_pair(), []
    for side in (pair.server, pair.loader._live_pages):
        note = partial(lambda side: settled.append((side, len(pair.script.requests))), side)
        side._copier = _Settling(side._copier, note)
    pair.grant(3)
    assert pair.load((0,), (7,)).cause == ""
    assert settled == [(pair.loader._live_pages, 0), (pair.server, 0)]


class _Settling:
    def __init__(self, copier: Any, then: Callable[[], None]) -> None:
        self._copier = copier
        self._then = then

    def settle(self, block_ids: Any) -> None:
        self._copier.settle(block_ids)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)


def test_write_that_does_not_end_holds_up_no_other_peer(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair(FOREVER)
    pair.grant(3)
    spec = pair.start((0,), (7,))
    pair.wait_written(1)
    assert pair.send_pool.num_free == NUM_SLOTS - 1
    pair.pass_time(LIMIT_S)
    wait_until(lambda: pair.send_pool.num_free == NUM_SLOTS)
    assert pair.result().num_resting == 1
    assert pair.load((0,), (8,)).cause == ""
    assert pair.loader.take_rested() == []
    pair.engine.end_delays()
    pair.wait_rested(spec)


def test_answer_of_another_producer_is_none(make_pair: Callable[..., DirectPair]) -> None:
    """It knows its own fetch, and so the numbers of those before."""
    pair = make_pair(FOREVER)
    pair.grant(3)
    pair.start((0,), (7,))
    pair.wait_written(1)
    with RawServer() as other:
        mine = pair.start((0,), (8,), peer=other.endpoint)
        peer = other.accept()
        fetch = decode_data(peer.receive())
        assert isinstance(fetch, Fetch)
        answers = Fetched(fetch.fetch_id - 1, 0), Fetched(fetch.fetch_id, 0, Cause.EVICTED.value)
        peer.send(*map(encode, answers))
        result = pair.result()
    assert (result.load_id, result.cause) == (mine.load_id, Cause.EVICTED.value)
    pair.engine.end_delays()
    assert pair.result().cause == ""
    expect_loaded(pair, (3,), (7,))


# Fences.


def test_write_from_pages_that_are_given_up_meanwhile_does_not_count(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair(FOREVER)
    pair.grant(3)
    pair.start((0,), (7,))
    pair.wait_written(1)
    pair.grants.discard([pair.lease()])
    pair.generation = 2
    pair.grant(5)  # the same name, other blocks
    pair.engine.end_delays()
    result = pair.result()
    assert (result.cause, result.num_resting) == (Cause.LEASE_EXPIRED.value, 0)
    assert pair.load((0,), (7,)).cause == ""
    expect_loaded(pair, (5,), (7,))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"epoch": "other"}, Cause.WRONG_EPOCH),
        ({"transfer_id": "unknown"}, Cause.LEASE_EXPIRED),
    ],
)
def test_stale_reference_writes_nothing(
    make_pair: Callable[..., DirectPair], changes: dict[str, str], cause: Cause
) -> None:
    pair = make_pair()
    pair.grant(3)
    result = pair.load((0,), (7,), **changes)
    assert (result.cause, result.num_resting) == (cause.value, 0)
    assert pair.script.requests == []


RUN = (PageRun(4096, PAGE, PAGE),)
LIVE = LivePages((7,), (RUN,))


@pytest.mark.parametrize(
    "live",
    [
        LivePages((7, 8), (RUN,)),
        LivePages((7,), (RUN, RUN)),
        LivePages((7,), ((PageRun(4096, PAGE, PAGE - 1),),)),
    ],
    ids=["blocks", "layers", "bytes"],
)
def test_pages_that_do_not_fit_are_refused(
    make_pair: Callable[..., DirectPair], live: LivePages
) -> None:
    pair = make_pair()
    pair.grant(3)
    assert ask(pair, live).cause == Cause.BAD_PARAMS.value
    assert pair.num_free() == (NUM_SLOTS, NUM_SLOTS)
    assert pair.script.requests == []


def test_producer_without_direct_placement_refuses() -> None:
    pair = Pair(FaultScript())
    pair.grant(3)
    assert ask(pair, LIVE).cause == Cause.BAD_PARAMS.value
    pair.stop()


def test_pages_outside_of_what_the_consumer_registered_are_not_written(
    make_pair: Callable[..., DirectPair],
) -> None:
    pair = make_pair()
    pair.grant(3)
    assert ask(pair, LIVE).cause == Cause.TRANSFER_FAILED.value


def test_fetch_that_waited_for_a_slot_too_long_is_not_begun(
    make_pair: Callable[..., DirectPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer may have given it up, and have given the pages away."""
    pair = make_pair()
    monkeypatch.setattr(TransferEngine, "LATE_WRITE_S", 0.0)
    pair.grant(9)
    assert pair.load((0,), (17,)).cause == Cause.DEADLINE.value
    assert pair.script.requests == []


def ask(pair: Pair, live: LivePages) -> Fetched:
    """One fetch of one page by hand, and its answer."""
    ticket, sessions = pair.admit().ticket, {"fake": pair.our_engine.session}
    fetch = Fetch(1, "t", "e", ticket, 0, 0, 1, (0,), sessions, 0, PAGE, 0, live=live)
    with connected(pair.server.page_server.endpoint) as peer:
        peer.send(encode(fetch))
        answer = decode_data(peer.receive())
    assert isinstance(answer, Fetched)
    return answer
