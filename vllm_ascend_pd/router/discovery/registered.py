# SPDX-License-Identifier: Apache-2.0
"""Engines that register themselves: the router's side of ``vllm_ascend_pd.registration``."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from vllm_ascend_pd import registration
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.breaker import BreakerState
from vllm_ascend_pd.router.answers import error_response, json_response
from vllm_ascend_pd.router.auth import Secrets, bearer_token
from vllm_ascend_pd.router.incoming import ORDER_TIMEOUT_S, BodyError, read_body, read_order
from vllm_ascend_pd.router.instances import InstanceSpec, Word
from vllm_ascend_pd.router.roles import role_obstacle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from vllm_ascend_pd.registration import Registration
    from vllm_ascend_pd.router.instances import Instance, Registry, Words

logger = logging.getLogger(__name__)

SOURCE = "registered"
MAX_INSTANCES = 1024
MAX_WORDS = 4 * MAX_INSTANCES
"""Of an operator, of instances that are there and of those that are gone."""
STOPPED_S = registration.TTL_S - 2 * registration.HEARTBEAT_S
"""A router that looks so late was stopped itself meanwhile, and heard nobody."""
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


class Heartbeats(Protocol):
    """Who hears of it when an engine beats or leaves."""

    async def beat(self, spec: InstanceSpec) -> None:
        """Registered, or still there."""

    async def leave(self, instance_id: str, epoch: str | None) -> None:
        """Gone; nothing if it was not known, or only with another epoch."""

    async def say(self, instance_id: str, epoch: str, changes: dict[str, Any]) -> None:
        """What an operator says of it from now on, as it runs: fields of its `Word`. Another one
        may say others at another worker, at the same time.
        """


class Roster:
    """Engines that registered, until they leave or fall silent, and an operator's words of these
    and others. Event loop thread."""

    def __init__(self, on_change: Callable[[list[InstanceSpec], Words], Awaitable[None]]) -> None:
        """``on_change`` gets all of them whenever one comes, changes or goes."""
        self._on_change = on_change
        self._specs: dict[str, InstanceSpec] = {}
        self._last_heard: dict[str, float] = {}
        self._looked_at: float | None = None
        self._words: Words = {}

    async def beat(self, spec: InstanceSpec) -> None:
        now = time.monotonic()
        self._last_heard[spec.instance_id] = now
        is_new = self._specs.get(spec.instance_id) != spec
        self._specs[spec.instance_id] = spec
        if self._forget_word(spec.instance_id, now) or is_new:
            await self._changed()

    async def say(self, instance_id: str, epoch: str, changes: dict[str, Any]) -> None:
        word = self._words.get(instance_id, Word())
        if word.epoch != epoch:  # that drain was its predecessor's
            word = Word(role=word.role)
        word = msgspec.structs.replace(word, epoch=epoch, **changes)
        if self._words.get(instance_id) != word:
            self._words.pop(instance_id, None)
            self._words[instance_id] = word
            if len(self._words) > MAX_WORDS:
                del self._words[next(iter(self._words))]  # the oldest
            await self._changed()

    async def leave(self, instance_id: str, epoch: str | None) -> None:
        known = self._specs.get(instance_id)
        if known is not None and epoch in (None, known.epoch):
            self._remove(instance_id, "it took its leave")
            await self._changed()

    async def expire(self, now: float) -> None:
        """Remove those that were silent for too long; called often; ``now`` is monotonic."""
        late_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if late_s > STOPPED_S:
            logger.warning("nobody was heard for %.0f s, in which the router did not run", late_s)
            for instance_id, heard_at in self._last_heard.items():
                self._last_heard[instance_id] = min(heard_at + late_s, now)
        silent = [name for name, at in self._last_heard.items() if now - at > registration.TTL_S]
        for instance_id in silent:
            self._remove(instance_id, f"silent for {registration.TTL_S:g} s")
        if self._forget_words(now) or silent:
            await self._changed()

    def _remove(self, instance_id: str, why: str) -> None:
        logger.info("%s: %s", instance_id, why)
        del self._specs[instance_id], self._last_heard[instance_id]

    def _forget_words(self, now: float) -> bool:
        """Those that hold no more, or a part of them; whether there were any."""
        return sum(self._forget_word(name, now) for name in tuple(self._words)) > 0

    def _forget_word(self, instance_id: str, now: float) -> bool:
        word = self._words.get(instance_id, Word())
        left = word.after(now)
        if left == word:
            return False
        if left == Word():
            del self._words[instance_id]
        else:
            self._words[instance_id] = left
        return True

    async def _changed(self) -> None:
        await self._on_change(list(self._specs.values()), self._words.copy())


def follow(registry: Registry, specs: list[InstanceSpec], words: Words) -> None:
    """Make these the registered instances; what is known from elsewhere stays as it is, but for an
    operator's words."""
    registry.obey(words)
    ours = [
        spec
        for spec in specs
        if (known := registry.get(spec.instance_id)) is None or known.spec.source == SOURCE
    ]
    registry.replace(SOURCE, ours)


class RegisteredDiscovery:
    """The routes of ``registration``. Event loop thread."""

    def __init__(self, registry: Registry, token_file: Path | None, heartbeats: Heartbeats) -> None:
        self._registry = registry
        self._token = Secrets(token_file, "--registration-token-file") if token_file else None
        self._heartbeats = heartbeats

    def add_routes(self, app: web.Application) -> None:
        one = registration.PATH + "/{instance_id}"
        app.router.add_put(one, self._of_the_instance(self._put))
        app.router.add_delete(one, self._of_the_instance(self._delete))
        app.router.add_put(one + "/drain", self._of_the_instance(self._drain))
        app.router.add_delete(one + "/drain", self._of_the_instance(self._undo_drain))
        app.router.add_put(one + "/role", self._of_the_instance(self._role))

    def refresh_secrets(self) -> None:
        if self._token is not None:
            self._token.refresh()

    async def _put(self, request: web.Request, instance_id: str) -> web.Response:
        try:
            body = await read_body(request, ORDER_TIMEOUT_S)
            if len(body) > registration.MAX_BODY_BYTES:
                raise ConfigError(f"a registration of {len(body)} bytes is too long")
            described = registration.decode(body)
        except BodyError as e:
            return error_response(e.status, "bad_registration", str(e))
        except ConfigError as e:
            return error_response(400, "bad_registration", str(e))
        if self._token is None and (outside := _not_on_loopback(described)):
            message = f"{outside} is not on loopback: give the router --registration-token-file"
            return error_response(403, "forbidden", message)
        known = self._registry.get(instance_id)
        if known is not None and known.spec.source != SOURCE:
            message = f"{instance_id} is known from {known.spec.source}: register another id"
            return error_response(409, "conflict", message)
        if known is not None and _is_another(known, described):
            message = (
                f"{instance_id} is the engine at {known.spec.url}, which"
                f" {'starts' if known.spec.state == 'starting' else 'answers'}, so the one at"
                f" {described.url} is not used: give it a router.instance_id of its own, or leave"
                " that out"
            )
            return error_response(409, "conflict", message)
        if known is None and sum(i.spec.source == SOURCE for i in self._registry) >= MAX_INSTANCES:
            message = f"{MAX_INSTANCES} instances have registered already"
            after = {"Retry-After": f"{registration.TTL_S:.0f}"}  # when one has been silent
            return error_response(429, "too_many_instances", message, headers=after)
        spec = InstanceSpec.of(described, instance_id, SOURCE, described.epoch)
        await self._heartbeats.beat(spec)
        return json_response(registration.Registered())

    async def _delete(self, request: web.Request, instance_id: str) -> web.Response:
        await self._heartbeats.leave(instance_id, request.query.get("epoch"))
        return web.Response(status=204)

    async def _drain(self, request: web.Request, instance_id: str) -> web.Response:
        order = await read_order(request, registration.DrainOrder, '{"seconds": 30} or nothing')
        seconds = order.seconds
        if seconds is not None and self._is_drained_for_good(instance_id):
            return web.Response(status=204)
        until = None if seconds is None else time.monotonic() + seconds
        return await self._say(instance_id, drained=True, until=until)

    def _is_drained_for_good(self, instance_id: str) -> bool:
        """Until that is undone: an order for some seconds does not end it."""
        known, word = self._registry.get(instance_id), self._registry.word(instance_id)
        is_its = known is not None and known.spec.epoch == word.epoch
        return is_its and word.drained and word.until is None

    async def _undo_drain(self, request: web.Request, instance_id: str) -> web.Response:
        return await self._say(instance_id, drained=False)

    async def _role(self, request: web.Request, instance_id: str) -> web.Response:
        fix = '{"role": "prefill"}, "decode" or "both"'
        role = (await read_order(request, registration.RoleOrder, fix)).role
        known = self._registry.get(instance_id)
        if known is not None and (why := role_obstacle(self._registry, known, role)):
            return error_response(409, "conflict", why)
        return await self._say(instance_id, role=role)

    async def _say(self, instance_id: str, **changes: Any) -> web.Response:
        known = self._registry.get(instance_id)
        if known is None:
            names = ", ".join(sorted(one.instance_id for one in self._registry))
            message = f"{instance_id} has not registered here, nor is it in a list; known: {names}"
            return error_response(404, "not_found", message)
        await self._heartbeats.say(instance_id, known.spec.epoch, changes)
        return web.Response(status=204)

    def _of_the_instance(
        self, obey: Callable[[web.Request, str], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A handler, of accepted requests that name an instance."""

        async def handle(request: web.Request) -> web.Response:
            if refused := self.refuse(request):
                return refused
            instance_id = request.match_info["instance_id"]
            try:
                registration.check_instance_id(instance_id)
            except ConfigError as e:
                return error_response(400, "bad_registration", str(e))
            try:
                return await obey(request, instance_id)
            except BodyError as e:
                return error_response(e.status, "bad_order", str(e))

        return handle

    def has_token(self, request: web.Request) -> bool:
        return self._token is not None and self._token.accepts(
            bearer_token(request.headers.get("Authorization"))
        )

    def refuse(self, request: web.Request) -> web.Response | None:
        """The answer to somebody who is no engine of ours."""
        if self._token is not None:
            if self.has_token(request):
                return None
            return error_response(403, "forbidden", "the registration token is wrong or missing")
        # A browser on this host sends simple requests for any page without a preflight.
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("//")[2] != request.host:
            return error_response(403, "forbidden", "not for pages of other origins")
        # A proxy on this host makes everybody a neighbour.
        proxied = any(name in request.headers for name in _FORWARDED)
        if not proxied and registration.is_loopback(request.remote or ""):
            return None
        message = "only from loopback, unless the router has --registration-token-file"
        return error_response(403, "forbidden", message)


def _is_another(known: Instance, described: Registration) -> bool:
    """Whether an engine elsewhere has the id, and answers, or says that it starts, when probes
    find nobody there yet; one that moved is not to be reached where it was, also before it was
    silent for long enough."""
    is_there = known.spec.state == "starting" or known.breaker.state is not BreakerState.OPEN
    return known.spec.url != described.url and is_there


def _not_on_loopback(described: Registration) -> str | None:
    """The first address of these that is not, since a router or an engine would connect to it."""
    addresses = {"url": registration.check_url(described.url)}
    if described.kv is not None:
        addresses["kv.host"] = described.kv.host
    if described.kv_events is not None:
        for endpoint in (described.kv_events.endpoint, described.kv_events.replay_endpoint):
            if endpoint is not None:
                addresses["kv_events"] = urlsplit(endpoint).hostname or ""
    return next((name for name, a in addresses.items() if not registration.is_loopback(a)), None)
