# SPDX-License-Identifier: Apache-2.0
"""A pool of this process's memory and of plain files, in real engines without Mooncake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine
from tests.integration.pool_steps import POOL, provenance, settle, store

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

FULL = 6 * BLOCK_SIZE
NUM_TOKENS = FULL + 9
ASK = {"return_provenance": True}


def has_mooncake(engine: Engine) -> bool:
    return "mooncake" in Path(f"/proc/{engine.process_id}/maps").read_text()


def test_blocks_in_files_outlive_their_engine(
    engines: Engines, single: SingleEngine, prompt_of: Callable[..., list[int]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "pool": {
            **POOL,
            "tiers": ["dram", "fs"],
            "ssd": {"path": str(tmp_path / "kv"), "size": "256MiB"},
        },
        "transfer": {"transport": "shared_memory"},
    }
    first = engines.own("kv_both", **options)
    prompt = prompt_of(NUM_TOKENS)
    expected = single(prompt).token_ids
    store(first, prompt)
    answer = first.ask(prompt, 8, ASK)
    assert answer.token_ids == expected
    assert provenance(answer) == {"dram": FULL, "computed": 9}
    assert not has_mooncake(first)
    settle(first)
    engines.kill(first)

    second = engines.own("kv_both", **options)
    answer = second.ask(prompt, 8, ASK)
    assert answer.token_ids == expected
    assert provenance(answer) == {"ssd": FULL, "computed": 9}
    settle(second)
    assert second.reset_prefix_cache()
    # What came from a file is in memory now.
    answer = second.ask(prompt, 8, ASK)
    assert answer.token_ids == expected
    assert provenance(answer) == {"dram": FULL, "computed": 9}
