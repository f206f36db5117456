# SPDX-License-Identifier: Apache-2.0
"""Running requests with LoRA adapters that another engine takes over."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from tests.engine.test_content import Executor, adapter
from tests.schedulers.harness import POLL_LIMIT_S, Engines, hasher, prompt_of
from tests.schedulers.test_move_faults import NUM_OUTPUT, PATIENT, PROMPT, Move, coming
from vllm_ascend_pd import envs
from vllm_ascend_pd.engine.scheduler.moves_out import MovesOut

NUM_OF_OTHER = 40


def begin(move: Move, lora: LoRARequest) -> None:
    """The same request at both."""
    options: dict[str, Any] = {"max_tokens": NUM_OUTPUT, "temperature": 0, "lora_request": lora}
    move.source.add("r", PROMPT, **options)
    move.source.run(lambda: len(move.source.tokens["r"]) >= 3)
    move.target.add("t", PROMPT, {"resume": coming("r", move.source)}, **options)


def step_until(move: Move, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + POLL_LIMIT_S
    while not is_so():
        move.step()
        assert time.monotonic() < deadline, (move.source.counts(), move.target.counts())


def test_request_that_stays_waits_where_others_took_its_adapters_place(
    engines: Engines, tmp_path: Path
) -> None:
    """Workers have room for one adapter. It is another one's while the request is stopped, and its
    move comes to nothing."""
    engines.base = copy.copy(engines.base)
    engines.base.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)
    move = Move(engines, **PATIENT)
    source, target = move.source, move.target
    one, other = (adapter(tmp_path / name, b"w", n) for n, name in ((1, "one"), (2, "other")))
    begin(move, one)
    out = source.scheduler.pd.part(MovesOut)
    step_until(move, lambda: source.requests["r"] not in source.scheduler.running)
    move.loads_end = False
    assert out.counts() == {"moves_out": 1}
    source.add("other", prompt_of(20, 5000), max_tokens=NUM_OF_OTHER, lora_request=other)
    source.run(lambda: len(source.tokens["other"]) > 2)
    target.abort("t")
    move.answers_only = lambda: True  # else the other may end meanwhile
    step_until(move, lambda: out.counts() == {"moves_out": 0})
    assert source.requests["other"] in source.scheduler.running
    assert source.requests["r"] not in source.scheduler.running
    source.run_to_end()
    move.expect_one_answer()
    source.expect_tokens("other", NUM_OF_OTHER)
    assert source.requests["r"].num_preemptions == 1


def test_adapter_that_is_loaded_anew_ends_the_move(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the target would have KV of the new one under hashes of the old one."""
    monkeypatch.setattr(envs, "cache_folder", lambda: tmp_path / "cache")
    move = Move(engines, **PATIENT)
    source, target = move.source, move.target
    for engine in source, target:
        core = SimpleNamespace(model_executor=Executor(1), request_block_hasher=hasher)
        engine.scheduler.pd.on_engine_started(core)
    begin(move, adapter(tmp_path / "one", b"old weights"))
    move.loads_end = False
    step_until(move, lambda: bool(target.worker.parked))
    hashed = list(source.requests["r"].block_hashes)
    source.scheduler.pd.on_lora_loaded(adapter(tmp_path / "one", b"new weights"))
    assert source.requests["r"].block_hashes[0] != hashed[0]
    assert source.scheduler.pd.part(MovesOut).counts() == {"moves_out": 0}
    move.loads_end = True
    step_until(move, lambda: not target.scheduler.requests)
    assert move.outcome == "move_incompatible"
    assert not target.tokens["t"]
    assert not move.has_left
    source.run_to_end()
    assert len(source.tokens["r"]) == NUM_OUTPUT
    assert source.scheduler.reset_prefix_cache()  # some of it is hashed as no request is any more
