#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""For how long a request that moves to another engine gives no token.

One run, one machine, interleaved: two engines, requests of --tokens tokens that decode at the first
one. The stop is the time from the last token there to the first new one here, in medians of the
first engine's own decode steps:

  live      the KV is copied while it decodes, and it stops for the last blocks
  blocking  it stops first, and then all of it is copied
  replay    it is aborted, and the second engine is told its tokens and computes all

    python benchmarks/migration.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KINDS = ("live", "blocking", "replay")
NUM_BEFORE = 24
NUM_OUTPUT = 400


def serve(pipe: Connection, options: argparse.Namespace) -> None:
    """An engine in this process; it says of each output when it came."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from vllm_ascend_pd.engine.scheduler import moves_in
    from vllm_ascend_pd.engine.scheduler.producer import Producer

    extra = {"transfer": {"max_freeze_s": 30, "peer_timeout_s": 30}}
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
    producer = engine.engine_core.engine_core.scheduler.pd.part(Producer)
    at = producer.endpoint
    pipe.send({"host": at.host, "port": at.port, "key": at.key, "epoch": producer.epoch})
    limit = moves_in._MAX_MISSING
    while True:
        if pipe.poll(0.0 if engine.has_unfinished_requests() else 0.001):
            if (job := pipe.recv()) is None:
                break
            name, *arguments = job
            if name == "abort":
                engine.abort_request(arguments)
            else:
                request_id, prompt, kv, is_blocking = arguments
                moves_in._MAX_MISSING = 1 << 30 if is_blocking else limit
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=NUM_OUTPUT,
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


class Outputs:
    """Of one engine, by request."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def next(self, name: str) -> tuple[float, list[int], str | None]:
        while (output := self.pipe.recv())[0] != name:
            pass
        return output[1:]


def measure(
    engines: tuple[Outputs, Outputs], at: Any, name: str, num_tokens: int, kind: str
) -> tuple[float, float]:
    """The stop, and the source's median step, in ms."""
    from vllm_ascend_pd.resume import ResumeKey

    source, target = engines
    prompt = [random.randrange(10, 1000) for _ in range(num_tokens)]
    source.pipe.send(("add", name, prompt, None, False))
    times: list[float] = []
    tokens: list[int] = []
    reason = None
    while reason is None:
        came_at, tokens, reason = source.next(name)
        if len(times) < len(tokens):
            times.append(came_at)
        if len(times) != NUM_BEFORE:
            continue
        if kind == "replay":
            source.pipe.send(("abort", name))
            break
        resume = ResumeKey(None).sign(name, prompt, [], source=at).to_params()
        target.pipe.send(("add", name, prompt, {"resume": resume}, kind == "blocking"))
    assert reason in (None, "abort"), f"it did not move: {reason}"
    if kind == "replay":
        resume = ResumeKey(None).sign(name, prompt, tokens).to_params()
        target.pipe.send(("add", name, prompt, {"resume": resume}, False))
    num_there = len(tokens)
    while len(tokens) <= num_there:
        came_at, tokens, _ = target.next(name)
    target.pipe.send(("abort", name))
    steps = [after - before for before, after in itertools.pairwise(times[2:NUM_BEFORE])]
    return (came_at - times[-1]) * 1000, statistics.median(steps) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        pipe, child = context.Pipe()
        processes.append(context.Process(target=serve, args=(child, options)))
        processes[-1].start()
        pipes.append(pipe)
    from vllm_ascend_pd.resume import Source

    at, _ = (Source(**pipe.recv()) for pipe in pipes)
    engines = Outputs(pipes[0]), Outputs(pipes[1])
    random.seed(0)
    stops: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds + 1):
        for num_tokens in options.tokens:
            for kind in KINDS:
                name = f"{kind}-{num_tokens}-{number}"
                stop_ms, step_ms = measure(engines, at, name, num_tokens, kind)
                if number:  # the first round opens connections and touches memory
                    stops.setdefault((kind, num_tokens), []).append(stop_ms / step_ms)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
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


if __name__ == "__main__":
    main()
