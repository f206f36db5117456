#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the KV pool gains and costs, each figure as a ratio within one run.

ttft       time to the first token of a prompt: computed, from DRAM, from SSD
overhead   prefill and decode throughput with write-through, against an engine without a pool
saves      blocks packed while their step computes them, against after it: pins, time until they are
           stored, prefill throughput
pass       one scheduler pass with 64 waiting requests, against an engine without a pool
tier       put and get of the DRAM tier with our checksum, against memcpy of the same bytes
lookup     lookups of 20,000 keys

  python benchmarks/pool.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from host import usual_dtype
from pooled import with_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier

GIB = 1 << 30
NUM_PAIRS = 3
NUM_SETS = 5
_QUIET_S = 1.5
PARTS = ("ttft", "overhead", "saves", "pass", "tier", "lookup")


# --------------------------------------------------------------------------- the child: one engine


def engine_main(options: argparse.Namespace) -> None:
    """Obeys one JSON line at a time."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.length + 256,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=options.kv_cache_mb << 20,
        kv_transfer_config=with_pool(options.pool),
    )
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    passes: list[float] = []
    inner = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            passes.append((time.perf_counter() - started) * 1000)

    scheduler.schedule = schedule

    from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide

    pool = scheduler.pd.part(PoolSide) if scheduler.pd is not None else None

    def settle() -> None:
        while pool is not None and pool.saves.num_under_way:
            pool.collect()
            time.sleep(0.001)

    saves = SaveTimes(pool) if pool is not None else None
    if options.own_core:
        take_a_core()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "generate":
            passes.clear()
            if saves is not None:
                saves.begin(command["ahead"], command["stores"])
            prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
            sampling = SamplingParams(
                temperature=0,
                max_tokens=command["max_tokens"],
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"return_provenance": True}}
                if options.pool
                else None,
            )
            started = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            answer["ms"] = (time.perf_counter() - started) * 1000
            answer["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
            answer["passes_ms"] = list(passes)
            params = outputs[0].kv_transfer_params or {}
            answer["provenance"] = params.get("provenance")
            if saves is not None and command["max_tokens"] == 1:
                settle()
                answer["saves"] = saves.end()
        elif command["do"] == "reset":
            settle()
            answer["done"] = llm.llm_engine.reset_prefix_cache()
        print(json.dumps(answer), flush=True)
    llm.llm_engine.engine_core.shutdown()


def take_a_core() -> None:
    """For this thread. All others of the process and of its children get the others."""
    import psutil

    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return
    process = psutil.Process()
    for each in (process, *process.children(recursive=True)):
        for thread in each.threads():
            is_this = thread.id == threading.get_native_id()
            os.sched_setaffinity(thread.id, [first] if is_this else others)


class SaveTimes:
    """When each save was sent, packed and stored; perhaps nothing is packed ahead, or stored."""

    def __init__(self, pool: Any) -> None:
        self._saves = pool.saves
        self._times: dict[int, dict[str, float]] = {}
        self._num_ahead = 0
        send, handle = pool.saves._send, pool._link._handle

        def on_send(message: Any) -> None:
            if type(message).__name__ == "Save":
                self._times[message.save_id] = {"sent": time.perf_counter()}
                self._num_ahead += bool(message.ahead_id)
            send(message)

        def on_message(message: Any) -> None:
            name = type(message).__name__
            if name in ("Packed", "Saved"):
                self._times.setdefault(message.save_id, {})[name] = time.perf_counter()
            handle(message)

        pool.saves._send, pool._link._handle = on_send, on_message

    def begin(self, ahead: bool, stores: bool) -> None:
        self._saves._packs_ahead = ahead
        self._saves._resume_at = 0.0 if stores else math.inf
        self._times.clear()
        self._num_ahead = 0

    def end(self) -> dict[str, float]:
        """Milliseconds: of the mean pin, and from the last step's end until all is stored."""
        times = [t for t in self._times.values() if "sent" in t]
        if not times:
            return {}
        last_step = max(t["sent"] for t in times) - 0.02
        stored = max(t["Saved"] for t in times)
        return {
            "pinned_ms": 1000 * sum(t["Packed"] - t["sent"] for t in times) / len(times),
            "stored_ms": 1000 * (stored - min(t["sent"] for t in times if t["sent"] > last_step)),
            "num_saves": len(times),
            "num_ahead": self._num_ahead,
        }


class Engine:
    """An engine process."""

    def __init__(
        self,
        options: argparse.Namespace,
        pool: dict[str, Any] | None,
        max_num_seqs: int = 8,
        own_core: bool = False,
    ) -> None:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [sys.executable, __file__, "--engine", "--model", options.model]
        command += ["--dtype", options.dtype, "--length", str(options.length)]
        command += ["--kv-cache-mb", str(options.kv_cache_mb), "--max-num-seqs", str(max_num_seqs)]
        if pool is not None:
            command += ["--pool", json.dumps(pool)]
        if own_core:
            command += ["--own-core"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("error: an engine ended; its messages are above")

    def call(self, do: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def generate(
        self,
        *prompts: list[int],
        max_tokens: int = 1,
        ahead: bool = True,
        stores: bool = True,
        quiet_s: float = _QUIET_S,
    ) -> dict[str, Any]:
        """Timed, once the others are quiet: an engine spins for a second after its last step."""
        time.sleep(quiet_s)
        return self.call(
            "generate", prompts=prompts, max_tokens=max_tokens, ahead=ahead, stores=stores
        )

    def reset(self) -> None:
        assert self.call("reset")["done"]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2000) for _ in range(length)]


def report(
    name: str, value: float, unit: str, against: float | None = None, ratios: Sequence[float] = ()
) -> None:
    """With the ratio to ``against``, or the median and the quartiles of those of the turns."""
    ratio = f"   ratio {value / against:.3f}" if against else ""
    if ratios:
        low, middle, high = statistics.quantiles(ratios, method="inclusive")
        ratio = f"   ratio {middle:.3f} ({low:.3f} to {high:.3f})"
    print(f"  {name:<44} {value:10.2f} {unit}{ratio}", flush=True)


# ------------------------------------------------------------------------------------ engine parts


def bench_ttft(options: argparse.Namespace) -> None:
    """The same prompts, first computed, then from the pool after the local cache was reset."""
    print(f"ttft, {options.length} tokens, median of {options.rounds}", flush=True)
    prompts = [prompt_of(i, options.length) for i in range(options.rounds)]
    warm_up = prompt_of(10_000, options.length)
    with tempfile.TemporaryDirectory() as folder:
        off = Engine(options, None)
        dram = Engine(options, {"dram_size": 2 * GIB, "load": "all"})
        ssd_options = {"path": folder, "size": 4 * GIB}
        # Memory for two or three prompts, so that what is asked again is on disk.
        ssd = Engine(options, {"dram_size": "160MiB", "ssd": ssd_options, "load": "all"})
        for engine in (off, dram, ssd):
            for prompt in (warm_up, prompts[0]):  # the segment's pages, the allocator, the caches
                engine.generate(prompt[::-1])
                engine.reset()
        times: dict[str, list[float]] = {"off": [], "cold": [], "dram": [], "ssd": []}
        for prompt in prompts:
            expected = off.generate(prompt)
            off.reset()
            times["off"].append(expected["ms"])
            times["cold"].append(dram.generate(prompt)["ms"])
            dram.reset()
            answer = dram.generate(prompt)
            dram.reset()
            times["dram"].append(answer["ms"])
            assert answer["tokens"] == expected["tokens"]
            assert answer["provenance"]["num_dram_tokens"] > 0.9 * options.length
            ssd.generate(prompt)
            ssd.reset()
            time.sleep(2.5)  # Mooncake writes to disk once a second
        for i in range(5):  # memory forgets the prompts, which are on disk by now
            ssd.generate(prompt_of(20_000 + i, options.length))
            ssd.reset()
        num_ssd = 0
        for prompt in prompts:
            answer = ssd.generate(prompt)
            ssd.reset()
            origin = answer["provenance"]
            if origin["num_ssd_tokens"] > 0.9 * options.length:
                num_ssd += 1
                times["ssd"].append(answer["ms"])
        computed = statistics.median(times["off"])
        report("computed, no pool", computed, "ms")
        report("computed, stored meanwhile", statistics.median(times["cold"]), "ms", computed)
        report("from DRAM", statistics.median(times["dram"]), "ms", computed)
        if num_ssd:
            report(f"from SSD ({num_ssd} prompts)", statistics.median(times["ssd"]), "ms", computed)
        else:
            print("  from SSD: no prompt was still there in full", flush=True)
        for engine in (off, dram, ssd):
            engine.stop()


def bench_overhead(options: argparse.Namespace) -> None:
    """Fresh prompts each time; the ways take turns in rotating order.

    Two processes of one kind of engine differ by more than what is asked for here, all turns long.
    So there are several pairs of them, and the engine with a pool runs every turn twice: when it
    stores nothing, all that is missing is the writing.
    """
    print(f"write-through, {NUM_PAIRS} pairs of engines, {options.rounds} turns each", flush=True)
    ways = ("no pool", "nothing stored", "write-through")
    rates: dict[str, dict[str, list[float]]] = {
        what: {way: [] for way in ways} for what in ("prefill", "decode")
    }
    for _pair in range(NUM_PAIRS):
        plain, pooled = Engine(options, None), Engine(options, {"dram_size": 2 * GIB})
        for turn in range(options.rounds + 1):
            for way in ways[turn % 3 :] + ways[: turn % 3]:
                engine = plain if way == "no pool" else pooled
                stores = way == "write-through"
                seed = random.randrange(1 << 30)
                long = [prompt_of(seed + i, 1024) for i in range(4)]
                short = [prompt_of(seed + 50 + i, 64) for i in range(8)]
                engine.reset()
                ms = engine.generate(*long, stores=stores)["ms"]
                engine.reset()
                decode_ms = engine.generate(*short, max_tokens=160, stores=stores)["ms"]
                if turn:  # the first one warms up
                    rates["prefill"][way].append(4 * 1024 / ms * 1000)
                    rates["decode"][way].append(8 * 160 / decode_ms * 1000)
        for engine in (plain, pooled):
            engine.stop()
    for what, by_way in rates.items():
        report(f"{what}, no pool", statistics.median(by_way["no pool"]), "tokens/s")
        stored = by_way["write-through"]
        for against in ("no pool", "nothing stored"):
            ratios = [b / a for a, b in zip(by_way[against], stored, strict=True)]
            name = f"{what}, write-through / {against}"
            report(name, statistics.median(stored), "tokens/s", ratios=ratios)


def bench_saves(options: argparse.Namespace) -> None:
    """An engine without a pool, and one with, which packs ahead or not; fresh prompts each time."""
    engines = {"off": Engine(options, None), "pool": Engine(options, {"dram_size": 2 * GIB})}
    ways = ("packed after", "packed ahead")
    for num_prompts, length in ((1, 1024), (4, 1024), (8, 160)):
        print(f"saves, {num_prompts} prompts of {length} tokens, median of {options.rounds}")
        rates: dict[str, list[float]] = {way: [] for way in ways}
        times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for turn in range(options.rounds + 1):
            for way in ways[:: 1 if turn % 2 else -1]:
                seed = random.randrange(1 << 30)
                prompts = [prompt_of(seed + i, length) for i in range(num_prompts)]
                answers = {}
                for name in list(engines)[:: 1 if turn % 4 < 2 else -1]:
                    engines[name].reset()
                    answers[name] = engines[name].generate(*prompts, ahead=way == "packed ahead")
                off, pool = answers["off"], answers["pool"]
                assert off["tokens"] == pool["tokens"]
                if turn:
                    rates[way].append(off["ms"] / pool["ms"])
                    times[way].append(pool["saves"])
        for way, ratios in rates.items():
            report(f"prefill, {way}", statistics.median(ratios), "of that without a pool")
        ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
        quartiles = ", ".join(f"{value:.3f}" for value in statistics.quantiles(ratios))
        print(f"  prefill, packed ahead / after, quartiles: {quartiles}", flush=True)
        for what in times["packed after"][0]:
            after, ahead = (statistics.median(t[what] for t in times[way]) for way in ways)
            report(f"{what}, packed after", after, "")
            report(f"{what}, packed ahead", ahead, "", after)
    for engine in engines.values():
        engine.stop()


def bench_pass(options: argparse.Namespace) -> None:
    """64 requests, of which two run: the others wait, each with a lookup behind it.

    The scheduler's thread has a core of its own, since otherwise p99 says how often the machine
    has interrupted a pass. Quantiles are those of all passes of an engine. A second engine without
    a pool says how far two engines of the same kind are apart by the same measure, and since that
    is as much as what is asked for here, there are several sets of engines.
    """
    num_turns = options.rounds + 3
    print(
        f"one scheduler pass, 64 waiting requests, {NUM_SETS} sets of engines, {num_turns} turns"
        " each: median (quartiles)",
        flush=True,
    )
    if len(os.sched_getaffinity(0)) == 1:
        print("    on the only core, with all other threads, so p99 says how often they ran")
    names = ("no pool", "no pool again", "pool")
    quantiles = (0.5, 0.9, 0.99)
    ms: dict[float, dict[str, list[float]]] = {q: {name: [] for name in names} for q in quantiles}
    for engine_set in range(NUM_SETS):
        engines = {
            name: Engine(
                options,
                {"dram_size": GIB} if name == "pool" else None,
                max_num_seqs=2,
                own_core=True,
            )
            for name in names
        }
        passes: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-1, num_turns):  # the first one warms up
            prompts = [prompt_of(90_000 + 100 * turn + i, 160) for i in range(64)]
            order = names[turn % 3 :] + names[: turn % 3]
            for name in order[:: 1 if (turn + engine_set) % 2 else -1]:
                answer = engines[name].generate(*prompts, max_tokens=8, quiet_s=0.3)
                engines[name].reset()
                if turn >= 0:
                    passes[name] += answer["passes_ms"]
        for engine in engines.values():
            engine.stop()
        for quantile in quantiles:
            for name in names:
                ms[quantile][name].append(sorted(passes[name])[int(len(passes[name]) * quantile)])
    for quantile, of in ms.items():
        what = f"p{round(quantile * 100)}"
        report(f"{what}, no pool", statistics.median(of["no pool"]), "ms")
        for name in names[1:]:
            ratios = [b / a for a, b in zip(of["no pool"], of[name], strict=True)]
            report(f"{what}, {name}", statistics.median(of[name]), "ms", ratios=ratios)
            print("    " + " ".join(f"{ratio:.2f}" for ratio in ratios), flush=True)


# -------------------------------------------------------------------------------------- tier parts


class Memory:
    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.map = mmap.mmap(-1, num_bytes, flags=flags)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def bench_tier(options: argparse.Namespace) -> None:
    """Blocks of 16 layers: put as the pool's save thread does it, 8 MiB at a time; get as its
    read threads do, up to 32 MiB at a time.
    """
    from vllm_ascend_pd.config import PoolConfig
    from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier
    from vllm_ascend_pd.pool.tier import Opening

    backend = MooncakeTier.open(Opening(PoolConfig(dram_size=2 * GIB)))
    print("DRAM tier with checksum, against memcpy by as many threads", flush=True)
    for block_mb in (1, 8):
        for num_threads in (1, 2):
            _bench_tier(options, backend, block_mb << 20, num_threads)
    backend.close()


def _bench_tier(  # noqa: C901 - one experiment, from top to bottom
    options: argparse.Namespace, backend: MooncakeTier, block_bytes: int, num_threads: int
) -> None:
    import numpy as np

    from vllm_ascend_pd.backends.block_copy import (
        GroupPages,
        PageLayout,
        Region,
        make_block_copier,
    )
    from vllm_ascend_pd.pool.keys import KeySpace
    from vllm_ascend_pd.pool.tier import Status, Value
    from vllm_ascend_pd.pool.values import BlockValues

    num_layers, num_bytes = 16, 256 << 20
    page, num_blocks = block_bytes // num_layers, num_bytes // block_bytes
    pages, copy = Memory(num_bytes), Memory(num_bytes)
    layout = PageLayout.packed(
        Region(pages.addr, num_bytes),
        np.arange(num_layers, dtype=np.int64) * page * num_blocks,
        page,
    )
    space = KeySpace.of("bench")
    group = GroupPages.of(layout, 128, range(num_layers))
    values = BlockValues(make_block_copier(), group, space)
    size = values.num_bytes
    batch = max(1, (8 << 20) // block_bytes)
    stagings = [Memory(batch * size) for _ in range(num_threads)]
    for staging in stagings:
        backend.store.register(staging.addr, len(staging.map))
    hashes: list[bytes] = []

    def memcpy(thread: int) -> None:
        for start in range(thread * batch, num_blocks, num_threads * batch):
            offset, length = start * block_bytes, batch * block_bytes
            ctypes.memmove(copy.addr + offset, pages.addr + offset, length)

    def put(thread: int) -> None:
        staging = stagings[thread]
        region = Region(staging.addr, len(staging.map))
        for start in range(thread * batch, num_blocks, num_threads * batch):
            ids = np.arange(start, start + batch, dtype=np.int64)
            totals = values.pack_layers(0, num_layers, ids, region)
            for i, total in enumerate(totals):
                values.seal(int(total), hashes[start + i], region, i * size)
            part = [
                Value(space.key(h), staging.addr + i * size, size)
                for i, h in enumerate(hashes[start : start + batch])
            ]
            assert set(backend.put(part)) == {Status.OK}

    def get(thread: int) -> None:
        for start in range(thread * 4 * batch, num_blocks, num_threads * 4 * batch):
            keys = [space.key(h) for h in hashes[start : start + 4 * batch]]
            with backend.view(keys, size) as addrs:
                for i, addr in enumerate(addrs, start):
                    assert values.unpack(i, hashes[i], Region(addr, size), 0) is Status.OK

    rates: dict[str, list[float]] = {"memcpy": [], "put": [], "get": []}
    for turn in range(options.rounds + 1):
        hashes = [random.randbytes(32) for _ in range(num_blocks)]
        for name, run in (("memcpy", memcpy), ("put", put), ("get", get)):
            seconds = _in_threads(num_threads, run)
            if turn:  # the first one pays for the pages of the segment
                rates[name].append(num_bytes / seconds / 1e9)
        backend.remove([space.key(h) for h in hashes])
    plain = statistics.median(rates["memcpy"])
    what = f"blocks of {block_bytes >> 20} MiB, {num_threads} threads"
    for name, measured in rates.items():
        report(f"{what}, {name}", statistics.median(measured), "GB/s", plain)
    for staging in stagings:
        backend.store.unregister(staging.addr)


def _in_threads(num_threads: int, run: Callable[[int], None]) -> float:
    """Seconds until all have ended."""
    with ThreadPoolExecutor(num_threads) as executor:
        list(executor.map(lambda _: None, range(num_threads)))
        started = time.perf_counter()
        list(executor.map(run, range(num_threads)))
        return time.perf_counter() - started


def bench_lookup(options: argparse.Namespace) -> None:
    from vllm_ascend_pd.config import PoolConfig
    from vllm_ascend_pd.pool.keys import KeySpace
    from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier
    from vllm_ascend_pd.pool.tier import Opening, Value

    backend = MooncakeTier.open(Opening(PoolConfig(dram_size=GIB)))
    memory = Memory(1 << 20)
    backend.store.register(memory.addr, len(memory.map))
    space = KeySpace.of("bench")
    hashes = [i.to_bytes(32, "big") for i in range(20_000)]
    keys = [space.key(block_hash) for block_hash in hashes]
    for start in range(0, 10_000, 1000):
        backend.put([Value(key, memory.addr, 1024) for key in keys[start : start + 1000]])
    times = []
    for _ in range(options.rounds * 2):
        started = time.perf_counter()
        places = backend.lookup([space.key(block_hash) for block_hash in hashes])
        times.append((time.perf_counter() - started) * 1000)
    print("lookup of 20,000 keys, half of them there", flush=True)
    assert sum(map(bool, places)) == 10_000
    report("median", statistics.median(times), "ms")
    report("worst", max(times), "ms")
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/models/60m")
    parser.add_argument("--dtype", default=usual_dtype())
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt of `ttft`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv-cache-mb", type=int, default=512)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pool", help=argparse.SUPPRESS)
    parser.add_argument("--max-num-seqs", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--own-core", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_main(options)
        return
    run = {
        "ttft": bench_ttft,
        "overhead": bench_overhead,
        "saves": bench_saves,
        "pass": bench_pass,
        "tier": bench_tier,
        "lookup": bench_lookup,
    }
    for part in options.parts:
        run[part](options)


if __name__ == "__main__":
    main()
