#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill in one engine, decode in another, on one machine.

Two processes that differ only in their KVTransferConfig: the producer computes each prompt and one
token, the consumer takes the prompt's KV from it and generates the answer. With --verify a third,
ordinary engine answers the same prompts and every token must be equal.

    python -m vllm_ascend_pd.testing.tiny_model --out .cache/models/tiny
    python examples/offline_inference/disaggregated_prefill.py --model .cache/models/tiny --verify

With --device npu or cuda each engine has a device of its own; nothing else changes. That has not
been run on such hardware yet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PROMPTS = ["Hello, my name is", "Hi, your name is", "Tell me a very long story"]
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
PRODUCER = {"kv_role": "kv_producer", "kv_rank": 0}
CONSUMER = {"kv_role": "kv_consumer", "kv_rank": 1}


@dataclass
class Answer:
    """What one engine made of one prompt."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    ttft_ms: float
    kv_transfer_params: dict[str, Any] = field(default_factory=dict)


def serve(
    pipe: Connection, options: argparse.Namespace, transfer: dict[str, Any] | None, device: int
) -> None:
    """One engine: answers (prompts, max_tokens, kv_transfer_params per prompt) until None comes."""
    if options.device in VISIBLE_DEVICES:  # read when the engine's libraries are loaded
        os.environ[VISIBLE_DEVICES[options.device]] = str(device)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    kv_transfer_config = None
    if transfer is not None:
        kv_transfer_config = KVTransferConfig(
            kv_connector="InEngine", kv_parallel_size=2, kv_port=0, **transfer
        )
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_mb << 20,
        kv_transfer_config=kv_transfer_config,
        disable_log_stats=False,
    )
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        prompts, max_tokens, params = job
        answers = []
        for prompt, one in zip(prompts, params, strict=True):
            sampling = SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args={"kv_transfer_params": one} if one else None,
            )
            [output] = llm.generate([prompt], sampling, use_tqdm=False)
            answers.append(
                Answer(
                    text=output.outputs[0].text,
                    token_ids=list(output.outputs[0].token_ids),
                    num_prompt_tokens=len(output.prompt_token_ids or ()),
                    ttft_ms=output.metrics.first_token_latency * 1000,
                    kv_transfer_params=output.kv_transfer_params or {},
                )
            )
        pipe.send(answers)
    # A multiprocessing child ends without the finalizers that would stop the engine's processes.
    # These take up to 5 s on two cores, which is all that vLLM gives them unless told otherwise.
    llm.llm_engine.engine_core.shutdown(timeout=10.0)


class Engine:
    """A process with one engine in it."""

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        transfer: dict[str, Any] | None,
        device: int = 0,
    ) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        arguments = (child, options, transfer, device)
        self._process = context.Process(target=serve, args=arguments, name=name)
        self._process.start()
        child.close()

    def wait_ready(self, started: float) -> None:
        self._receive()
        print(f"  {self.name} engine ready after {time.monotonic() - started:.0f} s", flush=True)

    def generate(
        self, prompts: list[str], max_tokens: int, params: list[dict[str, Any]]
    ) -> list[Answer]:
        self._pipe.send((prompts, max_tokens, params))
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit(f"error: the {self.name} engine ended; its messages are above")

    def stop(self) -> None:
        if self._process.is_alive():
            with suppress(BrokenPipeError):
                self._pipe.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()


def long_prompt() -> str:
    """Several thousand tokens of numbered sentences."""
    return " ".join(f"This is sentence {i} of a long story about a journey." for i in range(320))


def print_table(answers: list[Answer], prefills: list[Answer]) -> None:
    head = (
        f"{'prompt':>6} {'tokens':>7} | {'local':>6} {'peer':>6} {'computed':>8} |"
        f" {'blocks':>6} {'KiB moved':>10} {'transfer ms':>11} | {'prefill ms':>10} {'TTFT ms':>8}"
    )
    print(head)
    print("-" * len(head))
    for number, (answer, prefill) in enumerate(zip(answers, prefills, strict=True)):
        origin = answer.kv_transfer_params["provenance"]
        print(
            f"{number:>6} {answer.num_prompt_tokens:>7} | {origin['num_local_tokens']:>6}"
            f" {origin['num_peer_tokens']:>6} {origin['num_computed_tokens']:>8} |"
            f" {origin['num_peer_blocks']:>6} {origin['num_peer_bytes'] / 1024:>10.0f}"
            f" {origin['transfer_ms']:>11.1f} | {prefill.ttft_ms:>10.1f} {answer.ttft_ms:>8.1f}"
        )
    print(
        "\nlocal, peer, computed: where the KV of the prompt's tokens came from on the consumer."
        "\nprefill ms: time to the first token on the producer; TTFT ms: the same on the consumer,"
        "\nfrom the arrival of the request there, transfer included."
    )


def compare(answers: list[Answer], expected: list[Answer]) -> bool:
    equal = True
    for number, (ours, single) in enumerate(zip(answers, expected, strict=True)):
        if ours.token_ids != single.token_ids:
            equal = False
            first = next(
                i
                for i, pair in enumerate(zip(ours.token_ids, single.token_ids, strict=False))
                if pair[0] != pair[1]
            )
            print(f"prompt {number}: DIFFERENT from output token {first} on", flush=True)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="model folder or name")
    parser.add_argument(
        "--device",
        choices=["cpu", *VISIBLE_DEVICES],
        default="cpu",
        help="cuda, npu: the producer has device 0, the consumer device 1 (default: cpu)",
    )
    parser.add_argument("--dtype", default="float32", help="float32 makes equality exact")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-cache-mb", type=int, default=512, help="KV cache of each engine")
    parser.add_argument(
        "--verify", action="store_true", help="compare with one ordinary engine, token by token"
    )
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    prompts = [*PROMPTS, long_prompt()]
    started = time.monotonic()
    print(
        "starting the producer and the consumer (two processes, half a minute or more) ...",
        flush=True,
    )
    engines = [Engine("producer", options, PRODUCER, 0), Engine("consumer", options, CONSUMER, 1)]
    producer, consumer = engines
    try:
        for engine in engines:
            engine.wait_ready(started)
        print("prefill on the producer ...", flush=True)
        wanted = {"do_remote_decode": True}
        prefills = producer.generate(prompts, 1, [wanted] * len(prompts))
        params = [{**prefill.kv_transfer_params, "return_provenance": True} for prefill in prefills]
        print("decode on the consumer ...", flush=True)
        answers = consumer.generate(prompts, options.max_tokens, params)
        for engine in engines:
            engine.stop()
        for prompt, answer in zip(prompts, answers, strict=True):
            shown = prompt if len(prompt) < 60 else prompt[:57] + "..."
            print(f"\nPrompt: {shown!r}\nGenerated text: {answer.text!r}")
        print()
        print_table(answers, prefills)
        moved = sum(a.kv_transfer_params["provenance"]["num_peer_tokens"] for a in answers)
        if not moved:
            sys.exit("error: no KV was transferred; the messages above say why")
        if options.verify:
            print("\nverifying against one ordinary engine ...", flush=True)
            single = Engine("single", options, None)
            engines.append(single)
            single.wait_ready(time.monotonic())
            expected = single.generate(prompts, options.max_tokens, [{}] * len(prompts))
            if not compare(answers, expected):
                sys.exit("error: the tokens differ from those of a single engine")
            print(f"verified: all {sum(len(a.token_ids) for a in answers)} tokens are equal")
    finally:
        for engine in engines:
            engine.stop()


if __name__ == "__main__":
    main()
