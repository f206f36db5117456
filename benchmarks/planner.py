#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd plan`` against what it predicts, how fast it is, and what a router's work costs.

``--part fit`` starts a P and a D with ``vllm-pd up``, takes a profile, replays traces at several
speeds, and compares goodput and times with the simulation's. ``--part speed`` simulates many
instances and requests with that profile. ``--part costs`` measures the router's parts, one by one.

  python benchmarks/planner.py --part fit --model .cache/models/60m --folder /tmp/planner
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
import urllib.request
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
from host import usual_dtype
from serving import free_port
from traces import make_trace, prompt_of, scale

from vllm_ascend_pd.planner.limits import router_needs
from vllm_ascend_pd.planner.profile import load
from vllm_ascend_pd.planner.report import needs
from vllm_ascend_pd.planner.search import Objective, Row
from vllm_ascend_pd.planner.simulate import Outcome, Split, simulate
from vllm_ascend_pd.planner.speeds import Speeds
from vllm_ascend_pd.planner.trace_file import RequestTrace, TraceRequest
from vllm_ascend_pd.router.policies import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VLLM_PD = str(Path(sys.executable).with_name("vllm-pd"))
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
FIRST_TOKEN, LAST_TOKEN = 300, 2000
BLOCK_SIZE = 128
ONE_EACH = Split(1, 1)


# ------------------------------------------------------------------------------------- --part fit


@contextlib.contextmanager
def cluster(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A P, a D and a router that leaves no P out; its URL."""
    port = free_port()
    topology: dict[str, Any] = {
        "model": str(options.model),
        "served_model_name": "model",
        "router": {"port": port, "args": {"skip-prefill": "never", "access-log": "off"}},
        "args": {
            "dtype": options.dtype,
            "enforce-eager": True,
            "max-model-len": 4096,
            "block-size": BLOCK_SIZE,
            "kv-cache-memory-bytes": 1 << 30,
            "distributed-executor-backend": "uni",  # engine core and worker do not share a core
        },
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"},
    }
    if options.waiting:
        topology["args"]["worker-cls"] = "waiting_worker.WaitingWorker"
        topology["env"]["PYTHONPATH"] = str(Path(__file__).parent)
    path = folder / "topology.yaml"
    path.write_text(json.dumps(topology))
    command = [VLLM_PD, "up", "--config", str(path), "--log-dir", str(folder / "logs")]
    log = (folder / "up.log").open("wb")
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 150
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{url}/health", timeout=2) as response,
            ):
                if json.load(response)["status"] == "ok":
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"error: no cluster\n{(folder / 'up.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


async def replay(url: str, requests: Sequence[TraceRequest]) -> Outcome:
    """What the cluster made of them, as the simulation says it."""
    ttft, itl, ends = (np.zeros(len(requests)) for _ in range(3))
    gaps: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter() + 0.2

        async def one(number: int, request: TraceRequest) -> None:
            prompt = prompt_of(request, BLOCK_SIZE, FIRST_TOKEN, LAST_TOKEN)
            body: dict[str, Any] = {"model": "model", "prompt": prompt, "stream": True}
            body |= {"max_tokens": request.output_length, "temperature": 0, "ignore_eos": True}
            due = began + request.timestamp_ms / 1000
            await asyncio.sleep(due - time.perf_counter())
            times = []
            async with http.post(f"{url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        assert b'"error"' not in line, line
                        times.append(time.perf_counter())
            ttft[number], ends[number] = times[0] - due, times[-1] - began
            itl[number] = (times[-1] - times[0]) / max(1, request.output_length - 1)
            gaps.extend(b - a for a, b in itertools.pairwise(times))

        await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))
    steps = np.array(gaps)
    ones = np.ones(len(steps))
    return Outcome(ONE_EACH, ttft, itl, float(ends.max()), steps, ones, 0.0, 0.0, 0.0, 0)


def fit(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    objective = Objective(options.slo_ttft, options.slo_itl)
    with cluster(options, folder) as url:
        command = [VLLM_PD, "profile", url, "--out", str(folder / "profile.json")]
        command += ["--tokens", "128,512,1024", "--batches", "1,4,16,32"]
        command += ["--contexts", "128,1024", "--rounds", str(options.rounds)]
        command += ["--max-num-batched-tokens", "2048", "--max-num-seqs", "128"]
        command += ["--both-busy"] if options.both_busy else []
        subprocess.run(command, check=True, env=ENVIRONMENT)
        speeds = Speeds.of(load(folder / "profile.json"))
        print("| requests/s | | overloaded | goodput | in time | TTFT p50 | p99 | ITL p50 | p99 |")
        print("|---|---|---|---|---|---|---|---|---|")
        for number, per_second in enumerate(options.rates):
            requests = _requests(per_second, options.seconds, number)
            measured = Row.of(asyncio.run(replay(url, requests)), objective)
            trace = RequestTrace(requests, tokens_per_id=BLOCK_SIZE)
            predicted = Row.of(simulate(trace, speeds, ONE_EACH), objective)
            (folder / f"trace-{per_second:g}.json").write_bytes(msgspec.json.encode(requests))
            for name, row in (("measured", measured), ("predicted", predicted)):
                overloaded = "yes" if row.is_overloaded else "no"
                print(
                    f"| {per_second:g} | {name} | {overloaded}"
                    f" | {row.goodput:.2f}/s | {100 * row.attained:.0f} %"
                    f" | {row.ttft_p50_s:.3f} s | {row.ttft_p99_s:.3f} s"
                    f" | {1000 * row.itl_p50_s:.1f} ms | {1000 * row.itl_p99_s:.1f} ms |",
                    flush=True,
                )


def _requests(per_second: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Conversations of 4 turns in the mean, 512 tokens of them as one block."""
    num_requests = round(per_second * seconds)
    made = make_trace(num_requests, 4, duration_ms=1e6, seed=seed)
    fitting = [r for r in scale(made, BLOCK_SIZE, 1e6) if 2 < r.input_length < 1200]
    chosen = random.Random(seed).sample(fitting, num_requests)
    chosen.sort(key=lambda request: request.timestamp_ms)
    rng, now, requests = random.Random(seed), 0.0, []
    for request in chosen:  # by a Poisson process
        requests.append(msgspec.structs.replace(request, timestamp_ms=now))
        now += 1000 * rng.expovariate(per_second)
    return requests


# ----------------------------------------------------------------------------------- --part speed


def speed(options: argparse.Namespace) -> None:
    speeds = Speeds.of(load(options.folder / "profile.json"))
    rng = np.random.default_rng(0)
    num_requests, num_instances = options.requests, options.instances
    prompts = np.clip(rng.lognormal(6.0, 0.9, num_requests), 8, 4000).astype(int)
    outputs = np.clip(rng.lognormal(5.0, 0.7, num_requests), 2, 2000).astype(int)
    split = Split(num_instances // 2, num_instances - num_instances // 2)
    busiest = float(speeds.prefill_s(prompts).mean()) / split.num_prefill
    arrivals = np.cumsum(rng.exponential(busiest / 0.7, num_requests)) * 1000
    began = time.perf_counter()
    trace = RequestTrace(
        TraceRequest(*values)
        for values in zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    )
    made = time.perf_counter()
    outcome = simulate(trace, speeds, split)
    ended = time.perf_counter()
    row = Row.of(outcome, Objective(options.slo_ttft, options.slo_itl))
    print(
        f"{num_requests:,} requests, {split}: {made - began:.1f} s to make the trace,"
        f" {ended - made:.1f} s to simulate {outcome.duration_s:,.0f} s of it"
        f" ({int(outputs.sum()):,} tokens)"
    )
    print(row)
    print(needs(router_needs(trace, row)))


# ----------------------------------------------------------------------------------- --part costs


def costs(options: argparse.Namespace) -> None:
    for policy in sorted(POLICIES):
        taken = {number: 1e6 * _choice_s(policy, number) for number in (2, 10, 100, 1000)}
        said = ", ".join(f"{us:.1f} us of {number}" for number, us in taken.items())
        print(f"choice of a pair, {policy}: {said}")
    print(f"a block in a KV event: {1e6 * _block_event_s():.2f} us")
    for number in (1, 10, 100, 1000):
        own, shared = (_block_bytes(number, is_shared) for is_shared in (False, True))
        print(f"memory of a block, {number} engines: {own:.0f} bytes, {shared:.0f} if all have it")
    print(f"a heartbeat: {1e6 * _heartbeat_s(options.heartbeats):.0f} us of processor time")


def _choice_s(policy: str, num_instances: int) -> float:
    """With what the request changes of its engines, at its begin and at its end."""
    from vllm_ascend_pd.router.instances import Instance, InstanceSpec, Registry
    from vllm_ascend_pd.router.policies import Pair, Routed, make_policy
    from vllm_ascend_pd.router.policies.prefix_aware import PrefixAware
    from vllm_ascend_pd.router.prefix.index import PrefixIndex
    from vllm_ascend_pd.router.selection import Labels, Selector

    registry = Registry(lambda spec: Instance(spec, None, 3))  # type: ignore[arg-type]
    for number in range(num_instances):
        registry.put(
            InstanceSpec(
                instance_id=f"i{number}",
                source="static",
                url=f"http://127.0.0.1:{number + 1}",
                role="decode" if number % 2 else "prefill",
                models=("model",),
                fingerprint="one",
            )
        )
    made = make_policy(policy)
    rng, taken = random.Random(0), []
    systems = [tuple(rng.choices(range(150_000), k=2 * BLOCK_SIZE)) for _ in range(8)]
    if isinstance(made, PrefixAware):  # each engine has two of the system prompts
        for one in registry:
            one.prefix_index = PrefixIndex(made.subscriber.holders)
            for number, tokens in enumerate(rng.sample(systems, 2)):
                one.prefix_index.receive(number, _stored(rng, tokens))
    selector = Selector(registry, made, Labels())
    running: list[tuple[Pair, int]] = []

    def count(pair: Pair, requests: int, num_tokens: int) -> None:
        for one in (pair.prefill, pair.decode):
            one.num_admitted += requests
            one.num_active += requests
            one.num_active_tokens += num_tokens
        pair.decode.num_decoding += requests

    for number in range(500 + 2 * num_instances):
        num_tokens = rng.randrange(10, 2000)
        request = Routed(num_prompt_tokens=num_tokens, model="model", session=f"s{number}")
        if made.needs_token_ids:
            user = rng.choices(range(150_000), k=1000)
            request.token_ids = rng.choice(systems) + tuple(user)
            request.num_prompt_tokens = len(request.token_ids)
        began = time.perf_counter()
        pair = selector.choose(request)
        assert isinstance(pair, Pair)
        count(pair, 1, num_tokens)
        running.append((pair, num_tokens))
        if len(running) > num_instances:
            pair, num_tokens = running.pop(rng.randrange(len(running)))
            count(pair, -1, -num_tokens)
        taken.append(time.perf_counter() - began)
    return median(taken)


def _stored(rng: random.Random, token_ids: Sequence[int], block_size: int = BLOCK_SIZE) -> bytes:
    """What an engine publishes that has computed these blocks."""
    from vllm_ascend_pd.router.prefix.index import BlockStored, EventBatch

    event = BlockStored(
        block_hashes=[rng.randbytes(32) for _ in range(len(token_ids) // block_size)],
        parent_block_hash=None,
        token_ids=list(token_ids),
        block_size=block_size,
    )
    return msgspec.msgpack.encode(EventBatch(0.0, [event]))


def _block_event_s() -> float:
    from vllm_ascend_pd.router.prefix.index import Holders, PrefixIndex

    index, rng = PrefixIndex(Holders()), random.Random(0)
    payloads = [_stored(rng, rng.choices(range(150_000), k=8 * BLOCK_SIZE)) for _ in range(500)]
    began = time.perf_counter()
    for number, payload in enumerate(payloads):
        index.receive(number, payload)
    assert len(index) == 8 * len(payloads)
    return (time.perf_counter() - began) / len(index)


def _block_bytes(num_engines: int, is_shared: bool) -> float:
    """Of the router's memory, for each block of each engine; its tokens are not kept."""
    from vllm_ascend_pd.router.prefix.index import Holders, PrefixIndex

    num_blocks, rng = 200_000 // num_engines, random.Random(0)
    tracemalloc.start()
    holders, indexes = Holders(), []
    for number in range(num_engines):
        first = 0 if is_shared else number * num_blocks
        indexes.append(PrefixIndex(holders))
        indexes[-1].receive(0, _stored(rng, range(first, first + num_blocks), block_size=1))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, indexes)) == num_engines * num_blocks
    return taken / (num_engines * num_blocks)


def _heartbeat_s(num_heartbeats: int) -> float:
    """Of a router with 200 engines that are not there."""
    import psutil

    port = free_port()
    command = [VLLM_PD, "router", "--port", str(port), "--access-log", "off"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    body = {"url": "http://127.0.0.1:9", "role": "decode", "epoch": "e", "state": "starting"}

    async def beat() -> float:
        url = f"http://127.0.0.1:{port}/registry/instances"
        async with aiohttp.ClientSession() as http:
            for _ in range(200):
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(url):
                        break
                await asyncio.sleep(0.1)

            async def put(number: int) -> None:
                async with http.put(f"{url}/i{number % 200}", json=body) as response:
                    assert response.status == 200, await response.text()

            for number in range(200):
                await put(number)
            watched = psutil.Process(process.pid)
            idle_began, idle_cpu = time.perf_counter(), sum(watched.cpu_times()[:2])
            await asyncio.sleep(3)
            began, cpu = time.perf_counter(), sum(watched.cpu_times()[:2])
            idle = (cpu - idle_cpu) / (began - idle_began)
            for number in range(num_heartbeats):
                await put(number)
            spent = sum(watched.cpu_times()[:2]) - cpu
            return (spent - idle * (time.perf_counter() - began)) / num_heartbeats

    try:
        return asyncio.run(beat())
    finally:
        process.terminate()
        process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("fit", "speed", "costs"), default="fit")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/60m"))
    parser.add_argument("--dtype", default=usual_dtype())
    parser.add_argument(
        "--folder", type=Path, help="where --part fit writes, and --part speed reads the profile"
    )
    parser.add_argument("--slo-ttft", type=float, default=1.0)
    parser.add_argument("--slo-itl", type=float, default=0.04)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5, 3.0, 6.0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each replay")
    parser.add_argument("--rounds", type=int, default=3, help="of the profile")
    parser.add_argument("--both-busy", action="store_true", help="as of vllm-pd profile")
    parser.add_argument(
        "--waiting",
        action="store_true",
        help="steps take as long as if accelerators computed them, and leave the cores alone",
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="for --part speed")
    parser.add_argument("--instances", type=int, default=1000, help="for --part speed")
    parser.add_argument("--heartbeats", type=int, default=3000, help="for --part costs")
    options = parser.parse_args()
    if options.folder is None and options.part != "costs":
        parser.error(f"--part {options.part} needs --folder")
    {"fit": fit, "speed": speed, "costs": costs}[options.part](options)


if __name__ == "__main__":
    main()
