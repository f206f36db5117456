# SPDX-License-Identifier: Apache-2.0
"""The routes of ``vllm_ascend_pd.operating``. Event loop thread."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from vllm_ascend_pd.operating import (
    REQUESTS,
    MoveOrder,
    MoveReport,
    RequestStatus,
    RunningRequests,
)
from vllm_ascend_pd.router.answers import error_response, json_response
from vllm_ascend_pd.router.incoming import BodyError, read_order
from vllm_ascend_pd.router.move_states import MoveState

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from vllm_ascend_pd.router.instances import Registry
    from vllm_ascend_pd.router.moves import Answering, Move, Moves

OPERATOR = "operator"
"""The reason of a move that was asked for."""


class Requests(Protocol):
    """Requests in progress: of this process, or of all workers."""

    async def requests(self) -> RunningRequests:
        """All that an engine answers now."""

    async def move(self, request_id: str, order: MoveOrder) -> tuple[list[MoveReport], list[str]]:
        """Those of this id; returns when their moves have ended. And the workers that did not
        answer."""


class OwnRequests:
    """Those of this process."""

    def __init__(self, registry: Registry, moves: Moves) -> None:
        self._registry = registry
        self._moves = moves

    async def requests(self) -> RunningRequests:
        return RunningRequests(requests=[_status(one) for one in self._moves.running])

    async def move(self, request_id: str, order: MoveOrder) -> tuple[list[MoveReport], list[str]]:
        found = [one for one in self._moves.running if one.job.trace.request_id == request_id]
        begun = [self._begin(one, order) for one in found]  # now: any may be over soon
        reports = [
            one if isinstance(one, MoveReport) else await asyncio.shield(one.ended) for one in begun
        ]
        return reports, []

    def _begin(self, source: Answering, order: MoveOrder) -> Move | MoveReport:
        """Its move, or that there is none."""
        target = None if order.to is None else self._registry.get(order.to)
        started = (
            "unknown_instance"
            if order.to is not None and target is None
            else self._moves.start(source, target, OPERATOR)
        )
        if not isinstance(started, str):
            return started
        return MoveReport(
            request_id=source.job.trace.request_id,
            source=source.instance.instance_id,
            target=order.to or "",
            outcome=MoveState.STAYED.value,
            cause=started,
            seconds=0.0,
        )


class OperatorRoutes:
    """``requests``: of all workers, if there are several."""

    def __init__(
        self,
        registry: Registry,
        requests: Requests,
        refuse: Callable[[web.Request], web.Response | None],
    ) -> None:
        """``refuse``: the answer to somebody who is no operator."""
        self._registry = registry
        self._requests = requests
        self._refuse = refuse

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get(REQUESTS, self._list)
        app.router.add_post(REQUESTS + "/{request_id:.+}/move", self._move)

    async def _list(self, request: web.Request) -> web.Response:
        return self._refuse(request) or json_response(await self._requests.requests())

    async def _move(self, request: web.Request) -> web.Response:
        if refused := self._refuse(request):
            return refused
        try:
            order = await read_order(request, MoveOrder, '{"to": "INSTANCE"} or nothing')
        except BodyError as e:
            return error_response(e.status, "bad_order", str(e))
        if order.to is not None and self._registry.get(order.to) is None:
            known = ", ".join(sorted(one.instance_id for one in self._registry))
            message = f"no instance {order.to!r}; there are {known}"
            return error_response(404, "not_found", message, param="to")
        request_id = request.match_info["request_id"]
        reports, silent = await self._requests.move(request_id, order)
        if not reports and silent:
            message = (
                f"worker {', '.join(silent)} of this router does not answer: whether"
                f" {request_id!r} is a request of theirs is not known, nor whether it moves"
            )
            return error_response(504, "worker_silent", message)
        if not reports:
            message = f"no request {request_id!r} is answered by an engine now: see {REQUESTS}"
            return error_response(404, "not_found", message)
        return json_response(reports)


def _status(one: Answering) -> RequestStatus:
    trace, move = one.job.trace, one.move
    return RequestStatus(
        request_id=trace.request_id,
        path=trace.request.path,
        model=trace.model,
        instance=one.instance.instance_id,
        age_s=time.monotonic() - trace.started,
        num_bytes=trace.num_bytes,
        stays=one.obstacle() or one.failed_by,
        moves_to=move.target.instance_id if move is not None and move.target is not None else None,
    )
