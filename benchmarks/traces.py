# SPDX-License-Identifier: Apache-2.0
"""Traces in Mooncake's format: made up, scaled, and what a cache could gain on them.

One JSON object per line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``, one for each 512 tokens of the input (the last for what is left): two requests share
a prefix as far as their ids are equal.

  python benchmarks/traces.py --out trace.jsonl --conversations 40 --turns 6
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import OrderedDict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.planner.trace_file import TOKENS_PER_ID, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def make_trace(
    num_conversations: int,
    num_turns: int,
    num_systems: int = 4,
    duration_ms: float = 600_000.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Conversations that begin at random times, share ``num_systems`` system prompts, and come back
    with all that was said before and some more, after a while of reading and typing.
    """
    rng = random.Random(seed)
    ids = count()
    systems = [[next(ids) for _ in range(rng.randint(2, 4))] for _ in range(num_systems)]
    turns: list[tuple[float, int, TraceRequest]] = []
    order = count()
    for _ in range(num_conversations):
        now = rng.uniform(0, duration_ms)
        blocks = list(rng.choice(systems))
        length = len(blocks) * TOKENS_PER_ID
        for _ in range(max(1, round(rng.expovariate(1 / num_turns)))):
            length += max(8, round(rng.lognormvariate(6.3, 0.9)))
            output_length = max(4, round(rng.lognormvariate(5.2, 0.7)))
            while len(blocks) < length // TOKENS_PER_ID:
                blocks.append(next(ids))
            hash_ids = list(blocks)
            if length % TOKENS_PER_ID:  # what is left is a prefix of a block that is not full yet
                hash_ids.append(next(ids))
            request = TraceRequest(now, length, output_length, tuple(hash_ids))
            heapq.heappush(turns, (now, next(order), request))
            length += output_length
            now += 20 * output_length + rng.expovariate(1 / (duration_ms / 12))
    ordered = [heapq.heappop(turns)[2] for _ in range(len(turns))]
    first = ordered[0].timestamp_ms
    return [_moved(request, request.timestamp_ms - first) for request in ordered]


def _moved(request: TraceRequest, timestamp_ms: float) -> TraceRequest:
    return msgspec.structs.replace(request, timestamp_ms=timestamp_ms)


def scale(
    requests: Sequence[TraceRequest], tokens_per_id: int, duration_ms: float
) -> list[TraceRequest]:
    """Shorter, and faster: ``tokens_per_id`` in place of 512 tokens, and the last one at
    ``duration_ms``. Full blocks stay full.
    """
    last = max(request.timestamp_ms for request in requests) or 1.0
    scaled = []
    for request in requests:
        num_full, rest = divmod(request.input_length, TOKENS_PER_ID)
        left = min(tokens_per_id - 1, math.ceil(rest * tokens_per_id / TOKENS_PER_ID))
        scaled.append(
            TraceRequest(
                request.timestamp_ms * duration_ms / last,
                num_full * tokens_per_id + left,
                max(1, round(request.output_length * tokens_per_id / TOKENS_PER_ID)),
                request.hash_ids[: num_full + bool(left)],
            )
        )
    return scaled


def prompt_of(request: TraceRequest, tokens_per_id: int, first: int, last: int) -> list[int]:
    """Token ids from ``first`` to ``last``: equal ids give equal tokens, and nothing else does."""
    prompt: list[int] = []
    for hash_id in request.hash_ids:
        rng = random.Random(hash_id)
        prompt += [rng.randint(first, last) for _ in range(tokens_per_id)]
    return prompt[: request.input_length]


def ideal_hits(
    requests: Sequence[TraceRequest], tokens_per_id: int, capacity_blocks: float
) -> Iterator[int]:
    """Of each request, the prompt tokens that a cache of so many ids would have, if it were written
    at once and always forgot what was used least recently. The last token is always computed.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    for request in requests:
        usable = request.hash_ids[: (request.input_length - 1) // tokens_per_id]
        num_hits = next((i for i, h in enumerate(usable) if h not in cache), len(usable))
        yield num_hits * tokens_per_id
        for hash_id in request.hash_ids[: request.input_length // tokens_per_id]:
            cache[hash_id] = None
            cache.move_to_end(hash_id)
            if len(cache) > capacity_blocks:
                cache.popitem(last=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6, help="mean turns of a conversation")
    parser.add_argument("--systems", type=int, default=4, help="different system prompts")
    parser.add_argument("--duration-s", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-id", type=int, default=TOKENS_PER_ID, help="shorter requests")
    options = parser.parse_args()
    requests = make_trace(
        options.conversations,
        options.turns,
        options.systems,
        options.duration_s * 1000,
        options.seed,
    )
    if options.tokens_per_id != TOKENS_PER_ID:
        requests = scale(requests, options.tokens_per_id, options.duration_s * 1000)
    rounded = (_moved(request, round(request.timestamp_ms)) for request in requests)
    options.out.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rounded))
    num_tokens = sum(request.input_length for request in requests)
    hits = sum(ideal_hits(requests, options.tokens_per_id, math.inf))
    print(
        f"{options.out}: {len(requests)} requests of {num_tokens:,} tokens, of which"
        f" {100 * hits / num_tokens:.1f} % have come before"
    )


if __name__ == "__main__":
    main()
