# SPDX-License-Identifier: Apache-2.0
"""Measures a P and a D that run behind a router, over HTTP. They should have nothing else to do."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.operating import TRUST_FIX
from vllm_ascend_pd.planner.profile import (
    FORMAT,
    BesidePoint,
    DecodePoint,
    HandoverPoint,
    PrefillPoint,
    Profile,
)
from vllm_ascend_pd.registration import InstanceStatus

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from vllm_ascend_pd.registration import Role

_DONE = b"[DONE]"
_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=10)
NUM_STEPS = 24
"""Of D, for each point: enough that how requests begin and end does not count."""

MOST_STEPS = 16 * NUM_STEPS + 4
"""Of D, where its requests do not run together for long enough."""

NUM_STREAMS, BUSY_TOKENS = 4, 256
"""What keeps D busy while P is measured: streams, and the tokens of their prompts and answers. P is
kept busy with such prompts, one after another, that it hands over to nobody: a P in service waits
for prompts, too, and D is not measured as if it never did."""

MANY_STREAMS = 24
"""And while it is measured by how much more of them slow P down."""

LEAST_LENGTH = 2 * BUSY_TOKENS

_PAUSE_S = 0.5
"""After a request that failed."""

_BEGIN_S = 60.0
"""That those which keep an engine busy may take to begin; ``_LOOK_S``: between two looks."""
_LOOK_S = 0.01

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    num_tokens: Sequence[int]
    """Of prompts, for P and the hand-over."""
    batches: Sequence[int]
    """Requests of a D at once; those of P are up to 4 of them."""
    contexts: Sequence[int]
    most_tokens: int
    """Of all requests that run at once; larger batches of long contexts are left out."""
    rounds: int
    """Of each point; what counts is the median."""
    token_ids: tuple[int, int]
    """Prompts are drawn from these."""
    both_busy: bool = False
    """Each engine is measured while the other one works, as it does in service: for engines that
    take cores or memory bandwidth from each other."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engines were started with and do not tell."""

    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Access:
    """Whom to ask, and with what."""

    router: str
    """Its URL, without a slash after it."""
    key: str | None = None
    """Of the router's API, if it wants one."""
    engine_key: str | None = None
    """Of the engines'."""
    tls: ssl.SSLContext | None = None
    """Of https servers; ``None``: the system's certificate authorities."""

    def headers(self, url: str) -> dict[str, str]:
        """With which that server is asked."""
        key = self.key if url == self.router else self.engine_key
        return {"Authorization": f"Bearer {key}"} if key else {}


class Measurement:
    """Of one pair. Random prompts, so that no cache has any of them."""

    def __init__(
        self, http: aiohttp.ClientSession, access: Access, grid: Grid, say: Say, seed: int = 0
    ) -> None:
        self._http, self._access, self._grid, self._say = http, access, grid, say
        self._router = access.router
        self._random = random.Random(f"{seed} {time.time_ns()}")
        self._model = self._prefill = self._decode = ""
        self._num_tokens = 0
        """That have come, of all requests."""

    async def take(self, limits: EngineLimits) -> Profile:
        """All of it; ``ConfigError`` says which server did not answer, and how."""
        await self._find_engines()
        num_p_tokens = math.prod(await self._kv_blocks(self._prefill))
        num_blocks, block_size = await self._kv_blocks(self._decode)
        await self._fit_grid()
        for url in (self._prefill, self._decode):  # what is compiled or allocated at first
            await self._first_token_s(url, self._prompt(max(self._grid.num_tokens)))
        async with self._busy(self._decode, NUM_STREAMS, BUSY_TOKENS):
            prefill = [point async for point in self._prefills()]
            handover = [point async for point in self._handovers(prefill)]
            sending_s = await self._sending_s(prefill, handover)
        async with self._busy(self._prefill, 1, 1):
            decode = [point async for point in self._decodes()]
        beside: Sequence[BesidePoint] = ()
        decode_alone = 1.0
        if self._grid.both_busy:
            beside = await self._beside(limits)
            decode_alone = await self._decode_alone(decode)
        return Profile(
            format=FORMAT,
            model=self._model,
            prefill=tuple(prefill),
            decode=tuple(decode),
            handover=tuple(handover),
            sending_seconds_per_token=sending_s,
            prefill_beside=tuple(beside),
            decode_alone=decode_alone,
            block_size=block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            prefill_kv_tokens=num_p_tokens,
            decode_kv_tokens=num_blocks * block_size,
        )

    async def _find_engines(self) -> None:
        listed = await self._get(self._router, "/instances")
        try:
            instances = msgspec.json.decode(listed, type=list[InstanceStatus])
        except msgspec.MsgspecError as e:
            raise ConfigError(f"{self._router} is no vllm-pd router: {e}") from e
        found: dict[Role, dict[str, InstanceStatus]] = {"prefill": {}, "decode": {}, "both": {}}
        for instance in instances:
            if instance.healthy and instance.state == "ready":
                role = instance.used_for if instance.role == "both" else instance.role
                found[role].setdefault(instance.url, instance)
        pair = []
        for role in ("prefill", "decode"):
            if not (able := found[role] or found["both"]):
                raise ConfigError(f"{self._router} has no {role} engine that is ready")
            pair.append(able.pop(next(iter(able))))
        self._prefill, self._decode = pair[0].url, pair[1].url
        self._model = next(iter(pair[1].models), "")
        self._say(f"model {self._model}, P {self._prefill}, D {self._decode}")

    async def _fit_grid(self) -> None:
        """Prompts that are too long for the engines become the longest that they take."""
        longest = min([await self._max_model_len(url) for url in (self._prefill, self._decode)])
        if longest < LEAST_LENGTH:
            raise ConfigError(
                f"the engines' --max-model-len is {longest}; they need {LEAST_LENGTH}"
            )
        num_tokens, contexts = self._grid.num_tokens, self._grid.contexts
        if max(num_tokens) > longest - 2:  # the router is asked for two tokens
            num_tokens = sorted({min(n, longest - 2) for n in num_tokens})
            self._say(f"P: {num_tokens[-1]} tokens at most, as --max-model-len is {longest}")
        if max(contexts) > longest - MOST_STEPS:
            contexts = sorted({min(n, longest - MOST_STEPS) for n in contexts})
            self._say(f"D: contexts of {contexts[-1]} at most, as --max-model-len is {longest}")
        self._grid = replace(self._grid, num_tokens=num_tokens, contexts=contexts)

    @asynccontextmanager
    async def _busy(self, url: str, num_clients: int, num_tokens: int) -> AsyncIterator[None]:
        """Clients that ask one thing after another meanwhile, if it is wanted. Says how many of
        their requests failed; ``ConfigError`` if none of them is answered."""
        num_clients *= self._grid.both_busy
        num_begun, errors = 0, list[ConfigError]()

        def begun() -> None:
            nonlocal num_begun
            num_begun += 1

        async def ask() -> None:
            while True:
                try:
                    await self._token_times(url, self._prompt(BUSY_TOKENS), num_tokens, begun)
                except ConfigError as e:
                    errors.append(e)
                    await asyncio.sleep(_PAUSE_S)

        def failed() -> str:
            return f"{len(errors)} requests that were to keep {url} busy failed: {errors[-1]}"

        clients = [asyncio.ensure_future(ask()) for _ in range(num_clients)]
        try:
            end = asyncio.get_running_loop().time() + _BEGIN_S
            while num_begun + len(errors) < num_clients:
                await asyncio.sleep(_LOOK_S)
                if asyncio.get_running_loop().time() > end:
                    raise ConfigError(f"{url} did not answer {num_clients} requests at once")
            if errors and not num_begun:
                raise ConfigError(failed())
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        if errors:
            self._say(failed())

    async def _prefills(self) -> AsyncIterator[PrefillPoint]:
        for num_tokens in self._grid.num_tokens:
            for batch in sorted({1, *(b for b in self._grid.batches if b <= 4)}):
                if batch > 1 and num_tokens * batch > self._grid.most_tokens:
                    continue
                taken = []
                for _ in range(self._grid.rounds):
                    prompts = [self._prompt(num_tokens) for _ in range(batch)]
                    began = time.perf_counter()
                    await asyncio.gather(*(self._first_token_s(self._prefill, p) for p in prompts))
                    taken.append(time.perf_counter() - began)
                seconds = median(taken)
                self._say(f"P: {batch} x {num_tokens} tokens in {1000 * seconds:.1f} ms")
                yield PrefillPoint(num_tokens=num_tokens, batch=batch, seconds=seconds)

    async def _decodes(self) -> AsyncIterator[DecodePoint]:
        for context in self._grid.contexts:
            for batch in self._grid.batches:
                if batch > 1 and context * batch > self._grid.most_tokens:
                    continue
                seconds = await self._decode_s(batch, context)
                self._say(f"D: {batch} requests at {context} tokens: {1000 * seconds:.2f} ms")
                middle = context + NUM_STEPS // 2
                yield DecodePoint(batch=batch, context_tokens=middle, seconds=seconds)

    async def _decode_s(self, batch: int, context: int) -> float:
        prompts = [self._prompt(context) for _ in range(batch)]
        for prompt in prompts:  # into D's prefix cache: all begin at once below
            await self._first_token_s(self._decode, prompt)
        return median([await self._step_s(prompts) for _ in range(self._grid.rounds)])

    async def _step_s(self, prompts: Sequence[Sequence[int]]) -> float:
        """While all of them decode; longer, if they do not do so for long enough."""
        for num_steps in (NUM_STEPS + 4, 4 * NUM_STEPS + 4, MOST_STEPS):
            streams = await asyncio.gather(
                *(self._token_times(self._decode, prompt, num_steps) for prompt in prompts)
            )
            began, ended = max(times[0] for times in streams), min(times[-1] for times in streams)
            inside = [time for time in streams[0] if began <= time <= ended]
            if len(inside) > NUM_STEPS // 2:
                return (inside[-1] - inside[0]) / (len(inside) - 1)
        raise ConfigError(
            f"{self._decode} does not run {len(prompts)} requests at once; is its --max-num-seqs"
            " smaller? Give smaller --batches"
        )

    async def _beside(self, limits: EngineLimits) -> Sequence[BesidePoint]:
        """P's pace while D has no, few and many streams; the second is as in ``_prefills``."""
        most = min(limits.max_num_seqs, self._grid.most_tokens // (2 * BUSY_TOKENS), MANY_STREAMS)
        if most <= NUM_STREAMS:
            self._say("P beside D: not measured, for D may not have many streams")
            return ()
        num_tokens = sorted(self._grid.num_tokens)[len(self._grid.num_tokens) // 2]
        found = []
        for num_streams in (0, NUM_STREAMS, most):
            async with self._busy(self._decode, num_streams, BUSY_TOKENS):
                prompts = [self._prompt(num_tokens) for _ in range(2 * self._grid.rounds + 1)]
                began, before = time.perf_counter(), self._num_tokens
                taken = [await self._first_token_s(self._prefill, prompt) for prompt in prompts]
                streamed = self._num_tokens - before - len(prompts)
                per_second = streamed / (time.perf_counter() - began)
            self._say(
                f"P: {num_tokens} tokens in {1000 * median(taken):.1f} ms beside"
                f" {per_second:.0f} tokens a second of D"
            )
            found.append((per_second, median(taken)))
        usual_s = found[1][1]
        return [BesidePoint(tokens_per_second=r, slowdown=s / usual_s) for r, s in found]

    async def _decode_alone(self, points: Sequence[DecodePoint]) -> float:
        """Of the fewest and the most requests at once, at the shortest context."""
        shortest = min(point.context_tokens for point in points)
        points = [point for point in points if point.context_tokens == shortest]
        shares = []
        for point in (points[0], points[-1]):
            seconds = await self._decode_s(point.batch, shortest - NUM_STEPS // 2)
            self._say(f"D: {point.batch} requests while P is idle: {1000 * seconds:.2f} ms")
            shares.append(min(1.0, seconds / point.seconds))
        return median(shares)

    async def _handovers(self, prefill: Sequence[PrefillPoint]) -> AsyncIterator[HandoverPoint]:
        for point in prefill:
            if point.batch > 1:
                continue
            prompts = [self._prompt(point.num_tokens) for _ in range(self._grid.rounds)]
            taken = [await self._first_token_s(self._router, prompt) for prompt in prompts]
            seconds = max(0.0, median(taken) - point.seconds)
            self._say(f"hand-over: {point.num_tokens} tokens in {1000 * seconds:.1f} ms")
            yield HandoverPoint(num_tokens=point.num_tokens, seconds=seconds)

    async def _sending_s(
        self, prefill: Sequence[PrefillPoint], handover: Sequence[HandoverPoint]
    ) -> float:
        """By how much slower P is where its prompts are handed over, for each of their tokens."""
        longest = max(handover, key=lambda point: point.num_tokens)
        num_tokens = longest.num_tokens
        alone_s = next(p.seconds for p in prefill if (p.num_tokens, p.batch) == (num_tokens, 1))
        if 2 * num_tokens > self._grid.most_tokens or longest.seconds > alone_s / 2:
            self._say("sending: not measured, for P would wait for others")
            return 0.0
        service_s = await self._pace_s(self._router, num_tokens, alone_s)
        seconds = max(0.0, service_s - await self._pace_s(self._prefill, num_tokens, alone_s))
        self._say(f"sending: {num_tokens} tokens in {1000 * seconds:.1f} ms of P's time")
        return seconds / num_tokens

    async def _pace_s(self, url: str, num_tokens: int, alone_s: float) -> float:
        """Seconds for each prompt while one more always waits for P."""
        ended: list[float] = []

        async def ask() -> None:
            for _ in range(2 * self._grid.rounds + 1):
                began = time.perf_counter()
                ended.append(began + await self._first_token_s(url, self._prompt(num_tokens)))

        async def ask_later() -> None:
            await asyncio.sleep(alone_s / 2)  # or one step computes both, and nobody waits
            await ask()

        await asyncio.gather(ask(), ask_later())
        ended.sort()
        return median(after - before for before, after in itertools.pairwise(ended))

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(*self._grid.token_ids), k=num_tokens)

    async def _first_token_s(self, url: str, prompt: Sequence[int]) -> float:
        began = time.perf_counter()
        num_tokens = 2 if url == self._router else 1
        return (await self._token_times(url, prompt, num_tokens))[0] - began

    async def _token_times(
        self,
        url: str,
        prompt: Sequence[int],
        num_tokens: int,
        came: Callable[[], None] = lambda: None,
    ) -> Sequence[float]:
        """When each piece of a streamed answer came; at least one. ``came`` is called with the
        first one."""
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        times = []
        try:
            async with self._http.post(
                f"{url}/v1/completions",
                json=body,
                headers=self._access.headers(url),
                timeout=_TIMEOUT,
            ) as response:
                if response.status != 200:
                    raise ConfigError(f"{url}: {response.status}: {(await response.text())[:300]}")
                async for line in response.content:
                    if line.startswith(b"data:") and _DONE not in line:
                        _refuse_error(url, line)
                        times.append(time.perf_counter())
                        self._num_tokens += 1
                        if len(times) == 1:
                            came()
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            raise ConfigError(f"{url} broke off: {type(e).__name__}: {e}") from e
        if not times:
            raise ConfigError(f"{url} answered without a token")
        return times

    async def _get(self, url: str, path: str) -> bytes:
        headers = self._access.headers(url)
        try:
            async with self._http.get(url + path, headers=headers, timeout=_TIMEOUT) as response:
                body = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            is_distrusted = isinstance(e, aiohttp.ClientConnectorCertificateError)
            fix = f"; {TRUST_FIX}" if is_distrusted else ""
            raise ConfigError(f"{url}{path} does not answer: {type(e).__name__}: {e}{fix}") from e
        if response.status != 200:
            option = "--api-key-file" if url == self._router else "--engine-api-key-file"
            fix = f"; name a file with its key with {option}" if response.status == 401 else ""
            raise ConfigError(
                f"{url}{path}: {response.status}: {body[:300].decode(errors='replace')}{fix}"
            )
        return body

    async def _max_model_len(self, url: str) -> int:
        """Tokens of a prompt and its answer together."""
        models = await self._get(url, "/v1/models")
        try:
            return int(msgspec.json.decode(models)["data"][0]["max_model_len"])
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as e:
            raise ConfigError(f"{url}/v1/models has no max_model_len; is it vLLM?") from e

    async def _kv_blocks(self, url: str) -> tuple[int, int]:
        """How many, and the tokens of each."""
        page = (await self._get(url, "/metrics")).decode()
        told = [
            sample.labels
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "vllm:cache_config_info"
        ]
        if not told:
            raise ConfigError(f"{url}/metrics has no vllm:cache_config_info; is it vLLM?")
        if len(told) > 1:
            raise ConfigError(
                f"{url} is {len(told)} data parallel ranks, which share what it is asked, and a"
                " plan counts each by itself: measure a P and a D without --data-parallel-size"
            )
        return int(told[0]["num_gpu_blocks"]), int(told[0]["block_size"])


def _refuse_error(url: str, line: bytes) -> None:
    """``ConfigError`` if the engine says so in its stream, which has begun with 200."""
    if b'"error"' not in line:
        return
    try:
        error = msgspec.json.decode(line.removeprefix(b"data:"))["error"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ConfigError(f"{url} failed: {message}")


async def take_profile(access: Access, grid: Grid, limits: EngineLimits, say: Say) -> Profile:
    """``ConfigError`` says which server did not answer, and how."""
    connector = aiohttp.TCPConnector(limit=0, ssl=access.tls or True)
    async with aiohttp.ClientSession(connector=connector) as http:
        return await Measurement(http, access, grid, say).take(limits)
