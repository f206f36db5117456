# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: workers let go of the KV caches before these are unmapped, and take them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_pd import hooks
from vllm_ascend_pd.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.engine.scheduler.identity import Identity
    from vllm_ascend_pd.engine.scheduler.loads import Loads
    from vllm_ascend_pd.engine.scheduler.parking import Parking
    from vllm_ascend_pd.engine.scheduler.parts import Part
    from vllm_ascend_pd.engine.vllm_api.types import Executor


class Suspension:
    """Scheduler thread."""

    def __init__(
        self,
        loads: Loads,
        parking: Parking,
        parts: Sequence[Part],
        identity: Identity,
        executor: Executor,
    ) -> None:
        self._loads = loads
        self._parking = parking
        self._parts = parts
        self._identity = identity
        self._executor = executor

    def begin(self, level: int) -> None:
        """See ``hooks.SchedulerHooks.before_sleep``.

        Raises:
            TransferError: the caches are in use.
        """
        if len(self._loads) or any(part.is_storing for part in self._parts):
            raise TransferError("KV is still loaded or stored: no sleep; try again in a moment")
        try:
            self._executor.collective_rpc(suspend)
        except Exception:  # of one worker; the others have let go, and nobody will wake them
            self._executor.collective_rpc(resume)
            raise
        self._parking.is_suspended = True
        if level > 1:  # the weights go, too
            self._identity.weights_changed()

    def end(self, tags: list[str] | None) -> None:
        """See ``hooks.SchedulerHooks.after_wake_up``."""
        if tags is None or "kv_cache" in tags:
            self._executor.collective_rpc(resume)
            self._parking.is_suspended = False


def suspend(worker: object) -> None:
    """Runs in the worker processes."""
    side: Any = hooks.worker
    side.suspend()


def resume(worker: object) -> None:
    """Runs in the worker processes."""
    side: Any = hooks.worker
    side.resume()
