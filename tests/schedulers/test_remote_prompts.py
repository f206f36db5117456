# SPDX-License-Identifier: Apache-2.0
"""What a consumer loads of a peer's prompt, what it computes itself, and what it says of both."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.schedulers.harness import BLOCK_SIZE, PAGE_SERVER, Engine, Engines, prompt_of
from vllm_ascend_pd.types import Cause, Endpoint


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 33, 96, 97, 100])
def test_remote_prompt_is_loaded_and_one_token_computed(
    producer: Engine, consumer: Engine, num_tokens: int
) -> None:
    params = producer.prefill("p", prompt_of(num_tokens))
    request = consumer.add("c", prompt_of(num_tokens), params, max_tokens=4)
    assert request.status is RequestStatus.WAITING_FOR_KV
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    num_full = (num_tokens - 1) // BLOCK_SIZE
    num_tail = (num_tokens - 1) % BLOCK_SIZE
    (load,) = step.loads
    table = consumer.scheduler.kv_cache_manager.get_block_ids("c")[0]
    assert load.blocks[0].indices == tuple(range(num_full + bool(num_tail)))
    assert load.block_ids == tuple(table[: num_full + bool(num_tail)])
    assert load.blocks[0].has_tail is bool(num_tail)
    assert load.in_step
    (peer,) = load.peers
    assert Endpoint(peer.host, peer.port) == PAGE_SERVER.endpoint
    assert PAGE_SERVER.key.accepts(load.transfer_id, peer.ticket)
    assert load.transfer_id == params["transfer_id"]
    assert load.epoch == params["remote_epoch"]
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


def test_request_waits_without_holding_up_others(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", peer_timeout_s=1.0)
    params = producer.prefill("p", prompt_of(100))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        waits = consumer.add("c", prompt_of(100), {**params, "remote_port": port})
        consumer.add("other", prompt_of(40, start=500))
        step = consumer.step()
        assert step.output.num_scheduled_tokens == {"other": 40}
        assert waits.status is RequestStatus.WAITING_FOR_KV
        consumer.run_to_end()
    consumer.expect_tokens("other", 1)
    consumer.expect_tokens("c", 1)
    producer.scheduler.reset_prefix_cache()


def test_unreachable_producer_means_compute_here(engines: Engines, producer: Engine) -> None:
    consumer = engines.make("kv_consumer", peer_timeout_s=0.2)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), {**params, "remote_port": 9})
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 100}
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    producer.scheduler.reset_prefix_cache()


def test_second_request_of_the_step_shares_the_load(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.wait_for_answer()
    second = consumer.add("d", [*prompt_of(96), 5, 6, 8], max_tokens=3)
    step = consumer.schedule_until_admitted(first)
    assert step.output.num_scheduled_tokens == {"c": 1, "d": 3}
    assert len(step.loads) == 1
    tables = [
        consumer.scheduler.kv_cache_manager.get_block_ids(r.request_id)[0] for r in (first, second)
    ]
    assert tables[0][:6] == tables[1][:6]
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)
    consumer.expect_tokens("d", 3)


def test_lookup_is_idempotent_while_the_request_cannot_be_scheduled(
    producer: Engine, engines: Engines
) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer = engines.make("kv_consumer", num_blocks=12)
    consumer.add("long", prompt_of(70, start=500), max_tokens=30)
    consumer.step()
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    counts = [consumer.counts() for _ in range(4) if consumer.step()]
    assert request.status is RequestStatus.WAITING
    assert {c["phantoms"] for c in counts} == {6}
    assert {c["free_blocks"] for c in counts} == {6}
    assert {c["loads"] for c in counts} == {0}
    consumer.run_to_end()
    consumer.expect_tokens("long", 30)
    consumer.expect_tokens("c", 1)


def test_abort_after_the_lookup_withdraws_phantoms(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(request)
    _, num_tokens, _ = consumer.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert num_tokens == 99
    assert consumer.counts()["phantoms"] == 6
    assert consumer.counts()["free_blocks"] == consumer.counts_at_start["free_blocks"]
    consumer.abort("c")
    assert consumer.counts()["phantoms"] == 0
    assert consumer.cached_block(request, 0) is None


def test_abort_while_the_peer_is_asked_leaves_nothing(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_hole_is_filled_and_later_local_blocks_are_used(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(100))
    warm = consumer.requests["w"]
    kept = [consumer.cached_block(warm, i).block_id for i in (0, 1, 4, 5)]
    consumer.evict(warm, 2, 3)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    (load,) = step.loads
    assert load.blocks[0].indices == (2, 3, 6)
    table = consumer.scheduler.kv_cache_manager.get_block_ids("c")[0]
    assert [table[i] for i in (0, 1, 4, 5)] == kept
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_local_blocks_beyond_what_the_peer_has_are_used(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(100))
    consumer.evict(consumer.requests["w"], 0, 1)
    params = producer.prefill("p", prompt_of(50))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 4}
    (load,) = step.loads
    assert load.blocks[0].indices == (0, 1)
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_only_the_tail_is_loaded_when_all_blocks_are_cached(
    producer: Engine, consumer: Engine
) -> None:
    consumer.warm("w", prompt_of(100))
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    step = consumer.schedule_until_admitted(request)
    (load,) = step.loads
    assert load.blocks[0].indices == (6,)
    assert load.blocks[0].has_tail
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_nothing_is_loaded_when_all_is_cached(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(97))
    params = producer.prefill("p", prompt_of(97))
    request = consumer.add("c", prompt_of(97), {**params, "return_provenance": True})
    step = consumer.schedule_until_admitted(request)
    assert not step.loads
    consumer.run_to_end()
    returned = consumer.params["c"]
    assert returned is not None
    assert returned["provenance"]["outcome"] == "local"
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_longer_prompt_loads_what_the_peer_has(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(50))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 52}
    (load,) = step.loads
    assert load.blocks[0].indices == (0, 1, 2)
    assert not load.blocks[0].has_tail
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_reference_to_another_prompt_is_refused(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100, start=700), {**params, "return_provenance": True})
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 100}
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    returned = consumer.params["c"]
    assert returned is not None
    assert returned["provenance"]["outcome"] == Cause.HASH_MISMATCH.value
    assert returned["provenance"]["num_computed_tokens"] == 100


def test_each_request_of_a_lease_gets_the_answer_to_its_own_prompt(
    producer: Engine, consumer: Engine
) -> None:
    """The same reference twice, once with another prompt, asked at the same time."""
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.add("d", prompt_of(100, start=700), params)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    consumer.expect_tokens("d", 1)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        pytest.param(prompt_of(1), {}, id="one token is computed in any case"),
        pytest.param(prompt_of(100), {"prompt_logprobs": 1}, id="prompt logprobs"),
    ],
)
def test_kv_that_is_not_needed_is_given_back(
    producer: Engine, consumer: Engine, prompt: list[int], sampling: dict[str, Any]
) -> None:
    params = producer.prefill("p", prompt)
    request = consumer.add("c", prompt, params, **sampling)
    assert request.status is RequestStatus.WAITING
    step = consumer.step()
    assert step.output.num_scheduled_tokens == {"c": len(prompt)}
    assert not step.loads
    consumer.run_to_end()
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_port": "x"},
        {"remote_port": 0},
        {"transfer_id": ""},
        {"remote_host": None},
        {"remote_host": "192.0.2.1"},
        {"remote_epoch": 5},
    ],
    ids=str,
)
def test_bad_params_mean_compute_here(
    producer: Engine, consumer: Engine, wrong: dict[str, Any]
) -> None:
    params = producer.prefill("p", prompt_of(40))
    request = consumer.add("c", prompt_of(40), {**params, **wrong})
    assert request.status is RequestStatus.WAITING
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    producer.scheduler.reset_prefix_cache()


def test_provenance_adds_up_to_the_prompt(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(40))
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), {**params, "return_provenance": True})
    consumer.run_to_end()
    returned = consumer.params["c"]
    assert returned is not None
    provenance = returned["provenance"]
    assert provenance["num_prompt_tokens"] == 100
    assert provenance["num_local_tokens"] == 32
    assert provenance["num_peer_tokens"] == 67
    assert provenance["num_computed_tokens"] == 1
    assert provenance["num_peer_blocks"] == 5
    assert provenance["outcome"] == "loaded"


def test_prefill_stats_count_peer_tokens_as_external(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(40))
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.schedule_until_admitted(request)
    stats = request.prefill_stats
    assert stats is not None
    assert stats.num_local_cached_tokens == 32
    assert stats.num_external_cached_tokens == 67
    assert stats.num_computed_tokens == 1


def test_what_a_peer_has_computed_is_no_hit_of_the_own_prefix_cache(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    for name, num_hits in ("c", 0), ("again", 96):
        consumer.add(name, prompt_of(100), params if name == "c" else None)
        consumer.schedule_until_admitted(consumer.requests[name])
        stats = consumer.scheduler.make_stats().prefix_cache_stats
        consumer.run_to_end()
        assert (stats.queries, stats.hits) == (100, num_hits)


def test_request_without_a_transfer_is_counted_when_it_is_scheduled_first(
    producer: Engine,
) -> None:
    """Preempted, it finds more here than its prompt: what it has computed itself."""
    params = {"do_remote_prefill": True, "return_provenance": True}
    producer.add("c", prompt_of(20), params, max_tokens=40)
    producer.run(lambda: len(producer.tokens["c"]) == 30)
    while producer.in_flight:
        producer.finish_step()
    producer.preempt(producer.requests["c"])
    producer.run_to_end()
    producer.expect_tokens("c", 40)
    provenance = (producer.params["c"] or {})["provenance"]
    assert provenance["outcome"] == Cause.WRONG_ROLE.value
    assert (provenance["num_local_tokens"], provenance["num_computed_tokens"]) == (0, 20)
