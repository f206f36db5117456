# SPDX-License-Identifier: Apache-2.0
"""Steps that the tests of the pool share."""

from __future__ import annotations

import time
from typing import Any

from tests.integration.engines import Answer, Engine

POOL = {"dram_size": "64MiB", "lookup_timeout_ms": 2000, "load": "all"}
"""Its own master and segment. Patient and always loading, because the machine may be busy."""


def settle(engine: Engine, timeout: float = 60.0) -> None:
    """Until everything that this engine stores is stored."""
    deadline = time.monotonic() + timeout
    while (counts := engine.counts())["pool_saves"] or counts["pool_waiting"]:
        assert time.monotonic() < deadline, f"{engine.name} still stores blocks\n{engine.log()}"
        time.sleep(0.01)


def store(engine: Engine, prompt: list[int], max_tokens: int = 1, **more: Any) -> Answer:
    """Compute a prompt, so that only the pool has it."""
    answer = engine.ask(prompt, max_tokens, **more)
    settle(engine)
    assert engine.reset_prefix_cache()
    return answer


def delta(before: dict[str, float], after: dict[str, float], name: str) -> float:
    """By how much a counter has grown."""
    return after.get(name, 0) - before.get(name, 0)


def provenance(answer: Answer) -> dict[str, int]:
    """Prompt tokens by where their KV came from, those that are not zero."""
    names = ("local", "peer", "dram", "remote", "ssd", "computed")
    found = {name: answer.provenance[f"num_{name}_tokens"] for name in names}
    return {name: count for name, count in found.items() if count}
