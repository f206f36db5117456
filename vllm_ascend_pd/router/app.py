# SPDX-License-Identifier: Apache-2.0
"""The router as an aiohttp application: its routes, and the parts behind them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from vllm_ascend_pd import __version__, registration
from vllm_ascend_pd.net.trust import Secret
from vllm_ascend_pd.private_file import read_token
from vllm_ascend_pd.resume import ResumeKey
from vllm_ascend_pd.router.access_log import AccessLog
from vllm_ascend_pd.router.admission import Admission
from vllm_ascend_pd.router.answers import error_response, json_response, not_admitted
from vllm_ascend_pd.router.apis import APIS, BATCH, INVOCATIONS
from vllm_ascend_pd.router.auth import Secrets, bearer_token
from vllm_ascend_pd.router.background import Background
from vllm_ascend_pd.router.bodies import BadRequest
from vllm_ascend_pd.router.cors import CrossOrigin
from vllm_ascend_pd.router.deadlines import LoopLag
from vllm_ascend_pd.router.discovery.registered import RegisteredDiscovery, Roster, follow
from vllm_ascend_pd.router.drains import Drains, share_of
from vllm_ascend_pd.router.front import check_target
from vllm_ascend_pd.router.generation import Generation
from vllm_ascend_pd.router.health import Prober
from vllm_ascend_pd.router.health_routes import HealthRoutes
from vllm_ascend_pd.router.http_client import EngineClient
from vllm_ascend_pd.router.incoming import (
    BodyError,
    forwarded_headers,
    request_id,
    was_here,
)
from vllm_ascend_pd.router.instances import Instance, InstanceSpec, Registry
from vllm_ascend_pd.router.legs import Legs
from vllm_ascend_pd.router.metrics import Metrics
from vllm_ascend_pd.router.moves import Moves
from vllm_ascend_pd.router.openapi import document
from vllm_ascend_pd.router.operator import OperatorRoutes, OwnRequests
from vllm_ascend_pd.router.page import instances, page, seen_by, status
from vllm_ascend_pd.router.passthrough import ENGINE_PATHS, TOKENIZER_INFO, Passthrough
from vllm_ascend_pd.router.policies import Routed, make_policy
from vllm_ascend_pd.router.policies.base import WatchesInstances
from vllm_ascend_pd.router.rebalance import Rebalancing
from vllm_ascend_pd.router.relay import Relay
from vllm_ascend_pd.router.releases import Releases
from vllm_ascend_pd.router.resumption import Resumption
from vllm_ascend_pd.router.retries import RetryBudget
from vllm_ascend_pd.router.roles import AutoRoles
from vllm_ascend_pd.router.selection import Labels, Selector, Unavailable
from vllm_ascend_pd.router.skipping import Skipper
from vllm_ascend_pd.router.tenants import Tenants, in_progress
from vllm_ascend_pd.router.tls import client_context
from vllm_ascend_pd.router.tokens import PromptLengths
from vllm_ascend_pd.router.trace import Trace
from vllm_ascend_pd.router.tracing import Tracing, make_tracing
from vllm_ascend_pd.router.without_effect import WithoutEffect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.instances import Words
    from vllm_ascend_pd.router.planned_roles import PlannedRoles
    from vllm_ascend_pd.router.snapshot import Snapshot
    from vllm_ascend_pd.router.workers.worker import KeeperLink

logger = logging.getLogger(__name__)

OWN_PATHS = dict.fromkeys((*APIS, BATCH), ("POST",)) | {"/v1/models": ("GET", "HEAD")}
"""Below ``/v1/``, and their methods; the rest there is passed on."""
LOOP = (
    "this request was sent by this router itself: one of its engines is a router, this one or one"
    " that has it as an engine. Give the URLs of engines (--prefill, --decode, --instances)"
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HEARS_ALL_S = 1.5 * registration.HEARTBEAT_S
"""After its start a router that awaits registrations has heard of all: requests wait so long for
engines that it does not know."""
CLOSE_S = 1.0
"""For requests that were cancelled when the router stops, and then for prompts that are given back
because of it."""


class Router:
    """All parts of one router process. Event loop thread."""

    def __init__(
        self,
        config: RouterConfig,
        tracing: Tracing | None = None,
        keeper: KeeperLink | None = None,
    ) -> None:
        """``keeper``: of all workers, if this is one of several."""
        self.config = config
        self._keeper = keeper
        self.is_draining = False
        self._engine_tls = client_context("--engine-ca", config.tls.engine_ca)
        self._engine_authorization: bytes | None = None
        if config.engine_api_key_file is not None:
            key = read_token("--engine-api-key-file", str(config.engine_api_key_file))
            self._engine_authorization = b"Bearer " + key.encode()
        self._keys = (
            Secrets(config.api_keys_file, "--api-keys-file") if config.api_keys_file else None
        )
        self.registry = Registry(
            self._make_instance, self._added, self._removed, self._listen_elsewhere
        )
        self.skipper = Skipper(config.skip)
        self.policy = make_policy(config.policy)
        labels = Labels(frozenset(config.prefill_labels), frozenset(config.decode_labels))
        queueing = config.queueing.share(config.num_workers)
        self.selector = Selector(
            self.registry,
            self.policy,
            labels,
            require_prefill=config.require_prefill,
            max_requests=queueing.max_requests,
            hears_all_at=time.monotonic() + HEARS_ALL_S if config.awaits_registrations else 0.0,
        )
        self.metrics = Metrics(
            lambda: self.registry,
            self.skipper.break_evens,
            self.selector.degraded,
            config.stats_window_s,
        )
        lengths = PromptLengths()
        self.admission = Admission(self.selector, queueing, self.metrics)
        self.metrics.num_queued = lambda: self.admission.num_queued
        self.legs = Legs(config.timeouts, self.metrics)
        budget = RetryBudget(config.retries.budget_ratio, config.retries.budget_burst)
        self.tracing = tracing or make_tracing(config.otlp_endpoint)
        self.moves = Moves(
            config,
            self.registry,
            self.admission,
            self.legs,
            self.metrics,
            self.tracing,
            _resume_key(config),
        )
        self._background = Background(config.timeouts)
        self.relay = Relay(
            config,
            self.selector,
            self.admission,
            self.skipper,
            self.legs,
            budget,
            lengths,
            self.metrics,
            self.tracing,
            Releases(config.timeouts.prefill_s, self.metrics),
            self.moves,
            Resumption(config, self.admission, self.legs, self.metrics, self.tracing, self.moves),
            self._background,
        )
        self.tenants = (
            Tenants(config.tenants_file, self.metrics, config.num_workers)
            if config.tenants_file
            else None
        )
        self.passthrough = Passthrough(
            config, self.selector, self.admission, self.legs, self.metrics, self.tenants
        )
        plan = _make_plan(config)
        self._counts_tokens = self.tenants is not None or plan is not None
        self.generation = Generation(
            self.relay, self.selector, self.passthrough, lengths, config, self.tenants, plan
        )
        auth = self._engine_authorization
        self.cross_origin = CrossOrigin(config.cors)
        self.lag = LoopLag(self.metrics.loop_lag.observe)
        headers = [(b"authorization", auth)] if auth else []
        self.prober = Prober(config.probes, headers, self._connect_prober)
        self.health = HealthRoutes(self.selector, self.prober, lambda: self.is_draining)
        self.access_log = AccessLog(config.access_log)
        self._retired: set[Instance] = set()
        self._alone = Roster(self.follow)
        self._drains = Drains(self.moves, self.metrics, share_of(config.num_workers))
        self._draining: asyncio.Task[None] | None = None
        self.registered = RegisteredDiscovery(
            self.registry, config.registration_token_file, keeper or self._alone
        )
        self._rebalancing = Rebalancing(self.registry, self.moves, self.metrics)
        self._without_effect = WithoutEffect.of(config, self.registry)
        self._roles: AutoRoles | None = None
        if config.roles == "auto":
            self._roles = AutoRoles(self.registry, self._alone.say, self.metrics, plan)
        self.requests = OwnRequests(self.registry, self.moves)
        self.operator = OperatorRoutes(
            self.registry, keeper or self.requests, self.registered.refuse
        )

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=self.config.max_body_bytes,
            middlewares=[check_target, self._answer_preflight],
        )
        app.on_response_prepare.append(self.cross_origin.prepare)
        for path in (*APIS, BATCH, INVOCATIONS):
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/load", self._load)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_get("/", self._page)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/status", self._status)
        app.router.add_get("/instances", self._instances)
        self.registered.add_routes(app)
        self.operator.add_routes(app)
        app.router.add_get(registration.PATH, self._registered)
        self.health.add_routes(app)
        for path in ENGINE_PATHS:
            app.router.add_route("GET" if path == TOKENIZER_INFO else "POST", path, self._pass)
        app.router.add_route("*", "/v1/{path:.*}", self._pass)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._close)  # requests in progress have ended or been cancelled
        return app

    async def _start(self, app: web.Application) -> None:
        self.lag.start()
        self._draining = asyncio.ensure_future(self._drains.keep_looking())

    async def _close(self, app: web.Application) -> None:
        if self._draining is not None:
            self._draining.cancel()
        until = time.monotonic() + CLOSE_S
        while self.metrics.num_requests and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await self.relay.releases.close(CLOSE_S)
        await self._background.close()
        await self.prober.close()
        if isinstance(self.policy, WatchesInstances):
            await self.policy.close()
        for instance in (*self.registry, *self._retired):
            instance.client.close()
        self.tracing.close()
        self.lag.stop()

    # Routes.

    @web.middleware
    async def _answer_preflight(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        return self.cross_origin.preflight(request) or await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self.generation.serve)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.path in OWN_PATHS:
            raise web.HTTPMethodNotAllowed(request.method, OWN_PATHS[request.path])
        return await self._serve(request, self.passthrough.serve)

    async def _serve(
        self,
        request: web.Request,
        handle: Callable[[Trace], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """What all requests to engines have in common: a key, an id, one outcome, a log line."""
        trace = Trace(request, request_id(request))
        self.metrics.came(trace)
        try:
            if not self._is_authorized(request):
                return self._refuse(trace, 401, "unauthorized", "a valid API key is needed")
            if was_here(request, self.config.router_id):
                response = self._refuse(trace, 508, "loop", LOOP)
                trace.outcome = "failed"
                return response
            trace.headers = forwarded_headers(
                request, trace.request_id, self._engine_authorization, self.config.router_id
            )
            trace.tenant = self.tenants.of(request) if self.tenants else None
            trace.counts_tokens = self._counts_tokens
            with self.tracing.request(trace), in_progress(trace.tenant) as refused:
                return not_admitted(trace, refused) if refused else await handle(trace)
        except BadRequest as e:
            return self._refuse(trace, e.status, "client_error", str(e), e.param)
        except BodyError as e:
            return self._refuse(trace, e.status, "client_error", str(e))
        except ConnectionError as e:  # the client went away while we wrote
            trace.error = str(e)
            raise
        except Exception:
            trace.outcome, trace.status = "failed", 500
            logger.exception("request %s", trace.request_id)
            raise
        finally:
            self.metrics.ended(trace)
            self.access_log.write(trace)

    async def _models(self, request: web.Request) -> web.Response:
        """Every model that an engine serves now, once."""
        if not self._is_authorized(request):
            return error_response(401, "unauthorized", "a valid API key is needed")
        entries: dict[str, Any] = {}
        alone = () if self.config.require_prefill else self.registry.prefills
        for instance in (*self.registry.decodes, *alone):
            if instance.is_available:
                for entry in self.prober.models.get(instance, ()):
                    entries.setdefault(entry["id"], entry)
        if not entries:
            found = self.selector.decode(Routed())
            message = found.message if isinstance(found, Unavailable) else "no model is known yet"
            return error_response(503, "service_unavailable", message, headers={"Retry-After": "1"})
        return json_response({"object": "list", "data": list(entries.values())})

    async def _load(self, request: web.Request) -> web.Response:
        return json_response({"server_load": (await self._snapshot()).num_requests})

    async def _metrics(self, request: web.Request) -> web.Response:
        snapshot = await self._snapshot()
        # Of a thousand engines there are tens of thousands of lines.
        exposed = await asyncio.to_thread(snapshot.expose)
        return web.Response(body=exposed, headers={"Content-Type": METRICS_TYPE})

    async def _version(self, request: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def _page(self, request: web.Request) -> web.Response:
        return page()

    async def _openapi(self, request: web.Request) -> web.Response:
        return json_response(document())

    async def _status(self, request: web.Request) -> web.Response:
        if not self._may_look(request):
            return error_response(401, "unauthorized", "a valid API key is needed")
        tenant = self._tenant_that_looks(request)
        return json_response(status(await self._snapshot(), self.config, tenant))

    async def _instances(self, request: web.Request) -> web.Response:
        if not self._may_look(request):
            return error_response(401, "unauthorized", "a valid API key is needed")
        tenant = self._tenant_that_looks(request)
        return json_response(instances(seen_by(tenant, await self._snapshot())))

    async def _registered(self, request: web.Request) -> web.Response:
        return self.registered.refuse(request) or json_response(instances(await self._snapshot()))

    # Parts.

    async def _snapshot(self) -> Snapshot:
        """Of all workers, if there are several."""
        return await self._keeper.snapshot() if self._keeper else self.metrics.snapshot()

    async def follow(self, specs: list[InstanceSpec], words: Words) -> None:
        """These are the engines that registered, and what an operator says of engines."""
        follow(self.registry, specs, words)

    def _is_authorized(self, request: web.Request) -> bool:
        if self._keys is None:
            return True
        return self._keys.accepts(bearer_token(request.headers.get("Authorization")))

    def _may_look(self, request: web.Request) -> bool:
        """At what the router does."""
        return self._is_authorized(request) or self.registered.has_token(request)

    def _tenant_that_looks(self, request: web.Request) -> str | None:
        """``None``: it may see what is others', as an operator, or where there are no tenants."""
        if self.tenants is None or self.registered.refuse(request) is None:
            return None
        return self.tenants.of(request).name

    def refused(self, request: web.BaseRequest, status: int, message: str) -> None:
        """No handler has answered it."""
        trace = Trace(cast("web.Request", request), request_id(request))
        trace.outcome, trace.status, trace.error = "client_error", status, message
        self.metrics.add("requests", trace.outcome)
        self.access_log.write(trace)

    def _refuse(
        self, trace: Trace, status: int, kind: str, message: str, param: str | None = None
    ) -> web.Response:
        trace.status, trace.error = status, message
        trace.outcome = "unauthorized" if status == 401 else "client_error"
        headers = {"x-request-id": trace.request_id}
        return error_response(status, kind, message, param=param, headers=headers)

    def _make_instance(self, spec: InstanceSpec) -> Instance:
        client = self._connect(spec, self.config.timeouts.connect_s)
        return Instance(spec, client, self.config.probes.failure_threshold)

    def _connect_prober(self, spec: InstanceSpec) -> EngineClient:
        return self._connect(spec, self.config.probes.timeout_s)

    def _connect(self, spec: InstanceSpec, timeout_s: float) -> EngineClient:
        return EngineClient(
            spec.url,
            rank=spec.data_parallel_rank,
            connect_timeout_s=timeout_s,
            tls=self._engine_tls,
            lag=self.lag,
        )

    def _added(self, instance: Instance) -> None:
        self.prober.watch(instance)
        if isinstance(self.policy, WatchesInstances):
            self.policy.watch(instance)

    def _removed(self, instance: Instance) -> None:
        self.prober.forget(instance)
        if isinstance(self.policy, WatchesInstances):
            self.policy.forget(instance)
        self.metrics.forget(instance.instance_id)
        self._retired = {old for old in self._retired if old.client.num_open}
        self._retired.add(instance)
        instance.client.retire()

    def _listen_elsewhere(self, instance: Instance) -> None:
        if isinstance(self.policy, WatchesInstances):
            self.policy.forget(instance)
            self.policy.watch(instance)

    async def refresh(self, now: float) -> None:
        """Called every second or so: files that changed, engines that are silent."""
        if self._keys is not None:
            self._keys.refresh()
        if self.tenants is not None:
            self.tenants.refresh()
        self.registered.refresh_secrets()
        await self._alone.expire(now)
        self.health.look()
        self._without_effect.look(now)
        if self._roles is not None:
            await self._roles.look(now)
        if self.config.rebalance == "load":
            self._rebalancing.look(now)


def _make_plan(config: RouterConfig) -> PlannedRoles | None:
    if config.planning is None:
        return None
    from vllm_ascend_pd.router.planned_roles import PlannedRoles  # it needs NumPy

    return PlannedRoles.of(config.planning)


def _resume_key(config: RouterConfig) -> ResumeKey:
    path = config.secret_file
    return ResumeKey(Secret.load(str(path), "--secret-file") if path else None)
