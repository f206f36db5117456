# SPDX-License-Identifier: Apache-2.0
"""Shows a supervisor's children: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.processes.child import Child, State

if TYPE_CHECKING:
    from collections.abc import Iterator

_STYLES = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.BACKOFF: "red",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
}


class Display:
    """Used as a context; loop thread."""

    def __init__(self, console: Console, urls: dict[str, str]) -> None:
        """``urls`` by name of the child."""
        self._console = console
        self._urls = urls
        self._children: dict[str, Child] = {}
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._is_live = console.is_terminal

    def __enter__(self) -> Display:
        if self._is_live:
            with self._if_it_can_be_shown():
                self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_live:
            self.refresh()
            with self._if_it_can_be_shown():
                self._live.stop()

    def changed(self, child: Child) -> None:
        """A child has a new state."""
        self._children[child.spec.name] = child
        if not self._is_live or child.state is State.BACKOFF:
            self.say(self._line(child))
        self.refresh()

    def say(self, text: str | Text) -> None:
        """A line that stays."""
        with self._if_it_can_be_shown():
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def refresh(self) -> None:
        """Draw the table again, with the times and log lines of now."""
        if self._is_live:
            with self._if_it_can_be_shown():
                self._live.update(self._table(), refresh=True)

    @contextmanager
    def _if_it_can_be_shown(self) -> Iterator[None]:
        """The processes go on where a disk is full, or nobody reads any more: for that rich raises
        ``SystemExit``, and writes nowhere from then on.
        """
        try:
            yield
        except (OSError, SystemExit):
            self._is_live = False

    def _line(self, child: Child) -> Text:
        line = Text(f"{time.strftime('%H:%M:%S')}  ")
        line.append(f"{child.spec.name:12} ")
        line.append(f"{child.state.value:9}", _STYLES[child.state])
        details = [child.note] if child.note else []
        if child.state is State.STARTING:
            details = [f"pid {child.pid}, log {child.log}"]
        elif child.state is State.READY:
            details = [self._urls[child.spec.name]]
        elif child.state is State.BACKOFF:
            details.append(f"log {child.log}")
        line.append(" " + "; ".join(details))
        return line

    def _table(self) -> Group:
        table = Table(box=None, pad_edge=False, expand=True)
        for title, ratio in (("name", 2), ("state", 2), ("for", 1), ("pid", 1), ("", 8)):
            table.add_column(title, ratio=ratio, no_wrap=True, overflow="ellipsis")
        for child in self._children.values():
            last = child.last_lines(1) if child.state is not State.READY else []
            text = child.note or (last[0] if last else self._urls[child.spec.name])
            crashes = f" ({child.num_crashes} crashes)" if child.num_crashes else ""
            table.add_row(
                child.spec.name,
                Text(child.state.value + crashes, _STYLES[child.state]),
                f"{time.monotonic() - child.since:.0f} s",
                str(child.pid or ""),
                Text(text, "" if child.state is State.READY else "dim"),
            )
        elapsed = time.monotonic() - self._started
        return Group(table, Text(f"{elapsed:.0f} s; Ctrl-C stops all", "dim"))
