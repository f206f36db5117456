#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it gains that the router moves requests and changes roles by itself.

The router is the real one; the engines are made up, because two cores cannot run as many as it
takes (``made_up_engines``). So this says what the router's decisions are worth for such engines,
and nothing of a real one's speed. Deployments run at the same time.

``--part load``: two engines, and conversations of which most stick to the first one;
``--rebalance load`` against none. ``--part roles``: three engines that can do both, and a trace
that turns from long prompts to long answers; ``--roles auto`` against each fixed split.

    python benchmarks/rebalancing.py --part load --png rebalancing.png
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from made_up_engines import ANSWER, Engine
from router import ROUTER_CORE, free_port, process

from vllm_ascend_pd.router.policies.session_affinity import owner
from vllm_ascend_pd.router.ranking import affinity_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

SLO_TTFT_S, SLO_ITL_S = 2.0, 0.2

# ------------------------------------------------------------------------------- one deployment


@dataclass(frozen=True)
class Sent:
    """One request of a trace."""

    at_s: float
    num_prompt: int
    num_output: int
    session: str = ""


@dataclass
class Got:
    """What its client saw."""

    at_s: float
    ttft_s: float
    waits_s: list[float]

    @property
    def is_good(self) -> bool:
        return self.ttft_s <= SLO_TTFT_S and statistics.fmean(self.waits_s or [0]) <= SLO_ITL_S


@dataclass(frozen=True)
class Result:
    got: list[Got]
    num_moved: int
    num_switched: int
    """Roles of engines."""

    @property
    def num_good(self) -> int:
        return sum(one.is_good for one in self.got)


@dataclass(frozen=True)
class Deployment:
    name: str
    roles: tuple[str, ...]
    options: tuple[str, ...]
    num_kv_tokens: int


@contextlib.asynccontextmanager
async def deployed(one: Deployment, folder: Path) -> AsyncIterator[str]:
    """The router's URL."""
    engines = [Engine(f"e{i}", role, one.num_kv_tokens) for i, role in enumerate(one.roles)]
    runners = [await engine.start() for engine in engines]
    tasks = [asyncio.ensure_future(engine.run()) for engine in engines]
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / f"{one.name.replace(' ', '-')}.log"
    command = [str(Path(sys.executable).with_name("vllm-pd")), "router", "--port", str(port)]
    command += ["--access-log", "off", "--probe-interval", "0.5", "--skip-prefill", "never"]
    with process([*command, *one.options], ROUTER_CORE, log):
        async with aiohttp.ClientSession() as http:
            await until_ok(http, f"{url}/health/live")
            registering = asyncio.ensure_future(register(http, url, engines))
            await until_ok(http, f"{url}/health")
            yield url
            for task in (registering, *tasks):
                task.cancel()
            await asyncio.gather(registering, *tasks, return_exceptions=True)
    for runner in runners:
        await runner.cleanup()


async def until_ok(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)


async def register(http: aiohttp.ClientSession, url: str, engines: Sequence[Engine]) -> None:
    while True:
        for one in engines:
            kv = {"engine_id": one.name, "host": "127.0.0.1", "port": one.port, "key": "k"}
            body = {"url": f"http://127.0.0.1:{one.port}", "role": one.role, "epoch": "e", "kv": kv}
            async with http.put(f"{url}/registry/instances/{one.name}", json=body) as response:
                assert response.status == 200, await response.text()
        await asyncio.sleep(4)


async def ask(http: aiohttp.ClientSession, url: str, sent: Sent, started: float) -> Got:
    await asyncio.sleep(started + sent.at_s - time.monotonic())
    body = {"model": "tiny", "prompt": list(range(sent.num_prompt)), "stream": True}
    body |= {"temperature": 0, "max_tokens": sent.num_output}
    headers = {"x-session-id": sent.session} if sent.session else {}
    last = time.monotonic()
    waits: list[float] = []
    async with http.post(url + ANSWER, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        num_words, end = 0, b""
        async for piece in response.content.iter_any():
            now, end = time.monotonic(), (end + piece)[-20:]
            if num_now := piece.count(b" w"):
                num_words += num_now
                waits.append(now - last)
                last = now
    assert end.endswith(b"[DONE]\n\n"), end
    assert num_words == sent.num_output, f"{num_words} of {sent.num_output} tokens"
    return Got(sent.at_s, waits[0], waits[1:])


async def replay(one: Deployment, trace: Sequence[Sent], folder: Path) -> Result:
    async with (
        deployed(one, folder) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        started = time.monotonic()
        asked = [asyncio.ensure_future(ask(http, url, sent, started)) for sent in trace]
        telling = asyncio.ensure_future(tell(one.name, asked, started))
        got = await asyncio.gather(*asked)
        telling.cancel()
        async with http.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        moved = (line for line in lines if "moves_total{" in line and 'outcome="moved"' in line)
        switched = (line for line in lines if "role_switches_total{" in line)
        return Result(got, *(sum(int(float(m.split()[-1])) for m in n) for n in (moved, switched)))


async def tell(name: str, asked: Sequence[asyncio.Future[Got]], started: float) -> None:
    """From time to time, how far it is."""
    while True:
        await asyncio.sleep(15)
        ended = [one.result() for one in asked if one.done()]
        now = time.monotonic() - started
        good = sum(one.is_good for one in ended)
        print(
            f"{now:4.0f} s: {name}: {len(ended)} of {len(asked)} answered, {good} in time",
            file=sys.stderr,
            flush=True,
        )


# ------------------------------------------------------------------------------- traces, report


def arrivals(rate: float, begin_s: float, end_s: float, rng: random.Random) -> Iterator[float]:
    at = begin_s
    while (at := at + rng.expovariate(rate)) < end_s:
        yield at


def skewed(duration_s: float) -> list[Sent]:
    """Five turns of six are of conversations that stick to the first engine."""
    rng = random.Random(0)
    names = [f"s{i}" for i in range(60)]
    keys = np.array([affinity_key(engine) for engine in ("e0", "e1")], dtype=np.uint64)
    hot, cold = ([name for name in names if owner(name, keys) == one] for one in (0, 1))
    return [
        Sent(
            at,
            rng.randint(100, 300),
            min(300, round(rng.lognormvariate(4.8, 0.5))),
            rng.choice(hot if rng.random() < 5 / 6 else cold),
        )
        for at in arrivals(1.15, 0, duration_s, rng)
    ]


def turning(duration_s: float) -> list[Sent]:
    """Long prompts and short answers; from the middle on the other way round."""
    rng, half = random.Random(0), duration_s / 2
    first = [Sent(at, rng.randint(700, 1100), 10) for at in arrivals(2.0, 0, half, rng)]
    then = arrivals(1.9, half, duration_s, rng)
    return first + [Sent(at, rng.randint(30, 70), rng.randint(60, 140)) for at in then]


LOAD = [
    Deployment(name, ("decode",) * 2, ("--policy", "session-affinity", "--rebalance", mode), 4000)
    for name, mode in (("no rebalancing", "off"), ("--rebalance load", "load"))
]
ROLES = [
    Deployment("1 P, 2 D", ("prefill", "decode", "decode"), (), 2400),
    Deployment("2 P, 1 D", ("prefill", "prefill", "decode"), (), 2400),
    Deployment("--roles auto", ("both",) * 3, ("--roles", "auto"), 2400),
]


def report(results: dict[str, Result], duration_s: float) -> None:
    print(
        "| | in time | goodput | TTFT p50 | TTFT p99 | a token's wait, p50 | p99"
        " | moved | other role |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in results.items():
        ttft, waits = quantiles(one)
        print(
            f"| {name} | {one.num_good} of {len(one.got)} | {one.num_good / duration_s:.2f}/s"
            f" | {ttft[49]:.2f} s | {ttft[98]:.2f} s"
            f" | {waits[49] * 1000:.0f} ms | {waits[98] * 1000:.0f} ms"
            f" | {one.num_moved} | {one.num_switched} |"
        )
    *others, last = results
    best = max(others, key=lambda name: results[name].num_good)
    ratios = [
        after[98] / before[98]
        for before, after in zip(quantiles(results[best]), quantiles(results[last]), strict=True)
    ]
    goodput = results[last].num_good / max(1, results[best].num_good)
    print(
        f"{last} against {best}: goodput {goodput:.2f}, TTFT p99 {ratios[0]:.2f},"
        f" p99 of a token's wait {ratios[1]:.2f}"
    )


def quantiles(one: Result) -> tuple[list[float], list[float]]:
    """Of times to the first token, and of waits for each further one."""
    waits = itertools.chain(*(got.waits_s for got in one.got))
    ttft = (got.ttft_s for got in one.got)
    return statistics.quantiles(ttft, n=100), statistics.quantiles(waits, n=100)


def draw(results: dict[str, Result], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (late, spread, good) = pyplot.subplots(1, 3, figsize=(14, 3.4))
    for name, one in results.items():
        ordered = sorted(one.got, key=lambda got: got.at_s)
        at = [got.at_s for got in ordered]
        late.plot(at, [got.ttft_s for got in ordered], label=name)
        waits = sorted(itertools.chain(*(got.waits_s for got in one.got)))
        spread.plot([w * 1000 for w in waits], [i / len(waits) for i in range(len(waits))])
        good.plot(at, list(itertools.accumulate(got.is_good for got in ordered)))
    late.axhline(SLO_TTFT_S, color="black", linewidth=0.8)
    late.set(title="time to the first token, s", xlabel="request came at, s", yscale="log")
    late.legend()
    spread.axvline(SLO_ITL_S * 1000, color="black", linewidth=0.8)
    spread.set(title="waits for each token, share", xlabel="ms", xscale="log", ylim=(0.5, 1))
    good.set(title="requests in time so far", xlabel="request came at, s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def run(options: argparse.Namespace, folder: Path) -> None:
    duration_s = options.duration_s or (60 if options.part == "load" else 150)
    trace = (skewed if options.part == "load" else turning)(duration_s)
    deployments = LOAD if options.part == "load" else ROLES
    found = await asyncio.gather(*(replay(one, trace, folder) for one in deployments))
    results = {one.name: got for one, got in zip(deployments, found, strict=True)}
    report(results, duration_s)
    if options.png is not None:
        draw(results, options.png)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("load", "roles"), required=True)
    parser.add_argument("--duration-s", type=float, help="of the trace")
    parser.add_argument("--png", type=Path, help="draw it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options, Path(folder)))


if __name__ == "__main__":
    main()
