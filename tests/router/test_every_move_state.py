# SPDX-License-Identifier: Apache-2.0
"""Twenty streams move at once, and when one of them is in a certain state their engines die or
stop, or their clients leave: each client that stays gets what one engine gives, and nothing of it
is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from tests.router.broken_streams import PATIENT, text, uninterrupted
from tests.router.harness import Deployment, run, until
from tests.router.moving import Client, is_whole, name
from tests.router.scripted_engine import LIVE, ScriptedEngine
from tests.router.test_live_moves import movable
from vllm_ascend_pd.registration import State
from vllm_ascend_pd.router.config import Retries
from vllm_ascend_pd.router.move_states import ENDS, MoveState
from vllm_ascend_pd.router.moves import Move, Moves

NUM_STREAMS = 20
NUM_TOKENS = 400
"""More than come before a test hurries."""
CONFIG = replace(
    PATIENT, retries=Retries(max_attempts=5), timeouts=replace(PATIENT.timeouts, idle_s=2)
)
IMPATIENT = replace(CONFIG, timeouts=replace(CONFIG.timeouts, first_token_s=2, keep_alive_s=2))
"""An engine that stops is given up within the test."""


@dataclass
class Twenty:
    """Streams of the first engine, which move to the second one; a third one is there, too. The
    target copies one of them, for scripted streams have one name, and is told the others' tokens.
    """

    d: Deployment
    source: ScriptedEngine
    target: ScriptedEngine
    clients: list[Client] = field(default_factory=list)

    async def begin(self) -> None:
        self._say("draining")
        self.clients += [Client(self.d, f"r{i}", max_tokens=NUM_TOKENS) for i in range(NUM_STREAMS)]
        for client in self.clients:
            await client.has(3)
        assert self.source.num_in_progress == NUM_STREAMS
        self._say("ready")

    async def expect_the_streams(self, num_late: int) -> None:
        """Whole; so many at most may have waited in vain for the engine that had copied them."""
        streams = [await client.events() for client in self.clients]
        late = [got for got in streams if not is_whole(got, self.source)]
        assert len(late) <= num_late
        for got in late:
            assert got[-1]["error"]["type"] == "broken_stream"
            assert text(uninterrupted(self.source.received[0])).startswith(text(got[:-1]))

    def hurry(self) -> None:
        """All engines but those that have stopped."""
        for engine in self.d.decodes:
            if engine.port in LIVE:
                engine.token_s = 0

    def _say(self, state: State) -> None:
        """Of all engines but the first."""
        registry = self.d.router.registry
        for engine in self.d.decodes[1:]:
            spec = registry.get(name(engine)).spec
            registry.put(msgspec.structs.replace(spec, state=state))

    async def move(self) -> None:
        """All of them, as an operator asks, who may come late."""

        async def one(client: Client) -> None:
            url = f"{self.d.url}/requests/{client.request_id}/move"
            async with self.d.http.post(url, json={"to": name(self.target)}) as response:
                assert response.status in (200, 404)
                await response.read()

        await asyncio.gather(*map(one, self.clients))


def stop(engine: ScriptedEngine) -> None:
    """As a process that gets SIGSTOP: its connections stay, and nothing comes."""
    LIVE.pop(engine.port)
    engine.token_s = 1000
    engine.copy_s = 1000
    engine.health_hangs = True


async def source_is_killed(twenty: Twenty) -> None:
    await twenty.source.stop()


async def target_is_killed(twenty: Twenty) -> None:
    await twenty.target.stop()


async def both_are_killed(twenty: Twenty) -> None:
    await asyncio.gather(twenty.source.stop(), twenty.target.stop())


async def source_stops(twenty: Twenty) -> None:
    stop(twenty.source)


async def target_stops(twenty: Twenty) -> None:
    stop(twenty.target)


async def clients_leave(twenty: Twenty) -> None:
    tasks = [client.task for client in twenty.clients]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


ACTS = [
    source_is_killed,
    target_is_killed,
    both_are_killed,
    source_stops,
    target_stops,
    clients_leave,
]
STATES = [state for state in MoveState if state not in ENDS or state is MoveState.MOVED]


def when_moves_change(patch: pytest.MonkeyPatch, seen: Callable[[Move], None]) -> None:
    """``seen`` is told of each move that has begun, and then of each of its states."""
    start, advance = Moves.start, Move.advance

    def started(moves: Moves, *order: Any) -> Move | str:
        move = start(moves, *order)
        if isinstance(move, Move):
            seen(move)
        return move

    def advanced(move: Move, *event: Any) -> None:
        advance(move, *event)
        seen(move)

    patch.setattr(Moves, "start", started)
    patch.setattr(Move, "advance", advanced)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.value)
def test_twenty_streams_go_on(
    monkeypatch: pytest.MonkeyPatch,
    state: MoveState,
    act: Callable[[Twenty], Awaitable[None]],
) -> None:
    async def test() -> None:
        config = IMPATIENT if act in (source_stops, target_stops) else CONFIG
        async with movable(3, config, copy_s=0.05) as d:
            twenty = Twenty(d, *d.decodes[:2])
            await twenty.begin()
            twenty.target.token_s = 5 * twenty.source.token_s
            acting: asyncio.Future[None] | None = None

            def seen(move: Move) -> None:
                nonlocal acting
                if move.state is state and acting is None:
                    acting = asyncio.ensure_future(act(twenty))

            when_moves_change(monkeypatch, seen)
            await twenty.move()
            assert acting is not None
            await acting
            twenty.hurry()
            if act is not clients_leave:
                await twenty.expect_the_streams(num_late=act is target_stops)
            await until(lambda: not d.router.moves.running, "requests left")
            assert all(i.num_admitted == 0 for i in d.router.registry)

    run(test)
