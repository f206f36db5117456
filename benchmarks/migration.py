#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a request that moves to another engine costs it and others, and what a lost engine costs.

One run, one machine, two engines, each figure as a ratio within the run:

stop    the time from the last token at the first engine to the first new one at the second, in
        medians of the first engine's own decode steps, for requests of --tokens tokens:
          live      the KV is copied while it decodes, and it stops for the last blocks
          blocking  it stops first, and then all of it is copied
          replay    it is aborted, and the second engine is told its tokens and computes all
others  the time between two tokens of other requests at both engines, each of which computes with
        one thread and has its front end in another process, while one moves, against the same
        requests' before it; and, as the limit, while another process copies as many bytes, there
        and back, and nothing moves
idle    decode steps of an engine that can move requests and has none to move, against the same
        engine's without the parts that do it, in turns
pool    the time to the next token of a request whose engine is lost, with its blocks in a pool of
        both, against one that the pool does not know
forward a request that the first engine, which is about to end, has the second one compute, while
        its client stays: its stop, as above; the time between two of its tokens from then on, and
        the processor time of both engines' processes for each, against the same request's before

    python benchmarks/migration.py --model .cache/models/60m --part stop
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import queue
import random
import socket
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from host import usual_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

PARTS = ("stop", "others", "idle", "pool", "forward")
KINDS = ("live", "blocking", "replay")
NUM_BEFORE = 24
NUM_OUTPUT = 500
NUM_OTHERS = 3
NUM_OF_OTHERS = 6000
TURN_STEPS = 25
NUM_FORWARDED = 100
"""Tokens that count, on each side of a forward."""
AWAY, PROCESSOR = "away", "processor"
"""Instead of a request's name."""


def engine_options(options: argparse.Namespace, extra: dict[str, Any], port: int) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.config import KVTransferConfig

    extra = {"transfer": {"max_freeze_s": 30, "peer_timeout_s": 30}, **extra}
    return {
        "model": options.model,
        "dtype": options.dtype,
        "enforce_eager": True,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 1 << 30,
        "shutdown_timeout": 60,
        "worker_cls": "waiting_worker.WaitingWorker" if options.waiting else "auto",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="InEngine",
            kv_role="kv_both",
            kv_port=port,
            kv_connector_extra_config=extra,
        ),
    }


def sampling_of(kv: dict[str, Any] | None, num_output: int) -> Any:
    from vllm import SamplingParams

    extra_args = {"kv_transfer_params": kv} if kv else None
    return SamplingParams(
        temperature=0, max_tokens=num_output, ignore_eos=True, extra_args=extra_args
    )


def serve(pipe: Connection, options: argparse.Namespace, extra: dict[str, Any], port: int) -> None:
    """All in this process; it says of each output when it came."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    chosen = engine_options(options, extra, port)
    from vllm import LLM

    engine = LLM(**chosen).llm_engine
    from vllm_ascend_pd.engine.scheduler import moves_in
    from vllm_ascend_pd.engine.scheduler.forwards_out import ForwardsOut
    from vllm_ascend_pd.engine.scheduler.producer import Producer

    scheduler = engine.engine_core.engine_core.scheduler
    side = scheduler.pd
    forwards = side.part(ForwardsOut)
    if forwards is not None:
        tell_when_away(forwards, pipe)
    producer = side.part(Producer)
    at = producer.endpoint
    pipe.send({"host": at.host, "port": at.port, "key": at.key, "epoch": producer.epoch})
    limit = moves_in._MAX_MISSING
    parts = list(side.parts), list(side._supply.parts)
    while True:
        has_work = engine.has_unfinished_requests() or scheduler.running
        if pipe.poll(0.0 if has_work else 0.001):
            if (job := pipe.recv()) is None:
                break
            name, *arguments = job
            if name == "abort":
                engine.abort_request(arguments)
            elif name == "ending":
                forwards.is_ending = lambda is_ending=arguments[0]: is_ending
            elif name == PROCESSOR:
                pipe.send((PROCESSOR, time.monotonic(), time.process_time(), None))
            elif name == "moves":
                for mine, all_parts in zip((side.parts, side._supply.parts), parts, strict=True):
                    mine[:] = [
                        part
                        for part in all_parts
                        if arguments[0] or type(part).__name__ not in ("MovesIn", "MovesOut")
                    ]
            else:
                request_id, prompt, kv, num_output, is_blocking = arguments
                moves_in._MAX_MISSING = 1 << 30 if is_blocking else limit
                sampling = sampling_of(kv, num_output)
                engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        outputs = engine.step()
        if not outputs and not scheduler.running:
            time.sleep(0.001)  # as vLLM's engine process does when it has computed nothing
        for output in outputs:
            sample = output.outputs[0]
            said = list(sample.token_ids), sample.finish_reason
            pipe.send((output.request_id, time.monotonic(), *said))
    engine.engine_core.shutdown()


def serve_apart(
    pipe: Connection, options: argparse.Namespace, extra: dict[str, Any], port: int
) -> None:
    """As ``vllm serve`` has it: a front end in this process, and the engine's core in its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no worker apart from the core, as on GPUs
    asyncio.run(_serve_apart(pipe, options, extra, port))
    os._exit(0)  # vLLM's front end, which is down, complains while the interpreter ends


async def _serve_apart(
    pipe: Connection, options: argparse.Namespace, extra: dict[str, Any], port: int
) -> None:
    chosen = engine_options(options, extra, port)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_ascend_pd.engine.vllm_api.answers import ElsewhereError
    from vllm_ascend_pd.resume import HAS_MOVED

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**chosen, distributed_executor_backend="uni")
    )

    def generate(name: str, prompt: list[int], kv: dict[str, Any] | None, num_output: int) -> Any:
        sampling = sampling_of(kv, num_output)
        return engine.generate({"prompt_token_ids": prompt}, sampling, request_id=name)

    async def tell(name: str, *asked: Any) -> None:
        tokens: list[int] = []
        try:
            async for output in generate(name, *asked):
                sample = output.outputs[0]
                tokens = list(sample.token_ids)
                pipe.send((name, time.monotonic(), tokens, sample.finish_reason))
        except ElsewhereError as error:  # as a client is told it, with status 409
            reason = "abort" if HAS_MOVED in str(error) else str(error)
            pipe.send((name, time.monotonic(), tokens, reason))

    async for output in generate("first", new_prompt(64), {"do_remote_decode": True}, 1):
        known = output.kv_transfer_params
    cache = engine.vllm_config.cache_config
    bytes_per_token = cache.kv_cache_memory_bytes / cache.num_gpu_blocks / cache.block_size
    told = {name: known[f"remote_{name}"] for name in ("host", "port", "key", "epoch")}
    pipe.send({**told, "bytes_per_token": bytes_per_token})
    running = set()
    while (job := await asyncio.to_thread(pipe.recv)) is not None:
        what, *arguments = job
        if what == "abort":
            await engine.abort(arguments)
        else:
            running.add(asyncio.create_task(tell(*arguments[:4])))
    engine.shutdown()


def tell_when_away(forwards: Any, pipe: Connection) -> None:
    go = forwards.go

    def tell(request: Any) -> None:
        go(request)
        pipe.send((AWAY, time.monotonic(), None, None))

    forwards.go = tell


class Engine:
    """One of the two; what its requests say, by request."""

    def __init__(self, options: argparse.Namespace, extra: dict[str, Any], port: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        target = serve_apart if options.part == "others" else serve
        self._process = context.Process(target=target, args=(child, options, extra, port))
        self._process.start()
        self.times: dict[str, list[float]] = {}
        """When each token came."""
        self.away: list[float] = []
        """When each request that it forwards had been stopped."""
        self.processor_s = 0.0
        """Of its process, when it was asked last."""
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def wait_until_ready(self) -> None:
        from vllm_ascend_pd.resume import RunningAt

        told = self._pipe.recv()
        self.bytes_per_token: float = told.pop("bytes_per_token", 0.0)
        """Of KV; of an engine that is served apart."""
        self.source = RunningAt(**told)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """All the time: an engine whose pipe is full would wait for us."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._said.put(self._pipe.recv())
        self._said.put(None)

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
            said = self._said.get()
            if said is None:
                raise SystemExit("error: an engine has ended; its own words are above")
            of, came_at, tokens, reason = said
            if of == AWAY:
                self.away.append(came_at)
            elif of == PROCESSOR:
                self.processor_s = tokens
                if name == PROCESSOR:
                    return came_at, [], None
            if of in (AWAY, PROCESSOR):
                continue
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
        came_at, tokens, reason = target.next(name)
        assert reason is None, f"it does not go on: {reason}"
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


@dataclass(frozen=True)
class Window:
    """Of something that others may feel, and of the time before it."""

    before: float
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def measure_others(source: Engine, target: Engine, options: argparse.Namespace) -> None:
    """Each engine has others that decode all the time; each round moves a request, and copies."""
    print("between two tokens of others, against before (p50, p99), while a request moves;")
    print("and while another process copies as many bytes, there and back")
    engines = {"source": source, "target": target}
    for num_tokens in options.tokens:
        others = [f"other-{num_tokens}-{i}" for i in range(NUM_OTHERS)]
        for engine in engines.values():
            keep_busy(engine, others)
        rounds = []
        with copier(round(num_tokens * source.bytes_per_token)) as copy:
            for number in range(options.rounds + 1):
                name, prompt = f"mover-{num_tokens}-{number}", new_prompt(num_tokens)
                times, came_at = move(source, target, name, prompt, "live")
                moved = Window(times[1], times[NUM_BEFORE - 1], came_at)
                rounds.append({"moves": moved, "copies": copy_for_as_long(copy, moved)})
                for engine in engines.values():
                    engine.read()
        for engine in engines.values():
            for other in others:
                engine.tell("abort", other)
        for where, engine in engines.items():
            told = [
                f"{kind}: {against_before(engine, others, [r[kind] for r in rounds[1:]])}"
                for kind in ("moves", "copies")
            ]
            print(f"{num_tokens:>6} tokens, {where}, {'. '.join(told)}", flush=True)
        ms = statistics.median(r["moves"].seconds for r in rounds[1:]) * 1000
        print(f"        a move took {ms:.0f} ms")


def copy_for_as_long(copy: Callable[[], None], moved: Window) -> Window:
    """As a move took, with as much before it."""
    time.sleep(0.2)  # what has moved is aborted
    before = time.monotonic()
    time.sleep(moved.begin - moved.before)
    begin = time.monotonic()
    copy()
    time.sleep(max(0.0, begin + moved.seconds - time.monotonic()))
    return Window(before, begin, time.monotonic())


def against_before(engine: Engine, others: list[str], windows: Sequence[Window]) -> str:
    waits: tuple[list[float], list[float]] = [], []
    for window in windows:
        parts = (window.before, window.begin), (window.begin, window.end)
        for part, (begin, end) in enumerate(parts):
            waits[part].extend(gaps_between(engine, others, begin, end))
    return f"{ratios(*waits)} of {len(waits[1])} tokens"


def ratios(usual: list[float], meanwhile: list[float]) -> str:
    return " ".join(f"{percentile(meanwhile, q) / percentile(usual, q):.2f}" for q in (0.5, 0.99))


@contextlib.contextmanager
def copier(num_bytes: int) -> Iterator[Callable[[], None]]:
    """Has another process copy so much there and back."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=copy_when_asked, args=(child, num_bytes))
    process.start()
    assert pipe.recv() == "ready"

    def copy() -> None:
        pipe.send("copy")
        pipe.recv()

    try:
        yield copy
    finally:
        pipe.send(None)
        process.join()


def copy_when_asked(pipe: Connection, num_bytes: int) -> None:
    import numpy as np

    here, there = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    pipe.send("ready")
    while pipe.recv() is not None:
        np.copyto(there, here)
        np.copyto(here, there)
        pipe.send("copied")


def keep_busy(engine: Engine, others: list[str]) -> None:
    for other in others:
        engine.add(other, new_prompt(256), num_output=NUM_OF_OTHERS)
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


def measure_forward(source: Engine, target: Engine, options: argparse.Namespace) -> None:
    print("a request that is forwarded, against itself before: its stop in decode steps (median,")
    print("worst); time between tokens (p50, p99) and processor time for each of both engines")
    for num_tokens in options.tokens:
        stops: list[float] = []
        costs: list[float] = []
        waits: tuple[list[float], list[float]] = [], []
        for number in range(options.rounds + 1):
            name = f"forward-{num_tokens}-{number}"
            decode_some(source, name, new_prompt(num_tokens))
            before = follow(source, target, name, NUM_FORWARDED)
            source.away.clear()
            source.tell("ending", True)
            while not source.away:
                assert source.next(name)[2] is None, "it has ended before it was away"
            away_at = source.away[0]
            while source.times[name][-1] <= away_at:
                source.next(name)
            after = follow(source, target, name, NUM_FORWARDED)
            source.tell("abort", name)
            source.tell("ending", False)
            times = source.times.pop(name)
            if not number:  # it opens connections
                continue
            first = next(i for i, at in enumerate(times) if at > away_at)
            stops.append((times[first] - times[first - 1]) / statistics.median(before.gaps))
            costs.append(after.processor_s / before.processor_s)
            waits[0].extend(before.gaps)
            waits[1].extend(after.gaps)
        print(
            f"{num_tokens:>6} tokens: stop {statistics.median(stops):.1f} ({max(stops):.1f}),"
            f" between tokens {ratios(*waits)}, processor time {statistics.median(costs):.2f}",
            flush=True,
        )


@dataclass(frozen=True)
class Followed:
    gaps: list[float]
    processor_s: float
    """Of both engines."""


def follow(source: Engine, target: Engine, name: str, num_tokens: int) -> Followed:
    """So many tokens of a request that streams."""
    began = processor_of(source, target)
    times = [source.next(name)[0] for _ in range(num_tokens + 1)]
    return Followed(gaps(times), processor_of(source, target) - began)


def processor_of(*engines: Engine) -> float:
    for engine in engines:
        engine.tell(PROCESSOR)
        engine.next(PROCESSOR)
    return sum(engine.processor_s for engine in engines)


def forwarding_engines(options: argparse.Namespace, folder: Path) -> list[Engine]:
    """The second one is the first one's peer."""
    secret = folder / "secret"
    secret.write_text("of these two engines " * 3)
    secret.chmod(0o600)
    security = {"security": {"secret_file": str(secret)}}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    peers = {"forward": {"peers": [f"127.0.0.1:{port}"]}}
    return [Engine(options, {**security, **peers}), Engine(options, security, port)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default=usual_dtype())
    parser.add_argument("--part", choices=PARTS, default="stop")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--waiting",
        action="store_true",
        help="steps take as long as if accelerators computed them, and leave the cores alone",
    )
    options = parser.parse_args()
    from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

    random.seed(0)
    if options.part == "others":
        os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.ExitStack() as stack:
        extra: dict[str, Any] = {}
        if options.part == "pool":
            master = EmbeddedMaster()
            stack.callback(master.stop)
            extra["pool"] = {"master": master.address, "dram_size": 1 << 30}
        if options.part == "forward":
            engines = forwarding_engines(options, Path(stack.enter_context(TemporaryDirectory())))
        else:
            engines = [Engine(options, extra) for _ in range(1 if options.part == "idle" else 2)]
        for engine in engines:
            engine.wait_until_ready()
        measure = {
            "stop": measure_stop,
            "others": measure_others,
            "idle": measure_idle,
            "pool": measure_pool,
            "forward": measure_forward,
        }[options.part]
        measure(*engines, options)
        for engine in engines:
            engine.end()


if __name__ == "__main__":
    main()
