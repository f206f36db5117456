# SPDX-License-Identifier: Apache-2.0
"""How an engine gets empty, or gets another role: what is left on it, told as it changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import DrainOrder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from vllm_ascend_pd.cluster.operator import RouterOperator
    from vllm_ascend_pd.operating import RequestStatus
    from vllm_ascend_pd.registration import InstanceStatus, Role

POLL_S = 0.5


async def drain(operator: RouterOperator, instance_id: str) -> AsyncIterator[str]:
    """It gets no new requests until that is undone; line by line, how those that it has move away
    or end. ``ConfigError`` if the router does not know it.
    """
    await operator.drain(instance_id, DrainOrder(seconds=None))

    def num_left(status: InstanceStatus) -> int:
        if status.state != "draining":
            raise ConfigError(f"{instance_id} is drained no more: somebody has undone it")
        return status.num_left

    async for line in _emptied(operator, instance_id, num_left):
        yield line or f"{instance_id} is empty: it may be stopped"


async def switch(operator: RouterOperator, instance_id: str, role: Role) -> AsyncIterator[str]:
    """It is used for this role from now on; line by line, how what it answers moves away or ends,
    if it is to compute prompts. ``ConfigError`` if the router refuses.
    """
    await operator.use_for(instance_id, role)

    def num_left(status: InstanceStatus) -> int:
        if status.used_for != role:
            raise ConfigError(f"{instance_id} is used for {status.used_for}: somebody has said so")
        return status.num_decoding if role == "prefill" else 0

    async for line in _emptied(operator, instance_id, num_left):
        yield line or f"{instance_id} is used for {role}"


async def _emptied(
    operator: RouterOperator, instance_id: str, num_left: Callable[[InstanceStatus], int]
) -> AsyncIterator[str]:
    """What the router says of the requests that are left, whenever that changes; at last nothing.
    ``num_left`` looks at each answer, and raises where nobody needs to wait any more.
    """
    told: str | None = None
    while True:
        found = [one for one in await operator.instances() if one.instance_id == instance_id]
        if not found:
            raise ConfigError(f"{instance_id} is gone")
        told_of = await operator.requests()
        running = [one for one in told_of.requests if one.instance == instance_id]
        count = num_left(found[0])
        line = f"{instance_id} {_left(count, running)}" if count else ""
        line += f" ({told_of.missing})" if line and told_of.missing else ""
        if line != told:
            yield line
            told = line
        if not count:
            return
        await asyncio.sleep(POLL_S)


def _left(num_left: int, running: Sequence[RequestStatus]) -> str:
    """``num_left``: those that have not begun too."""
    moving = sum(one.moves_to is not None or one.stays == "moving" for one in running)
    return ", ".join([f"has {num_left} requests", f"{moving} move", *who_cannot_move(running)])


def who_cannot_move(running: Sequence[RequestStatus]) -> list[str]:
    """How many for each cause."""
    stay = Counter(one.stays for one in running if one.stays not in (None, "moving", "no_token"))
    return [f"{count} cannot move ({cause})" for cause, count in sorted(stay.items())]
