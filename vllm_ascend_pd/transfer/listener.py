# SPDX-License-Identifier: Apache-2.0
"""The socket that many consumers connect to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from vllm_ascend_pd.transfer.dealers import MAX_UNHEARD_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.transfer.seal import Channel, Seals

_MAX_FRAME_BYTES = 64 << 20
_MAX_FRAMES_A_TURN = 256


class Listener:
    """A ROUTER that lets only authentic payloads through. Reactor thread only, once it runs."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], seals: Seals, channel: Channel
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.TCP_MAXRT, MAX_UNHEARD_MS)
        self._seals = seals
        self._seal = seals.server(channel)

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """``(identity, payload)`` of what has arrived; does not block."""
        for _ in range(_MAX_FRAMES_A_TURN):
            try:
                first, *rest = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = first.bytes
            received = self._seal.receive(identity, b"".join(part.buffer for part in rest))
            if received.refused is not None:
                address = rest[-1].get("Peer-Address") if rest else "a peer"
                self._seals.note_refused(received.refused, str(address))
            for answer in received.answers:
                self._send(identity, answer)
            if received.payload is not None:
                yield identity, received.payload

    def send(self, identity: bytes, payload: bytes) -> None:
        """To a consumer that has sent something; dropped when it is gone."""
        frame = self._seal.send(identity, payload)
        if frame is not None:
            self._send(identity, frame)

    def _send(self, identity: bytes, frame: bytes) -> None:
        self.socket.send_multipart([identity, frame], zmq.NOBLOCK)
