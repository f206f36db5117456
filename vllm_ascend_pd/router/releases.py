# SPDX-License-Identifier: Apache-2.0
"""Prompts that producers keep and nobody comes for: the router gives them back.

    P keeps the KV ──► D refuses, fails, or its client leaves ──► P is told, and frees its blocks

P hears of it in a request of its own, whose ``kv_transfer_params`` name the transfer. Only who
knows its id can give a prompt back; clients' own parameters never reach an engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.router.failures import Failure

if TYPE_CHECKING:
    from vllm_ascend_pd.router.http_client import Headers
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.metrics import Metrics

logger = limited_logger(__name__)


@dataclass(slots=True)
class Kept:
    """The KV of one prefill leg, which is given back at the end of ``with`` unless it is taken."""

    releases: Releases
    producer: Instance
    transfer_id: str | None
    """Under which the producer keeps it, if it does."""
    headers: Headers
    is_taken: bool = False
    """Whether D has begun to answer: then it gives the KV back itself."""

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.is_taken and self.transfer_id is not None:
            self.releases.start(self)


class Releases:
    """Event loop thread."""

    def __init__(self, timeout_s: float, metrics: Metrics) -> None:
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, kept: Kept) -> None:
        """Give it back."""
        task = asyncio.create_task(self._give_back(kept))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float) -> None:
        """Those under way have so long to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def _give_back(self, kept: Kept) -> None:
        response = await kept.producer.client.request(
            b"POST",
            b"/v1/completions",
            kept.headers,
            _release(kept),
            head_timeout_s=self._timeout_s,
            phase="release",
        )
        if isinstance(response, Failure):
            self._count(kept, response.kind.value)
            return
        try:
            data = await response.read()
        finally:
            response.close()
        failed = isinstance(data, Failure) or response.status >= 400
        self._count(kept, "failed" if failed else "ok")

    def _count(self, kept: Kept, outcome: str) -> None:
        self._metrics.add("releases", outcome)
        if outcome != "ok":
            logger.warning(
                "%s could not be told that nobody needs transfer %s (%s): its lease ends by itself",
                kept.producer.instance_id,
                kept.transfer_id,
                outcome,
            )


def _release(kept: Kept) -> bytes:
    """Of no model: the producer may not have the one that was asked for."""
    params = {"release_transfer_id": kept.transfer_id}
    return msgspec.json.encode({"prompt": [0], "max_tokens": 1, "kv_transfer_params": params})
