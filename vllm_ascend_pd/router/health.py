# SPDX-License-Identifier: Apache-2.0
"""Watches the engines: are they there, what do they serve, how loaded are they."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.kv.breaker import BreakerState
from vllm_ascend_pd.registration import ROLE_OF, engine_on
from vllm_ascend_pd.resume import RunningAt
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.instances import (
    EngineLoad,
    HitRate,
    Instance,
    InstanceSpec,
    TokensMadeBy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_ascend_pd.registration import Role
    from vllm_ascend_pd.router.config import Probes
    from vllm_ascend_pd.router.http_client import EngineClient, Headers

logger = logging.getLogger(__name__)

MODELS_EVERY = 5
"""Rounds of probes between two looks at ``/v1/models``."""
MISSED_LOADS = 3
"""Looks at an engine's metrics in vain, after which what they told last counts no more."""
SILENT = (FailureKind.TIMEOUT, FailureKind.CONNECT_TIMEOUT)

_LOADS = (
    b"num_requests_running",
    b"num_requests_waiting",
    b"kv_cache_usage_perc",
    b"prefix_cache_queries_total",
    b"prefix_cache_hits_total",
)
_OF_ROUTERS = b"pd_router_requests_in_progress"
_TELLS = (b"pd_engine_info", b"pd_tokens_made_by", _OF_ROUTERS)
_TOLD = re.compile(rb'(?:^|,)(epoch|kv_endpoint|fingerprint|role|part|adapter|value)="([^"\\]*)"')


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    """Whose adapter it is."""


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Server:
    """What several data parallel ranks have in common: its ``/metrics`` are those of all of them,
    so each of them reading it would cost the square of their number."""

    def __init__(self) -> None:
        self.num_ranks = 0
        self.asked_at = -math.inf
        self.reading: asyncio.Future[bytes | None] | None = None
        """The lines that are used here, or soon; ``None``: it does not tell them."""


class Prober:
    """One task per instance, from ``watch`` until it is gone and nothing goes on there. Event loop
    thread."""

    def __init__(
        self,
        probes: Probes,
        engine_headers: Headers,
        connect: Callable[[InstanceSpec], EngineClient],
    ) -> None:
        """``connect``: to an engine, apart from requests, whose number delays no probe."""
        self._probes = probes
        self._connect = connect
        self._clients: dict[Instance, EngineClient] = {}
        self._headers = tuple(engine_headers)
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self.models: dict[Instance, list[Any]] = {}
        """Entries of ``/v1/models``, as each engine gave them."""
        self._servers: dict[str, _Server] = {}
        """By URL."""
        self._asked: set[Instance] = set()
        self._suspected: dict[Instance, str] = {}
        """What the last look at its metrics has raised, which the next one may clear."""

    def has_asked(self, instance: Instance) -> bool:
        """Whether it has answered a probe, or not answered one."""
        return instance in self._asked

    def watch(self, instance: Instance) -> None:
        self._clients[instance] = self._connect(instance.spec)
        server = self._servers.setdefault(instance.spec.url, _Server())
        server.num_ranks += 1
        server.reading = None  # it may be of the processes before
        self._tasks[instance] = asyncio.ensure_future(self._watch(instance))

    def forget(self, instance: Instance) -> None:
        """It is gone. What goes on there is probed for: that its host dies silently is noticed by
        probes alone."""
        if not _is_needed(instance):
            self._stop(instance)

    def _stop(self, instance: Instance) -> None:
        self.models.pop(instance, None)
        self._suspected.pop(instance, None)
        self._asked.discard(instance)
        if task := self._tasks.pop(instance, None):
            task.cancel()
        if client := self._clients.pop(instance, None):
            client.close()
            server = self._servers[instance.spec.url]
            server.num_ranks -= 1
            if not server.num_ranks:
                del self._servers[instance.spec.url]
                if server.reading is not None:
                    server.reading.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for instance in list(self._tasks):
            self._stop(instance)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, instance: Instance) -> None:
        num_failed = num_rounds = num_unread = 0
        while _is_needed(instance):
            try:
                began = time.monotonic()
                failure = await self._probe(instance)
                if failure is None and (instance not in self.models or num_rounds == 0):
                    await self._read_models(instance)  # before it gets requests
                if not _tells_nothing(failure, began, instance):
                    num_failed = num_failed + 1 if failure else 0
                    self._judge(instance, failure, num_failed)
                has_load = failure is None and await self._read_load(instance)
                num_unread = 0 if has_load else num_unread + 1
                if num_unread == MISSED_LOADS:
                    self._forget_load(instance)
                if failure is None:
                    num_rounds = (num_rounds + 1) % MODELS_EVERY
                elif num_failed:
                    num_rounds = 0  # it may come back as another engine
                    instance.was_away()
                    self._servers[instance.spec.url].reading = None
                self._asked.add(instance)
            except Exception:
                logger.exception("probing %s", instance.instance_id)
            is_open = instance.breaker.state is BreakerState.OPEN
            await asyncio.sleep(instance.breaker.backoff_s if is_open else self._probes.interval_s)
        self._stop(instance)

    def _judge(self, instance: Instance, failure: Failure | None, num_failed: int) -> None:
        breaker = instance.breaker
        if failure is None:
            was = breaker.state
            breaker.probe_answered()
            if breaker.state is not was:
                logger.info("%s answers again (%s)", instance.instance_id, breaker.state.value)
            return
        if breaker.state is BreakerState.OPEN:
            breaker.probe_failed(unreachable=failure.kind is FailureKind.CONNECT)
        elif failure.kind is FailureKind.CONNECT:
            instance.failed(failure, "probe")
        elif (
            failure.kind is not FailureKind.ROUTER and num_failed >= self._probes.failure_threshold
        ):
            down = Failure(FailureKind.DOWN, f"{num_failed} probes failed, last {failure}")
            instance.failed(down, "probe")
        if breaker.state is BreakerState.OPEN:
            # Who waits for its answer waits in vain, and can still be sent elsewhere. What is under
            # way may go on where an engine that stops has closed its port first.
            is_silent = failure.kind in SILENT and num_failed >= self._probes.failure_threshold
            down = Failure(FailureKind.DOWN, "it answers no probes")
            instance.client.fail_waiting(down, is_silent=is_silent)

    async def _probe(self, instance: Instance) -> Failure | None:
        result = await self._get(self._clients[instance], b"/health")
        if isinstance(result, Failure):
            hint = _hint_of_tls(result, instance.spec.url)
            return Failure(result.kind, f"{result.detail}; {hint}") if hint else result
        status, _ = result
        if status >= 500:
            return Failure(FailureKind.STATUS, f"/health: {status}")
        return None

    async def _read_models(self, instance: Instance) -> None:
        result = await self._get(self._clients[instance], b"/v1/models")
        if isinstance(result, Failure):
            return
        if result[0] != 200:
            fix = ": give the router --engine-api-key-file" if result[0] in (401, 403) else ""
            instance.doubt(f"/v1/models: status {result[0]}, so nobody knows what it serves{fix}")
            return
        try:
            models = msgspec.json.decode(result[1], type=_Models)
            entries = msgspec.json.decode(result[1])["data"]
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
            return
        self.models[instance] = entries
        instance.models = tuple(model.id for model in models.data)
        instance.adapter_names = frozenset(model.id for model in models.data if model.parent)

    async def _read_load(self, instance: Instance) -> bool:
        """Whether it is known."""
        if time.monotonic() - instance.load.read_at < self._probes.load_interval_s:
            return True
        server = self._servers[instance.spec.url]
        now = time.monotonic()
        every_s = max(self._probes.interval_s, self._probes.load_interval_s)
        if server.reading is None or now - server.asked_at > every_s / 2:
            server.asked_at = now
            server.reading = asyncio.ensure_future(self._read_metrics(self._clients[instance]))
        reading, asked_at = server.reading, server.asked_at
        text = await asyncio.shield(reading)
        if text is None:
            if server.reading is reading:
                server.reading = None
        else:
            engine = engine_on(text, instance.spec.data_parallel_rank)
            instance.load = parse_load(text, engine, asked_at)
            instance.hit_rate.note(instance.load)
            infos = parse_infos(text, engine)
            instance.runs_at = place_of(infos)
            instance.fingerprint = fingerprint_of(infos)
            instance.tokens_made_by = parse_makers(text, engine)
            self._doubt(instance, infos, text)
        return text is not None

    def _forget_load(self, instance: Instance) -> None:
        """What it has told too long ago says nothing of now: it may have been full then."""
        if not instance.load.read_at:
            return
        instance.load, instance.hit_rate = EngineLoad(), HitRate()
        if instance.breaker.closed:
            instance.doubt(
                "its /metrics do not answer: how full it is, and what waits there, is not known;"
                " look at its load, and at what else reads them"
            )

    def _doubt(self, instance: Instance, infos: Sequence[dict[str, str]], text: bytes) -> None:
        """Whether it says something else of itself than how it is used. What only one look shows
        may be an engine that has begun a moment ago."""
        before, found = self._suspected.get(instance), misuse(instance.spec.role, infos, text)
        if found is None and not infos and any(one.told_fingerprint for one in self._tasks):
            found = (
                "its /metrics have no vllm:pd_engine_info, as other engines have it: without"
                " kv_connector InEngine in its --kv-transfer-config no KV comes from it or goes to"
                " it; see vllm-pd doctor"
            )
        if found is not None and found == before:
            instance.doubt(found)
        self._suspected[instance] = found or ""

    async def _read_metrics(self, client: EngineClient) -> bytes | None:
        result = await self._get(client, b"/metrics")
        if isinstance(result, Failure) or result[0] != 200:
            return None
        return told_lines(result[1])

    async def _get(self, client: EngineClient, target: bytes) -> tuple[int, bytes] | Failure:
        return await client.fetch(b"GET", target, self._headers, b"", self._probes.timeout_s)


def _hint_of_tls(failure: Failure, url: str) -> str | None:
    """Where what failed may be that one side speaks TLS and the other one does not."""
    if url.startswith("http://"):
        if failure.kind is FailureKind.DISCONNECT:
            return "if it serves https (--ssl-certfile), give its URL as https://"
        return None
    if "WRONG_VERSION_NUMBER" in failure.detail:
        return "if it serves http, give its URL as http://"
    if "CERTIFICATE_VERIFY_FAILED" in failure.detail:
        return "give the router the CA of its certificate with --engine-ca"
    return None


def _is_needed(instance: Instance) -> bool:
    """Whether anybody wants to know how it is."""
    return not instance.is_gone or bool(instance.num_admitted or instance.num_active)


def _tells_nothing(failure: Failure | None, began: float, instance: Instance) -> bool:
    """Of an engine that had other things to say first, or of the router alone."""
    if failure is None:
        return False
    is_late = failure.kind in (FailureKind.CONNECT_TIMEOUT, FailureKind.TIMEOUT)
    return failure.kind is FailureKind.ROUTER or (is_late and instance.client.heard_at > began)


def _lines(text: bytes, name: bytes) -> Iterator[bytes]:
    """Of vLLM's series of this name. Finds them several times as fast as an expression does: a page
    has a thousand others.
    """
    start = b"\nvllm:" + name
    end = 0
    while (at := text.find(start, end)) >= 0:
        end = text.find(b"\n", at + len(start))
        end = len(text) if end < 0 else end
        yield text[at + 1 : end]


def told_lines(page: bytes) -> bytes:
    """Of a page of ``/metrics``, what is read here."""
    page = b"\n" + page
    return b"\n".join(line for name in (*_LOADS, *_TELLS) for line in _lines(page, name))


def _series(text: bytes, name: bytes, engine: int | None) -> Iterator[tuple[bytes, float]]:
    """Labels and values of vLLM's series of this name, of one ``engine`` or of all."""
    start = b"vllm:" + name
    wanted = b"" if engine is None else b'engine="%d"' % engine
    for line in _lines(text, name):
        labels, _, value = line[len(start) :].rpartition(b" ")
        is_name = not labels or (labels.startswith(b"{") and labels.endswith(b"}"))
        if is_name and wanted in labels:
            with contextlib.suppress(ValueError):
                if math.isfinite(number := float(value)):
                    yield labels[1:-1], number


def parse_load(text: bytes, engine: int | None = None, read_at: float = 0.0) -> EngineLoad:
    """Of vLLM's ``/metrics``; without ``engine``, those behind one server are added up."""
    text = b"\n" + text
    found = {name: [value for _, value in _series(text, name, engine)] for name in _LOADS}
    sums = {name: sum(values) for name, values in found.items()}
    num_engines = max(len(found[b"kv_cache_usage_perc"]), 1)
    return EngineLoad(
        num_running=sums[b"num_requests_running"],
        num_waiting=sums[b"num_requests_waiting"],
        kv_usage=sums[b"kv_cache_usage_perc"] / num_engines,
        prefix_queries=sums[b"prefix_cache_queries_total"],
        prefix_hits=sums[b"prefix_cache_hits_total"],
        read_at=read_at,
    )


def parse_infos(text: bytes, engine: int | None = None) -> list[dict[str, str]]:
    """What ``/metrics`` say of the engine, or of each of several behind one server: ``epoch``,
    ``kv_endpoint``, ``fingerprint``.
    """
    return _labels_of(b"pd_engine_info", text, engine)


def parse_makers(text: bytes, engine: int | None = None) -> TokensMadeBy:
    """What ``/metrics`` say of it; of several engines behind one server, in what all agree that say
    something.
    """
    values: dict[tuple[str, str], set[str]] = {}
    for told in _labels_of(b"pd_tokens_made_by", text, engine):
        if told.keys() >= {"part", "adapter", "value"}:
            values.setdefault((told["part"], told["adapter"]), set()).add(told["value"])
    known = {key: found.pop() for key, found in values.items() if len(found) == 1}
    adapters = {of: value for (_, of), value in known.items() if of}
    grammars = known.pop(("grammars", ""), "")
    sampling = {part: value for (part, of), value in known.items() if not of}
    return TokensMadeBy(sampling, grammars, adapters)


def _labels_of(name: bytes, text: bytes, engine: int | None) -> list[dict[str, str]]:
    """Of those that are 1: what they say is so."""
    return [
        {label.decode(): told.decode(errors="replace") for label, told in _TOLD.findall(labels)}
        for labels, value in _series(b"\n" + text, name, engine)
        if value == 1
    ]


def misuse(role: Role, infos: Sequence[dict[str, str]], text: bytes) -> str | None:
    """What its ``/metrics`` say against its use as ``role``."""
    if any(_lines(b"\n" + text, _OF_ROUTERS)):
        return (
            "it is a router, not an engine: it drops kv_transfer_params, so no KV is handed over."
            " Give the URLs of the engines behind it"
        )
    for kv_role in sorted(info.get("role", "") for info in infos):
        if ROLE_OF.get(kv_role, "both") not in ("both", role):
            return (
                f"it is used for {role} and its kv_role is {kv_role}: no KV is handed over. Change"
                " its kv_role, or its role here"
            )
    return None


def place_of(infos: Sequence[dict[str, str]]) -> RunningAt | None:
    """Where the engine hands running requests over. It does so to who has the installation's
    secret, by which the two know each other; of several nobody knows which has a request."""
    if len(infos) != 1:
        return None
    host, _, port = infos[0].get("kv_endpoint", "").rpartition(":")
    epoch = infos[0].get("epoch")
    return RunningAt(host, int(port), "", epoch) if port.isdecimal() and epoch else None


def fingerprint_of(infos: Sequence[dict[str, str]]) -> str | None:
    """That of all of them."""
    told = {info.get("fingerprint") for info in infos}
    return told.pop() if len(told) == 1 else None
