# SPDX-License-Identifier: Apache-2.0
"""What a consumer learns of its producers, and when it leaves one alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.clock import Clock
from vllm_ascend_pd.engine.scheduler.known_peers import KnownPeer, KnownPeers
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.types import Cause, Endpoint, LoadId

MAX_STEP_MS = 50.0
PEER, OTHER = Endpoint("10.0.0.1", 1, "a"), Endpoint("10.0.0.2", 1, "b")


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.peers = KnownPeers(3, self.clock)
        self.asked: list[Any] = []

    @property
    def peer(self) -> KnownPeer:
        return self.peers.of(PEER)

    def asks(self) -> bool:
        """Whether the producer of one more prompt is asked for it; it is under way then."""
        prompt: Any = SimpleNamespace(is_under_way=True, is_parked=False)
        prompt.load_beside_steps = lambda: setattr(prompt, "is_parked", True)
        is_asked = self.peer.may_be_asked(prompt)
        if is_asked:
            self.asked.append(prompt)
        return is_asked

    def end(
        self, cause: Cause | None = None, in_step: bool = False, ms: float = 1.0, kb: float = 0
    ) -> bool:
        result = LoadResult(LoadId(1), cause.value if cause else "", int(kb * 1000), ms)
        return self.peer.load_ended(result, MAX_STEP_MS if in_step else None)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    "cause", [Cause.PEER_UNREACHABLE, Cause.TRANSFER_FAILED, Cause.CHECKSUM, Cause.DEADLINE]
)
def test_peer_that_fails_several_times_in_a_row_is_left_alone(world: World, cause: Cause) -> None:
    assert [world.end(cause) for _ in range(2)] == [False, False]
    assert world.asks()
    assert world.end(cause)
    assert not world.peer.is_well
    assert not world.asks()
    assert world.peer.cause == cause.value
    assert world.peers.of(OTHER).is_well


def test_load_that_comes_in_between_counts(world: World) -> None:
    for _ in range(3):
        assert not world.end(Cause.DEADLINE)
        assert not world.end(Cause.DEADLINE)
        assert not world.end()
    assert world.peer.is_well


def test_peer_for_which_a_step_has_waited_in_vain_is_left_alone_at_once(world: World) -> None:
    assert world.end(Cause.DEADLINE, in_step=True, ms=5000.0)
    assert not world.asks()


@pytest.mark.parametrize(
    "cause", [Cause.CANCELLED, Cause.LEASE_EXPIRED, Cause.WRONG_EPOCH, Cause.INCOMPATIBLE]
)
def test_answer_of_a_peer_that_is_well_counts_against_none(world: World, cause: Cause) -> None:
    assert not any(world.end(cause, in_step=True) for _ in range(10))
    assert world.asks()


def test_peer_that_is_left_alone_is_tried_by_one_at_a_time_beside_the_steps(world: World) -> None:
    assert world.asks()
    assert not world.asked[-1].is_parked
    world.end(Cause.DEADLINE, in_step=True)
    assert not world.asks()
    world.clock.now += world.peer.backoff_s
    assert world.asks()
    assert world.asked[-1].is_parked
    assert not world.asks()
    world.asked[-1].is_under_way = False  # its client has left
    assert world.asks()
    assert world.end()
    assert world.peer.is_well
    assert world.asks()
    assert not world.asked[-1].is_parked


def test_peer_that_fails_again_and_again_is_tried_ever_more_rarely(world: World) -> None:
    world.end(Cause.DEADLINE, in_step=True)
    waits = []
    for _ in range(6):
        waits.append(world.peer.backoff_s)
        world.clock.now += waits[-1] - 0.01
        assert not world.asks()
        world.clock.now += 0.02
        assert world.asks()
        world.end(Cause.DEADLINE)
        world.asked[-1].is_under_way = False
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_slow_peer_is_not_taken_for_another(world: World) -> None:
    for _ in range(30):
        world.end(ms=1000.0, kb=100)
    assert world.peer.speed.ms(100_000) == pytest.approx(1000.0, rel=0.1)
    other = KnownPeers(3).of(OTHER)
    assert other.speed.ms(100_000) < 1.0


def test_load_for_which_a_step_has_waited_too_long_counts_at_once(world: World) -> None:
    """Bit by bit it would be believed after a dozen steps that wait as long."""
    world.end(in_step=True, ms=1000.0, kb=100)
    assert world.peer.speed.ms(100_000) == pytest.approx(1000.0)
    world.end(ms=1.0, kb=100)  # a good one beside the steps
    assert world.peer.speed.ms(100_000) < MAX_STEP_MS


def test_load_of_which_nothing_has_come_counts_as_slow(world: World) -> None:
    world.end(Cause.TRANSFER_FAILED, in_step=True, ms=2000.0)
    assert world.peer.speed.ms(100_000) > 1e6


def test_load_that_takes_a_little_longer_than_it_should_moves_the_mean_only(world: World) -> None:
    world.end(in_step=True, ms=100.0, kb=100)
    assert world.peer.speed.ms(100_000) < 1.0


def test_what_came_from_others_is_believed_of_one_that_is_new() -> None:
    peers = KnownPeers(3)
    for _ in range(30):
        peers.speed.note(100_000, 1000.0)
    assert peers.of(PEER).speed.ms(100_000) == pytest.approx(1000.0, rel=0.1)


def test_number_of_peers_is_bounded(world: World) -> None:
    """Requests name them."""
    world.end(Cause.DEADLINE, in_step=True)
    for port in range(1, 1024):
        world.peers.of(Endpoint("10.0.0.3", port))
    assert not world.peer.is_well
    for port in range(1, 1025):
        world.peers.of(Endpoint("10.0.0.3", port))
    assert world.peer.is_well
