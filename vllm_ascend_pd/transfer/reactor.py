# SPDX-License-Identifier: Apache-2.0
"""One thread that owns some ZMQ sockets, a queue of commands, and a clock."""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Reactor(threading.Thread):
    """Runs handlers of sockets and commands one after another, on its own thread.

    Subclasses register sockets with ``watch`` and override ``on_tick``. Every public method of a
    subclass that touches its state goes through ``submit``. An exception in a handler is logged
    and counted in ``num_errors``; the thread lives on, because others depend on its deadlines.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.context = zmq.Context()
        self.num_errors = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Under the lock, because the number of a closed descriptor may be another one's at once.
        self._wake_lock = threading.Lock()
        self._can_wake = True
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._stopping = False

    def submit(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the reactor's thread, soon. Any thread; never blocks."""
        self._commands.put(command)
        with self._wake_lock:
            if self._can_wake:
                os.eventfd_write(self._wake, 1)

    def watch(self, socket: zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever ``socket`` can be read. Reactor thread, or before start."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes], linger_ms: int = 0) -> None:
        """Forget and close ``socket``; what was sent leaves within ``linger_ms``."""
        del self._handlers[socket]
        self._poller.unregister(socket)
        socket.close(linger_ms)

    def on_tick(self) -> float | None:
        """Called on every turn; returns seconds until the next one is needed, or ``None``."""
        return None

    def run(self) -> None:
        while not self._stopping:
            timeout = self._guard(self.on_tick)
            timeout_ms = None if timeout is None else max(0, int(timeout * 1000 + 0.999))
            ready = dict(self._poller.poll(timeout_ms))
            if ready.pop(self._wake, None):
                os.eventfd_read(self._wake)
            while not self._commands.empty():
                self._guard(self._commands.get_nowait())
            for socket in ready:
                if handler := self._handlers.get(socket):
                    self._guard(handler)
        self._close()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread, if it was started, and close its sockets. Idempotent."""
        if self._stopping:
            return
        if self.ident is None:
            self._stopping = True
            self._close()
            return

        def end() -> None:
            self._stopping = True

        self.submit(end)
        self.join(timeout)

    def _close(self) -> None:
        for socket in list(self._handlers):
            self.unwatch(socket, linger_ms=200)
        self.context.term()
        with self._wake_lock:
            self._can_wake = False
            os.close(self._wake)

    def _guard(self, call: Callable[[], float | None] | Callable[[], None]) -> float | None:
        try:
            return call()
        except Exception:  # a thread boundary: others wait for this thread's deadlines
            self.num_errors += 1
            logger.exception("%s: a handler failed", self.name)
            return 1.0
