# SPDX-License-Identifier: Apache-2.0
"""Two data parallel ranks in vLLM's own loop for lock-step: real schedulers, simulated workers.

A forward of one rank, and a dummy batch, is a barrier for both, as the experts' collectives are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState
from vllm.v1.request import Request

from tests.schedulers.harness import Engine, Engines, hasher, prompt_of
from tests.unit.engine.test_registrar import until as wait_until
from vllm_ascend_pd.engine.scheduler.producer import Producer

PATIENCE_S = 30.0


class Group:
    """What two ranks do together."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._told = [False, False]
        self.num_forwards = [0, 0]

    def forward(self, rank: int) -> None:
        self.num_forwards[rank] += 1
        self._barrier.wait()

    def any(self, rank: int, mine: bool) -> bool:
        self._told[rank] = mine
        self._barrier.wait()
        found = any(self._told)
        self._barrier.wait()
        return found


class Rank(DPEngineCoreProc):
    """Its loop, its queue and its waves are vLLM's; a step is that of the tests' engine."""

    def __init__(self, rank: int, engine: Engine, group: Group) -> None:
        self.engine, self.group = engine, group
        self.dp_rank = self.engine_index = rank
        self.scheduler, self.vllm_config = engine.scheduler, engine.scheduler.vllm_config
        self.shutdown_state = EngineShutdownState.RUNNING
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.aborts_queue = queue.Queue()
        self.model_executor: Any = SimpleNamespace(is_sleeping=False)
        self.request_block_hasher = hasher
        self.batch_queue = self.eep_scaling_state = None
        self.engines_running = self.pending_pause = self.ignore_start_dp_wave = False
        self.publish_dp_lb_stats = self.log_stats = self.enable_fault_tolerance = False
        self.process_input_queue_block = self.has_coordinator = True
        self.current_wave = self.step_counter = 0
        self._idle_state_callbacks = []
        self.step_fn = self._turn
        self.error: BaseException | None = None
        engine.scheduler.pd.on_engine_started(self)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.run_busy_loop()
        except SystemExit:
            pass
        except threading.BrokenBarrierError as e:
            self.error = e

    def _turn(self) -> tuple[dict[int, Any], bool]:
        if not self.scheduler.has_requests():
            return {}, False
        executed = self.engine.schedule().output.total_num_scheduled_tokens > 0
        if executed:
            self.group.forward(self.dp_rank)
        self.engine.finish_step()
        return {}, executed

    def execute_dummy_batch(self) -> None:
        self.group.forward(self.dp_rank)

    def post_step(self, model_executed: bool) -> None:
        pass

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        return self.group.any(self.dp_rank, local_unfinished)

    def send(self, request_id: str, params: dict[str, Any] | None, max_tokens: int = 1) -> None:
        """As the front end does it for the first request of a wave: the other rank is told."""
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(request_id, prompt_of(40), sampling, None, block_hasher=hasher)
        self.engine.requests[request_id], self.engine.tokens[request_id] = request, []
        self.input_queue.put((EngineCoreRequestType.ADD, (request, self.current_wave)))
        self.other.start_wave()

    def start_wave(self) -> None:
        wave = self.current_wave, 1 - self.engine_index
        self.input_queue.put((EngineCoreRequestType.START_DP_WAVE, wave))

    def end(self) -> None:
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    other: Rank


@pytest.fixture
def ranks(base_config: Any) -> Iterator[tuple[Rank, Rank]]:
    engines, group = Engines(Scheduler, base_config), Group()
    first, second = (Rank(rank, engines.make("kv_both"), group) for rank in (0, 1))
    first.other, second.other = second, first
    yield first, second
    for rank in (first, second):
        rank.end()
    for rank in (first, second):
        rank.thread.join()
        assert rank.error is None, f"rank {rank.dp_rank} has waited for the other one"
    engines.end()


def rest(*ranks: Rank, wave: int) -> None:
    """The wave is over, and no rank computes."""
    wait_until(lambda: all(r.current_wave == wave and not r.engines_running for r in ranks))


def test_request_that_ends_without_a_forward_leaves_no_rank_waiting(
    ranks: tuple[Rank, Rank],
) -> None:
    first, second = ranks
    first.send("refused", {"resume": "nonsense"})
    rest(*ranks, wave=1)
    second.send("next", None)
    rest(*ranks, wave=2)
    assert len(second.engine.tokens["next"]) == 1
    assert first.group.num_forwards[0] == first.group.num_forwards[1]


@pytest.mark.parametrize("is_busy", [False, True], ids=["all at rest", "the other one computes"])
def test_prompt_is_given_back_by_a_rank_without_requests(
    ranks: tuple[Rank, Rank], is_busy: bool
) -> None:
    first, second = ranks
    first.send("p", {"do_remote_decode": True})
    rest(*ranks, wave=1)
    params = first.engine.params["p"]
    assert params is not None
    producer = first.scheduler.pd.part(Producer)
    assert producer.counts()["pinned_blocks"] == len(params["remote_block_ids"])
    assert first.engine.worker.grants
    if is_busy:
        second.send("long", None, max_tokens=400)
        wait_until(lambda: len(second.engine.tokens["long"]) > 0)
    assert producer.book.release(params["transfer_id"], params["remote_epoch"])
    first.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    wait_until(lambda: not first.engine.worker.grants)
    assert producer.counts()["pinned_blocks"] == 0
    if is_busy:
        assert len(second.engine.tokens["long"]) < 400
        rest(*ranks, wave=2)
