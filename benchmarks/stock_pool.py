#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The KV pool of this project against stock pools: same run, same machine, same prompts.

Each set-up is one ``vllm serve`` with one compute thread, free to use both cores. A prompt is
computed and stored, the engine's own prefix cache is reset, and the prompt is asked again. Set-ups
take turns.

  computed        stock vLLM, no pool: the prompt is computed again
  ours            pool in DRAM, with defaults; ours-all: with pool.load "all"
  mooncake-store  MooncakeStoreConnector, one master, a segment in the engine
  lmcache         LMCacheMPConnector and its server, L1 in shared memory

LMCache is left out when its folder is missing:

    pip install --no-deps --target .cache/peers/lmcache lmcache==0.5.6 nvtx==0.2.17 \\
        sortedcontainers==2.4.0 blake3==1.0.11 aiofile==3.12.3 caio==0.12.10 aiofiles==25.1.0 \\
        cachetools==8.0.0 redis==8.1.0 opentelemetry-exporter-prometheus==0.61b0

    python benchmarks/stock_pool.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving import (
    PEERS,
    Engine,
    EnginePlan,
    Launcher,
    free_port,
    stop_engines_when_terminated,
    unpatched_tree,
)
from stock_pd import Answer, Client, make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEMS = ("computed", "ours", "ours-all", "mooncake-store", "lmcache")
STOCK = ("mooncake-store", "lmcache")
GIB = 1 << 30


@contextlib.contextmanager
def helper(command: list[str], port: int, log: Path, env: dict[str, str]) -> Iterator[None]:
    """A process beside the engines, once it listens."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **env}, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.5)
            else:
                raise SystemExit(f"error: {command[0]} did not start; see {log}")
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def plan_ours(load: str) -> dict[str, Any]:
    return {
        "kv_connector": "InEngine",
        "kv_role": "kv_both",
        "kv_port": 0,
        "kv_connector_extra_config": {"pool": {"dram_size": "1GiB", "load": load}},
    }


def plan_of(name: str, stack: contextlib.ExitStack, logs: Path) -> EnginePlan:
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    plan = EnginePlan(name, cores, num_threads=1, arguments=("--enable-prompt-tokens-details",))
    if name in ("ours", "ours-all"):
        plan.transfer = plan_ours("all" if name == "ours-all" else "auto")
    elif name == "mooncake-store":
        port, metrics = free_port(), free_port()
        master = str(Path(sys.executable).parent / "mooncake_master")
        command = [master, f"--rpc_port={port}", f"--metrics_port={metrics}"]
        command += ["--rpc_address=127.0.0.1"]
        stack.enter_context(helper(command, port, logs / "mooncake_master.log", {}))
        config = logs / "mooncake_store.json"
        settings = {
            "mode": "embedded",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{port}",
            "global_segment_size": "1GB",
            "local_buffer_size": "512MB",
            "protocol": "tcp",
            "device_name": "",
        }
        config.write_text(json.dumps(settings))
        plan.env = {"MOONCAKE_CONFIG_PATH": str(config)}
        plan.transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        plan.pretend_device = True
    elif name == "lmcache":
        port = free_port()
        path = str(PEERS / "lmcache")
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--l1-size-gb", "1", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "engine_driven", "--disable-metrics"]
        command += ["--http-port", str(free_port())]
        command += ["--shm-name", f"bench-{uuid.uuid4().hex[:8]}"]
        env = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        stack.enter_context(helper(command, port, logs / "lmcache_server.log", env))
        plan.paths = (Path(path),)
        plan.arguments += ("--disable-hybrid-kv-cache-manager",)
        plan.transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
            },
        }
    return plan


async def measure(engines: dict[str, Engine], options: argparse.Namespace, num_tokens: int) -> None:
    client = Client()
    rng = random.Random(options.seed + num_tokens)
    names = list(engines)
    found: dict[str, list[tuple[Answer, Answer]]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        prompt = make_prompt(rng, num_tokens)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            engine = engines[name]
            cold = await client.stream(engine, prompt, 1, None)
            await asyncio.sleep(options.settle)
            engine.reset_prefix_cache()
            await client.stream(engine, make_prompt(rng, 200), 1, None)
            warm = await client.stream(engine, prompt, 1, None)
            await asyncio.sleep(0.1)
            if name != "computed" and warm.cached_tokens < 0.9 * num_tokens:
                print(f"{name}: only {warm.cached_tokens} of {num_tokens} tokens were hits")
            if number:  # the first round opens connections and touches memory
                found[name].append((cold, warm))
    await client.close()
    middle = {
        name: [statistics.median(pair[i].ttft_ms for pair in pairs) for i in (0, 1)]
        for name, pairs in found.items()
    }
    stock = [middle[name][1] for name in STOCK if name in middle]
    print(f"\n{num_tokens} tokens, medians of {options.rounds} in ms (min..max)")
    print(f"{'':>16} {'TTFT':>8} {'':18} {'/ computed':>10} {'/ best stock':>12} {'storing':>9}")
    for name, pairs in found.items():
        warm_ms = [warm.ttft_ms for _, warm in pairs]
        line = f"{name:>16} {middle[name][1]:8.1f} ({min(warm_ms):7.1f}..{max(warm_ms):7.1f})"
        if "computed" in middle:
            line += f" {middle[name][1] / middle['computed'][1]:10.3f}"
        line += f" {middle[name][1] / min(stock):12.2f}" if stock else f"{'':13}"
        print(f"{line} {middle[name][0]:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4096, 4160],
        help="4,096 is a multiple of the block size: then vLLM computes the last block again",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds for stores to end")
    parser.add_argument("--logs", type=Path, help="folder for the logs")
    options = parser.parse_args()
    stop_engines_when_terminated()
    names = list(options.systems)
    if "lmcache" in names and not (PEERS / "lmcache").is_dir():
        print(f"lmcache is left out: {PEERS / 'lmcache'} is missing; see --help")
        names.remove("lmcache")
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(exist_ok=True)
        tree = stack.enter_context(unpatched_tree())
        ours, stock = Launcher(), Launcher(tree)
        stack.callback(ours.close)
        stack.callback(stock.close)
        engines: dict[str, Engine] = {}
        # Helpers before engines, which take ports of their own when they start.
        plans = {name: plan_of(name, stack, logs) for name in names}
        for name, plan in plans.items():
            launcher = ours if name.startswith("ours") else stock
            engines[name] = launcher.start(plan, options.model, logs)
            stack.callback(engines[name].stop)
        for engine in engines.values():
            engine.wait_until_ready()
        for num_tokens in options.tokens:
            asyncio.run(measure(engines, options, num_tokens))


if __name__ == "__main__":
    main()
