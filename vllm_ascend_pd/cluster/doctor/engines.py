# SPDX-License-Identifier: Apache-2.0
"""Checks of engines that run: are they there, do they fit together, do their clocks agree."""

from __future__ import annotations

import asyncio
import email.utils
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm_ascend_pd.cluster.doctor.findings import Finding, fail, ok, reason_of, skipped, warn
from vllm_ascend_pd.operating import TRUST_FIX
from vllm_ascend_pd.registration import RANK_HEADER, ROLE_OF, InstanceStatus, Role, engine_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

T = TypeVar("T")
R = TypeVar("R")

ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, ValueError)
"""What a server that is not there, or not what it should be, causes."""

AT_ONCE = 32
"""Engines that are asked at a time: of hundreds some do not answer for as long as one may wait."""
MAX_CLOCK_SKEW_S = 2.0
_TIMEOUT = aiohttp.ClientTimeout(total=60, sock_connect=10)
"""A busy engine answers late; a host that is not there does not hold the examination up."""
_INFO = "vllm:pd_engine_info"
_OF_ROUTERS = "vllm:pd_router_requests_in_progress"
_POOL_TROUBLE = ("failed", "bypassed", "full")
"""Outcomes of lookups, loads and puts that somebody should know of."""

_FITTING: dict[str, dict[str, str]] = {
    "block hashes": {
        "hash": "give both sides the same --prefix-caching-hash-algo",
        "seed": "start both sides with the same PYTHONHASHSEED, or with none and sha256",
    },
    "model": {
        "config": "start both sides with the same config.json and --hf-overrides",
        "weights": "start both sides with the same weight files; update both in place",
        "generation": "change the weights of both sides in place, by the same call",
        "arch": "give both sides the same --model-impl",
        "load": "give both sides the same --load-format",
        "quant": "give both sides the same --quantization",
        "length": "the model computes with --max-model-len: give both sides the same",
        "window": "give --disable-sliding-window to both sides or to none",
        "code": "start both sides with the same code beside the model (--trust-remote-code)",
        "draft": (
            "give prefill engines the drafter of the decode engines: method and model of"
            " --speculative-config"
        ),
    },
    "KV layout": {
        "dtype": "give both sides the same --dtype",
        "kv_dtype": "give both sides the same --kv-cache-dtype",
        "block": "give both sides the same --block-size",
        "page": (
            "give both sides the same drafter or none, and equal tensor parallel sizes where its"
            " pages have another size than the model's"
        ),
        "reach": (
            "give --disable-hybrid-kv-cache-manager to both sides or to none, and both the same"
            " drafter or none"
        ),
        "layout": "start both sides with the same VLLM_KV_CACHE_LAYOUT",
        "kernel": "give both sides the same --attention-backend, or a --block-size of 64 or less",
        "via": "give both sides the same transfer.protocol",
        "isa": "run both sides on the same kind of CPU",
    },
    "engine versions": {
        "vllm": "install the same vLLM on both sides",
        "wire": "install the same vllm-ascend-pd on both sides",
    },
}
"""What both sides must have in common: check, key of the fingerprint, what to do."""


@dataclass(slots=True)
class Engine:
    """What one engine says of itself; empty where it says nothing."""

    url: str
    role: Role
    name: str = ""
    rank: int | None = None
    """Of a data parallel rank that is an instance of its own."""
    error: str = ""
    """Why it cannot be asked."""
    version: str = ""
    model: str = ""
    named: str = ""
    """``--model``, as it was given."""
    models: frozenset[str] = frozenset()
    """All names that it serves: that one's others, and adapters."""
    is_router: bool = False
    max_model_len: int = 0
    generates: bool = True
    """Not a pooling model, which embeds, scores or classifies and has no part in P/D."""
    info: dict[str, str] = field(default_factory=dict)
    """Labels of ``vllm:pd_engine_info``."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Its parts; empty when the engine does not tell."""
        words = self.info.get("fingerprint", "").split(" ")
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def headers(self) -> dict[str, str]:
        """With which a request goes to it."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    def __str__(self) -> str:
        return self.name or f"{self.role} {self.url}"


class Web:
    """HTTP with engines and routers; every request has a deadline."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def text(self, url: str) -> str:
        """The body of a 200; ``ERRORS`` otherwise."""
        async with self._session.get(url, timeout=_TIMEOUT) as response:
            response.raise_for_status()
            return await response.text()

    async def has_route(self, url: str) -> bool:
        """Whether anything can be asked there, by whatever method."""
        async with self._session.get(url, timeout=_TIMEOUT) as response:
            return response.status != 404

    async def json(self, url: str) -> Any:
        """The body of a 200 as a value."""
        return msgspec.json.decode(await self.text(url))

    async def post(
        self,
        url: str,
        body: Mapping[str, Any],
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON answer; an answer that is no 200 is an ``aiohttp.ClientError`` with its text."""
        timeout = aiohttp.ClientTimeout(timeout_s)
        async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status}: {text[:300]}")
            return msgspec.json.decode(text)

    async def order(
        self, url: str, body: Mapping[str, Any], timeout_s: float, token: str | None
    ) -> Any:
        """The JSON answer of a router; an ``aiohttp.ClientResponseError`` has its status."""
        timeout = aiohttp.ClientTimeout(timeout_s)
        headers = {"Authorization": f"Bearer {token}"} if token else None
        async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read())

    async def stream(
        self, url: str, body: Mapping[str, Any], request_id: str, timeout_s: float
    ) -> AsyncIterator[Any]:
        """The chunks of an answer; an error within it is an ``aiohttp.ClientError``, too."""
        timeout, headers = aiohttp.ClientTimeout(timeout_s), {"x-request-id": request_id}
        async with self._session.post(url, json=body, timeout=timeout, headers=headers) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = msgspec.json.decode(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise aiohttp.ClientPayloadError(chunk["error"]["message"])
                yield chunk

    async def date(self, url: str) -> tuple[float, float, float] | None:
        """Time before, ``Date`` of the answer (whole seconds), time after."""
        before = time.time()
        async with self._session.get(url, timeout=_TIMEOUT) as response:
            after = time.time()
            if (header := response.headers.get("Date")) is None:
                return None
            return before, email.utils.parsedate_to_datetime(header).timestamp(), after


async def each(asking: Callable[[T], Awaitable[R]], of: Iterable[T]) -> list[R]:
    """What ``asking`` gives of each, in their order; ``AT_ONCE`` at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def ask_one(one: T) -> R:
        async with room:
            return await asking(one)

    return await asyncio.gather(*map(ask_one, of))


async def discover(web: Web, router: str) -> list[Engine]:
    """The engines that a router knows; ``ERRORS`` when it cannot be asked."""
    text = await web.text(f"{router}/instances")
    listed = msgspec.json.decode(text, type=list[InstanceStatus])
    return [Engine(i.url, i.role, i.instance_id, i.data_parallel_rank) for i in listed]


async def ask_all(web: Web, engines: Iterable[Engine]) -> None:
    """Fill in what each says of itself."""
    await each(partial(ask, web), engines)


async def ask(web: Web, engine: Engine) -> None:
    try:
        await web.text(f"{engine.url}/health")
        engine.version = str((await web.json(f"{engine.url}/version"))["version"])
        models = (await web.json(f"{engine.url}/v1/models"))["data"]
        engine.models = frozenset(str(model["id"]) for model in models)
        model = models[0]
        engine.model, engine.max_model_len = str(model["id"]), int(model["max_model_len"])
        engine.named = str(model.get("root") or "")
        engine.generates = await web.has_route(f"{engine.url}/v1/completions")
        page = await web.text(f"{engine.url}/metrics")
        engine.info, engine.is_router = find_info(page, engine.rank), _OF_ROUTERS in page
    except (*ERRORS, KeyError, IndexError, TypeError) as e:
        engine.error = reason_of(e)


def find_info(page: str, rank: int | None = None) -> dict[str, str]:
    """Labels of ``vllm:pd_engine_info`` on a page of metrics, of a rank or of the first."""
    number = engine_on(page.encode(), rank)
    for family in text_string_to_metric_families(page):
        if family.name == _INFO:
            for sample in family.samples:
                # 0: what it was before its weights changed
                if sample.value and _is_of(sample.labels, number):
                    return dict(sample.labels)
    return {}


def _is_of(labels: Mapping[str, str], number: int | None) -> bool:
    return number is None or labels.get("engine") == str(number)


def not_applicable(check: str, engines: Iterable[Engine]) -> list[Finding]:
    """What a check of P/D says of pooling models."""
    pooling = [engine for engine in engines if not engine.error and not engine.generates]
    return [skipped(check, f"{engine}: not applicable: pooling model") for engine in pooling]


def by_model(engines: Sequence[Engine]) -> dict[str, list[Engine]]:
    """A router may have engines of several models; only those of one hand over to each other."""
    groups: dict[str, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.model, []).append(engine)
    return groups


class Reachable:
    """Whether each engine answers, and there is one of each role for each model."""

    name = "engines"

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    async def run(self) -> Sequence[Finding]:
        findings = []
        for engine in self._engines:
            if engine.error:
                found = f"{engine}: {engine.error}"
                findings.append(fail(self.name, found, _fix_of(engine), url=engine.url))
            else:
                found = f"{engine}: vLLM {engine.version} serves {engine.model}"
                findings.append(ok(self.name, found, url=engine.url, version=engine.version))
        models = by_model([one for one in self._engines if one.generates and not one.error])
        for model, of_model in (models or {"": []}).items():
            for role in ("prefill", "decode"):
                if not any(engine.role in (role, "both") for engine in of_model):
                    found = f"no {role} engine answers"
                    fix = f"start one: vllm-pd up MODEL --{role} 1, or vllm serve with that kv_role"
                    if len(models) > 1:
                        found = f"no {role} engine serves {model}"
                        fix += "; or give all engines of one model the same --served-model-name"
                    findings.append(fail(self.name, found, fix))
        return findings


def _fix_of(engine: Engine) -> str:
    if engine.error.startswith("401"):
        return "name a file with the key that it wants with --engine-api-key-file"
    return fix_of_tls(engine.error) or f"curl -i {engine.url}/health; then see its log"


def fix_of_tls(reason: str) -> str:
    """Of a server whose certificate is not trusted here; else nothing."""
    is_distrusted = "CERTIFICATE_VERIFY_FAILED" in reason
    return TRUST_FIX if is_distrusted else ""


class InEngine:
    """Whether each engine runs our code, in the role that it is used for."""

    name = "in-engine transfers"

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = [engine for engine in engines if not engine.error]

    async def run(self) -> Sequence[Finding]:
        return [self._judge(engine) for engine in self._engines]

    def _judge(self, engine: Engine) -> Finding:
        if engine.is_router:
            found = f"{engine} is a router, not an engine: it drops kv_transfer_params"
            return fail(self.name, found, "give the URLs of the engines behind it")
        if not engine.generates:
            if engine.role == "both":
                return not_applicable(self.name, [engine])[0]
            found = f"{engine} has a pooling model: used for {engine.role} it counts as degraded"
            return warn(self.name, found, "give it the role both (docs/router.md)")
        if not engine.info:
            return fail(
                self.name,
                f"{engine} does not report {_INFO}",
                'start it with --kv-transfer-config \'{"kv_connector": "InEngine", …}\' on a'
                " patched vLLM, without --disable-log-stats; on its host: vllm-pd doctor",
            )
        role = ROLE_OF.get(engine.info["role"], engine.info["role"])
        if role not in (engine.role, "both"):
            return fail(
                self.name,
                f"{engine} is used for {engine.role} and its kv_role is {engine.info['role']}",
                "change its kv_role, or how the router uses it",
            )
        registered = engine.info["kv_endpoint"]
        at = f", consumers reach it at {registered}" if registered else ""
        return ok(self.name, f"{engine}: {engine.info['role']}{at}", **engine.info)


class Fitting:
    """Whether producers and consumers agree on everything that KV depends on."""

    name = "compatibility"

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._models = by_model([e for e in engines if e.fingerprint and not e.error])

    async def run(self) -> Sequence[Finding]:
        findings = []
        for model, known in self._models.items():
            where = f" of {model}" if len(self._models) > 1 else ""
            if len(known) < 2:
                continue
            rest = set[str]().union(*(engine.fingerprint for engine in known))
            for check, fixes in _FITTING.items():
                findings.append(self._judge(check + where, fixes, known))
                rest -= fixes.keys()
            others = dict.fromkeys(sorted(rest), "start both sides with the same options")
            findings.append(self._judge("other properties" + where, others, known))
            if any("media" in engine.fingerprint for engine in known):
                findings.append(_images("images" + where, known))
        if not findings:
            return [skipped(self.name, "no two engines of one model say what they are")]
        return findings

    def _judge(self, check: str, fixes: Mapping[str, str], known: Sequence[Engine]) -> Finding:
        same: dict[str, str] = {}
        wrong: list[str] = []
        todo: list[str] = []
        for key, fix in fixes.items():
            values = {
                str(engine): engine.fingerprint.get(key, "nothing") for engine in _alike(key, known)
            }
            if set(values.values()) <= {"nothing"}:
                continue  # a property of other platforms, or of drafters that nobody needs
            if len(set(values.values())) == 1:
                same[key] = next(iter(values.values()))
                continue
            wrong.append(f"{key}: " + ", ".join(f"{e} has {value}" for e, value in values.items()))
            todo.append(fix)
        if wrong:
            return fail(check, "; ".join(wrong), "; ".join(todo))
        found = ", ".join(f"{key} {value}" for key, value in same.items())
        return ok(check, found or "there are none", **same)


def _images(check: str, known: Sequence[Engine]) -> Finding:
    """vLLM's hash of an image, with which its blocks are found, holds the name of the model."""
    names = {str(engine): engine.named for engine in known}
    if len(set(names.values())) == 1:
        return ok(check, f"all engines were started with --model {known[0].named}")
    return warn(
        check,
        "; ".join(f"{engine} was started with --model {name}" for engine, name in names.items())
        + ": engines that call it otherwise compute prompts from the first image on themselves",
        "give all engines the same --model, letter by letter",
    )


def _alike(key: str, known: Sequence[Engine]) -> Sequence[Engine]:
    """Those that must have the same: the KV of a drafter is only for who has one, too."""
    if key != "draft":
        return known
    concerned = [e for e in known if e.role != "decode" or key in e.fingerprint]
    drafts = any(e.role != "prefill" and key in e.fingerprint for e in concerned)
    return concerned if drafts else []


class Pool:
    """Whether engines that have a pool look into it and store in it; asked after a request."""

    name = "pool"

    def __init__(self, web: Web, engines: Sequence[Engine]) -> None:
        self._web = web
        self._engines = [engine for engine in engines if not engine.error]

    async def run(self) -> Sequence[Finding]:
        found = [one for one in await each(self._look, self._engines) if one is not None]
        return found or [skipped(self.name, "no engine has one")]

    async def _look(self, engine: Engine) -> Finding | None:
        try:
            page = await self._web.text(f"{engine.url}/metrics")
            counts = count(page, "vllm:pd_pool_", engine.rank)
            bypassed = bypassed_directions(page, engine.rank)
        except ERRORS as e:
            return fail(self.name, f"{engine}: {e}", "see its log")
        return self._judge(str(engine), counts, bypassed) if counts else None

    def _judge(self, engine: str, counts: Mapping[str, float], bypassed: Sequence[str]) -> Finding:
        stored, hits = counts.get("put_blocks ok", 0), counts.get("lookups hit", 0)
        found = f"{engine}: {stored:.0f} blocks stored, {hits:.0f} lookups hit"
        bad = {key: number for key, number in counts.items() if key.split(" ")[-1] in _POOL_TROUBLE}
        always = ("breaker_opened", "file_errors")
        bad |= {key: number for key, number in counts.items() if key.startswith(always)}
        if not bad:
            return ok(self.name, found, **counts)
        listed = ", ".join(f"{key} {number:.0f}" for key, number in bad.items())
        fix = "see its log for the reason; is the master there, and has the pool room?"
        now = f"; bypassed now: {', '.join(bypassed)}" if bypassed else ""
        return warn(self.name, f"{found}{now}; since its start: {listed}", fix, **counts)


def count(page: str, prefix: str, rank: int | None = None) -> dict[str, float]:
    """Counters whose names begin with ``prefix``, by the rest of the name and the last label; of
    one rank, or of all that the page tells of.
    """
    counts: dict[str, float] = {}
    number = engine_on(page.encode(), rank)
    for family in text_string_to_metric_families(page):
        for sample in family.samples if family.name.startswith(prefix) else ():
            if sample.name == f"{family.name}_total" and _is_of(sample.labels, number):
                labels = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
                key = " ".join([family.name.removeprefix(prefix), *labels]).strip()
                counts[key] = counts.get(key, 0) + sample.value
    return counts


def bypassed_directions(page: str, rank: int | None = None) -> list[str]:
    """In which the pool is not used at the moment, by one rank, or by any."""
    number = engine_on(page.encode(), rank)
    return sorted(
        {
            sample.labels.get("direction", "")
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "vllm:pd_pool_bypassed"
            and sample.value
            and _is_of(sample.labels, number)
        }
    )


class ClockSkew:
    """How far the clocks of the engines' hosts are off this one's, by their ``Date`` headers."""

    name = "clock"

    def __init__(self, web: Web, engines: Sequence[Engine], num_probes: int = 40) -> None:
        self._web = web
        self._engines = [engine for engine in engines if not engine.error]
        self._num_probes = num_probes

    async def run(self) -> Sequence[Finding]:
        return await each(self._judge, self._engines)

    async def _judge(self, engine: Engine) -> Finding:
        low, high = float("-inf"), float("inf")
        last_date, last_before = None, 0.0
        for _ in range(self._num_probes):
            try:
                seen = await self._web.date(f"{engine.url}/health")
            except ERRORS as e:
                return skipped(self.name, f"{engine}: {e}")
            if seen is None:
                return skipped(self.name, f"{engine} sends no Date")
            before, date, after = seen
            # The header is the time there, cut to seconds. A busy server keeps it for as long as it
            # likes, so only one that is new says how far the clock may be ahead.
            low = max(low, date - after)
            if last_date is not None and date != last_date:
                high = date + 1 - last_before
                break
            last_date, last_before = date, before
            await asyncio.sleep(0.15)
        return self.judge(str(engine), low, high)

    def judge(self, engine: str, low: float, high: float) -> Finding:
        """``low`` to ``high``: seconds that the clock there is ahead, at least and at most."""
        surely = max(low, -high, 0.0)
        if surely > MAX_CLOCK_SKEW_S:
            found = f"{engine}: {surely:.1f} s {'ahead' if low > 0 else 'behind'}"
            fix = "timedatectl set-ntp true, or chronyc makestep, on both hosts"
            return warn(self.name, found, fix, skew_s=surely if low > 0 else -surely)
        if high == float("inf"):
            found = f"{engine}: not ahead; it is too busy to tell more"
            return ok(self.name, found, skew_s=surely)
        return ok(self.name, f"{engine}: within {max(-low, high, 0):.1f} s", skew_s=surely)
