#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What taking a prompt's KV from a peer costs, against computing it again.

One run, one machine, interleaved: a producer and a consumer engine, prompts of --tokens tokens that
no cache has seen. Reported as medians and ratios:

  load       TTFT on the consumer when the producer has computed the prompt
  recompute  TTFT on the same consumer when nobody has
  transfer   the load alone, from its start in the worker to the last verified page, by --transport
  raw        Mooncake's own write of the same bytes in one piece between two processes
  socket     the same bytes over a loopback TCP socket, memcpy: the same bytes in one process

    python benchmarks/handover.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from host import usual_dtype

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PRODUCER = {"kv_role": "kv_producer"}
CONSUMER = {"kv_role": "kv_consumer"}


def serve(pipe: Connection, options: argparse.Namespace, transfer: dict[str, Any]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    extra = {
        "transfer": {
            "load_mode": options.load_mode,
            "transport": options.transport,
            # What is measured is how soon D can compute on P's KV.
            "first_token": "compute",
        }
    }
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config=KVTransferConfig(
            kv_connector="InEngine", kv_connector_extra_config=extra, **transfer
        ),
        disable_log_stats=False,
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
        pipe.send((output.metrics.first_token_latency * 1000, output.kv_transfer_params))
    llm.llm_engine.engine_core.shutdown()


def raw_sink(pipe: Connection, num_bytes: int) -> None:
    """The receiving side of the raw transfers."""
    from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine

    engine = MooncakeTransferEngine("127.0.0.1")
    memory = ctypes.create_string_buffer(num_bytes)
    ctypes.memset(memory, 1, num_bytes)
    engine.register(ctypes.addressof(memory), num_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((engine.session, ctypes.addressof(memory), listener.getsockname()[1]))
    connection, _ = listener.accept()
    view = memoryview(memory).cast("B")
    while (order := pipe.recv()) is not None:
        received = 0
        while received < num_bytes:
            received += connection.recv_into(view[received:], num_bytes - received)
        connection.send(order)
    engine.close()


class RawTransfer:
    """One-piece Mooncake writes, socket copies and memcpys of the same bytes, timed in ms."""

    def __init__(self, num_bytes: int) -> None:
        from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine

        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._sink = context.Process(target=raw_sink, args=(child, num_bytes))
        self._sink.start()
        self._session, self._address, port = self._pipe.recv()
        self._num_bytes = num_bytes
        self._engine = MooncakeTransferEngine("127.0.0.1")
        self._source = ctypes.create_string_buffer(num_bytes)
        self._copy = ctypes.create_string_buffer(num_bytes)
        for memory in (self._source, self._copy):
            ctypes.memset(memory, 2, num_bytes)
        self._engine.register(ctypes.addressof(self._source), num_bytes)
        self._connection = socket.create_connection(("127.0.0.1", port))

    def measure(self) -> dict[str, float]:
        return {"raw": self._write(), "socket": self._send(), "memcpy": self._move()}

    def _write(self) -> float:
        from vllm_ascend_pd.backends.transfer_engine import TransferStatus

        source = ctypes.addressof(self._source)
        started = time.perf_counter()
        handle = self._engine.submit_write(self._session, source, self._address, self._num_bytes)
        while (status := self._engine.poll(handle)) is TransferStatus.RUNNING:
            time.sleep(100e-6)
        assert status is TransferStatus.DONE
        return (time.perf_counter() - started) * 1000

    def _send(self) -> float:
        self._pipe.send(b"k")
        started = time.perf_counter()
        sender = threading.Thread(target=self._connection.sendall, args=(self._source,))
        sender.start()
        self._connection.recv(1)
        elapsed = (time.perf_counter() - started) * 1000
        sender.join()
        return elapsed

    def _move(self) -> float:
        started = time.perf_counter()
        ctypes.memmove(self._copy, self._source, self._num_bytes)
        return (time.perf_counter() - started) * 1000

    def close(self) -> None:
        self._pipe.send(None)
        self._sink.join()
        self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default=usual_dtype())
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--load-mode", default="step", choices=("auto", "step", "park"))
    parser.add_argument("--transport", default="auto", help="see transfer.transport")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    engines = []
    for transfer in (PRODUCER, CONSUMER):
        pipe, child = context.Pipe()
        process = context.Process(target=serve, args=(child, options, transfer))
        process.start()
        engines.append((process, pipe))
    for _, pipe in engines:
        pipe.recv()
    (_, producer), (_, consumer) = engines

    def ask(pipe: Connection, token_ids: list[int], params: dict[str, Any] | None) -> Any:
        pipe.send((token_ids, params))
        return pipe.recv()

    rng = random.Random(0)
    times: dict[str, list[float]] = {}
    raw: RawTransfer | None = None
    for number in range(options.rounds + 2):
        prompt = [rng.randrange(10, 1000) for _ in range(options.tokens)]
        prefill, params = ask(producer, prompt, {"do_remote_decode": True})
        load, got = ask(consumer, prompt, {**params, "return_provenance": True})
        other = [rng.randrange(10, 1000) for _ in range(options.tokens)]
        recompute, _ = ask(consumer, other, None)
        origin = got["provenance"]
        assert origin["num_peer_tokens"] == options.tokens - 1, origin
        num_bytes = origin["num_peer_bytes"]
        raw = raw or RawTransfer(num_bytes)
        busy = raw.measure()["raw"]  # the engines' processes spin for a second after a step
        time.sleep(1.2)
        measured = raw.measure()
        measured |= {"prefill": prefill, "load": load, "recompute": recompute}
        measured["raw busy"] = busy
        measured["transfer"] = origin["transfer_ms"]
        if number >= 2:  # the first rounds open connections and touch memory
            for name, value in measured.items():
                times.setdefault(name, []).append(value)
    assert raw is not None
    raw.close()
    for process, pipe in engines:
        pipe.send(None)
        process.join(60)
    middle = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{options.tokens} tokens, {num_bytes / 1e6:.1f} MB of KV, {options.rounds} rounds,"
        f" load mode {options.load_mode}, by {origin['transport']}; medians in ms (min..max)"
    )
    for name, value in middle.items():
        speed = f"  {num_bytes / value / 1e6:6.2f} GB/s" if name in _BYTES else ""
        print(f"  {name:>9} {value:8.1f}  ({min(times[name]):.1f}..{max(times[name]):.1f}){speed}")
    print(f"load / recompute = {middle['load'] / middle['recompute']:.3f}   (goal: at most 0.25)")
    print(f"transfer / raw   = {middle['transfer'] / middle['raw']:.3f}   (goal: at most 1.2)")


_BYTES = ("transfer", "raw", "socket", "memcpy")

if __name__ == "__main__":
    main()
