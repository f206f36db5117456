# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for what the pool has of their prompts; the pool has nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus

from tests.schedulers.harness import Engine, Engines, fail_all, hasher, prompt_of
from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.messages import Found, Lookup


@pytest.fixture
def pooled(engines: Engines, tmp_path: Path) -> Iterator[tuple[Engine, Callable[[], None]]]:
    """An engine with a pool, and what answers its lookup: the pool has nothing."""
    engine = engines.make("kv_both", pool={"put": False})
    address = tmp_path / "pool"
    lookups: list[Any] = []
    worker = PoolLink("worker", lookups.append)
    worker.listen(str(address))
    worker.start()
    executor = SimpleNamespace(collective_rpc=lambda method: [(str(address), 4)])
    pd = engine.scheduler.pd
    core = SimpleNamespace(model_executor=executor, request_block_hasher=hasher)
    pd.on_engine_started(core)

    def answer() -> None:
        engine.poll(lambda: bool(lookups))
        lookup = lookups.pop()
        assert isinstance(lookup, Lookup)
        num_blocks = len(lookup.hashes) // lookup.hash_bytes
        worker.send(Found(lookup.lookup_id, bytes(num_blocks), True))
        engine.poll(lambda: not pd.part(PoolSide).source.answers.empty())

    yield engine, answer
    worker.stop()


def test_preempted_request_that_the_pool_has_nothing_for_is_resumed(
    pooled: tuple[Engine, Callable[[], None]],
) -> None:
    """Also when the answer is folded in by the very pass that comes to it."""
    engine, answer = pooled
    request = engine.add("p", prompt_of(100), max_tokens=3)
    answer()
    engine.schedule()
    engine.preempt(request)
    engine.finish_step()
    engine.scheduler.pd.part(PoolSide).source.add(request, admitted=True)
    assert request.status is RequestStatus.WAITING_FOR_KV
    answer()
    step = engine.schedule()
    assert step.output.scheduled_cached_reqs.resumed_req_ids == {"p"}
    engine.run_to_end()
    engine.expect_tokens("p", 3)


def test_request_that_is_looked_up_before_the_report_delivers_no_stale_token(
    producer: Engine, pooled: tuple[Engine, Callable[[], None]]
) -> None:
    """Preempted by the pass after the one of its load, it waits for the pool when that fails."""
    engine, answer = pooled
    engine.worker.peers.append(producer.worker)
    engine.worker.cause_of = fail_all
    request = engine.add("c", prompt_of(100), producer.prefill("p", prompt_of(100)), max_tokens=3)
    engine.schedule_until_admitted(request)
    engine.preempt(request)
    engine.schedule()
    assert request.status is RequestStatus.WAITING_FOR_KV
    engine.finish_step()
    assert engine.tokens["c"] == []
    answer()
    engine.run_to_end()
    engine.expect_tokens("c", 3)


def test_request_that_the_pool_has_nothing_for_still_waits_for_its_grammar(
    pooled: tuple[Engine, Callable[[], None]],
) -> None:
    engine, answer = pooled
    constraint = StructuredOutputsParams(regex="a")
    request = engine.add("p", prompt_of(100), structured_outputs=constraint)
    assert request.status is RequestStatus.WAITING_FOR_KV
    answer()
    assert not engine.step().output.num_scheduled_tokens
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.abort("p")
