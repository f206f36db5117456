#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of conversations without a pool, with DRAM, and with DRAM and SSD.

The trace is one in Mooncake's format (``--trace``), or one that `traces.py` makes up. Lengths are
scaled down, and requests arrive by the trace's clock, scaled too. For each engine: the share of
prompt tokens that were not computed, beside that of an ideal cache of the same capacity; time to
the first token; throughput.

  python benchmarks/trace.py --model .cache/models/60m --png docs/trace.png
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from host import usual_dtype
from pooled import with_pool
from traces import ideal_hits, make_trace, prompt_of, scale

from vllm_ascend_pd.planner.trace_file import TraceRequest, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_TOKEN, LAST_TOKEN = 300, 2000


@dataclass(frozen=True)
class Result:
    """What one engine made of the trace."""

    name: str
    hit_rate: float
    ideal: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float


# --------------------------------------------------------------------------- the child: one engine


def engine_main(options: argparse.Namespace) -> None:
    """Says how many bytes a block takes, reads the trace, replays it, prints what it saw."""
    from vllm import LLM

    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        block_size=options.tokens_per_id,
        max_model_len=options.max_length,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_length,
        num_gpu_blocks_override=options.hbm_blocks,
        kv_cache_memory_bytes=options.hbm_blocks << 24,  # enough; what counts is above
        kv_transfer_config=with_pool(options.pool),
    )
    core: Any = llm.llm_engine.engine_core.engine_core
    spec = core.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    num_layers = sum(len(t.layers) for t in core.scheduler.kv_cache_config.kv_cache_tensors)
    print(json.dumps({"block_bytes": spec.page_size_bytes * num_layers}), flush=True)
    requests = [TraceRequest(*values) for values in json.loads(sys.stdin.readline())]
    print(json.dumps(_replay(llm.llm_engine, requests, options)), flush=True)
    llm.llm_engine.engine_core.shutdown()


def _replay(
    engine: Any, requests: Sequence[TraceRequest], options: argparse.Namespace
) -> dict[str, Any]:
    from vllm import SamplingParams

    prompts = [prompt_of(r, options.tokens_per_id, FIRST_TOKEN, LAST_TOKEN) for r in requests]
    warm_up = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("warm-up", {"prompt_token_ids": [9] * 200}, warm_up)
    while engine.has_unfinished_requests():
        engine.step()
    ttft_ms: dict[str, float] = {}
    cached: dict[str, int] = {}
    started = time.perf_counter()
    due = [started + request.timestamp_ms / 1000 for request in requests]
    num_added = 0
    while len(cached) < len(requests):
        while num_added < len(requests) and due[num_added] <= time.perf_counter():
            sampling = SamplingParams(
                temperature=0, max_tokens=requests[num_added].output_length, ignore_eos=True
            )
            prompt = {"prompt_token_ids": prompts[num_added]}
            engine.add_request(str(num_added), prompt, sampling)
            num_added += 1
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.outputs[0].token_ids and output.request_id not in ttft_ms:
                ttft_ms[output.request_id] = (now - due[int(output.request_id)]) * 1000
            if output.finished:
                cached[output.request_id] = output.num_cached_tokens or 0
        if not outputs:
            time.sleep(0.0005)
    return {
        "seconds": time.perf_counter() - started,
        "ttft_ms": sorted(ttft_ms.values()),
        "num_cached_tokens": sum(cached.values()),
    }


class Engine:
    """An engine process."""

    def __init__(self, options: argparse.Namespace, pool: dict[str, Any] | None) -> None:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [sys.executable, __file__, "--engine", "--model", options.model]
        for name in ("dtype", "tokens_per_id", "max_length", "max_num_seqs", "hbm_blocks"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        if pool is not None:
            command += ["--pool", json.dumps(pool)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.block_bytes: int = self._read()["block_bytes"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("error: an engine ended; its messages are above")

    def replay(self, requests: Sequence[TraceRequest]) -> dict[str, Any]:
        assert self._process.stdin is not None
        values = [msgspec.structs.astuple(request) for request in requests]
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()
        try:
            return self._read()
        finally:
            self._process.stdin.close()
            self._process.wait(60)


# -------------------------------------------------------------------------------------- the report


def run(
    name: str,
    options: argparse.Namespace,
    requests: Sequence[TraceRequest],
    pool: dict[str, Any] | None,
    capacity_bytes: int,
) -> Result:
    """``capacity_bytes`` of its largest tier; of the engine's own cache without a pool."""
    engine = Engine(options, pool)
    answer = engine.replay(requests)
    num_prompt_tokens = sum(request.input_length for request in requests)
    num_output_tokens = sum(request.output_length for request in requests)
    capacity = max(options.hbm_blocks, capacity_bytes // engine.block_bytes)
    ideal = sum(ideal_hits(requests, options.tokens_per_id, capacity))
    ttft = answer["ttft_ms"]
    return Result(
        name,
        answer["num_cached_tokens"] / num_prompt_tokens,
        ideal / num_prompt_tokens,
        ttft[len(ttft) // 2],
        ttft[min(len(ttft) - 1, math.floor(len(ttft) * 0.99))],
        (num_prompt_tokens + num_output_tokens) / answer["seconds"],
    )


def report(results: Sequence[Result]) -> None:
    print("| | hit rate | ideal | TTFT p50 | TTFT p99 | throughput |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.name} | {100 * r.hit_rate:.1f} % | {100 * r.ideal:.1f} % | {r.ttft_p50_ms:,.0f}"
            f" ms | {r.ttft_p99_ms:,.0f} ms | {r.tokens_per_s:,.0f} tokens/s |"
        )


def draw(results: Sequence[Result], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (hits, ttft, throughput) = pyplot.subplots(1, 3, figsize=(11, 3.2))
    names = [result.name for result in results]
    places = range(len(results))
    hits.bar(places, [100 * r.hit_rate for r in results], color="#4878a8")
    for place, result in zip(places, results, strict=True):
        hits.hlines(100 * result.ideal, place - 0.45, place + 0.45, colors="black")
    hits.set(title="prompt tokens not computed, %\n(line: ideal of that capacity)", ylim=(0, 100))
    width = 0.38
    ttft.bar([p - width / 2 for p in places], [r.ttft_p50_ms for r in results], width, label="p50")
    ttft.bar([p + width / 2 for p in places], [r.ttft_p99_ms for r in results], width, label="p99")
    ttft.set(title="time to the first token, ms", yscale="log")
    ttft.legend()
    throughput.bar(places, [r.tokens_per_s for r in results], color="#6a9f58")
    throughput.set(title="prompt and output tokens per second")
    for axes in (hits, ttft, throughput):
        axes.set_xticks(list(places), names)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/models/60m")
    parser.add_argument("--dtype", default=usual_dtype())
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--max-requests", type=int, default=480, help="the first ones of the trace")
    parser.add_argument("--duration-s", type=float, default=40.0, help="the trace in real time")
    parser.add_argument("--tokens-per-id", type=int, default=32, help="in place of 512")
    parser.add_argument("--max-length", type=int, default=2560, help="longer requests are left out")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--hbm-blocks", type=int, default=96, help="of the engine's own cache")
    parser.add_argument("--dram-mb", type=int, default=104)
    parser.add_argument("--ssd-mb", type=int, default=1024)
    parser.add_argument("--png", type=Path, help="draw the table")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pool", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_main(options)
        return
    if options.trace is not None:
        requests = read_trace(options.trace, options.max_requests, needs_prefixes=True)
    else:
        requests = make_trace(num_conversations=120, num_turns=4)[: options.max_requests]
    scaled = scale(requests, options.tokens_per_id, options.duration_s * 1000)
    fitting = [r for r in scaled if r.input_length + r.output_length < options.max_length]
    num_tokens = sum(request.input_length for request in fitting)
    print(
        f"{len(fitting)} requests of {num_tokens:,} tokens in {options.duration_s:.0f} s;"
        f" {len(scaled) - len(fitting)} longer ones left out\n",
        flush=True,
    )
    results = [run("no pool", options, fitting, None, 0)]
    dram = {"dram_size": options.dram_mb << 20}
    results.append(run("DRAM", options, fitting, dram, options.dram_mb << 20))
    with tempfile.TemporaryDirectory() as folder:
        ssd = {**dram, "ssd": {"path": folder, "size": options.ssd_mb << 20}}
        results.append(run("DRAM + SSD", options, fitting, ssd, options.ssd_mb << 20))
    report(results)
    if options.png is not None:
        draw(results, options.png)


if __name__ == "__main__":
    main()
