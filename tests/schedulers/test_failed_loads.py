# SPDX-License-Identifier: Apache-2.0
"""What a failed load has spoilt is computed again, and nobody sees it."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from tests.schedulers.harness import (
    BLOCK_SIZE,
    Engine,
    Engines,
    Step,
    fail_all,
    prompt_of,
    right_token,
)
from vllm_ascend_pd.engine.vllm_api.queues import remove_waiting


def begin_failing(
    producer: Engine, consumer: Engine, num_lent: int = 100, max_tokens: int = 3
) -> tuple[Request, Step]:
    """A request with 100 tokens, in the step that loads the first of them, which will fail."""
    params = producer.prefill("p", prompt_of(num_lent))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=max_tokens)
    return request, consumer.schedule_until_admitted(request)


def test_no_token_of_a_failed_load_is_delivered(producer: Engine, consumer: Engine) -> None:
    request, step = begin_failing(producer, consumer, max_tokens=5)
    hashes = [consumer.pool.blocks[i].block_hash for i in step.loads[0].block_ids[:6]]
    assert None not in hashes
    if consumer.runs_ahead:
        ahead = consumer.schedule()
        assert "c" in ahead.output.num_scheduled_tokens
    consumer.finish_step()
    assert consumer.tokens["c"] == []
    assert request.status is RequestStatus.PREEMPTED
    assert all(consumer.pool.blocks[i].block_hash is None for i in step.loads[0].block_ids)
    again = consumer.schedule()
    assert again.output.num_scheduled_tokens == {"c": 100}
    assert not again.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 5)


def test_blocks_computed_on_a_failed_load_are_evicted(producer: Engine, consumer: Engine) -> None:
    request, _ = begin_failing(producer, consumer, 50, max_tokens=2)
    consumer.finish_step()
    assert [consumer.cached_block(request, i) for i in range(6)] == [None] * 6
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_request_that_shares_a_bad_block_is_preempted_too(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer.worker.cause_of = fail_all
    first = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.wait_for_answer()
    second = consumer.add("d", [*prompt_of(96), 5, 6, 8], max_tokens=3)
    other = consumer.add("other", prompt_of(40, start=500), max_tokens=3)
    step = consumer.schedule_until_admitted(first)
    assert set(step.output.num_scheduled_tokens) == {"c", "d", "other"}
    consumer.finish_step()
    assert first.status is RequestStatus.PREEMPTED
    assert second.status is RequestStatus.PREEMPTED
    assert other.status is RequestStatus.RUNNING
    assert consumer.tokens == {"c": [], "d": [], "other": [right_token(40)]}
    consumer.run_to_end()
    for request_id in ("c", "d", "other"):
        consumer.expect_tokens(request_id, 3)


def test_request_preempted_during_its_own_load_is_loaded_again(
    producer: Engine, consumer: Engine
) -> None:
    """It shares blocks of another's load, which fails while its own is under way."""
    failing = consumer.add(
        "d", [*prompt_of(64), 5, 6, 8], producer.prefill("q", [*prompt_of(64), 5, 6, 8])
    )
    consumer.wait_for_answer()
    consumer.worker.cause_of = fail_all
    consumer.schedule_until_admitted(failing)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.wait_for_answer()
    if consumer.runs_ahead:
        step = consumer.schedule()
        assert step.output.num_scheduled_tokens["c"] == 1
        consumer.finish_step()
        assert request.status is RequestStatus.PREEMPTED
        assert consumer.in_flight
    consumer.worker.cause_of = lambda spec: ""
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)
    consumer.expect_tokens("d", 1)


def test_failed_hole_evicts_the_local_blocks_after_it(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(100))
    consumer.evict(consumer.requests["w"], 2)
    request, _ = begin_failing(producer, consumer, max_tokens=2)
    consumer.finish_step()
    assert consumer.cached_block(request, 1) is not None
    assert consumer.cached_block(request, 2) is None
    again = consumer.schedule()
    assert again.output.num_scheduled_tokens == {"c": 68}
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_request_preempted_before_the_report_delivers_no_stale_token(
    producer: Engine, consumer: Engine
) -> None:
    request, _ = begin_failing(producer, consumer)
    consumer.preempt(request)
    consumer.finish_step()
    assert consumer.tokens["c"] == []
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)


def test_request_preempted_before_the_report_leaves_no_bad_block_cached(
    producer: Engine, consumer: Engine
) -> None:
    """Blocks 3 to 5 are computed on the blocks that fail to load, and their table is gone."""
    request, _ = begin_failing(producer, consumer, 50)
    consumer.preempt(request)
    consumer.finish_step()
    assert [consumer.cached_block(request, i) for i in range(6)] == [None] * 6
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)


def test_request_aborted_before_the_report_leaves_no_bad_block_cached(
    producer: Engine, consumer: Engine
) -> None:
    request, _ = begin_failing(producer, consumer, 50)
    consumer.abort("c")
    consumer.finish_step()
    assert [consumer.cached_block(request, i) for i in range(6)] == [None] * 6
    # The holes before such blocks are filled, and then they would be hits.
    consumer.worker.cause_of = lambda spec: ""
    consumer.add("d", prompt_of(100), producer.prefill("q", prompt_of(50)), max_tokens=3)
    consumer.run_to_end()
    consumer.expect_tokens("d", 3)


def test_abort_during_a_load_that_succeeds_keeps_its_blocks(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.abort("c")
    consumer.finish_step()
    assert consumer.cached_block(request, 5) is not None
    consumer.add("d", prompt_of(100), max_tokens=2)
    assert consumer.step().output.num_scheduled_tokens == {"d": 4}
    consumer.run_to_end()
    consumer.expect_tokens("d", 2)
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_request_that_ends_under_its_load_leaves_no_table(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.abort("c")
    consumer.schedule()  # before the load's end is known
    consumer.finish_step()


def test_phantoms_of_a_failed_source_are_withdrawn(producer: Engine, engines: Engines) -> None:
    """The second half of the prompt is published, but no request has committed to it yet."""
    consumer = engines.make("kv_consumer")
    params = producer.prefill("p", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(first)
    consumer.scheduler.kv_cache_manager.get_computed_blocks(first)
    assert consumer.counts()["phantoms"] == 6
    remove_waiting(consumer.scheduler, first)
    # A short request commits to the first blocks only, and their load fails.
    short = consumer.add("d", [*prompt_of(32), 5, 6], max_tokens=2)
    consumer.worker.cause_of = fail_all
    step = consumer.schedule_until_admitted(short)
    assert step.loads[0].blocks[0].indices == (0, 1)
    assert consumer.counts()["phantoms"] == 4
    consumer.finish_step()
    assert consumer.counts()["phantoms"] == 0
    assert consumer.cached_block(first, 5) is None
    consumer.scheduler.waiting.add_request(first)
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)
    consumer.expect_tokens("d", 2)


def test_leases_on_bad_blocks_are_revoked(producer: Engine, engines: Engines) -> None:
    """A kv_both engine passes on what it loads; when the load fails, so does the lease."""
    both = engines.make("kv_both")
    params = producer.prefill("p", prompt_of(100))
    both.worker.cause_of = fail_all
    request = both.add("b", prompt_of(100), {**params, "do_remote_decode": True}, max_tokens=2)
    step = both.schedule_until_admitted(request)
    (grant,) = step.meta.grants
    both.finish_step()
    both.run_to_end()
    both.expect_tokens("b", 2)
    assert grant.lease not in both.worker.grants
    returned = both.params["b"]
    assert returned is not None
    assert returned["transfer_id"] != grant.lease.transfer_id
    both.scheduler.reset_prefix_cache()


def test_second_source_serves_after_the_first_has_failed(
    producer: Engine, consumer: Engine
) -> None:
    """A request preempted because another's load failed loads from its own peer again."""
    params = producer.prefill("p", prompt_of(100))
    other_params = producer.prefill("q", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(first)
    second = consumer.add("d", prompt_of(100), other_params, max_tokens=2)
    consumer.wait_for_answer()
    failed = params["transfer_id"]
    consumer.worker.cause_of = lambda s: fail_all(s) if s.transfer_id == failed else ""
    step = consumer.schedule_until_admitted(second)
    assert set(step.output.num_scheduled_tokens) == {"c", "d"}
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)
    consumer.expect_tokens("d", 2)


def test_prefill_stats_stay_sane_when_a_recovered_request_loads_again(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    other_params = producer.prefill("q", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(first)
    second = consumer.add("d", prompt_of(100), other_params)
    consumer.wait_for_answer()
    failed = params["transfer_id"]
    consumer.worker.cause_of = lambda s: fail_all(s) if s.transfer_id == failed else ""
    consumer.schedule_until_admitted(second)
    stats = [first.prefill_stats, second.prefill_stats]
    consumer.finish_step()
    consumer.schedule()
    for one in stats:
        assert one is not None
        assert one.num_local_cached_tokens >= 0
        assert one.num_local_cached_tokens + one.num_external_cached_tokens <= 100


WHOLE_BLOCK = prompt_of(BLOCK_SIZE)
"""All that is loaded of it is a tail, which is a full block with the token that is computed."""
LONGER = [*WHOLE_BLOCK, *range(7000, 7040)]


def begin_to_share_a_tail(
    producer: Engine, consumer: Engine, params: dict[str, Any] | None = None
) -> tuple[Request, Step]:
    """The load of one request will fail, which brings the tail of a block that another one, in the
    same step, has as an ordinary hit.
    """
    given = producer.prefill("p", WHOLE_BLOCK)
    consumer.worker.cause_of = fail_all
    first = consumer.add("c", WHOLE_BLOCK, given, max_tokens=3)
    consumer.wait_for_answer()
    second = consumer.add("d", LONGER, params, max_tokens=3)
    step = consumer.schedule_until_admitted(first)
    assert step.output.num_scheduled_tokens["d"] == len(LONGER) - BLOCK_SIZE
    return second, step


def test_who_shares_a_bad_tail_and_is_preempted_before_the_report_gets_no_token_of_it(
    producer: Engine, consumer: Engine
) -> None:
    second, _ = begin_to_share_a_tail(producer, consumer)
    consumer.preempt(second)
    consumer.finish_step()
    assert consumer.tokens["d"] == []
    consumer.run_to_end()
    consumer.expect_tokens("d", 3)


def test_who_shares_a_bad_tail_and_is_aborted_before_the_report_leaves_no_bad_block(
    producer: Engine, consumer: Engine
) -> None:
    begin_to_share_a_tail(producer, consumer)
    consumer.abort("d")
    consumer.finish_step()
    consumer.worker.cause_of = lambda spec: ""
    consumer.run_to_end()
    consumer.add("again", LONGER, max_tokens=3)
    consumer.run_to_end()
    assert consumer.tokens["again"] == [right_token(len(LONGER) + i) for i in range(3)]


def test_nothing_that_is_computed_on_a_tail_is_granted_before_it_has_come(
    producer: Engine, engines: Engines
) -> None:
    both = engines.make("kv_both")
    both.worker.peers.append(producer.worker)
    announced = {"do_remote_decode": True, "transfer_id": "chosen"}
    _, step = begin_to_share_a_tail(producer, both, announced)
    assert not [grant for grant in step.meta.grants if grant.lease.transfer_id == "chosen"]
    both.finish_step()
    both.run_to_end()
