# SPDX-License-Identifier: Apache-2.0
"""Loader and data server together: real sockets and threads, scripted writes, one process."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.pages import NUM_BLOCKS, NUM_LAYERS, PAGE, DevicePages, Pages, one_group
from tests.unit.transfer.raw_peers import (
    LIMIT_S,
    RawServer,
    connected,
    silent_server,
    wait_until,
)
from vllm_ascend_pd.backends.block_copy import (
    BlockCopier,
    GroupPages,
    PageLayout,
    WorkerPages,
    make_block_copier,
)
from vllm_ascend_pd.backends.direct_placement import page_regions
from vllm_ascend_pd.backends.fake_engine import FakeTransferEngine
from vllm_ascend_pd.backends.fault_script import Fault, FaultKind, FaultScript, WriteRequest
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import Transports
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import NO_BLOCK, LoadBlocks
from vllm_ascend_pd.net import peers
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer import send
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.live_pages import DirectPlacement
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.types import Cause, Endpoint, LeaseRef, LoadId
from vllm_ascend_pd.wire import Fetch, Fetched, Progress, Worker, decode_data, encode

SLOT_BYTES = 4 * PAGE
NUM_SLOTS = 4
NEVER = Fault(FaultKind.NEVER)


class Pair:
    """A producer's and a consumer's data side."""

    def __init__(
        self,
        script: FaultScript,
        write_timeout_s: float = 5.0,
        copier: BlockCopier | None = None,
        trust: Trust | None = None,
        our_trust: Trust | None = None,
        placement: DirectPlacement | None = None,
        make_pages: Callable[[int], Pages | DevicePages] | None = None,
        make_groups: Callable[[PageLayout], Sequence[GroupPages]] = one_group,
        **loader: Any,
    ) -> None:
        """``loader``: further options of the consumer's."""
        self.trust = trust or Trust()
        self.our_trust = our_trust or Trust()
        self.time_passed = 0.0  # at each look at the clock of slots: lets quarantines end
        self._skipped = 0.0
        self._ahead_s = 0.0
        copier = copier or PythonBlockCopier()
        make_pages = make_pages or Pages
        self.theirs = make_pages(1)
        self.ours = make_pages(2)
        is_direct = placement is not None
        self.engine = FakeTransferEngine(script, is_direct)
        self.our_engine = FakeTransferEngine(direct_placement=is_direct)
        if is_direct:
            names = {f"layer {index}": range(index, index + 1) for index in range(NUM_LAYERS)}
            for engine, pages in ((self.engine, self.theirs), (self.our_engine, self.ours)):
                for addr, num_bytes in page_regions(pages.layout, NUM_BLOCKS, names, 1):
                    engine.register(addr, num_bytes)
        self.send_pool = StagingPool(self.engine, NUM_SLOTS, SLOT_BYTES, self._clock)
        self.receive_pool = StagingPool(self.our_engine, NUM_SLOTS, SLOT_BYTES, self._clock)
        self.grants = Grants()
        self.server = DataServer(
            host="127.0.0.1",
            transports=Transports({"fake": self.engine}),
            pages=WorkerPages(copier, make_groups(self.theirs.layout)),
            pool=self.send_pool,
            grants=self.grants,
            allows_host=lambda host: host == "fake",
            write_timeout_s=write_timeout_s,
            trust=self.trust,
            clock=self.clock,
        )
        self.loader = PeerLoader(
            {"fake": self.our_engine.session},
            WorkerPages(copier, make_groups(self.ours.layout)),
            self.receive_pool,
            self.our_trust,
            placement=placement,
            clock=self.clock,
            **loader,
        )
        self.server.start()
        self.loader.start()
        self._load_ids = count(1)
        self.generation = 1
        """Of the leases that are granted and loaded from."""

    def _clock(self) -> float:
        self._skipped += self.time_passed
        return self.clock() + self._skipped

    def clock(self) -> float:
        """Of both threads."""
        return time.monotonic() + self._ahead_s

    def pass_time(self, seconds: float) -> None:
        """It is later by so much, and both threads have noticed that."""
        self._ahead_s += seconds
        for thread in (self.loader, self.server) * 2:
            if thread.is_alive():
                turn = threading.Event()
                thread.submit(turn.set)
                assert turn.wait(LIMIT_S)

    def lose_time(self, seconds: float) -> None:
        """As on a thread that had no turn for so long."""
        self._ahead_s += seconds

    def grant(self, *block_ids: int, transfer_id: str = "t", epoch: str = "e") -> None:
        self.grants.begin_step(
            [Grant(self.lease(transfer_id), epoch, (block_ids,), len(block_ids), len(block_ids))]
        )
        self.grants.end_step()

    def lease(self, transfer_id: str = "t") -> LeaseRef:
        return LeaseRef(transfer_id, self.generation)

    def admit(self, transfer_id: str = "t", end: int = NUM_BLOCKS) -> Worker:
        """What a consumer is told whose open is accepted."""
        return self.server.page_server.admit(self.lease(transfer_id), end)

    def spec(
        self,
        indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        *,
        transfer_id: str = "t",
        epoch: str = "e",
        has_tail: bool = False,
        in_step: bool = True,
        timeout_s: float = LIMIT_S,
        peer: Endpoint | None = None,
        admitted: Worker | None = None,
    ) -> LoadSpec:
        worker = admitted or self.admit(transfer_id)
        if peer is not None:
            worker = Worker(peer.host, peer.port, worker.ticket, peer.key)
        return LoadSpec(
            load_id=LoadId(next(self._load_ids)),
            peers=(worker,),
            transfer_id=transfer_id,
            epoch=epoch,
            blocks=(LoadBlocks(0, indices, block_ids, has_tail),),
            in_step=in_step,
            timeout_s=timeout_s,
        )

    def run(self, spec: LoadSpec) -> LoadResult:
        self.loader.start_load(spec)
        self.loader.wait_all()
        (result,) = self.loader.take_results()
        return result

    def num_free(self) -> tuple[int, int]:
        return self.send_pool.num_free, self.receive_pool.num_free

    def stop(self) -> None:
        self.loader.stop()
        self.server.stop()
        assert not self.loader.is_alive()
        assert not self.server.is_alive()
        self.send_pool.close()
        self.receive_pool.close()
        self.engine.close()
        self.our_engine.close()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(
        script: str | FaultScript = "",
        write_timeout_s: float = 5.0,
        copier: BlockCopier | None = None,
    ) -> Pair:
        parsed = FaultScript.parse(script) if isinstance(script, str) else script
        pairs.append(Pair(parsed, write_timeout_s, copier))
        return pairs[-1]

    yield make
    for pair in pairs:
        num_errors = pair.server.num_errors, pair.loader.num_errors
        pair.time_passed = 1000.0
        pair.stop()
        assert num_errors == (0, 0)
        assert pair.engine.num_regions() == pair.our_engine.num_regions() == 0


def expect_loaded(pair: Pair, indices_from: tuple[int, ...], to: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(
        pair.ours.bytes[:, list(to)], pair.theirs.bytes[:, list(indices_from)]
    )


# Data.


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 13])
@pytest.mark.parametrize("has_tail", [False, True])
def test_pages_arrive_and_no_other_is_touched(
    make_pair: Callable[..., Pair], num_blocks: int, has_tail: bool
) -> None:
    pair = make_pair()
    before = pair.ours.bytes.copy()
    sources = tuple(range(20, 20 - num_blocks, -1))
    targets = tuple(range(3, 3 + 2 * num_blocks, 2))
    pair.grant(*sources)
    result = pair.run(pair.spec(tuple(range(num_blocks)), targets, has_tail=has_tail))
    assert result.cause == ""
    assert result.num_bytes == NUM_LAYERS * num_blocks * PAGE
    expect_loaded(pair, sources, targets)
    others = [block for block in range(NUM_BLOCKS) if block not in targets]
    np.testing.assert_array_equal(pair.ours.bytes[:, others], before[:, others])
    wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))


def test_nothing_is_kept_of_a_peer_whose_connection_was_idle(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that starts again is another one, and they do so for weeks."""
    pair = make_pair()
    pair.grant(9)
    assert pair.run(pair.spec((0,), (0,))).cause == ""
    monkeypatch.setattr(peers, "IDLE_CONNECTION_S", 0.0)
    wait_until(lambda: bool(pair.loader.submit(lambda: None) or not pair.loader.peers))
    wait_until(lambda: not pair.loader._heard_at)


def test_slots_in_which_nothing_was_written_are_free_at_once(
    make_pair: Callable[..., Pair],
) -> None:
    """Steps wait for slots, also those that load from others."""
    pair = make_pair()
    pair.server._transports.engines.clear()
    pair.grant(9)
    assert pair.run(pair.spec((0,), (0,))).cause == Cause.TRANSFER_FAILED.value
    pair.pass_time(0.0)
    assert pair.num_free() == (NUM_SLOTS, NUM_SLOTS)


def test_some_of_a_leases_blocks_can_be_loaded(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(9, 8, 7, 6)
    assert pair.run(pair.spec((1, 3), (0, 1))).cause == ""
    expect_loaded(pair, (8, 6), (0, 1))


def test_several_loads_share_the_slots(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("delay(3)*")
    pair.grant(*range(16))
    specs = [pair.spec(tuple(range(i, i + 5)), tuple(range(i, i + 5))) for i in (0, 5, 10)]
    for spec in specs:
        pair.loader.start_load(spec)
    pair.loader.wait_all()
    assert [result.cause for result in pair.loader.take_results()] == ["", "", ""]
    expect_loaded(pair, tuple(range(15)), tuple(range(15)))
    assert pair.loader.num_loads() == 0


def test_slow_writes_only_take_longer(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("delay(20)*")
    pair.grant(*range(6))
    assert pair.run(pair.spec(tuple(range(6)), tuple(range(6)))).cause == ""
    expect_loaded(pair, tuple(range(6)), tuple(range(6)))


# Waiting.


def test_layer_is_in_place_before_later_layers(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(FaultScript([Fault(FaultKind.OK)] * 2, then=NEVER), write_timeout_s=2.0)
    pair.grant(*range(4))
    spec = pair.spec((0, 1, 2, 3), (4, 5, 6, 7))
    pair.loader.start_load(spec)
    pair.loader.wait_layer(0)
    pair.loader.wait_layer(1)
    np.testing.assert_array_equal(pair.ours.bytes[:2, 4:8], pair.theirs.bytes[:2, 0:4])
    assert pair.loader.take_results() == []
    pair.loader.cancel(spec.load_id)
    assert [r.cause for r in pair.loader.take_results()] == [Cause.CANCELLED.value]


def test_tail_is_in_place_before_the_blocks(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(FaultScript([Fault(FaultKind.OK)], then=NEVER), write_timeout_s=2.0)
    pair.grant(*range(5))
    spec = pair.spec((0, 1, 2, 3, 4), (10, 11, 12, 13, 14), has_tail=True)
    pair.loader.start_load(spec)
    pair.loader.wait_tails()
    np.testing.assert_array_equal(pair.ours.bytes[:, 14], pair.theirs.bytes[:, 4])
    assert pair.loader.take_results() == []
    pair.loader.cancel(spec.load_id)
    assert pair.loader.num_loads() == 1


def test_parked_load_is_not_waited_for(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(FaultScript(then=NEVER), write_timeout_s=2.0)
    pair.grant(*range(4))
    spec = pair.spec((0, 1), (0, 1), in_step=False)
    pair.loader.start_load(spec)
    pair.loader.wait_layer(0)
    pair.loader.wait_tails()
    pair.loader.wait_all()
    assert pair.loader.take_results() == []
    pair.loader.cancel(spec.load_id)
    assert len(pair.loader.take_results()) == 1


def test_waiting_for_a_failed_load_returns(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("fail*")
    pair.grant(*range(4))
    pair.loader.start_load(pair.spec((0, 1), (0, 1)))
    for layer in range(NUM_LAYERS):
        pair.loader.wait_layer(layer)
    pair.loader.wait_all()
    assert [r.cause for r in pair.loader.take_results()] == [Cause.TRANSFER_FAILED.value]


# Faults.


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (FaultKind.FAIL, Cause.TRANSFER_FAILED),
        (FaultKind.DROP, Cause.CHECKSUM),
        (FaultKind.SHORT, Cause.CHECKSUM),
        (FaultKind.CORRUPT, Cause.CHECKSUM),
        (FaultKind.NEVER, Cause.DEADLINE),
        (FaultKind.LATE, Cause.TRANSFER_FAILED),
    ],
)
@pytest.mark.parametrize("num_good", [0, 3])
def test_fault_ends_the_load_with_its_cause(
    make_pair: Callable[..., Pair], kind: FaultKind, cause: Cause, num_good: int
) -> None:
    pair = make_pair(
        FaultScript([Fault(FaultKind.OK)] * num_good, then=Fault(kind)), write_timeout_s=1.0
    )
    pair.grant(*range(8))
    result = pair.run(pair.spec(tuple(range(8)), tuple(range(8))))
    assert result.cause == cause.value
    assert result.num_bytes < NUM_LAYERS * 8 * PAGE
    pair.time_passed = 1000.0
    wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))


def test_load_after_a_failed_one_succeeds(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("corrupt")
    pair.grant(*range(4))
    assert pair.run(pair.spec((0, 1), (0, 1))).cause == Cause.CHECKSUM.value
    assert pair.run(pair.spec((0, 1), (0, 1))).cause == ""
    expect_loaded(pair, (0, 1), (0, 1))


def test_slots_of_a_failed_write_rest(make_pair: Callable[..., Pair]) -> None:
    """Late bytes may still land in them."""
    pair = make_pair("late")
    pair.grant(*range(4))
    pair.run(pair.spec((0,), (0,)))
    wait_until(lambda: not pair.receive_pool.num_held)
    assert pair.receive_pool.num_free == NUM_SLOTS - 1
    pair.time_passed = 1000.0
    assert pair.num_free() == (NUM_SLOTS, NUM_SLOTS)


def test_late_write_reaches_no_page(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("late*")
    pair.grant(*range(8))
    assert pair.run(pair.spec(tuple(range(8)), tuple(range(8)))).cause
    after = pair.ours.bytes.copy()
    assert pair.engine.land_late_writes() > 0
    pair.time_passed = 1000.0
    assert pair.run(pair.spec((0,), (31,))).cause == Cause.TRANSFER_FAILED.value
    np.testing.assert_array_equal(pair.ours.bytes, after)


def test_piece_that_lands_after_the_end_reaches_no_page(make_pair: Callable[..., Pair]) -> None:
    gate = threading.Event()

    def choose(write: WriteRequest) -> Fault:
        assert gate.wait(LIMIT_S)
        return Fault(FaultKind.OK)

    pair = make_pair(FaultScript(choose=choose))
    pair.grant(*range(4))
    before = pair.ours.bytes.copy()
    spec = pair.spec((0, 1, 2), (0, 1, 2))
    pair.loader.start_load(spec)
    wait_until(lambda: pair.receive_pool.num_free < NUM_SLOTS)
    pair.loader.cancel(spec.load_id)
    assert [r.cause for r in pair.loader.take_results()] == [Cause.CANCELLED.value]
    gate.set()
    wait_until(lambda: pair.send_pool.num_free == NUM_SLOTS)
    # Another load goes through the same sockets, so what came before it has been handled.
    pair.run(pair.spec((3,), (31,)))
    np.testing.assert_array_equal(pair.ours.bytes[:, :31], before[:, :31])


def test_cancelled_load_gives_its_slots_back(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(FaultScript(then=NEVER), write_timeout_s=60.0)
    pair.grant(*range(8))
    spec = pair.spec(tuple(range(8)), tuple(range(8)), timeout_s=60.0)
    pair.loader.start_load(spec)
    wait_until(lambda: pair.receive_pool.num_free < NUM_SLOTS)
    pair.loader.cancel(spec.load_id)
    pair.pass_time(2 * pair.loader.answer_timeout_s)
    pair.time_passed = 1000.0
    wait_until(lambda: pair.receive_pool.num_free == NUM_SLOTS)
    assert [r.cause for r in pair.loader.take_results()] == [Cause.CANCELLED.value]


def test_cancel_of_an_ended_load_changes_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(0)
    spec = pair.spec((0,), (0,))
    pair.loader.start_load(spec)
    pair.loader.wait_all()
    pair.loader.cancel(spec.load_id)
    assert [r.cause for r in pair.loader.take_results()] == [""]


@pytest.fixture
def silent_peer() -> Iterator[Endpoint]:
    """A socket that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """A producer that takes every fetch and answers none."""
    with silent_server() as endpoint:
        yield endpoint


def test_silent_peer_ends_in_deadline(make_pair: Callable[..., Pair], silent: Endpoint) -> None:
    pair = make_pair()
    started = time.monotonic()
    assert pair.run(pair.spec((0,), (0,), timeout_s=0.2, peer=silent)).cause == Cause.DEADLINE.value
    assert 0.2 <= time.monotonic() - started < 5.0


def test_parked_load_meets_its_deadline_too(
    make_pair: Callable[..., Pair], silent: Endpoint
) -> None:
    pair = make_pair()
    pair.loader.start_load(pair.spec((0,), (0,), timeout_s=0.2, peer=silent, in_step=False))
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(pair.loader.take_results()) or results))
    assert [r.cause for r in results] == [Cause.DEADLINE.value]


def test_parked_load_of_a_peer_that_says_nothing_ends_long_before_its_deadline(
    make_pair: Callable[..., Pair], silent: Endpoint
) -> None:
    pair = make_pair()
    pair.loader.start_load(pair.spec((0,), (0,), timeout_s=1000.0, peer=silent, in_step=False))
    for _ in range(6):
        pair.pass_time(pair.loader.answer_timeout_s / 2)
    assert [r.cause for r in pair.loader.take_results()] == [Cause.PEER_UNREACHABLE.value]
    pair.time_passed = 1000.0
    wait_until(lambda: pair.receive_pool.num_free == NUM_SLOTS)


def pass_time_in_which_it_answers(pair: Pair, seconds: float) -> None:
    """It is asked, and its answer is read."""
    heard_at = dict(pair.loader._heard_at)
    pair.pass_time(seconds)
    wait_until(lambda: pair.loader._heard_at != heard_at)


def test_parked_load_of_a_peer_that_writes_slowly_goes_on(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(FaultScript(then=NEVER), write_timeout_s=1000.0)
    pair.grant(0)
    spec = pair.spec((0,), (0,), timeout_s=1000.0, in_step=False)
    pair.loader.start_load(spec)
    wait_until(lambda: pair.receive_pool.num_free < NUM_SLOTS)
    for _ in range(20):
        pass_time_in_which_it_answers(pair, pair.loader.answer_timeout_s)
    assert pair.loader.take_results() == []
    pair.loader.cancel(spec.load_id)
    assert len(pair.loader.take_results()) == 1


def test_load_of_a_step_does_not_wait_for_a_peer_that_says_nothing(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(FaultScript(then=NEVER), write_timeout_s=1000.0)
    pair.grant(0)
    pair.loader.start_load(pair.spec((0,), (0,), timeout_s=1000.0))
    wait_until(lambda: pair.receive_pool.num_free < NUM_SLOTS)
    pair.pass_time(pair.loader.answer_timeout_s)
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(pair.loader.take_results()) or results))
    assert [result.cause for result in results] == [Cause.DEADLINE.value]


def test_parked_load_goes_on_after_its_own_process_was_stopped(
    make_pair: Callable[..., Pair],
) -> None:
    """Its peer has answered all that it was asked: it is asked again before it is given up."""
    pair = make_pair(FaultScript(then=NEVER), write_timeout_s=1000.0)
    pair.grant(0)
    spec = pair.spec((0,), (0,), timeout_s=1000.0, in_step=False)
    pair.loader.start_load(spec)
    wait_until(lambda: pair.receive_pool.num_free < NUM_SLOTS)
    pass_time_in_which_it_answers(pair, pair.loader.answer_timeout_s)
    pass_time_in_which_it_answers(pair, 20 * pair.loader.answer_timeout_s)
    assert pair.loader.take_results() == []
    pair.loader.cancel(spec.load_id)
    assert len(pair.loader.take_results()) == 1


def test_piece_that_came_in_time_counts_however_late_it_is_read(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread had no turn: the interpreter was busy with something else."""
    pair = make_pair()
    pair.grant(0)
    assert pair.run(pair.spec((0,), (1,))).cause == "", "it connects"
    peers = pair.loader.peers
    send = peers.send

    def get_no_turn() -> None:
        (connection,) = peers.connections.values()
        answer = select.poll()  # its descriptor may be beyond what select() takes
        answer.register(connection.stream, select.POLLIN)
        assert answer.poll(LIMIT_S * 1000)
        pair.lose_time(2 * pair.loader.answer_timeout_s)

    def send_and_get_no_turn(peer: Endpoint, payload: bytes) -> bool:
        pair.loader.submit(get_no_turn)
        return send(peer, payload)

    monkeypatch.setattr(peers, "send", send_and_get_no_turn)
    assert pair.run(pair.spec((0,), (0,))).cause == ""
    assert pair.loader.num_errors == 0
    expect_loaded(pair, (0,), to=(0,))


def test_peer_that_talks_of_something_else_keeps_no_slot(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    with RawServer() as server:
        spec = pair.spec((0,), (0,), peer=server.endpoint, in_step=False)
        pair.loader.start_load(spec)
        peer = server.accept()
        peer.receive()
        pair.loader.cancel(spec.load_id)
        pair.time_passed = 1000.0
        for _ in range(4):
            heard_at = dict(pair.loader._heard_at)
            peer.send(encode(Progress("another", 1, 1, 0)))
            wait_until(lambda before=heard_at: pair.loader._heard_at != before)
            pair.pass_time(pair.loader.answer_timeout_s / 2)
        assert pair.receive_pool.num_free == NUM_SLOTS


def test_peer_that_is_not_there_is_noticed_at_once(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    spec = pair.spec((0,), (0,), timeout_s=60.0, peer=Endpoint("127.0.0.1", 9))
    started = time.monotonic()
    assert pair.run(spec).cause == Cause.PEER_UNREACHABLE.value
    assert time.monotonic() - started < LIMIT_S
    pair.grant(0)
    assert pair.run(pair.spec((0,), (0,))).cause == ""


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "parked"])
def test_silent_peer_leaves_slots_for_another(
    make_pair: Callable[..., Pair], silent: Endpoint, in_step: bool
) -> None:
    pair = make_pair()
    pair.grant(*range(8))
    stuck = pair.spec(tuple(range(8)), tuple(range(8)), peer=silent, timeout_s=60.0, in_step=False)
    pair.loader.start_load(stuck)
    wait_until(lambda: pair.receive_pool.num_free < NUM_SLOTS)
    other = pair.spec(tuple(range(8)), tuple(range(8, 16)), timeout_s=10.0, in_step=in_step)
    pair.loader.start_load(other)
    pair.loader.wait_all()
    results: list[LoadResult] = []
    wait_until(lambda: bool(results.extend(pair.loader.take_results()) or results))
    assert [(r.load_id, r.cause) for r in results] == [(other.load_id, "")]
    pair.loader.cancel(stuck.load_id)
    assert len(pair.loader.take_results()) == 1


def test_step_does_not_wait_for_slots_of_parked_loads(
    make_pair: Callable[..., Pair], silent: Endpoint
) -> None:
    pair = make_pair()
    pair.grant(*range(8))
    blocks = tuple(range(8))
    stuck = [
        pair.spec(blocks, blocks, peer=silent, timeout_s=60.0, in_step=False) for _ in range(3)
    ]
    for spec in stuck:
        pair.loader.start_load(spec)
    pair.pass_time(0.0)  # the loader has looked
    assert pair.receive_pool.num_free
    assert pair.run(pair.spec(blocks, tuple(range(8, 16)))).cause == ""
    for spec in stuck:
        pair.loader.cancel(spec.load_id)
    assert len(pair.loader.take_results()) == 3


def test_slot_that_becomes_free_is_first_a_steps(
    make_pair: Callable[..., Pair], silent: Endpoint
) -> None:
    pair = make_pair()
    pair.grant(*range(8))
    blocks = tuple(range(8))
    stuck = pair.spec(blocks, blocks, peer=silent, timeout_s=60.0, in_step=False)
    spec = pair.spec(blocks, tuple(range(8, 16)))
    with ExitStack() as held:
        first, *others = [pair.receive_pool.acquire() for _ in range(NUM_SLOTS)]
        assert first is not None
        for slot in others:
            assert slot is not None
            held.enter_context(slot)
        with first:
            pair.loader.start_load(stuck)
            pair.loader.start_load(spec)
            pair.pass_time(0.0)  # the loader has begun both
        pair.pass_time(0.0)  # the loader has looked
        pair.loader.wait_all()
        assert [(r.load_id, r.cause) for r in pair.loader.take_results()] == [(spec.load_id, "")]
    pair.loader.cancel(stuck.load_id)
    assert len(pair.loader.take_results()) == 1


# What is refused.


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"transfer_id": "unknown"}, Cause.LEASE_EXPIRED),
        ({"epoch": "before"}, Cause.WRONG_EPOCH),
    ],
)
def test_load_is_refused_with_its_cause(
    make_pair: Callable[..., Pair], wrong: dict[str, str], cause: Cause
) -> None:
    pair = make_pair()
    pair.grant(0)
    before = pair.ours.bytes.copy()
    result = pair.run(pair.spec((0,), (0,), **wrong))  # type: ignore[arg-type]
    assert result.cause == cause.value
    np.testing.assert_array_equal(pair.ours.bytes, before)
    wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))


def test_index_beyond_the_lease_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(0, 1)
    assert pair.run(pair.spec((2,), (0,))).cause == Cause.BAD_PARAMS.value
    assert pair.run(pair.spec((-1,), (0,))).cause == Cause.BAD_PARAMS.value


def test_block_that_its_producer_has_given_up_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(NO_BLOCK, 1)
    before = pair.ours.bytes.copy()
    assert pair.run(pair.spec((0, 1), (0, 1))).cause == Cause.EVICTED.value
    np.testing.assert_array_equal(pair.ours.bytes, before)
    assert pair.run(pair.spec((1,), (1,))).cause == ""


def test_revoked_grant_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(0, 1)
    assert pair.run(pair.spec((0,), (0,))).cause == ""
    pair.grants.discard([pair.lease()])
    assert len(pair.grants) == 0
    assert pair.run(pair.spec((1,), (1,))).cause == Cause.LEASE_EXPIRED.value


def ask(pair: Pair, *frames: bytes) -> Fetched:
    """Send frames as a peer would; the server's answer to the last one."""
    with connected(pair.server.page_server.endpoint) as peer:
        peer.send(*frames)
        answer = decode_data(peer.receive())
    assert isinstance(answer, Fetched)
    return answer


def make_fetch(pair: Pair) -> Fetch:
    return Fetch(
        fetch_id=1,
        transfer_id="t",
        epoch="e",
        ticket=pair.admit().ticket,
        group=0,
        first_layer=0,
        num_layers=1,
        block_indices=(0,),
        sessions={"fake": pair.our_engine.session},
        address=pair.receive_pool.region.base,
        num_bytes=PAGE,
        seed=5,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_layer": -1},
        {"group": 1},
        {"group": -1},
        {"first_layer": NUM_LAYERS},
        {"num_layers": 0},
        {"num_layers": -1},
        {"num_layers": NUM_LAYERS + 1},
        {"num_layers": 1 << 62},
        {"block_indices": ()},
        {"block_indices": (0,) * 5, "num_bytes": 5 * PAGE},
        {"block_indices": (1 << 62,)},
        {"num_bytes": PAGE - 1},
        {"num_bytes": 0},
        {"sessions": {"fake": "192.0.2.1:5"}},
        {"sessions": {"fake": ""}},
        {"seed": -1},
        {"seed": (1 << 64) - 1},
        {"address": -1},
        {"address": 0},
    ],
    ids=str,
)
def test_fetch_that_makes_no_sense_is_answered_and_holds_no_slot(
    make_pair: Callable[..., Pair], wrong: dict[str, object]
) -> None:
    pair = make_pair(copier=make_block_copier())  # the native one where it is built
    pair.grant(0, 1)
    answer = ask(pair, encode(msgspec.structs.replace(make_fetch(pair), **wrong)))
    assert answer.fetch_id == 1
    if "seed" not in wrong:
        assert answer.cause
    pair.time_passed = 1000.0
    wait_until(lambda: pair.send_pool.num_free == NUM_SLOTS)


def test_garbage_is_refused_and_the_next_fetch_served(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(0, 1)
    good = encode(make_fetch(pair))
    bad_text = good.replace(b"\xa1t", b"\xa1\xff")
    assert bad_text != good
    answer = ask(pair, b"", b"\xc1", b"garbage", bad_text, encode(Fetched(1, 2)), good)
    assert answer.cause == ""
    assert pair.trust.take_refused() == {"malformed": 4}


def test_last_slot_is_for_a_peer_without_a_write(make_pair: Callable[..., Pair]) -> None:
    """Writes to a peer that is gone take long to fail."""
    gone_at: list[int] = []

    def choose(write: WriteRequest) -> Fault:
        return NEVER if write.dst_addr in gone_at else Fault(FaultKind.OK)

    pair = make_pair(FaultScript(choose=choose), write_timeout_s=60.0)
    pair.grant(0, 1)
    fetch = make_fetch(pair)
    gone_at.append(fetch.address)
    with connected(pair.server.page_server.endpoint) as gone:
        for fetch_id in range(2, 2 + NUM_SLOTS):
            gone.send(encode(msgspec.structs.replace(fetch, fetch_id=fetch_id)))
        wait_until(lambda: pair.send_pool.num_free == 1)
        there = pair.receive_pool.region.base + SLOT_BYTES
        answer = ask(pair, encode(msgspec.structs.replace(fetch, address=there)))
        assert (answer.fetch_id, answer.cause) == (1, "")


def test_fetches_that_wait_take_so_much_memory_only(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(FaultScript(then=NEVER), write_timeout_s=60.0)
    pair.grant(*range(NUM_BLOCKS))
    fetch = make_fetch(pair)
    long = msgspec.structs.replace(fetch, block_indices=(0,) * 100_000)
    monkeypatch.setattr(send, "_MAX_QUEUED_BYTES", 4 * len(encode(long)))
    with connected(pair.server.page_server.endpoint) as peer:
        for fetch_id in range(1, NUM_SLOTS):
            peer.send(encode(msgspec.structs.replace(fetch, fetch_id=fetch_id)))
        wait_until(lambda: pair.send_pool.num_free == 1)
        for fetch_id in range(11, 17):
            peer.send(encode(msgspec.structs.replace(long, fetch_id=fetch_id)))
        answers = [decode_data(peer.receive()) for _ in range(2)]
    assert [(a.fetch_id, a.cause) for a in answers if isinstance(a, Fetched)] == [
        (15, Cause.TRANSFER_FAILED.value),
        (16, Cause.TRANSFER_FAILED.value),
    ]
    assert pair.server.counts()["fetches"] == 4
    pair.pass_time(60.0)
    wait_until(lambda: not pair.server.counts()["fetches"])
    assert pair.server._num_queued_bytes == 0


def test_unregistered_address_fails_the_write_only(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.grant(0)
    fetch = msgspec.structs.replace(make_fetch(pair), address=4096)
    assert ask(pair, encode(fetch)).cause == Cause.TRANSFER_FAILED.value
    assert pair.run(pair.spec((0,), (0,))).cause == ""


# What raises: a bug here or in a library. The peer gets its answer, and nothing is kept.


class Raising:
    """Stands before a method, and raises instead of it for as long as it is told to."""

    def __init__(self, target: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.raises = True
        self._call = getattr(target, name)
        monkeypatch.setattr(target, name, self)

    def __call__(self, *args: object, **options: object) -> object:
        if self.raises:
            raise RuntimeError("scripted")
        return self._call(*args, **options)


@pytest.mark.parametrize("name", ["gather", "submit_write", "poll", "route", "look"])
def test_producer_that_raises_answers_and_serves_the_next(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair = make_pair()
    targets = {"gather": pair.server._copier, "route": pair.server._transports, "look": pair.grants}
    raising = Raising(targets.get(name, pair.engine), name, monkeypatch)
    pair.grant(*range(16))
    for _ in range(2 * NUM_SLOTS):
        assert pair.run(pair.spec((0, 1), (0, 1))).cause == Cause.TRANSFER_FAILED.value
        pair.time_passed += 1000.0
    wait_until(lambda: pair.send_pool.num_free == NUM_SLOTS)
    assert sum(pair.server.take_errors().values()) >= 2 * NUM_SLOTS
    raising.raises = False
    assert pair.run(pair.spec((0, 1, 2), (0, 1, 2))).cause == ""
    expect_loaded(pair, (0, 1, 2), (0, 1, 2))
    pair.server.num_errors = 0


@pytest.mark.parametrize("name", ["scatter", "send", "offer"])
def test_consumer_that_raises_ends_the_load_and_loads_the_next(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair = make_pair()
    loader = pair.loader
    targets = {"scatter": loader._copier, "send": loader.peers, "offer": loader._rings}
    raising = Raising(targets[name], name, monkeypatch)
    pair.grant(*range(16))
    for _ in range(2 * NUM_SLOTS):
        assert pair.run(pair.spec((0, 1), (0, 1))).cause == Cause.TRANSFER_FAILED.value
        wait_until(lambda: pair.num_free() == (NUM_SLOTS, NUM_SLOTS))
    assert loader.take_errors() == {"pd-loader": loader.num_errors}
    raising.raises = False
    assert pair.run(pair.spec((0, 1, 2), (0, 1, 2))).cause == ""
    expect_loaded(pair, (0, 1, 2), (0, 1, 2))
    loader.num_errors = 0
