#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time to first token through P and D, in both orders, against one engine with P's core.

One run, one machine: a producer on one core, a consumer on another, and an ordinary engine on the
producer's. Prompts that no cache has seen, in turns:

  alone          the ordinary engine: from the start to its first token
  prefill first  P computes, then D is asked: from the start to D's first token
  decode first   both are asked at once
  hand-over      from the end of the prefill on P to D's first token

    python benchmarks/decode_first.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SPIN_S = 1.2
"""The processes of an engine spin for a second after a step."""


def serve(pipe: Connection, options: argparse.Namespace, role: str | None, core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = {"transport": options.transport, "push_mode": options.push_mode}
    config = None
    if role is not None:
        config = KVTransferConfig(
            kv_connector="InEngine",
            kv_role=role,
            kv_connector_extra_config={"transfer": transfer},
        )
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=options.chunk,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config=config,
    )
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        token_ids, params = job
        sampling = SamplingParams(
            temperature=0,
            max_tokens=1,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        [output] = llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
        pipe.send((time.monotonic(), output.outputs[0].token_ids, output.kv_transfer_params))
    llm.llm_engine.engine_core.shutdown()


class Turns:
    """Asks the three engines."""

    def __init__(self, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        self._pipes = {}
        self._processes = []
        for name, role, core in (
            ("alone", None, cores[0]),
            ("P", "kv_producer", cores[0]),
            ("D", "kv_consumer", cores[1]),
        ):
            pipe, child = context.Pipe()
            process = context.Process(target=serve, args=(child, options, role, core))
            process.start()
            self._pipes[name] = pipe
            self._processes.append(process)
        for pipe in self._pipes.values():
            pipe.recv()
        self._where: dict[str, Any] = {}
        self._num_transfers = 0

    def alone(self, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
        """(ms to the first token, the token)."""
        started = time.monotonic()
        done, tokens, _ = self._ask("alone", prompt, None)
        return (done - started) * 1000, tokens

    def prefill_first(self, prompt: list[int]) -> tuple[float, float, tuple[int, ...]]:
        """(ms to the first token, ms of the hand-over, the token)."""
        started = time.monotonic()
        prefilled, _, params = self._ask("P", prompt, {"do_remote_decode": True})
        self._where = {
            name: params[name] for name in ("remote_engine_id", "remote_host", "remote_port")
        }
        done, tokens, got = self._ask("D", prompt, {**params, "return_provenance": True})
        check(got, prompt)
        return (done - started) * 1000, (done - prefilled) * 1000, tokens

    def decode_first(self, prompt: list[int]) -> tuple[float, float, tuple[int, ...]]:
        """The same, both asked at once."""
        self._num_transfers += 1
        transfer_id = f"{os.getpid()}-{self._num_transfers}"
        started = time.monotonic()
        self._pipes["P"].send((prompt, {"do_remote_decode": True, "transfer_id": transfer_id}))
        decode = {"do_remote_prefill": True, "transfer_id": transfer_id, **self._where}
        self._pipes["D"].send((prompt, {**decode, "return_provenance": True}))
        prefilled, _, _ = self._pipes["P"].recv()
        done, tokens, got = self._pipes["D"].recv()
        check(got, prompt)
        return (done - started) * 1000, (done - prefilled) * 1000, tokens

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(60)

    def _ask(self, name: str, prompt: list[int], params: dict[str, Any] | None) -> Any:
        self._pipes[name].send((prompt, params))
        return self._pipes[name].recv()


def check(answer: dict[str, Any], prompt: list[int]) -> None:
    origin = answer["provenance"]
    assert origin["num_peer_tokens"] == len(prompt) - 1, origin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--chunk", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--push-mode", default="auto")
    options = parser.parse_args()
    turns = Turns(options)
    rng = random.Random(0)
    print(f"{options.rounds} rounds, transport {options.transport}, push {options.push_mode}")
    for num_tokens in options.tokens:
        times: dict[str, list[float]] = {}
        num_equal = 0
        for number in range(options.rounds + 1):
            prompts = [[rng.randrange(10, 1000) for _ in range(num_tokens)] for _ in range(2)]
            alone, expected = turns.alone(prompts[0])
            time.sleep(SPIN_S)
            alone_again, expected_again = turns.alone(prompts[1])
            time.sleep(SPIN_S)
            first, first_handover, tokens = turns.prefill_first(prompts[0])
            time.sleep(SPIN_S)
            both, both_handover, tokens_again = turns.decode_first(prompts[1])
            time.sleep(SPIN_S)
            num_equal += (tokens == expected) + (tokens_again == expected_again)
            if number:  # the first round opens connections and touches memory
                for name, value in (
                    ("alone", (alone + alone_again) / 2),
                    ("prefill first", first),
                    ("decode first", both),
                    ("hand-over, prefill first", first_handover),
                    ("hand-over, decode first", both_handover),
                ):
                    times.setdefault(name, []).append(value)
        middle = {name: statistics.median(values) for name, values in times.items()}
        print(
            f"{num_tokens} tokens; medians in ms (min..max); of {2 * options.rounds + 2} first"
            f" tokens {num_equal} are those of the engine alone"
        )
        for name, value in middle.items():
            print(f"  {name:>25} {value:8.1f}  ({min(times[name]):.1f}..{max(times[name]):.1f})")
        for name in ("prefill first", "decode first"):
            print(f"  {name} / alone = {middle[name] / middle['alone']:.3f}")
    turns.close()


if __name__ == "__main__":
    main()
