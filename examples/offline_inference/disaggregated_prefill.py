#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill in one engine, decode in another, on one machine.

Two processes that differ only in their KVTransferConfig: the producer computes a prompt and one
token, and at once the consumer takes the prompt's KV from it and generates the answer. A prompt
that the consumer had to compute is an error. With --verify a third, ordinary engine answers the
same prompts and every token must be equal.

    python -m vllm_ascend_pd.testing.tiny_model --out .cache/models/tiny
    python examples/offline_inference/disaggregated_prefill.py --model .cache/models/tiny --verify

With --device npu or cuda each engine has a device of its own; nothing else changes. That has not
been run on such hardware yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PROMPTS = ["Hello, my name is", "Hi, your name is", "Tell me a very long story"]
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
PRODUCER = {"kv_role": "kv_producer"}
CONSUMER = {"kv_role": "kv_consumer"}
PATIENT = {"lease_s": 300, "peer_timeout_s": 60, "step_load_timeout_s": 60}
"""What a machine that is slow or busy needs; the defaults are for a service, where others wait."""
WORKER_BYTES = 400 << 20
"""Of /dev/shm, which vLLM wants for a worker process. Containers have 64 MiB unless told."""
SENTENCE_TOKENS = 20
"""At most, of a sentence of the long prompt."""
STOP_S = 120.0
"""What an engine has to end in; on a slow or busy machine vLLM's own 5 s are not enough."""


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
    """One engine: answers (prompt, max_tokens, kv_transfer_params) until None comes, or nobody is
    left who asks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has started ends, too
    if options.device in VISIBLE_DEVICES:  # read when the engine's libraries are loaded
        os.environ[VISIBLE_DEVICES[options.device]] = str(device)
    has_worker = shutil.disk_usage("/dev/shm").free >= WORKER_BYTES
    if not has_worker:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.config import KVTransferConfig

    kv_transfer_config = None
    if transfer is not None:
        kv_transfer_config = KVTransferConfig(
            kv_connector="InEngine",
            kv_port=0,
            kv_connector_extra_config={"transfer": options.transfer},
            **transfer,
        )
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_mb << 20,
        kv_transfer_config=kv_transfer_config,
        disable_log_stats=False,
        distributed_executor_backend=None if has_worker else "uni",
        **({"gpu_memory_utilization": 0.3} if options.one_device else {}),
    )
    try:
        with suppress(EOFError, ConnectionError):
            answer(pipe, llm)
    finally:
        # The end of a multiprocessing child awaits the engine's processes, which nobody else stops.
        llm.llm_engine.engine_core.shutdown(timeout=STOP_S)


def answer(pipe: Connection, llm: Any) -> None:
    from vllm import SamplingParams

    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        prompt, max_tokens, params = job
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        [output] = llm.generate([prompt], sampling, use_tqdm=False)
        pipe.send(
            Answer(
                text=output.outputs[0].text,
                token_ids=list(output.outputs[0].token_ids),
                num_prompt_tokens=len(output.prompt_token_ids or ()),
                ttft_ms=output.metrics.first_token_latency * 1000,
                kv_transfer_params=output.kv_transfer_params or {},
            )
        )


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
        self, prompt: str, max_tokens: int, params: dict[str, Any] | None = None
    ) -> Answer:
        self._pipe.send((prompt, max_tokens, params))
        answer: Answer = self._receive()
        return answer

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit(f"error: the {self.name} engine ended; its messages are above")

    def begin_stop(self) -> None:
        if self._process.is_alive():
            with suppress(BrokenPipeError):
                self._pipe.send(None)

    def wait_stopped(self) -> None:
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.terminate()


def stop(engines: list[Engine]) -> None:
    """All of them at once; ending takes an engine some seconds."""
    for engine in engines:
        engine.begin_stop()
    for engine in engines:
        engine.wait_stopped()
    engines.clear()


def long_prompt(max_tokens: int) -> str:
    """Several thousand tokens of numbered sentences, but no more than so many."""
    num_sentences = min(320, max_tokens // SENTENCE_TOKENS)
    return " ".join(
        f"This is sentence {i} of a long story about a journey." for i in range(num_sentences)
    )


def hand_over(
    producer: Engine, consumer: Engine, prompt: str, max_tokens: int
) -> tuple[Answer, Answer]:
    """One prompt: the producer's answer, and the consumer's, which continues from it."""
    prefill = producer.generate(prompt, 1, {"do_remote_decode": True})
    params = {**prefill.kv_transfer_params, "return_provenance": True}
    return prefill, consumer.generate(prompt, max_tokens, params)


def what_was_not_moved(answers: list[Answer]) -> list[str]:
    """For each prompt that the consumer computed itself, in whole or in part, why."""
    missed = []
    for number, answer in enumerate(answers):
        origin = answer.kv_transfer_params.get("provenance")
        if origin is None:
            missed.append(f"prompt {number}: the consumer says nothing of where its KV came from")
        elif origin["outcome"] != "loaded" or origin["num_computed_tokens"] > 1:
            missed.append(
                f"prompt {number}: {origin['num_computed_tokens']} of {answer.num_prompt_tokens}"
                f" tokens were computed on the consumer (outcome: {origin['outcome']})"
            )
    return missed


def print_table(answers: list[Answer], prefills: list[Answer]) -> None:
    head = (
        f"{'prompt':>6} {'tokens':>7} | {'local':>6} {'peer':>6} {'computed':>8} |"
        f" {'blocks':>6} {'KiB moved':>10} {'transfer ms':>11} | {'prefill ms':>10} {'TTFT ms':>8}"
    )
    print(head)
    print("-" * len(head))
    for number, (answer, prefill) in enumerate(zip(answers, prefills, strict=True)):
        origin = answer.kv_transfer_params.get("provenance")
        if origin is None:
            print(f"{number:>6} {answer.num_prompt_tokens:>7} | not asked for a transfer")
            continue
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
            pairs = enumerate(zip_longest(ours.token_ids, single.token_ids))
            first = next(i for i, (mine, theirs) in pairs if mine != theirs)
            print(f"prompt {number}: DIFFERENT from output token {first} on", flush=True)
    return equal


def model(told: str) -> str:
    """A folder that is there, or a name."""
    is_path = told.startswith((".", "/", "~")) or told.count("/") > 1
    if is_path and not Path(told).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {told}")
    return told


def json_object(told: str) -> dict[str, Any]:
    try:
        value = json.loads(told)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"this is no JSON: {e}") from e
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"give a JSON object, such as {json.dumps(PATIENT)}")
    return value


def refuse_unpatched_engine() -> None:
    """Before an engine is started for nothing."""
    from vllm_ascend_pd.cluster import launch
    from vllm_ascend_pd.errors import ConfigError

    try:
        asyncio.run(launch.refuse_unpatched_engine())
    except ConfigError as e:
        sys.exit(f"error: {e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        type=model,
        help="model folder, or a name that was downloaded before (HF_HUB_OFFLINE=0 downloads it)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", *VISIBLE_DEVICES],
        default="cpu",
        help="cuda, npu: the producer has device 0, the consumer device 1 (default: cpu)",
    )
    parser.add_argument("--one-device", action="store_true", help="both engines have device 0")
    parser.add_argument("--dtype", default="float32", help="float32 makes equality exact")
    parser.add_argument(
        "--max-tokens", type=int, default=32, help="tokens to generate, 2 at least (default: 32)"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-cache-mb", type=int, default=512, help="KV cache of each engine")
    parser.add_argument(
        "--transfer",
        default=json.dumps(PATIENT),
        type=json_object,
        metavar="JSON",
        help="options of kv_connector_extra_config.transfer (default: %(default)s)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare with one ordinary engine, token by token"
    )
    options = parser.parse_args()
    if options.max_tokens < 2:
        parser.error("--max-tokens: the first token is the producer's; the consumer needs 2")
    num_left = options.max_model_len - options.max_tokens
    if num_left < SENTENCE_TOKENS:
        parser.error(
            f"--max-model-len {options.max_model_len} leaves no room for a prompt: give"
            f" {options.max_tokens + SENTENCE_TOKENS} or more, or fewer --max-tokens"
        )
    if options.kv_cache_mb < 1:
        parser.error("--kv-cache-mb: give 1 or more")
    refuse_unpatched_engine()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(int(STOP_S)))
    run(options, [*PROMPTS, long_prompt(num_left)])


def run(options: argparse.Namespace, prompts: list[str]) -> None:
    started = time.monotonic()
    print("starting the producer and the consumer (two processes) ...", flush=True)
    second = 0 if options.one_device else 1
    producer = Engine("producer", options, PRODUCER)
    consumer = Engine("consumer", options, CONSUMER, second)
    engines = [producer, consumer]
    try:
        for engine in engines:
            engine.wait_ready(started)
        pairs = []
        for prompt in prompts:
            shown = prompt if len(prompt) < 60 else prompt[:57] + "..."
            prefill, answer = hand_over(producer, consumer, prompt, options.max_tokens)
            pairs.append((prefill, answer))
            print(f"\nPrompt: {shown!r}\nGenerated text: {answer.text!r}", flush=True)
        answers = [answer for _, answer in pairs]
        print()
        print_table(answers, [prefill for prefill, _ in pairs])
        if missed := what_was_not_moved(answers):
            lines = "\n".join(f"  {line}" for line in missed)
            sys.exit(
                f"error: {len(missed)} of {len(prompts)} prompts were not handed over:\n{lines}\n"
                "docs/observability.md says what an outcome means; the warnings above say more"
            )
        if options.verify:
            verify(options, prompts, answers, engines)
    finally:
        stop(engines)


def verify(
    options: argparse.Namespace, prompts: list[str], answers: list[Answer], engines: list[Engine]
) -> None:
    print("\nverifying: both engines end, and an ordinary one starts ...", flush=True)
    stop(engines)
    single = Engine("single", options, None)
    engines.append(single)
    single.wait_ready(time.monotonic())
    if not compare(answers, [single.generate(prompt, options.max_tokens) for prompt in prompts]):
        sys.exit("error: the tokens differ from those of a single engine")
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"verified: all {num_tokens} tokens are equal, and every prompt was handed over")


if __name__ == "__main__":
    main()
