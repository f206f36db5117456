# SPDX-License-Identifier: Apache-2.0
"""Listens to the KV events of every engine that publishes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from vllm_ascend_pd.router.deadlines import TIMED_OUT, timeout
from vllm_ascend_pd.router.prefix.index import Holders, IndexState, PrefixIndex

if TYPE_CHECKING:
    from vllm_ascend_pd.registration import KVEvents
    from vllm_ascend_pd.router.instances import Instance

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 2.0
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_REPLAY_IN_ALL_S = 30.0
_REPLAYS_AT_ONCE = 16
"""After a start of the router all engines have one for it, of up to 10,000 messages each."""
_MAX_SOCKETS = 1 << 16
"""An engine needs one; ZMQ's own limit is 1,023."""
_HIGH_WATER = 100_000
_HEARTBEAT_MS = 10_000
_HEARTBEATS = 3
"""So many without an answer, and a connection is made anew: its other end may be gone without a
word, with its host."""
_MAX_FRAME_BYTES = 64 << 20
_MAX_FRAMES = 16
"""Of one message; an event has 3, and a replayed one 4."""
_AT_ONCE = 4
"""Messages of one engine that are taken in one turn of the event loop: to wait for one costs more
than to read several that are there."""


class Subscriber:
    """One task per engine, from ``watch`` to ``forget``; what it hears is in the instance's
    ``prefix_index``. Event loop thread."""

    def __init__(self) -> None:
        self.holders = Holders()
        self._context: zmq.asyncio.Context | None = None
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._replays = asyncio.Semaphore(_REPLAYS_AT_ONCE)

    def watch(self, instance: Instance) -> None:
        instance.prefix_index = PrefixIndex(self.holders)
        if instance.spec.kv_events is not None:
            listening = self._listen(instance, instance.spec.kv_events)
            self._tasks[instance] = asyncio.ensure_future(listening)

    def forget(self, instance: Instance) -> None:
        index, instance.prefix_index = instance.prefix_index, None
        if index is not None:
            index.close()
        if task := self._tasks.pop(instance, None):
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for instance in list(self._tasks):
            self.forget(instance)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _listen(self, instance: Instance, events: KVEvents) -> None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        index = instance.prefix_index
        assert index is not None
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEATS * _HEARTBEAT_MS)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt_string(zmq.SUBSCRIBE, events.topic)
            socket.connect(events.endpoint)
            await self._replay(instance, events, index, 0)
            logger.info("%s: listening to %s", instance.instance_id, events.endpoint)
            while not index.is_closed:  # a wait that ends while it is cancelled goes on
                for frames in await _messages(socket):
                    if len(frames) != 3 or len(frames[1]) != 8:
                        continue
                    missing = index.first_missing(int.from_bytes(frames[1], "big"), frames[2])
                    if missing is not None:
                        await self._replay(instance, events, index, missing)
                    _receive(instance, index, frames[1], frames[2])
                await asyncio.sleep(0)  # a wait for what is there already gives nobody a turn
        except zmq.ZMQError as e:
            logger.warning("%s: no KV events: %s", instance.instance_id, e)
            index.forget(IndexState.FALLBACK)
        finally:
            socket.close(linger=0)

    async def _replay(
        self, instance: Instance, events: KVEvents, index: PrefixIndex, first: int
    ) -> None:
        """What was published from the message ``first`` on and has not come, as far as the engine
        still has it.
        """
        if events.replay_endpoint is not None:
            async with self._replays:
                await self._receive_again(instance, events.replay_endpoint, index, first)

    async def _receive_again(
        self, instance: Instance, endpoint: str, index: PrefixIndex, first: int
    ) -> None:
        due: int | None = first
        with contextlib.suppress(*TIMED_OUT):
            async with timeout(_REPLAY_IN_ALL_S):
                while due is not None:
                    due = await self._receive_from(instance, endpoint, index, due)

    async def _receive_from(
        self, instance: Instance, endpoint: str, index: PrefixIndex, first: int
    ) -> int | None:
        """The message to ask for next: vLLM leaves out those that its socket has no room for."""
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        due: int | None = None
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            socket.connect(endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with timeout(_REPLAY_TIMEOUT_S):
                    messages = await _messages(socket)
                for frames in messages:
                    if len(frames) != 4 or len(frames[2]) != 8 or frames[2] == _END_OF_REPLAY:
                        return None
                    seq = int.from_bytes(frames[2], "big")
                    if due is not None and seq > due:
                        return due
                    _receive(instance, index, frames[2], frames[3])
                    due = seq + 1
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)


async def _messages(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """The frames of the next one, and of those that have come behind it, up to ``_AT_ONCE``.

    Raises:
        zmq.ZMQError: one has more frames than any publisher sends.
    """
    there: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    messages = [_rest(await socket.recv(), there)]
    with contextlib.suppress(zmq.Again):
        while len(messages) < _AT_ONCE:
            messages.append(_rest(there.recv(zmq.NOBLOCK), there))
    return messages


def _rest(first: bytes, there: zmq.Socket[bytes]) -> list[bytes]:
    """All frames of a message: they come together."""
    frames = [first]
    while there.get(zmq.RCVMORE):
        if len(frames) == _MAX_FRAMES:
            raise zmq.ZMQError(zmq.EMSGSIZE)
        frames.append(there.recv(zmq.NOBLOCK))
    return frames


def _receive(instance: Instance, index: PrefixIndex, seq: bytes, payload: bytes) -> None:
    was = index.state
    try:
        index.receive(int.from_bytes(seq, "big"), payload)
    except Exception:  # one event of an engine must not end the task
        logger.exception("%s: an event was not understood", instance.instance_id)
        index.forget(IndexState.DEGRADED)
    if index.state is not was:
        logger.log(
            logging.INFO if index.state is IndexState.EXACT else logging.WARNING,
            "%s: what is known of its prefix cache was %s and is %s",
            instance.instance_id,
            was.value,
            index.state.value,
        )
