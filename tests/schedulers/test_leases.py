# SPDX-License-Identifier: Apache-2.0
"""What a producer lends: granted to its worker with the step that completes a prompt, given back,
revoked, expired."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.scripted_source import ScriptedSource
from tests.schedulers.harness import (
    BLOCK_SIZE,
    CHOSEN,
    SPEC,
    STATE,
    WINDOW,
    Engine,
    Engines,
    SimulatedRequest,
    prompt_of,
)
from vllm_ascend_pd.engine.metadata import StepMeta
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.kv.span import NO_BLOCK
from vllm_ascend_pd.types import TransferId


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 96, 100])
def test_grant_is_in_the_step_that_completes_the_prompt(producer: Engine, num_tokens: int) -> None:
    producer.add("p", prompt_of(num_tokens), {"do_remote_decode": True})
    step = producer.schedule()
    (grant,) = step.meta.grants
    table = producer.scheduler.kv_cache_manager.get_block_ids("p")[0]
    assert grant.block_ids == (tuple(table[: (num_tokens - 1) // BLOCK_SIZE + 1]),)
    assert grant.num_coming == num_tokens
    producer.finish_step()
    params = producer.params["p"]
    assert params is not None
    assert params["transfer_id"] == grant.lease.transfer_id
    producer.scheduler.reset_prefix_cache()


def test_hits_that_another_request_computes_in_the_same_step_cannot_be_read_before_its_end(
    producer: Engine,
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    producer.add("first", prompt)
    producer.add("second", prompt, CHOSEN)
    step = producer.schedule()
    assert step.output.num_scheduled_tokens == {"first": len(prompt), "second": 5}
    (grant,) = step.meta.grants
    assert (grant.num_ready, grant.num_coming) == (0, len(prompt))
    producer.finish_step()
    producer.scheduler.reset_prefix_cache()


def test_blocks_of_earlier_steps_can_be_read_while_the_next_chunk_is_computed(
    engines: Engines,
) -> None:
    producer = engines.make("kv_producer", scheduler_fields={"max_num_batched_tokens": 40})
    producer.scheduler.max_num_scheduled_tokens = 40
    producer.add("p", prompt_of(100), CHOSEN)
    grants = []
    for _ in range(3):
        grants += producer.schedule().meta.grants
        producer.finish_step()
    assert [(grant.num_ready, grant.num_coming) for grant in grants] == [
        (0, 40),
        (40, 80),
        (80, 100),
    ]
    producer.scheduler.reset_prefix_cache()


def test_chunked_prompt_is_granted_with_its_last_chunk(engines: Engines) -> None:
    producer = engines.make("kv_producer", scheduler_fields={"max_num_batched_tokens": 40})
    producer.scheduler.max_num_scheduled_tokens = 40
    producer.add("p", prompt_of(100), {"do_remote_decode": True})
    grants = []
    for num_expected in (40, 40, 20):
        step = producer.schedule()
        producer.finish_step()
        assert step.output.num_scheduled_tokens == {"p": num_expected}
        meta = step.output.pd_metadata
        grants.append(len(meta.grants) if isinstance(meta, StepMeta) else 0)
    assert grants == [0, 0, 1]
    assert producer.params["p"] is not None
    producer.scheduler.reset_prefix_cache()


def test_response_carries_upstreams_names(producer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_host"] == "127.0.0.1"
    assert 0 < params["remote_port"] <= 65535
    assert params["remote_engine_id"]
    assert len(params["remote_block_ids"]) == 7
    assert params["tp_size"] == 1
    assert params["remote_num_tokens"] == 100
    producer.scheduler.reset_prefix_cache()


def test_finishing_pins_the_prompts_blocks_until_they_are_released(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100), max_tokens=3)
    counts = producer.counts()
    assert counts["pinned_blocks"] == 7
    assert counts["leases"] == 1
    assert counts["free_blocks"] == producer.counts_at_start["free_blocks"] - 7
    consumer.add("c", prompt_of(100), params)
    consumer.run_to_end()
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_expired_lease_frees_its_blocks_without_a_request(engines: Engines) -> None:
    producer = engines.make("kv_producer", lease_s=1.0)
    producer.prefill("p", prompt_of(100))
    assert producer.counts()["pinned_blocks"] == 7
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


@pytest.mark.parametrize("max_tokens", [1, 50], ids=["computed", "still decoding"])
def test_prompt_is_given_back_by_a_request_that_names_it(producer: Engine, max_tokens: int) -> None:
    other = producer.prefill("q", prompt_of(100, start=3000))
    producer.add("p", prompt_of(100), CHOSEN, max_tokens)
    producer.run(lambda: bool(producer.tokens["p"]))
    producer.add("r", [5], {"release_transfer_id": CHOSEN["transfer_id"]})
    producer.run_to_end()
    assert producer.counts()["pinned_blocks"] == 7
    assert [lease.transfer_id for lease in producer.worker.grants] == [other["transfer_id"]]
    producer.scheduler.reset_prefix_cache()


def test_prompt_that_was_given_back_before_it_came_is_not_kept(producer: Engine) -> None:
    producer.add("r", [5], {"release_transfer_id": CHOSEN["transfer_id"]})
    producer.run_to_end()
    producer.add("p", prompt_of(100), CHOSEN)
    producer.run_to_end()
    assert producer.counts()["leases"] == 0
    # That a consumer does not need it is no fault of this engine.
    assert producer.params["p"]["transfer_id"] == CHOSEN["transfer_id"]


@pytest.mark.parametrize("transfer_id", ["unknown", "", None, 5, "x" * 10_000])
def test_who_knows_no_transfer_id_gives_nothing_back(producer: Engine, transfer_id: object) -> None:
    producer.prefill("p", prompt_of(100))
    producer.add("r", [5], {"release_transfer_id": transfer_id})
    producer.run_to_end()
    assert producer.counts()["pinned_blocks"] == 7
    producer.scheduler.reset_prefix_cache()


def test_reset_of_the_prefix_cache_gives_up_leases(producer: Engine) -> None:
    producer.prefill("p", prompt_of(100))
    assert producer.scheduler.reset_prefix_cache()
    assert producer.counts() == producer.counts_at_start
    producer.add("q", prompt_of(20))
    assert len(producer.schedule().meta.revokes) == 1
    producer.finish_step()


def test_abort_before_the_end_revokes(producer: Engine) -> None:
    producer.add("p", prompt_of(100), {"do_remote_decode": True}, max_tokens=5)
    (grant,) = producer.step().meta.grants
    producer.abort("p")
    producer.add("q", prompt_of(20, start=3000))
    assert producer.schedule().meta.revokes == (grant.lease,)
    producer.run_to_end()
    assert "p" not in producer.params
    assert grant.lease not in producer.worker.grants


def test_preempted_prompt_is_revoked_and_granted_again(producer: Engine) -> None:
    producer.add("p", prompt_of(100), {"do_remote_decode": True}, max_tokens=3)
    step = producer.schedule()
    (first,) = step.meta.grants
    producer.preempt(producer.requests["p"])
    producer.finish_step()
    steps = producer.run_to_end()
    metas = [s.output.pd_metadata for s in steps if isinstance(s.output.pd_metadata, StepMeta)]
    assert first.lease in [i for meta in metas for i in meta.revokes]
    grants = [grant for meta in metas for grant in meta.grants]
    assert len(grants) == 1
    assert grants[0].lease.transfer_id != first.lease.transfer_id
    params = producer.params["p"]
    assert params is not None
    assert params["transfer_id"] == grants[0].lease.transfer_id
    producer.expect_tokens("p", 3)
    producer.scheduler.reset_prefix_cache()


def test_consumer_role_ignores_do_remote_decode(consumer: Engine) -> None:
    consumer.add("c", prompt_of(40), {"do_remote_decode": True})
    consumer.run_to_end()
    assert "c" not in consumer.params
    consumer.expect_tokens("c", 1)


def test_prompt_whose_window_has_slid_on_is_not_lent_again(engines: Engines) -> None:
    """A reset ends the lease of a request that goes on, which has no more than its window."""
    producer = engines.make("kv_producer", specs=(SPEC, replace(WINDOW, sliding_window=2)))
    producer.add("p", prompt_of(30), {"do_remote_decode": True}, max_tokens=8)
    while len(producer.tokens["p"]) < 5:
        producer.step()
    assert producer.counts()["leases"] == 1
    assert not producer.scheduler.reset_prefix_cache()
    producer.run_to_end()
    assert producer.params.get("p") is None
    producer.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_state_that_was_only_published_is_not_handed_to_another_engine(
    engines: Engines, num_drafts: int
) -> None:
    """Of a request that goes on the state at its last boundary comes from the prefix cache, where
    another request may have put the block that its own load is to fill; with drafts of any request
    the one at the boundary before.
    """
    states = replace(STATE, num_speculative_blocks=num_drafts)
    engine = engines.make("kv_both", specs=(SPEC, states), num_drafts=num_drafts)
    pd = engine.scheduler.pd
    request = engine.add("r", prompt_of(100), max_tokens=40)
    engine.run(lambda: len(engine.tokens["r"]) > 2)
    while engine.in_flight:
        engine.finish_step()
    producer = pd.part(Producer)
    lease = producer.lend(request, TransferId("t"))
    index = 5 - num_drafts

    def handed_over() -> int:
        producer.extend(lease, request, 98)
        return lease.span.groups[1].block_ids[index]

    [state] = engine.pool.get_cached_block(request.block_hashes[index], [1])
    assert handed_over() == state.block_id
    engine.pool.evict_blocks({state.block_id})
    assert handed_over() == NO_BLOCK
    source = ScriptedSource(request, index + 1)
    pd.common.phantoms.publish(request, [[], []], source, 0)
    [state] = engine.pool.get_cached_block(request.block_hashes[index], [1])
    assert handed_over() == NO_BLOCK
    (phantom,) = pd.common.phantoms.claim([state])
    other = engine.add("other", prompt_of(100))
    pd.common.loads.claim(other, source, [phantom])
    assert handed_over() == NO_BLOCK
    # Its own loads are waited for before anything is granted.
    pd.common.loads.note_user(request, [state])
    assert handed_over() == state.block_id
    engine.pool.evict_blocks({state.block_id})
    pd.common.loads.new.clear()
    producer.take_back(lease)
    engine.run_to_end()


def test_state_that_a_step_leaves_within_it_is_taken_for_no_other(engines: Engines) -> None:
    """With a drafter vLLM 0.30.0 has that behind 64 tokens of a prompt of 96 in the block of the
    80th one."""
    states = replace(
        STATE,
        num_speculative_blocks=1,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    producer = engines.make("kv_producer", specs=(SPEC, states), num_drafts=1)
    producer.add("p", prompt_of(96), CHOSEN, 1)
    producer.run(lambda: bool(producer.params))
    assert producer.worker.num_checkpoints == 1
    [grant] = producer.worker.grants.values()
    contents = SimulatedRequest(prompt_of(96), []).contents(96)
    *_, early, whole = grant.block_ids[1]
    assert set(producer.worker.blocks[whole]) == {contents[95]}
    if early != NO_BLOCK:
        assert set(producer.worker.blocks[early]) == {contents[79]}
    producer.scheduler.reset_prefix_cache()
