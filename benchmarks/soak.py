#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether hand-overs leave anything behind: many of them, one after another, and what has grown.

A producer and a consumer engine, each with its own processes, and prompts that no cache has seen.
Each prompt goes from one to the other; every hand-over must load all of it. A third engine, without
transfers, answers the same prompts: what grows there is not ours. After --warm-up hand-overs, and
then every --sample, the processes of each engine are counted together:

  RSS      resident memory; the slope is that of a straight line through the samples' second half
  threads, fds
  regions  memory that is registered with the transports
  held     busy staging slots, loads and grants in the worker; a grant is given up in the next step

    python benchmarks/soak.py --model .cache/models/tiny

The exit status is 1 when threads, file descriptors, regions or what is held have grown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


ROLES = ("kv_producer", "kv_consumer", None)
NAMES = ("producer", "consumer", "no transfers")


@dataclass(frozen=True)
class Sample:
    """Of all processes of one engine."""

    rss_mib: float
    threads: int
    fds: int
    regions: int
    held: int


def worker_counts(worker: object) -> dict[str, int]:
    """Runs in the worker."""
    from vllm_ascend_pd import hooks

    side: Any = hooks.worker
    return side.counts() if side is not None else {}


worker_counts.keeps_weights = True  # type: ignore[attr-defined]


def take_sample(llm: Any) -> Sample:
    process = psutil.Process()
    tree = [process, *process.children(recursive=True)]
    counts = dict.fromkeys(("regions", "busy_slots", "loads", "grants"), 0)
    counts |= llm.collective_rpc(worker_counts)[0]
    return Sample(
        rss_mib=sum(p.memory_info().rss for p in tree) / 2**20,
        threads=sum(p.num_threads() for p in tree),
        fds=sum(p.num_fds() for p in tree),
        regions=counts["regions"],
        held=counts["busy_slots"] + counts["loads"] + counts["grants"],
    )


def serve(
    pipe: Connection, options: argparse.Namespace, role: str | None, secret_file: str
) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # worker_counts is sent to the worker
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    extra: dict[str, Any] = {"transfer": {"load_mode": options.load_mode}}
    if not options.plain:
        extra["security"] = {"secret_file": secret_file}
    transfer = None
    if role is not None:
        transfer = KVTransferConfig(
            kv_connector="InEngine", kv_role=role, kv_connector_extra_config=extra
        )
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=32 << 20,
        kv_transfer_config=transfer,
    )
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        if job == "sample":
            pipe.send(take_sample(llm))
            continue
        token_ids, params = job
        extra_args = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0, max_tokens=2, ignore_eos=True, extra_args=extra_args
        )
        [output] = llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
        pipe.send(output.kv_transfer_params)
    llm.llm_engine.engine_core.shutdown()


class Engine:
    """One engine in processes of its own."""

    def __init__(self, options: argparse.Namespace, role: str | None, secret_file: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, options, role, secret_file))
        self.process.start()
        self.samples: list[Sample] = []

    def ask(self, job: object) -> Any:
        self.pipe.send(job)
        return self.pipe.recv()

    def sample(self) -> None:
        self.samples.append(self.ask("sample"))

    def slope(self, every: int) -> float:
        """Growth of memory in KiB per hand-over, over the second half of the samples."""
        half = [sample.rss_mib for sample in self.samples[len(self.samples) // 2 :]]
        return float(np.polyfit(np.arange(len(half)) * every, half, 1)[0]) * 1024

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join(60)


def hand_over(producer: Engine, consumer: Engine, single: Engine, prompt: list[int]) -> None:
    params = producer.ask((prompt, {"do_remote_decode": True}))
    answer = consumer.ask((prompt, {**params, "return_provenance": True}))
    origin = answer["provenance"]
    assert origin["outcome"] == "loaded", origin
    assert origin["num_peer_tokens"] == len(prompt), origin
    single.ask((prompt, None))


def report(number: int, engines: list[Engine]) -> None:
    columns = [f"{number:6d}"]
    for engine in engines:
        sample = engine.samples[-1]
        columns.append(
            f"{sample.rss_mib:7.1f} {sample.threads:7d} {sample.fds:4d} {sample.regions:7d}"
            f" {sample.held:4d}"
        )
    print(" | ".join(columns), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hand-overs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=100, help="hand-overs before the first")
    parser.add_argument("--sample", type=int, default=100, help="hand-overs between samples")
    parser.add_argument("--load-mode", default="auto", choices=("auto", "step", "park"))
    parser.add_argument("--plain", action="store_true", help="without security.secret_file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret_file = Path(folder) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))
        engines = [Engine(options, role, str(secret_file)) for role in ROLES]
        for engine in engines:
            engine.pipe.recv()
    rng = random.Random(0)

    def make_prompt() -> list[int]:
        return [rng.randrange(300, 2000) for _ in range(options.tokens)]

    for _ in range(options.warm_up):
        hand_over(*engines, make_prompt())
    header = "RSS MiB threads  fds regions held"
    print("       | " + " | ".join(f"{name:<33}" for name in NAMES))
    print(" | ".join(["number", *[header] * len(engines)]))
    started = time.monotonic()
    for number in range(options.hand_overs + 1):
        if number:
            hand_over(*engines, make_prompt())
        if number % options.sample == 0:
            for engine in engines:
                engine.sample()
            report(number, engines)
    per_second = options.hand_overs / (time.monotonic() - started)
    print(f"{per_second:.1f} hand-overs of {options.tokens} tokens per second")
    grown = False
    for name, engine in zip(NAMES, engines, strict=True):
        first, last = engine.samples[0], engine.samples[-1]
        counts = {
            field.name: after - before
            for field, before, after in zip(
                fields(Sample)[1:], astuple(first)[1:], astuple(last)[1:], strict=True
            )
        }
        grown |= any(count > 0 for count in counts.values())
        print(
            f"{name}: RSS {last.rss_mib - first.rss_mib:+.1f} MiB,"
            f" slope {engine.slope(options.sample):+.2f} KiB per hand-over; "
            + ", ".join(f"{key} {count:+d}" for key, count in counts.items())
        )
    for engine in engines:
        engine.stop()
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
