# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` with the pool: what a client and a router see of each tier."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest
import requests
import zmq

from tests.e2e.forked_engines import Launcher
from tests.e2e.servers import free_port
from vllm_ascend_pd.router.prefix.index import Holders, IndexState, PrefixIndex
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
NUM_BLOCKS = 10
FULL = NUM_BLOCKS * BLOCK_SIZE
NUM_TOKENS = FULL + 5


class Listener(threading.Thread):
    """What a router gets: every KV event, in order, and an index of them."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self.index = PrefixIndex(Holders())
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        self._socket.connect(endpoint)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                _, seq, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            self.index.receive(int.from_bytes(seq, "big"), payload)
            self.events += msgspec.msgpack.decode(payload)[1]
        self._socket.close(0)

    def stop(self) -> None:
        self._ended.set()
        self.join(5)

    def media(self, tokens: list[int], index: int = 0) -> set[str]:
        """Where block ``index`` of these tokens is, as the events say."""
        block = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        own = None
        found: set[str] = set()
        for event in list(self.events):
            if event["type"] == "BlockStored" and event["token_ids"][:BLOCK_SIZE] == block:
                own = event["block_hashes"][0]
            if event["type"] == "AllBlocksCleared":
                found.discard("GPU")
            elif own in event["block_hashes"]:
                medium = event["medium"]
                (found.add if event["type"] == "BlockStored" else found.discard)(medium)
        return found

    def num_blocks_in(self, medium: str, tokens: list[int]) -> int:
        return sum(medium in self.media(tokens, index) for index in range(NUM_BLOCKS))

    def wait_media(self, tokens: list[int], *media: str) -> None:
        self.wait_for(lambda: self.media(tokens) == set(media))

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, self.events[-20:]
            time.sleep(0.05)


def make_prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randint(300, 2000) for _ in range(NUM_TOKENS)]


@dataclass
class Serving:
    url: str
    listener: Listener
    prompts: Iterator[list[int]] = field(default_factory=lambda: map(make_prompt, count()))

    def ask(self, prompt: list[int], max_tokens: int = 1) -> tuple[int, dict[str, int], str]:
        """Cached tokens, their provenance, and the text."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": {"return_provenance": True},
        }
        response = requests.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        answer = response.json()
        details = answer["usage"]["prompt_tokens_details"] or {}
        origin = answer["kv_transfer_params"]["provenance"]
        return details.get("cached_tokens", 0), origin, answer["choices"][0]["text"]

    def push_out(self, num_prompts: int) -> None:
        """Other prompts, until the prefix cache holds nothing older. It holds five."""
        for _ in range(num_prompts):
            self.ask(next(self.prompts))


@pytest.fixture(scope="module")
def serving(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("pool")
    make_tiny_model(folder / "model")
    ssd = {"path": str(folder / "ssd"), "size": "256MiB"}
    pool = {"dram_size": "16MiB", "ssd": ssd, "lookup_timeout_ms": 2000, "load": "all"}
    config = {
        "kv_connector": "InEngine",
        "kv_role": "kv_both",
        "kv_port": 0,
        "kv_connector_extra_config": {"pool": pool},
    }
    events = f"ipc://{folder}/events"
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    options = ["--kv-transfer-config", json.dumps(config)]
    options += ["--kv-events-config", json.dumps(publish), "--enable-prompt-tokens-details"]
    options += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "55"]
    options += ["--max-model-len", "1024"]
    engine = launched.engine("pool", folder / "model", folder, free_port(), *options)
    listener = Listener(events)
    listener.start()
    engine.start()
    engine.wait_ready()
    yield Serving(engine.url, listener)
    listener.stop()


def test_routers_index_counts_the_prefix_cache_alone(serving: Serving) -> None:
    """The first one, while memory has room for all of it."""
    prompt = next(serving.prompts)
    index = serving.listener.index
    serving.ask(prompt)
    serving.listener.wait_media(prompt, "GPU", "CPU")
    assert index.state is IndexState.EXACT
    assert index.holders.num_hit_tokens(prompt)[index.slot] == FULL
    serving.push_out(6)
    serving.listener.wait_media(prompt, "CPU")
    assert index.holders.num_hit_tokens(prompt)[index.slot] == 0


def test_cached_tokens_and_events_tell_each_tier(serving: Serving) -> None:
    prompt = next(serving.prompts)
    listener = serving.listener

    cached, origin, text = serving.ask(prompt, 4)
    assert (cached, origin["num_computed_tokens"]) == (0, NUM_TOKENS)
    listener.wait_media(prompt, "GPU", "CPU")

    cached, origin, again = serving.ask(prompt, 4)
    assert (cached, origin["num_local_tokens"], again) == (FULL, FULL, text)

    serving.push_out(6)
    listener.wait_media(prompt, "CPU")
    cached, origin, again = serving.ask(prompt, 4)
    assert (cached, origin["num_dram_tokens"], again) == (FULL, FULL, text)
    listener.wait_media(prompt, "GPU", "CPU")

    deadline = time.monotonic() + 60
    num_ssd_tokens = 0
    while num_ssd_tokens <= FULL // 2:
        assert time.monotonic() < deadline, origin
        for _ in range(9):  # memory holds about 120 blocks, and forgets the oldest a while later
            serving.push_out(4)
            time.sleep(0.4)
        cached, origin, again = serving.ask(prompt, 4)
        num_ssd_tokens = origin["num_ssd_tokens"]
        assert (cached, num_ssd_tokens + origin["num_dram_tokens"], again) == (FULL, FULL, text)
    listener.wait_for(lambda: listener.num_blocks_in("GPU", prompt) == NUM_BLOCKS)
    assert listener.num_blocks_in("STORAGE", prompt) == num_ssd_tokens // BLOCK_SIZE
    assert listener.num_blocks_in("CPU", prompt) == origin["num_dram_tokens"] // BLOCK_SIZE
