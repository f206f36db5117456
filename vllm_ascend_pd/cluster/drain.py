# SPDX-License-Identifier: Apache-2.0
"""How an engine gets empty: what is left on it, told as it changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import DrainOrder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from vllm_ascend_pd.cluster.operator import RouterOperator
    from vllm_ascend_pd.operating import RequestStatus

POLL_S = 0.5


async def drain(operator: RouterOperator, instance_id: str) -> AsyncIterator[str]:
    """It gets no new requests until that is undone; line by line, how those that it has move away
    or end. ``ConfigError`` if the router does not know it.
    """
    await operator.drain(instance_id, DrainOrder(seconds=None))
    told = ""
    while True:
        found = [one for one in await operator.instances() if one.instance_id == instance_id]
        if not found:
            yield f"{instance_id} is gone"
            return
        if found[0].state != "draining":
            raise ConfigError(f"{instance_id} is drained no more: somebody has undone it")
        running = [one for one in await operator.requests() if one.instance == instance_id]
        line = f"{instance_id} {_left(found[0].num_active, running)}"
        if line != told:
            yield line
            told = line
        if not found[0].num_active:
            return
        await asyncio.sleep(POLL_S)


def _left(num_active: int, running: Sequence[RequestStatus]) -> str:
    """``num_active``: all legs, those of prompts too."""
    if not num_active:
        return "is empty: it may be stopped"
    moving = sum(one.moves_to is not None or one.stays == "moving" for one in running)
    stay = Counter(one.stays for one in running if one.stays not in (None, "moving", "no_token"))
    parts = [f"has {num_active} requests", f"{moving} move"]
    parts += [f"{count} cannot move ({cause})" for cause, count in sorted(stay.items())]
    return ", ".join(parts)
