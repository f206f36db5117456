# SPDX-License-Identifier: Apache-2.0
"""Consumers that want to know how far a prompt is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.transfer.tickets import lease_of
from vllm_ascend_pd.types import Cause, LeaseRef
from vllm_ascend_pd.wire import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.transfer.grants import Grants
    from vllm_ascend_pd.wire import Watch

_MAX_WATCHED = 4096
_MAX_WATCHERS = 256
"""Of one prompt: some may be of connections that have ended."""


@dataclass(slots=True)
class _Watcher:
    """``told`` is the last thing it was told."""

    identity: bytes
    epoch: str
    each_layer: bool
    told: Progress | None = None


class Watchers:
    """The data server's thread, but for `__len__`."""

    def __init__(self, grants: Grants, reply: Callable[[bytes, Progress], None]) -> None:
        self._grants = grants
        self._reply = reply
        self._watchers: dict[LeaseRef, list[_Watcher]] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, identity: bytes, message: Watch) -> None:
        """Tell it now, and whenever that changes."""
        lease = lease_of(message)
        watchers = self._watchers.setdefault(lease, [])
        known = next((w for w in watchers if w.identity == identity), None)
        if known is None:
            known = _Watcher(identity, message.epoch, message.each_layer)
            watchers.append(known)
            del watchers[:-_MAX_WATCHERS]
        self._tell(lease, known, always=True)
        self._forget_ended(lease)
        while len(self._watchers) > _MAX_WATCHED:
            del self._watchers[next(iter(self._watchers))]

    def tell(self) -> None:
        """Grants have changed."""
        self._tell_all(list(self._watchers))

    def tell_layer(self) -> None:
        """The step has done one more. Many prompts are watched that are not in it yet."""
        self._tell_all(self._grants.in_step())

    def _tell_all(self, leases: list[LeaseRef]) -> None:
        for lease in leases:
            if watchers := self._watchers.get(lease):
                for watcher in watchers:
                    self._tell(lease, watcher, always=False)
                self._forget_ended(lease)

    def _tell(self, lease: LeaseRef, watcher: _Watcher, always: bool) -> None:
        transfer_id = lease.transfer_id
        grant, num_layers_done, is_gone = self._grants.look(lease)
        progress = Progress(transfer_id, 0, 0, 0)
        if is_gone:
            progress = Progress(transfer_id, 0, 0, 0, Cause.LEASE_EXPIRED.value)
        elif grant is not None and grant.epoch != watcher.epoch:
            progress = Progress(transfer_id, 0, 0, 0, Cause.WRONG_EPOCH.value)
        elif grant is not None:
            done = num_layers_done if watcher.each_layer else 0
            progress = Progress(transfer_id, grant.num_ready, grant.num_coming, done)
        if always or progress != watcher.told:
            watcher.told = progress
            self._reply(watcher.identity, progress)

    def _forget_ended(self, lease: LeaseRef) -> None:
        """Who was told the cause of an end is told nothing more."""
        watchers = self._watchers[lease]
        watchers[:] = [w for w in watchers if w.told is None or not w.told.cause]
        if not watchers:
            del self._watchers[lease]
