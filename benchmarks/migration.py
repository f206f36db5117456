#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a request that moves to another engine costs it and others, and what a lost engine costs.

One run, one machine, two engines, each figure as a ratio within the run:

stop    the time from the last token at the first engine to the first new one at the second, in
        medians of the first engine's own decode steps, for requests of --tokens tokens:
          live      the KV is copied while it decodes, and it stops for the last blocks
          blocking  it stops first, and then all of it is copied
          replay    it is aborted, and the second engine is told its tokens and computes all
others  the time between two tokens of other requests at both engines while one moves, against the
        same requests' before it
idle    decode steps of an engine that can move requests and has none to move, against the same
        engine's without the parts that do it, in turns
pool    the time to the next token of a request whose engine is lost, with its blocks in a pool of
        both, against one that the pool does not know

    python benchmarks/migration.py --model .cache/models/60m --part stop
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

PARTS = ("stop", "others", "idle", "pool")
KINDS = ("live", "blocking", "replay")
NUM_BEFORE = 24
NUM_OUTPUT = 400
NUM_OTHERS = 3
TURN_STEPS = 25


def serve(pipe: Connection, options: argparse.Namespace, pool: str | None) -> None:
    """An engine in this process; it says of each output when it came."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from vllm_ascend_pd.engine.scheduler import moves_in
    from vllm_ascend_pd.engine.scheduler.producer import Producer

    extra: dict[str, Any] = {"transfer": {"max_freeze_s": 30, "peer_timeout_s": 30}}
    if pool is not None:
        extra["pool"] = json.loads(pool)
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config=KVTransferConfig(
            kv_connector="InEngine", kv_role="kv_both", kv_port=0, kv_connector_extra_config=extra
        ),
    )
    engine: Any = llm.llm_engine
    side = engine.engine_core.engine_core.scheduler.pd
    producer = side.part(Producer)
    at = producer.endpoint
    pipe.send({"host": at.host, "port": at.port, "key": at.key, "epoch": producer.epoch})
    limit = moves_in._MAX_MISSING
    parts = list(side.parts), list(side._admission.parts)
    while True:
        if pipe.poll(0.0 if engine.has_unfinished_requests() else 0.001):
            if (job := pipe.recv()) is None:
                break
            name, *arguments = job
            if name == "abort":
                engine.abort_request(arguments)
            elif name == "moves":
                for mine, all_parts in zip((side.parts, side._admission.parts), parts, strict=True):
                    mine[:] = [
                        part
                        for part in all_parts
                        if arguments[0] or type(part).__name__ not in ("MovesIn", "MovesOut")
                    ]
            else:
                request_id, prompt, kv, num_output, is_blocking = arguments
                moves_in._MAX_MISSING = 1 << 30 if is_blocking else limit
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=num_output,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": kv} if kv else None,
                )
                engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        outputs = engine.step()
        if not outputs:  # as vLLM's engine process does when a step has computed nothing
            time.sleep(0.001)
        for output in outputs:
            sample = output.outputs[0]
            said = list(sample.token_ids), sample.finish_reason
            pipe.send((output.request_id, time.monotonic(), *said))
    engine.engine_core.shutdown()


class Engine:
    """One of the two; what its requests say, by request."""

    def __init__(self, options: argparse.Namespace, pool: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, options, pool))
        self._process.start()
        self.times: dict[str, list[float]] = {}
        """When each token came."""
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def wait_until_ready(self) -> None:
        from vllm_ascend_pd.resume import Source

        self.source = Source(**self._pipe.recv())
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """All the time: an engine whose pipe is full would wait for us."""
        with contextlib.suppress(EOFError):
            while True:
                self._said.put(self._pipe.recv())

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        kv: dict[str, Any] | None = None,
        num_output: int = NUM_OUTPUT,
        is_blocking: bool = False,
    ) -> None:
        self._pipe.send(("add", name, prompt, kv, num_output, is_blocking))

    def tell(self, *job: Any) -> None:
        self._pipe.send(job)

    def next(self, name: str | None = None) -> tuple[float, list[int], str | None]:
        """The next output of this request, or of any."""
        while True:
            of, came_at, tokens, reason = self._said.get()
            self.times.setdefault(of, []).append(came_at)
            if name in (None, of):
                return came_at, tokens, reason

    def read(self) -> None:
        """What it has said by now."""
        while not self._said.empty():
            self.next()

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


def resume_of(
    name: str, prompt: list[int], tokens: list[int], source: Any = None
) -> dict[str, Any]:
    from vllm_ascend_pd.resume import ResumeKey

    return {"resume": ResumeKey(None).sign(name, prompt, tokens, source=source).to_params()}


def new_prompt(num_tokens: int) -> list[int]:
    return [random.randrange(10, 1000) for _ in range(num_tokens)]


def decode_some(engine: Engine, name: str, prompt: list[int]) -> tuple[list[float], list[int]]:
    """It runs there and has so many tokens; when they came, and which."""
    engine.add(name, prompt)
    times: list[float] = []
    tokens: list[int] = []
    while len(times) < NUM_BEFORE:
        came_at, tokens, reason = engine.next(name)
        assert reason is None, f"it has ended: {reason}"
        times.append(came_at)
    return times, tokens


def move(
    source: Engine, target: Engine, name: str, prompt: list[int], kind: str
) -> tuple[list[float], float]:
    """When its tokens came at the source, and its first one at the target."""
    times, tokens = decode_some(source, name, prompt)
    reason = None
    if kind == "replay":
        source.tell("abort", name)
        target.add(name, prompt, resume_of(name, prompt, tokens))
    else:
        kv = resume_of(name, prompt, [], source.source)
        target.add(name, prompt, kv, is_blocking=kind == "blocking")
        while reason is None:
            num_known = len(tokens)
            came_at, tokens, reason = source.next(name)
            if num_known < len(tokens):
                times.append(came_at)
        assert reason == "abort", f"it did not move: {reason}"
    num_there = len(tokens)
    while len(tokens) <= num_there:
        came_at, tokens, _ = target.next(name)
    target.tell("abort", name)
    return times, came_at


def measure_stop(source: Engine, target: Engine, options: argparse.Namespace) -> None:
    stops: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds + 1):
        for num_tokens in options.tokens:
            for kind in KINDS:
                name = f"{kind}-{num_tokens}-{number}"
                times, came_at = move(source, target, name, new_prompt(num_tokens), kind)
                if number:  # the first round opens connections and touches memory
                    stop = (came_at - times[-1]) / statistics.median(gaps(times[2:NUM_BEFORE]))
                    stops.setdefault((kind, num_tokens), []).append(stop)
    print("stop in decode steps (median, worst of", options.rounds, "rounds)")
    for kind in KINDS:
        found = [stops[kind, n] for n in options.tokens]
        each = "  ".join(
            f"{n}: {statistics.median(values):.1f} ({max(values):.1f})"
            for n, values in zip(options.tokens, found, strict=True)
        )
        print(f"{kind:>8}  {each}")
    medians = [statistics.median(stops["live", n]) for n in options.tokens]
    print(f"live, longest to shortest: {medians[-1] / medians[0]:.2f}")


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def measure_others(source: Engine, target: Engine, options: argparse.Namespace) -> None:
    """Each engine has others that decode all the time; as many moves as fit beside them."""
    print("between two tokens of others while one moves, against before it (p50, p99)")
    for num_tokens in options.tokens:
        before: dict[str, list[float]] = {"source": [], "target": []}
        meanwhile: dict[str, list[float]] = {"source": [], "target": []}
        for number in range(options.rounds + 1):
            others = [f"other-{num_tokens}-{number}-{i}" for i in range(NUM_OTHERS)]
            for engine in (source, target):
                keep_busy(engine, others)
            name, prompt = f"mover-{num_tokens}-{number}", new_prompt(num_tokens)
            times, came_at = move(source, target, name, prompt, "live")
            begun_at = times[NUM_BEFORE - 1]
            for engine in (source, target):
                for other in others:
                    engine.tell("abort", other)
                engine.read()
            for where, engine in (("source", source), ("target", target)):
                if number:
                    before[where] += gaps_between(engine, others, times[1], begun_at)
                    meanwhile[where] += gaps_between(engine, others, begun_at, came_at)
        for where, usual in before.items():
            ratios = [percentile(meanwhile[where], q) / percentile(usual, q) for q in (0.5, 0.99)]
            print(
                f"{num_tokens:>6} tokens, {where}: {ratios[0]:.2f} {ratios[1]:.2f}"
                f" ({len(meanwhile[where])} and {len(usual)} tokens)"
            )


def keep_busy(engine: Engine, others: list[str]) -> None:
    for other in others:
        engine.add(other, new_prompt(256), num_output=4000)
    for other in others:
        while len(engine.times.get(other, ())) < 5:
            engine.next()


def gaps_between(engine: Engine, others: list[str], begin: float, end: float) -> list[float]:
    """Between their tokens that came in this time."""
    return [
        gap
        for other in others
        for gap in gaps([at for at in engine.times[other] if begin < at <= end])
    ]


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def measure_idle(source: Engine, options: argparse.Namespace) -> None:
    steps: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.rounds):
        names = [f"idle-{number}-{i}" for i in range(8)]
        for name in names:
            source.add(name, new_prompt(256), num_output=40 * TURN_STEPS)
        while len(source.times.get(names[-1], ())) < TURN_STEPS:
            source.next(names[-1])
        for turn in range(36):
            has_moves = turn % 4 in (0, 3)
            source.tell("moves", has_moves)
            times = [source.next(names[-1])[0] for _ in range(TURN_STEPS)]
            steps[has_moves] += gaps(times[2:])
        for name in names:
            source.tell("abort", name)
    medians = {has_moves: statistics.median(found) for has_moves, found in steps.items()}
    print(
        "decode steps/s with nothing to move, against the same engine without the parts that move:"
        f" {medians[False] / medians[True]:.4f} ({len(steps[True])} steps each,"
        f" {medians[True] * 1000:.2f} ms)"
    )


def measure_pool(source: Engine, target: Engine, options: argparse.Namespace) -> None:
    print("to the next token of a request whose engine is lost, pool against computed (ms)")
    for num_tokens in options.tokens:
        waits: dict[str, list[float]] = {"pool": [], "computed": []}
        for number in range(options.rounds + 1):
            for kind in waits:
                name, prompt = f"{kind}-{num_tokens}-{number}", new_prompt(num_tokens)
                _, tokens = decode_some(source, name, prompt)
                source.tell("abort", name)
                time.sleep(0.5)  # its last blocks are on their way to the pool
                told = prompt if kind == "pool" else new_prompt(num_tokens)
                lost_at = time.monotonic()
                target.add(name, told, resume_of(name, told, tokens))
                came_at, num_known = lost_at, len(tokens)
                while len(tokens) <= num_known:
                    came_at, tokens, _ = target.next(name)
                target.tell("abort", name)
                if number:
                    waits[kind].append((came_at - lost_at) * 1000)
        pool, computed = (statistics.median(waits[kind]) for kind in ("pool", "computed"))
        print(f"{num_tokens:>6} tokens: {pool / computed:.3f} ({pool:.0f} / {computed:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--part", choices=PARTS, default="stop")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

    random.seed(0)
    with contextlib.ExitStack() as stack:
        pool = None
        if options.part == "pool":
            master = EmbeddedMaster()
            stack.callback(master.stop)
            pool = json.dumps({"master": master.address, "dram_size": 1 << 30})
        engines = [Engine(options, pool) for _ in range(1 if options.part == "idle" else 2)]
        for engine in engines:
            engine.wait_until_ready()
        measure = {
            "stop": measure_stop,
            "others": measure_others,
            "idle": measure_idle,
            "pool": measure_pool,
        }[options.part]
        measure(*engines, options)
        for engine in engines:
            engine.end()


if __name__ == "__main__":
    main()
