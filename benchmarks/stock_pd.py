#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""P/D of this project against P/D of stock vLLM: same run, same machine, same prompts.

Every set-up is a producer on one core and a consumer on another, each a ``vllm serve``; ``single``
is one stock engine on the producer's core. Set-ups take turns; those whose turn it is not are
stopped. Stock engines run from a copy of vLLM without the patches.

  ours               shared memory, prefill first: P's answer goes to D
  ours-decode-first  the same engines, both asked at once
  ours-tcp, ours-tcp-decode-first  the same by Mooncake TCP
  nixl               NixlConnector over UCX TCP, its progress threads slowed and pinned
  mooncake           MooncakeConnector over TCP, both asked at once, as its own proxy does

--part handover: prompts that no cache has seen, one at a time, engines asked directly.
  TTFT       from the first request to D's first token
  hand-over  from P's answer to D's first token; below 0 where D has it sooner, as ours do when both
             are asked at once: P sends D the token that it has sampled
  second     from P's answer to D's second token, for which D needs all KV and a step of its own
--part load: ``vllm bench serve``, random 1,024 in and 64 out, through ``vllm-pd router`` for ours
  and ``vllm-router`` for stock set-ups.
--part decodes: the time between tokens of 8 running decodes while prompts of 4,096 tokens arrive,
  against one stock engine on both cores that computes prompts in chunks.
--part push: what giving its KV away costs a producer: prompts of 2,048 tokens, several at once, in
  chunks of 2,048, against the same producer with the same prompts and no consumer.

What the stock set-ups need (each is left out when its folder is missing):

    pip install --no-deps --target .cache/peers/nixl nixl==1.5.1 nixl-cu12==1.5.1
    pip install --no-deps --target .cache/peers/vllm-router vllm-router==0.1.17 orjson==3.13.0

    python benchmarks/stock_pd.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from serving import (
    PEERS,
    Engine,
    EnginePlan,
    Launcher,
    free_port,
    stop_engines_when_terminated,
    unpatched_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS = ("ours", "ours-decode-first", "ours-tcp", "ours-tcp-decode-first")
STOCK = ("nixl", "mooncake")
SINGLE = ("single", "one-2048", "one-512")
PARTS = {
    "handover": ("single", *OURS, *STOCK),
    "load": ("ours", "ours-decode-first", *STOCK),
    "decodes": ("one-2048", "one-512", "ours-decode-first", "mooncake"),
    "push": (*OURS, *STOCK),
}
"""And the set-ups that each compares unless told otherwise."""


@dataclass
class Answer:
    """Of one prompt. Times are of time.monotonic()."""

    sent: float
    prefilled: float | None
    first: float
    token_times: list[float]
    token_ids: list[int]
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.first - self.sent) * 1000

    @property
    def handover_ms(self) -> float:
        return (self.first - (self.prefilled or self.sent)) * 1000

    @property
    def second_ms(self) -> float:
        return (self.token_times[1] - (self.prefilled or self.sent)) * 1000


# ---------------------------------------------------------------------------------------- set-ups


@dataclass
class SetUp:
    """A producer and a consumer, or one engine, and how they are asked."""

    name: str
    consumer: Engine
    producer: Engine | None = None
    where: dict[str, Any] = field(default_factory=dict)
    bootstrap: int = 0

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (self.producer, self.consumer) if engine is not None]

    async def learn(self, client: Client) -> None:
        """What a router would know of the producer."""
        if self.name == "mooncake":
            address = f"http://127.0.0.1:{self.bootstrap}"
            async with client.session.get(f"{address}/query") as response:
                entry = next(iter((await response.json()).values()))
            self.where = {"remote_bootstrap_addr": address, "remote_engine_id": entry["engine_id"]}
        elif self.name.endswith("decode-first"):
            assert self.producer is not None
            params = {"do_remote_decode": True}
            answer = await client.complete(self.producer, list(range(10, 400)), params)
            wanted = ("remote_engine_id", "remote_host", "remote_port", "remote_key")
            self.where = {name: answer["kv_transfer_params"][name] for name in wanted}
            params = answer["kv_transfer_params"]
            await client.stream(self.consumer, list(range(10, 400)), 1, params)

    async def ask(
        self,
        client: Client,
        prompt: list[int],
        num_tokens: int,
        times: list[float] | None = None,
    ) -> Answer:
        sent = time.monotonic()
        if self.producer is None:
            return await client.stream(self.consumer, prompt, num_tokens, None, sent, times)
        if self.name in ("nixl", "ours", "ours-tcp"):
            prefill: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
            if self.name != "nixl":
                prefill = {"do_remote_decode": True}
            answer = await client.complete(self.producer, prompt, prefill)
            prefilled = time.monotonic()
            params = answer["kv_transfer_params"]
            got = await client.stream(self.consumer, prompt, num_tokens, params, sent, times)
            got.prefilled = prefilled
            return got
        transfer_id = f"bench-{uuid.uuid4()}"
        prefill = {"do_remote_decode": True, "transfer_id": transfer_id}
        decode = {"do_remote_prefill": True, "transfer_id": transfer_id, **self.where}
        if self.name == "mooncake":
            prefill["do_remote_prefill"] = False
            decode["do_remote_decode"] = False

        async def run_prefill() -> float:
            assert self.producer is not None
            await client.complete(self.producer, prompt, prefill)
            return time.monotonic()

        leg = asyncio.create_task(run_prefill())
        got = await client.stream(self.consumer, prompt, num_tokens, decode, sent, times)
        got.prefilled = await leg
        return got


class Client:
    """Asks engines."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=120)
        )

    async def complete(
        self, engine: Engine, prompt: list[int], params: dict[str, Any] | None
    ) -> dict[str, Any]:
        body = self._body(prompt, 1, params)
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise SystemExit(f"error: {engine.name}: {answer}; see {engine.log}")
            return answer

    async def stream(
        self,
        engine: Engine,
        prompt: list[int],
        num_tokens: int,
        params: dict[str, Any] | None,
        sent: float | None = None,
        times: list[float] | None = None,
    ) -> Answer:
        """``times`` gets the time of each token as it comes."""
        sent = sent or time.monotonic()
        body = self._body(prompt, num_tokens, params)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        times = [] if times is None else times
        token_ids: list[int] = []
        cached = 0
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise SystemExit(f"error: {engine.name}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line[6:])
                if event.get("choices"):
                    new = event["choices"][0].get("token_ids") or []
                    token_ids += new
                    times += [now] * max(1, len(new))
                if event.get("usage"):
                    cached = (event["usage"].get("prompt_tokens_details") or {}).get(
                        "cached_tokens"
                    ) or 0
        if not times:
            raise SystemExit(f"error: {engine.name} gave no token; see {engine.log}")
        return Answer(sent, None, times[0], times, token_ids, cached)

    def _body(
        self, prompt: list[int], num_tokens: int, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        return body

    async def close(self) -> None:
        await self.session.close()


class Systems:
    """Starts the set-ups' engines, and lets one at a time run."""

    def __init__(self, options: argparse.Namespace, stock_tree: Path, log_folder: Path) -> None:
        self._options = options
        self._logs = log_folder
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        self._launchers: dict[str, Launcher] = {}
        self._tree = stock_tree
        self.set_ups: dict[str, SetUp] = {}
        self._pairs: dict[str, tuple[Engine, Engine]] = {}

    def start(self, names: list[str]) -> None:
        try:
            for name in names:
                self.set_ups[name] = self._start(name)
            for engine in self.engines():
                engine.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        for engine in self.engines():
            engine.freeze()

    def engines(self) -> list[Engine]:
        found = {engine.name: engine for s in self.set_ups.values() for engine in s.engines}
        return list(found.values())

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[SetUp]:
        set_up = self.set_ups[name]
        for engine in set_up.engines:
            engine.thaw()
        try:
            yield set_up
        finally:
            for engine in set_up.engines:
                engine.freeze()

    def stop(self) -> None:
        for engine in self.engines():
            engine.stop()
        for launcher in self._launchers.values():
            launcher.close()

    def _launch(self, plan: EnginePlan, stock: bool) -> Engine:
        kind = "stock" if stock else "ours"
        if kind not in self._launchers:
            self._launchers[kind] = Launcher(self._tree if stock else None)
        plan.arguments = ("--enable-prompt-tokens-details", *plan.arguments)
        if self._options.part == "push":
            plan.arguments += ("--max-num-batched-tokens", "2048")
        return self._launchers[kind].start(plan, self._options.model, self._logs)

    def _start(self, name: str) -> SetUp:
        first, second = self._cores
        if name == "single":
            return SetUp(name, self._launch(EnginePlan(name, {first}), stock=True))
        if name in SINGLE:
            chunk = ("--max-num-batched-tokens", name.removeprefix("one-"))
            plan = EnginePlan(name, {first, second}, arguments=chunk)
            return SetUp(name, self._launch(plan, stock=True))
        if name in OURS:
            transport = "mooncake" if "tcp" in name else "shared_memory"
            if transport not in self._pairs:
                producer, consumer = (
                    self._launch(
                        EnginePlan(
                            f"{transport}-{role}", {core}, self._our_config(role, transport)
                        ),
                        stock=False,
                    )
                    for role, core in (("kv_producer", first), ("kv_consumer", second))
                )
                self._pairs[transport] = (producer, consumer)
            producer, consumer = self._pairs[transport]
            return SetUp(name, consumer, producer)
        start = {"nixl": self._start_nixl, "mooncake": self._start_mooncake}[name]
        return start(first, second)

    def _our_config(self, role: str, transport: str) -> dict[str, Any]:
        extra = {"transfer": {"transport": transport, **json.loads(self._options.transfer)}}
        return {
            "kv_connector": "InEngine",
            "kv_role": role,
            "kv_port": 0,
            "kv_connector_extra_config": extra,
        }

    def _start_nixl(self, first: int, second: int) -> SetUp:
        engines = []
        for role, core in (("producer", first), ("consumer", second)):
            transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
            }
            env = {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "UCX_TLS": "tcp,self",
                "UCX_NET_DEVICES": "lo",
            }
            plan = EnginePlan(f"nixl-{role}", {core}, transfer, env=env, paths=(PEERS / "nixl",))
            plan.nixl_delay_us = self._options.nixl_delay_us
            engines.append(self._launch(plan, stock=True))
        return SetUp("nixl", engines[1], engines[0])

    def _start_mooncake(self, first: int, second: int) -> SetUp:
        bootstrap = free_port()
        engines = []
        for role, core in (("producer", first), ("consumer", second)):
            transfer = {
                "kv_connector": "MooncakeConnector",
                "kv_role": f"kv_{role}",
                "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
            }
            port = bootstrap if role == "producer" else free_port()
            env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
            plan = EnginePlan(f"mooncake-{role}", {core}, transfer, env=env, pretend_device=True)
            engines.append(self._launch(plan, stock=True))
        return SetUp("mooncake", engines[1], engines[0], bootstrap=bootstrap)


def make_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(300, 2000) for _ in range(num_tokens)]


# --------------------------------------------------------------------------------- part: hand-over


async def measure_handover(systems: Systems, options: argparse.Namespace) -> None:
    client = Client()
    rng = random.Random(options.seed)
    warm = random.Random(options.seed + 1)
    names = list(systems.set_ups)
    found: dict[int, dict[str, list[Answer]]] = {}
    for name in names:
        with systems.turn(name) as set_up:
            await set_up.learn(client)
    for num_tokens in options.tokens:
        answers: dict[str, list[Answer]] = {name: [] for name in names}
        for number in range(options.rounds + 1):
            prompt = make_prompt(rng, num_tokens)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                # A pair asked in both orders has the prompt in its caches the second time.
                mine = [(token + 1) if "decode-first" in name else token for token in prompt]
                with systems.turn(name) as set_up:
                    # Engines that were still have cold caches, and idle threads to wake.
                    await set_up.ask(client, make_prompt(warm, 200), 4)
                    await asyncio.sleep(0.05)
                    answer = await set_up.ask(client, mine, 2)
                if set_up.producer is not None and answer.cached_tokens < num_tokens - 128:
                    print(f"{name}: only {answer.cached_tokens} of {num_tokens} came from P")
                if number:  # the first round opens connections and touches memory
                    answers[name].append(answer)
        found[num_tokens] = answers
        report_handover(num_tokens, answers)
    await client.close()
    report_flatness(found)
    if options.limits:
        report_limits(options.tokens[-1] * options.token_bytes)


def middle(answers: list[Answer], what: Callable[[Answer], float]) -> float:
    return statistics.median(what(answer) for answer in answers)


def report_handover(num_tokens: int, answers: dict[str, list[Answer]]) -> None:
    print(f"\n{num_tokens} tokens; medians of {len(next(iter(answers.values())))} in ms (min..max)")
    print(
        f"{'':>22} {'TTFT':>8} {'/ single':>9} {'':17} {'hand-over':>9} {'/ best stock':>12}"
        f" {'second':>8} {'/ best stock':>12}"
    )
    single = middle(answers["single"], lambda a: a.ttft_ms) if "single" in answers else None
    for name, mine in answers.items():
        ttft = [answer.ttft_ms for answer in mine]
        ratio = f"{statistics.median(ttft) / single:9.3f}" if single else f"{'':9}"
        line = f"{name:>22} {statistics.median(ttft):8.1f} {ratio}"
        line += f" ({min(ttft):7.1f}..{max(ttft):7.1f})"
        if name not in SINGLE:
            for what in (Answer.handover_ms, Answer.second_ms):
                stock = [middle(answers[name], what.__get__) for name in STOCK if name in answers]
                took = middle(mine, what.__get__)
                line += f" {took:8.1f} " + (f"{took / min(stock):12.2f}" if stock else " " * 12)
        print(line, flush=True)


def report_flatness(found: dict[int, dict[str, list[Answer]]]) -> None:
    print("\nlongest and shortest of the medians above, in ms: hand-over, second")
    for name in next(iter(found.values())):
        if name not in SINGLE:
            line = f"{name:>22}"
            for what in (Answer.handover_ms, Answer.second_ms):
                medians = [middle(answers[name], what.__get__) for answers in found.values()]
                line += f" {max(medians):8.1f} {min(medians):8.1f}"
            print(line)


def report_limits(num_bytes: int) -> None:
    from handover import RawTransfer

    raw = RawTransfer(num_bytes)
    rows = [raw.measure() for _ in range(7)][2:]
    raw.close()
    print(f"\nlimits: {num_bytes / 1e6:.1f} MB, the KV of the longest prompt, nothing else running")
    for key, text in (("raw", "Mooncake TCP"), ("socket", "loopback socket"), ("memcpy", "memcpy")):
        print(f"{text:>22} {statistics.median(row[key] for row in rows):.1f} ms")


# -------------------------------------------------------------------------------------- part: load


@contextlib.contextmanager
def router(set_up: SetUp, logs: Path) -> Iterator[str]:
    """The URL of a router in front of a set-up."""
    if set_up.producer is None:
        yield set_up.consumer.url
        return
    port = free_port()
    prefill, decode = set_up.producer.url, set_up.consumer.url
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if set_up.name in OURS:
        order = "concurrent" if set_up.name.endswith("decode-first") else "prefill-first"
        command = [str(Path(sys.executable).parent / "vllm-pd"), "router", "--access-log", "off"]
        command += ["--prefill", prefill, "--decode", decode, "--order", order]
        command += ["--skip-prefill", "never"]
    else:
        env["PYTHONPATH"] = str(PEERS / "vllm-router")
        command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        command += ["--kv-connector", set_up.name, "--policy", "round_robin"]
        command += ["--prefill", prefill, *([str(set_up.bootstrap)] if set_up.bootstrap else [])]
        command += ["--decode", decode, "--host", "127.0.0.1"]
        command += ["--prometheus-port", str(free_port())]
    command += ["--port", str(port)]
    with (logs / f"router-{set_up.name}.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            wait_for_model(f"http://127.0.0.1:{port}", log.name)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def wait_for_model(url: str, log: str) -> None:
    import urllib.request

    body = {"model": "model", "prompt": "hello, " * 200, "max_tokens": 1}
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=20) as answer:
            if answer.status == 200:
                return
        time.sleep(0.3)
    raise SystemExit(
        f"error: the router does not answer; see {log}\n{Path(log).read_text()[-2000:]}"
    )


def measure_load(systems: Systems, options: argparse.Namespace, logs: Path) -> None:
    rows: dict[str, dict[str, float]] = {}
    for name in systems.set_ups:
        with systems.turn(name) as set_up, router(set_up, logs) as url:
            for engine in set_up.engines:  # asked in another order, it has the prompts
                engine.reset_prefix_cache()
            rows[name] = bench_serve(url, options, logs / f"bench-{name}.json")
    print(
        f"\nvllm bench serve: random {options.input_len}/{options.output_len},"
        f" {options.num_prompts} prompts at {options.rate}/s; ms"
    )
    keys = ("median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_itl_ms", "p99_itl_ms")
    header = ("TTFT p50", "TTFT p99", "TPOT mean", "ITL p50", "ITL p99", "failed")
    print(f"{'':>22} " + " ".join(f"{title:>10}" for title in header))
    for name, row in rows.items():
        failed = options.num_prompts - row["completed"]
        print(f"{name:>22} " + " ".join(f"{row[k]:10.1f}" for k in keys) + f" {failed:10.0f}")


def bench_serve(url: str, options: argparse.Namespace, result: Path) -> dict[str, float]:
    command = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "vllm"]
    command += ["--base-url", url, "--model", "model", "--tokenizer", options.model]
    command += ["--dataset-name", "random", "--random-input-len", str(options.input_len)]
    command += ["--random-output-len", str(options.output_len), "--ignore-eos"]
    command += ["--num-prompts", str(options.num_prompts), "--request-rate", str(options.rate)]
    command += ["--seed", str(options.seed), "--temperature", "0"]
    command += ["--percentile-metrics", "ttft,tpot,itl"]
    command += ["--save-result", "--result-dir", str(result.parent), "--result-filename"]
    command += [result.name]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    env["VLLM_LOGGING_LEVEL"] = "ERROR"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: vllm bench serve: {done.stderr[-2000:]}")
    row: dict[str, float] = json.loads(result.read_text())
    return row


# ----------------------------------------------------------------------------------- part: decodes


async def measure_decodes(systems: Systems, options: argparse.Namespace) -> None:
    client = Client()
    rng = random.Random(options.seed)
    gaps: dict[str, list[float]] = {name: [] for name in systems.set_ups}
    ttfts: dict[str, list[float]] = {name: [] for name in systems.set_ups}
    for name in systems.set_ups:
        with systems.turn(name) as set_up:
            await set_up.learn(client)
            await set_up.ask(client, make_prompt(rng, 4096), 2)
    for number in range(options.rounds):
        names = list(systems.set_ups)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with systems.turn(name) as set_up:
                new, ttft = await decodes_with_arrivals(set_up, client, rng, options)
            gaps[name] += new
            ttfts[name] += ttft
    await client.close()
    base = {name: float(np.percentile(gaps[name], 99)) for name in names if name in SINGLE}
    print(f"\n8 decodes while prompts of 4,096 tokens arrive, {options.rounds} rounds; ms")
    against = "p99 / " + "/".join(base)
    print(f"{'':>22} {'ITL p50':>8} {'p99':>8} {'max':>8}  {against:>24} {'TTFT p50':>9}")
    for name, mine in gaps.items():
        p99 = float(np.percentile(mine, 99))
        ratios = " ".join(f"{p99 / other:.3f}" for other in base.values())
        print(
            f"{name:>22} {np.percentile(mine, 50):8.1f} {p99:8.1f} {max(mine):8.1f}  {ratios:>24}"
            f" {statistics.median(ttfts[name]):9.1f}"
        )


async def decodes_with_arrivals(
    set_up: SetUp, client: Client, rng: random.Random, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """(times between tokens of the decodes, TTFTs of the arrivals), in ms."""
    token_times: list[list[float]] = [[] for _ in range(8)]
    running = [
        asyncio.create_task(set_up.ask(client, make_prompt(rng, 128), 4000, times))
        for times in token_times
    ]
    await asyncio.sleep(1.5)
    started = time.monotonic()
    arrivals = []
    for _ in range(options.arrivals):
        arrivals.append(asyncio.create_task(set_up.ask(client, make_prompt(rng, 4096), 2)))
        await asyncio.sleep(options.interval)
    ttfts = [(await arrival).ttft_ms for arrival in arrivals]
    for decode in running:
        assert not decode.done(), "a decode ended before the last prompt was answered"
        decode.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    gaps = [
        (after - before) * 1000
        for times in token_times
        for before, after in itertools.pairwise(times)
        if before >= started
    ]
    await asyncio.sleep(0.3)
    return gaps, ttfts


# -------------------------------------------------------------------------------------- part: push


async def measure_push(systems: Systems, options: argparse.Namespace) -> None:
    client = Client()
    rng = random.Random(options.seed)
    names = list(systems.set_ups)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:
        with systems.turn(name) as set_up:
            await set_up.learn(client)
    for number in range(options.rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with systems.turn(name) as set_up:
                rate = [0.0, 0.0]
                for pushed in (False, True) if number % 2 else (True, False):
                    await set_up.ask(client, make_prompt(rng, 200), 1)
                    prompts = [make_prompt(rng, 2048) for _ in range(options.at_once)]
                    rate[pushed] = await prefill_rate(set_up, client, prompts, pushed)
                    await asyncio.sleep(0.2)
            if number:
                rates[name].append((rate[0], rate[1]))
    await client.close()
    print(f"\nprefill of {options.at_once} prompts of 2,048 tokens at once, medians; tokens/s")
    print(f"{'':>22} {'no consumer':>12} {'given away':>12} {'ratio of a turn':>16}")
    for name, mine in rates.items():
        ratio = statistics.median(pushed / plain for plain, pushed in mine)
        plain, pushed = (statistics.median(rate[i] for rate in mine) for i in (0, 1))
        print(f"{name:>22} {plain:12.0f} {pushed:12.0f} {ratio:16.3f}")


async def prefill_rate(
    set_up: SetUp, client: Client, prompts: list[list[int]], pushed: bool
) -> float:
    """Tokens per second up to the producer's last answer."""
    assert set_up.producer is not None
    started = time.monotonic()
    if pushed:
        answers = await asyncio.gather(*(set_up.ask(client, prompt, 1) for prompt in prompts))
        ended = max(answer.prefilled or 0.0 for answer in answers)
    else:
        await asyncio.gather(*(client.complete(set_up.producer, p, None) for p in prompts))
        ended = time.monotonic()
    return sum(len(prompt) for prompt in prompts) / (ended - started)


# -------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--part", default="handover", choices=tuple(PARTS))
    parser.add_argument("--systems", nargs="+", choices=(*SINGLE, *OURS, *STOCK))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--token-bytes", type=int, default=12288, help="KV of one token")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transfer", default="{}", help="more options of ours, as JSON")
    parser.add_argument("--no-limits", dest="limits", action="store_false")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--arrivals", type=int, default=4)
    parser.add_argument("--interval", type=float, default=2.5, help="seconds between arrivals")
    parser.add_argument("--at-once", type=int, default=4, help="prompts of a turn of push")
    parser.add_argument(
        "--nixl-delay-us",
        type=int,
        default=500,
        help="pause of NIXL's progress thread; out of the box it is 0, and the thread takes a core",
    )
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    options = parser.parse_args()
    stop_engines_when_terminated()
    names = list(options.systems or PARTS[options.part])
    for name, folder in (("nixl", "nixl"), ("nixl", "vllm-router"), ("mooncake", "vllm-router")):
        needed = folder == "nixl" or options.part == "load"
        if name in names and needed and not (PEERS / folder).is_dir():
            print(f"{name} is left out: {PEERS / folder} is missing; see --help")
            names.remove(name)
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(exist_ok=True)
        started = time.monotonic()
        systems = Systems(options, stack.enter_context(unpatched_tree()), logs)
        stack.callback(systems.stop)
        systems.start(names)
        print(f"{len(systems.engines())} engines ready in {time.monotonic() - started:.0f} s")
        if options.part == "handover":
            asyncio.run(measure_handover(systems, options))
        elif options.part == "load":
            measure_load(systems, options, logs)
        elif options.part == "push":
            asyncio.run(measure_push(systems, options))
        else:
            asyncio.run(measure_decodes(systems, options))


if __name__ == "__main__":
    main()
