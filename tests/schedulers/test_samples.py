# SPDX-License-Identifier: Apache-2.0
"""Samples of one prompt share a lease, whichever of them ends first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.schedulers.harness import CHOSEN, Engine, SimulatedRequest, prompt_of


def test_samples_of_one_request_share_one_lease(producer: Engine) -> None:
    for i in range(3):
        producer.add(f"{i}_p", prompt_of(100), {"do_remote_decode": True})
    producer.run_to_end()
    params = [producer.params[f"{i}_p"] for i in range(3)]
    assert len({p["transfer_id"] for p in params if p}) == 1
    assert None not in params
    assert producer.counts()["leases"] == 1
    assert producer.counts()["pinned_blocks"] == 7
    producer.scheduler.reset_prefix_cache()


def test_sample_that_ends_first_keeps_the_shared_lease(producer: Engine) -> None:
    """The lease is of the first sample's blocks, and the second one ends before it."""
    producer.add("0_p", prompt_of(100), {"do_remote_decode": True}, max_tokens=4)
    producer.add("1_p", prompt_of(100), {"do_remote_decode": True}, max_tokens=1)
    producer.run_to_end()
    assert producer.params.get("0_p") is not None
    producer.scheduler.reset_prefix_cache()


def add_samples(producer: Engine, params: dict[str, Any], *max_tokens: int) -> None:
    """Samples of one prompt, each computed in a step of its own."""
    producer.scheduler.max_num_scheduled_tokens = 32
    for i, num_tokens in enumerate(max_tokens):
        producer.add(f"{i}_p", prompt_of(32), params, num_tokens)


def reuse_blocks(producer: Engine) -> None:
    """Other prompts are computed in every block that nothing holds."""
    for number in range(12):
        producer.warm(f"other {number}", prompt_of(200, start=3000 + 500 * number))


def expect_readable(producer: Engine) -> None:
    """What consumers may read is the prompt's KV, and stays it."""
    reuse_blocks(producer)
    (grant,) = producer.worker.grants.values()
    (block_ids,) = grant.block_ids
    assert len(block_ids) == producer.counts()["pinned_blocks"] == 2
    simulated = SimulatedRequest(prompt_of(32), [list(block_ids)])
    assert producer.worker.holds(simulated, range(32))
    producer.scheduler.reset_prefix_cache()


def lease_params(producer: Engine, name: str) -> dict[str, Any]:
    """What a consumer is told, less what vLLM itself adds from 0.31 on, which is of one sample."""
    params = producer.params[name]
    assert params is not None
    return {key: value for key, value in params.items() if key != "remote_prefill_cached_tokens"}


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, CHOSEN], ids=["later", "at once"])
@pytest.mark.parametrize("max_tokens", [(1, 1), (1, 5), (5, 1), (5, 5)])
def test_lease_is_of_one_samples_blocks(
    producer: Engine, params: dict[str, Any], max_tokens: tuple[int, int]
) -> None:
    add_samples(producer, params, *max_tokens)
    producer.run_to_end()
    assert lease_params(producer, "0_p") == lease_params(producer, "1_p")
    expect_readable(producer)


def test_sample_that_comes_after_the_first_has_ended_changes_nothing(producer: Engine) -> None:
    add_samples(producer, CHOSEN, 1)
    producer.run_to_end()
    producer.add("1_p", prompt_of(32), CHOSEN)
    producer.run_to_end()
    assert lease_params(producer, "0_p") == lease_params(producer, "1_p")
    expect_readable(producer)


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, CHOSEN], ids=["later", "at once"])
def test_sample_that_is_preempted_after_the_first_has_ended_changes_nothing(
    producer: Engine, params: dict[str, Any]
) -> None:
    add_samples(producer, params, 1, 5)
    producer.run(lambda: "0_p" in producer.params and len(producer.scheduler.running) == 1)
    while producer.in_flight:
        producer.finish_step()
    producer.preempt(producer.requests["1_p"])
    reuse_blocks(producer)
    producer.run_to_end()
    producer.expect_tokens("1_p", 5)
    expect_readable(producer)


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, CHOSEN], ids=["later", "at once"])
def test_abort_of_another_sample_keeps_the_lease(producer: Engine, params: dict[str, Any]) -> None:
    add_samples(producer, params, 9, 9)
    producer.run(lambda: len(producer.tokens["1_p"]) > 1)
    producer.abort("1_p")
    producer.run_to_end()
    assert producer.params["0_p"]
    expect_readable(producer)


def test_sample_takes_over_when_the_leased_one_is_aborted(producer: Engine) -> None:
    add_samples(producer, {"do_remote_decode": True}, 9, 9)
    producer.run(lambda: len(producer.tokens["1_p"]) > 1)
    producer.abort("0_p")
    producer.run_to_end()
    assert producer.params["1_p"]
    expect_readable(producer)


def test_sample_that_is_aborted_before_its_first_step_leaves_the_prompt_to_the_other(
    producer: Engine,
) -> None:
    add_samples(producer, CHOSEN, 1, 1)
    producer.abort("0_p")
    producer.run_to_end()
    assert producer.params["1_p"]
    expect_readable(producer)


def test_prompt_whose_samples_are_all_aborted_before_their_first_step_is_given_up(
    producer: Engine,
) -> None:
    add_samples(producer, CHOSEN, 1, 1)
    assert producer.counts()["leases"] == 1
    for request_id in ("0_p", "1_p"):
        producer.abort(request_id)
    assert producer.counts()["leases"] == 0
