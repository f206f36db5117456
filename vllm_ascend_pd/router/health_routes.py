# SPDX-License-Identifier: Apache-2.0
"""What the router answers to those who ask whether it works."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from vllm_ascend_pd.router.answers import error_response
from vllm_ascend_pd.router.policies import Routed
from vllm_ascend_pd.router.selection import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.router.health import Prober
    from vllm_ascend_pd.router.selection import Selector

logger = logging.getLogger(__name__)


class HealthRoutes:
    """Event loop thread."""

    def __init__(self, selector: Selector, prober: Prober, is_draining: Callable[[], bool]) -> None:
        self._selector = selector
        self._prober = prober
        self._is_draining = is_draining
        self._has_started = False
        self._without_pair: dict[str | None, str] = {}
        """Models, and why, as the log knows it; ``None``: no engine has told of one."""

    def add_routes(self, app: web.Application) -> None:
        for path in ("/health", "/health/ready", "/ping"):
            app.router.add_get(path, self._ready)
        app.router.add_post("/ping", self._ready)
        app.router.add_get("/health/live", self._alive)
        app.router.add_get("/health/startup", self._started)

    def look(self) -> None:
        """Called every second or so: clients do not notice that one engine alone computes prompts
        and answers."""
        if not any(self._selector.registry) or not self._know_all():
            return
        found = self._selector.by_model()
        before, self._without_pair = self._without_pair, {m: why for m, why in found.items() if why}
        for model, why in self._without_pair.items():
            if before.get(model) != why:
                name, obstacle = model or "(not known)", self._selector.obstacle(model)
                logger.warning("model %s has no P and D (%s): %s", name, why, obstacle)
        for model in found.keys() - self._without_pair.keys() & before.keys():
            logger.info("model %s has a P and a D", model)

    def _know_all(self) -> bool:
        """Whether each engine has been asked once how it is."""
        return all(self._prober.has_asked(instance) for instance in self._selector.registry)

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether a request would be answered now, for one model at least."""
        if self._is_draining():
            message = "this router is about to stop"
            return error_response(503, "draining", message, headers={"Retry-After": "1"})
        found = self._selector.by_model()
        if all(why == "unavailable" for why in found.values()):
            nobody = self._selector.candidates(Routed(model=next(iter(found))))
            assert isinstance(nobody, Unavailable)
            after = {"Retry-After": str(nobody.retry_after_s)}
            return error_response(503, "service_unavailable", nobody.message, headers=after)
        is_degraded = any(why is not None for why in found.values())
        return web.json_response({"status": "degraded" if is_degraded else "ok"})

    async def _alive(self, request: web.Request) -> web.Response:
        """This answer is the proof."""
        return web.json_response({"status": "ok"})

    async def _started(self, request: web.Request) -> web.Response:
        """Whether what readiness says is known."""
        if self._know_all():
            self._has_started = True
        if self._has_started:
            return await self._alive(request)
        message = "not every engine was asked yet how it is"
        return error_response(503, "starting", message, headers={"Retry-After": "1"})
