# SPDX-License-Identifier: Apache-2.0
"""One thread that owns some sockets, a queue of commands, and a clock."""

from __future__ import annotations

import os
import queue
import selectors
import threading
from typing import TYPE_CHECKING, TypeVar

from vllm_ascend_pd.log_limit import limited_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = limited_logger(__name__)

T = TypeVar("T")

_MAX_WAIT_S = 3600.0
"""Of one turn: epoll takes no time-out of 25 days."""


class Reactor(threading.Thread):
    """Runs handlers of sockets and commands one after another, on its own thread.

    What owns sockets registers them with ``watch``, and how to close them in ``at_end``; subclasses
    override ``on_tick``. Every public method of a subclass that touches its state goes through
    ``submit``. An exception is logged and counted in ``num_errors``, and the thread lives on,
    because others depend on its deadlines. What somebody waits for is done in ``attempt``, so that
    it ends with an answer in any case.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.num_errors = 0
        self.at_end: list[Callable[[], None]] = []
        self._num_told_errors = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Under the lock, because the number of a closed descriptor may be another one's at once.
        self._wake_lock = threading.Lock()
        self._can_wake = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._stopping = False

    def submit(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the reactor's thread, soon. Any thread; never blocks."""
        self._commands.put(command)
        with self._wake_lock:
            if self._can_wake:
                os.eventfd_write(self._wake, 1)

    def watch(
        self, fd: int, handler: Callable[[], None], events: int = selectors.EVENT_READ
    ) -> None:
        """Call ``handler`` whenever ``events`` are possible; again to change them. Reactor thread,
        or before start.
        """
        if fd in self._handlers:
            self._selector.modify(fd, events)
        else:
            self._selector.register(fd, events)
        self._handlers[fd] = handler

    @property
    def num_watched(self) -> int:
        """Descriptors; any thread."""
        return len(self._handlers)

    def unwatch(self, fd: int) -> None:
        """Before it is closed."""
        del self._handlers[fd]
        self._selector.unregister(fd)

    def on_tick(self) -> float | None:
        """Called on every turn; returns seconds until the next one is needed, or ``None``."""
        return None

    def run(self) -> None:
        while not self._stopping:
            timeout = self.guard(self.on_tick)
            if timeout is not None:
                timeout = min(max(0.0, timeout), _MAX_WAIT_S)
            ready = self._selector.select(timeout)
            for key, _ in ready:
                if key.fd == self._wake:
                    os.eventfd_read(self._wake)
            self.run_commands()
            for key, _ in ready:
                if handler := self._handlers.get(key.fd):
                    self.guard(handler)
        self._close()

    def run_commands(self) -> None:
        """What has been submitted so far: one that submits another leaves a turn to everybody else.
        Reactor thread.
        """
        for _ in range(self._commands.qsize()):
            self.guard(self._commands.get_nowait())

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
        for close in self.at_end:
            self.guard(close)
        self._selector.close()
        with self._wake_lock:
            self._can_wake = False
            os.close(self._wake)

    def take_errors(self) -> dict[str, int]:
        """How many since the last call, by the thread's name; one other thread."""
        num_errors = self.num_errors
        num_new, self._num_told_errors = num_errors - self._num_told_errors, num_errors
        return {self.name: num_new} if num_new else {}

    def attempt(self, call: Callable[[], T], failed: Callable[[], T]) -> T:
        """What ``call`` returns, or ``failed`` when it raises. Reactor thread, or one that runs a
        handler of it.
        """
        try:
            return call()
        except Exception:  # a thread boundary: others wait for this thread's deadlines
            self.num_errors += 1
            logger.exception("%s: a handler failed", self.name)
            return failed()

    def guard(self, call: Callable[[], float | None] | Callable[[], None]) -> float | None:
        """Run it; what it raises ends here."""
        return self.attempt(call, lambda: 1.0)
