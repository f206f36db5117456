#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the hook in get_computed_blocks costs a scheduling pass.

No model runs: a real patched Scheduler, waiting requests with prompts of --tokens tokens, each of
which a peer holds. Reported per waiting request and pass: the engine's own lookup without hooks,
with them in the first pass (which publishes the peer's blocks), and with them in later passes. The
last line repeats that with the requests spread over many peers.

    python benchmarks/lookup_hook.py --model .cache/models/tiny
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import TYPE_CHECKING

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.wire import Opened, RemotePrefill, Ticket, Worker

if TYPE_CHECKING:
    from collections.abc import Callable


def make_scheduler(model: str, block_size: int, num_blocks: int) -> Scheduler:
    import torch

    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=16384),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=16384,
            max_model_len=16384,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="InEngine", kv_role="kv_consumer", engine_id="bench"
        ),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    caches = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=spec.page_size_bytes * num_blocks,
                layers=["layers.0"],
                layer_stride=spec.page_size_bytes * num_blocks,
                block_stride=spec.page_size_bytes,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=caches,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
    )


def add_waiting(
    scheduler: Scheduler, count: int, num_tokens: int, block_size: int, num_peers: int
) -> list[Request]:
    """Requests whose producers have answered, as if over the wire."""
    hasher = get_request_block_hasher(block_size, sha256)
    requests = []
    for number in range(count):
        peer = number % num_peers
        remote = RemotePrefill(
            remote_engine_id=f"peer-{peer}",
            remote_host="127.0.0.1",
            remote_port=20000 + peer,
            remote_key="key",
            transfer_id=f"t{number}",
            remote_epoch=f"e{peer}",
        )
        first = number * num_tokens
        request = Request(
            request_id=str(number),
            prompt_token_ids=[(first + i) % 1999 for i in range(num_tokens - 1)] + [number],
            sampling_params=SamplingParams(
                max_tokens=4, extra_args={"kv_transfer_params": remote.to_params()}
            ),
            pooling_params=None,
            block_hasher=hasher,
        )
        scheduler.pd.on_request_added(request)
        session = scheduler.pd.part(Consumer).find(request)
        worker = Worker("127.0.0.1", 1, Ticket(1, num_tokens, b""), "key")
        session.opened(Opened(f"t{number}", num_tokens - 1, (worker,), "e"))
        requests.append(request)
    return requests


def per_request_us(requests: list[Request], look_up: Callable[[Request], object]) -> float:
    started = time.perf_counter()
    for request in requests:
        look_up(request)
    return (time.perf_counter() - started) / len(requests) * 1e6


def measure(options: argparse.Namespace, block_size: int, num_peers: int) -> dict[str, float]:
    per_request = options.tokens // block_size
    scheduler = make_scheduler(options.model, block_size, per_request * options.requests + 64)
    try:
        manager = scheduler.kv_cache_manager
        requests = add_waiting(scheduler, options.requests, options.tokens, block_size, num_peers)
        gc.collect()
        gc.freeze()  # as the engine does at its start
        first = per_request_us(requests, manager.get_computed_blocks)
        later, engine = [], []
        for _ in range(options.passes):
            later.append(per_request_us(requests, manager.get_computed_blocks))
            hooks, manager.pd = manager.pd, None
            engine.append(per_request_us(requests, manager.get_computed_blocks))
            manager.pd = hooks
        return {
            "engine": statistics.median(engine),
            "first": first,
            "later": statistics.median(later),
        }
    finally:
        scheduler.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model folder; only its config is read")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=64, help="waiting requests")
    parser.add_argument("--passes", type=int, default=50)
    options = parser.parse_args()
    init_none_hash(sha256)
    print(
        f"{options.requests} waiting requests of {options.tokens} tokens; us per request and pass"
    )
    print(
        f"{'block':>6} {'peers':>6} | {'no hook':>8} {'with hook':>9} {'hook adds':>9} |"
        f" {'first pass adds':>15}"
    )
    for block_size in (128, 16):
        for num_peers in (1, 8, 64):
            got = measure(options, block_size, num_peers)
            print(
                f"{block_size:>6} {num_peers:>6} | {got['engine']:>8.1f} {got['later']:>9.1f}"
                f" {got['later'] - got['engine']:>9.1f} | {got['first'] - got['engine']:>15.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
