# SPDX-License-Identifier: Apache-2.0
"""The first token comes from the producer, in the real schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import vllm
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus

from tests.schedulers.harness import (
    BLOCK_SIZE,
    SPEC,
    STATE,
    Engine,
    Engines,
    fail_all,
    prompt_of,
    right_token,
    session_of,
)
from vllm_ascend_pd.engine.scheduler import remote_prompt
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.engine.scheduler.sources import SourceState
from vllm_ascend_pd.types import Cause

LENGTHS = [2, 15, 16, 17, 33, 96, 97, 100]


@pytest.fixture
def producer(engines: Engines) -> Engine:
    return engines.make("kv_producer", first_token="auto")


@pytest.fixture
def consumer(producer: Engine, engines: Engines) -> Engine:
    return engines.make("kv_consumer", first_token="auto")


@pytest.fixture
def parking(producer: Engine, engines: Engines) -> Engine:
    return engines.make("kv_consumer", first_token="auto", load_mode="park")


def wait_for_token(engine: Engine, request_id: str = "c") -> None:
    engine.run(lambda: len(engine.tokens[request_id]) == 1)


def ends_as(engine: Engine, request_id: str = "c") -> dict[str, Any]:
    params = engine.params[request_id]
    assert params is not None
    provenance: dict[str, Any] = params["provenance"]
    return provenance


# Prefill first: the token comes with the answer to the consumer's question.


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_nothing_of_the_prompt_is_computed(
    producer: Engine, consumer: Engine, num_tokens: int
) -> None:
    params = producer.prefill("p", prompt_of(num_tokens))
    request = consumer.add(
        "c", prompt_of(num_tokens), {**params, "return_provenance": True}, max_tokens=4
    )
    wait_for_token(consumer)
    consumer.expect_tokens("c", 1)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    (load,) = step.loads
    assert load.blocks[0].indices == tuple(range(-(-num_tokens // BLOCK_SIZE)))
    assert load.blocks[0].has_tail is bool(num_tokens % BLOCK_SIZE)
    (new,) = step.output.scheduled_new_reqs
    assert new.num_computed_tokens == num_tokens
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    provenance = ends_as(consumer)
    assert provenance["first_token"] == "peer"
    assert provenance["outcome"] == "loaded"
    assert provenance["num_peer_tokens"] == num_tokens
    assert provenance["num_computed_tokens"] == 0


def test_prompt_that_is_cached_here_takes_the_token_too(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(96))
    params = producer.prefill("p", prompt_of(96))
    request = consumer.add("c", prompt_of(96), params, max_tokens=4)
    wait_for_token(consumer)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


def test_first_output_says_where_the_prompt_came_from(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(40))
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    stats = request.prefill_stats
    assert stats is not None
    wait_for_token(consumer)
    assert request.prefill_stats is None
    assert stats.num_local_cached_tokens == 2 * BLOCK_SIZE
    assert stats.num_external_cached_tokens == 100 - 2 * BLOCK_SIZE
    assert stats.num_computed_tokens == 0


def test_another_request_shares_the_blocks(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(96))
    consumer.add("c", prompt_of(96), params, max_tokens=3)
    consumer.run_to_end()
    request = consumer.add("d", prompt_of(96), max_tokens=3)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"d": BLOCK_SIZE}
    longer = consumer.add("e", prompt_of(100), max_tokens=3)
    step = consumer.schedule_until_admitted(longer)
    assert step.output.num_scheduled_tokens["e"] == 4, "the last block of the prompt is cached"
    consumer.run_to_end()


def test_first_of_several_tokens_of_the_producer(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(40), max_tokens=3)
    consumer.add("c", prompt_of(40), params, max_tokens=4)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


@pytest.mark.parametrize("num_blocks", range(14, 18))
def test_drafts_behind_a_loaded_prompt_have_room_or_wait(engines: Engines, num_blocks: int) -> None:
    """The state behind the prompt is in one block, and those behind the drafts are in the next."""
    num_drafts = 3
    options: dict[str, Any] = {
        "first_token": "auto",
        "specs": (SPEC, replace(STATE, num_speculative_blocks=num_drafts)),
        "num_drafts": num_drafts,
    }
    producer = engines.make("kv_producer", **options)
    consumer = engines.make("kv_consumer", num_blocks=num_blocks, **options)
    params = producer.prefill("p", prompt_of(BLOCK_SIZE - 1))
    request = consumer.add("c", prompt_of(BLOCK_SIZE - 1), params, max_tokens=4)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.add("other", prompt_of(20, start=500), max_tokens=20)
    consumer.run(lambda: bool(consumer.tokens["other"]))
    (load_id,) = consumer.worker.parked
    consumer.worker.end_parked(load_id)
    consumer.schedule_until_admitted(request)
    consumer.run_to_end()
    consumer.expect_tokens("other", 20)
    consumer.expect_tokens("c", 4)


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
def test_rows_for_drafts_are_left_out_where_what_is_in_them_is_verified(
    engines: Engines, is_v2: bool
) -> None:
    """vLLM pads a step that computes one token; Model Runner V2 of 0.30 takes zeros for drafts."""
    producer = engines.make("kv_producer", first_token="auto", num_drafts=3)
    consumer = engines.make("kv_consumer", first_token="auto", num_drafts=3)
    consumer.scheduler.use_v2_model_runner = is_v2
    params = producer.prefill("p", prompt_of(40))
    request = consumer.add("c", prompt_of(40), params, max_tokens=6)
    output = consumer.schedule_until_admitted(request).output
    is_verified = is_v2 and vllm.__version__.startswith("0.30.")
    assert output.num_scheduled_tokens == {"c": 1 if is_verified else 4}
    assert output.scheduled_spec_decode_tokens == ({} if is_verified else {"c": [-1] * 3})
    consumer.run_to_end()
    consumer.expect_tokens("c", 6)


# A request that ends with it.


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"max_tokens": 1}, id="one token is all"),
        pytest.param({"max_tokens": 9, "stop_token_ids": [right_token(100)]}, id="stop token"),
    ],
)
@pytest.mark.parametrize("kind", ["consumer", "parking"])
def test_request_may_end_with_the_first_token(
    request: pytest.FixtureRequest, producer: Engine, kind: str, sampling: dict[str, Any]
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    engine.warm("w", prompt_of(40))
    params = producer.prefill("p", prompt_of(100))
    engine.add("c", prompt_of(100), {**params, "return_provenance": True}, **sampling)
    steps = engine.run_to_end()
    engine.expect_tokens("c", 1)
    assert not any("c" in step.output.num_scheduled_tokens for step in steps)
    provenance = ends_as(engine)
    assert provenance["outcome"] == "first_token"
    assert provenance["num_local_tokens"] == 2 * BLOCK_SIZE
    assert provenance["num_peer_tokens"] == 100 - 2 * BLOCK_SIZE
    assert engine.num_counted("prompt_tokens") == 100
    producer.run(lambda: producer.counts() == producer.counts_at_start)


# Decode first: the token is told when the prompt is computed.


class Concurrent:
    """Both requests at once, the consumer's first."""

    def __init__(self, producer: Engine, consumer: Engine, num_tokens: int, **more: Any) -> None:
        self.producer = producer
        self.consumer = consumer
        params = producer.prefill("where", prompt_of(3, start=50))
        known = ("remote_engine_id", "remote_host", "remote_port", "remote_key")
        where = {name: params[name] for name in known}
        producer.scheduler.reset_prefix_cache()
        producer.add(
            "p", prompt_of(num_tokens), {"do_remote_decode": True, "transfer_id": "both"}, 1
        )
        # A producer can be opened once its worker has said where it serves.
        self.request = consumer.add(
            "c",
            prompt_of(num_tokens),
            {
                "do_remote_prefill": True,
                "transfer_id": "both",
                "return_provenance": True,
                **where,
            },
            **more,
        )

    def park(self) -> None:
        self.consumer.run(lambda: bool(self.consumer.worker.parked))

    def end_load(self, cause: str = "") -> None:
        (load_id,) = self.consumer.worker.parked
        self.consumer.worker.end_parked(load_id, cause)

    def compute_prompt(self) -> None:
        self.producer.run(lambda: "p" in self.producer.params)

    def wait_for_token(self) -> None:
        """All KV is in place, and the promised token has not come."""
        self.park()
        self.compute_prompt()
        self.end_load()
        session = session_of(self.consumer, self.request)
        self.consumer.run(lambda: not session.parked)
        self.consumer.step()
        assert self.request.status is RequestStatus.WAITING_FOR_KV, "it waits a little"

    def compute_token(self) -> None:
        """The consumer does, and ends with the right tokens."""
        step = self.consumer.schedule_until_admitted(self.request)
        assert step.output.num_scheduled_tokens == {"c": 1}
        self.consumer.run_to_end()
        self.consumer.expect_tokens("c", 4)


@pytest.mark.parametrize("num_tokens", [17, 33, 96, 97, 100])
@pytest.mark.parametrize("token_first", [True, False])
def test_token_is_told_when_the_prompt_is_computed(
    producer: Engine,
    consumer: Engine,
    num_tokens: int,
    token_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_prompt, "_FIRST_TOKEN_S", 3600.0)  # who has it waits no more
    both = Concurrent(producer, consumer, num_tokens, max_tokens=4)
    both.park()
    (load,) = consumer.worker.parked.values()
    assert load.blocks[0].indices == tuple(range(-(-num_tokens // BLOCK_SIZE)))
    both.compute_prompt()
    if token_first:
        wait_for_token(consumer)
        assert consumer.worker.parked, "it is delivered while the KV is on its way"
        both.end_load()
    else:
        session = session_of(consumer, both.request)
        both.end_load()
        consumer.finish_step() if consumer.in_flight else None
        consumer.run(lambda: not session.parked)
    step = consumer.schedule_until_admitted(both.request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    provenance = ends_as(consumer)
    assert provenance["first_token"] == "peer"
    assert provenance["num_computed_tokens"] == 0


@pytest.mark.parametrize("num_tokens", [16, 17, 32, 33, 96, 97, 100])
def test_token_may_be_delivered_before_memory_for_the_prompt_is_found(
    producer: Engine, parking: Engine, num_tokens: int
) -> None:
    """Both answers of the producer have come when the consumer looks for the first time."""
    parking.schedule()
    both = Concurrent(producer, parking, num_tokens, max_tokens=4)
    parking.wait_for_answer()
    both.compute_prompt()
    parking.poll(lambda: parking.scheduler.pd.part(Consumer).client.outcomes.qsize() == 2)
    parking.finish_step()
    parking.expect_tokens("c", 1)
    both.park()
    (load,) = parking.worker.parked.values()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    assert load.blocks[0].indices == tuple(range(num_blocks))
    assert load.blocks[0].has_tail is bool(num_tokens % BLOCK_SIZE)
    assert load.num_awaited is None, "all of it is computed"
    both.end_load()
    parking.run_to_end()
    parking.expect_tokens("c", 4)
    assert ends_as(parking)["num_computed_tokens"] == 0


def test_prompt_behind_which_a_token_was_sampled_is_loaded_without_memory_to_park(
    producer: Engine, engines: Engines
) -> None:
    """It takes all of the memory, and a tenth of it has to stay free beside a parked load."""
    consumer = engines.make("kv_consumer", num_blocks=13, first_token="auto", load_mode="park")
    both = Concurrent(producer, consumer, 180, max_tokens=4)
    session = session_of(consumer, both.request)
    consumer.run(lambda: session.state is SourceState.READY)
    consumer.step()
    assert session.state is SourceState.READY, "it waits for memory, or for the producer"
    both.compute_prompt()
    step = consumer.schedule_until_admitted(both.request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    (load,) = step.loads
    assert load.in_step
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert ends_as(consumer)["num_computed_tokens"] == 0


@pytest.fixture
def silent(producer: Engine) -> Iterator[None]:
    """A producer that tells nobody what it has sampled."""
    server = producer.scheduler.pd.part(Producer).server
    told, server.tell_first_token = server.tell_first_token, lambda lease: None
    yield
    server.tell_first_token = told


@pytest.mark.parametrize("num_tokens", [17, 96, 97, 100])
@pytest.mark.usefixtures("silent")
def test_token_that_does_not_come_is_computed(
    producer: Engine, consumer: Engine, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prompt, "_FIRST_TOKEN_S", 0.2)
    both = Concurrent(producer, consumer, num_tokens, max_tokens=4)
    both.wait_for_token()
    both.compute_token()
    assert ends_as(consumer)["first_token"] == "here"
    assert ends_as(consumer)["num_computed_tokens"] == 1


@pytest.mark.usefixtures("silent")
def test_token_of_a_producer_that_is_gone_is_not_waited_for(
    producer: Engine, consumer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prompt, "_FIRST_TOKEN_S", 3600.0)
    both = Concurrent(producer, consumer, 100, max_tokens=4)
    both.wait_for_token()
    producer.scheduler.pd.part(Producer).server.stop()
    both.compute_token()
    producer.scheduler.pd.part(Producer).book.revoke_all()


@pytest.mark.usefixtures("silent")
def test_token_that_comes_after_admission_is_not_used(
    producer: Engine, consumer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prompt, "_FIRST_TOKEN_S", 0.0)
    both = Concurrent(producer, consumer, 100, max_tokens=4)
    both.park()
    both.compute_prompt()
    both.end_load()
    consumer.schedule_until_admitted(both.request)
    session = session_of(consumer, both.request)
    consumer.scheduler.pd.part(Consumer)._note_first_token(session, 5)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


# What goes wrong.


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_load_that_fails_after_the_token_is_computed_again(
    producer: Engine, consumer: Engine, num_tokens: int
) -> None:
    params = producer.prefill("p", prompt_of(num_tokens))
    consumer.worker.cause_of = fail_all
    consumer.add("c", prompt_of(num_tokens), params, max_tokens=4)
    wait_for_token(consumer)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


@pytest.mark.parametrize("num_tokens", [17, 96, 97, 100])
@pytest.mark.parametrize("token_first", [True, False])
def test_parked_load_that_fails_beside_the_token(
    producer: Engine, consumer: Engine, num_tokens: int, token_first: bool
) -> None:
    both = Concurrent(producer, consumer, num_tokens, max_tokens=4)
    both.park()
    if token_first:
        both.compute_prompt()
        wait_for_token(consumer)
    both.end_load(Cause.CHECKSUM.value)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    both.compute_prompt()


def test_producer_that_gives_the_prompt_up_promises_nothing(
    producer: Engine, consumer: Engine
) -> None:
    both = Concurrent(producer, consumer, 100, max_tokens=4)
    both.park()
    producer.abort("p")
    both.end_load(Cause.LEASE_EXPIRED.value)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert ends_as(consumer)["first_token"] == "here"


@pytest.mark.parametrize("before_the_load_ends", [True, False])
def test_abort_after_the_first_token(
    producer: Engine, consumer: Engine, before_the_load_ends: bool
) -> None:
    both = Concurrent(producer, consumer, 96, max_tokens=4)
    both.park()
    both.compute_prompt()
    wait_for_token(consumer)
    if not before_the_load_ends:
        both.end_load()
    session = session_of(consumer, both.request)
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start
    assert session.provenance.outcome == Cause.CANCELLED.value


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_token_that_is_none_is_ignored(
    producer: Engine, consumer: Engine, token_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    params = producer.prefill("p", prompt_of(100))
    (lease,) = producer.scheduler.pd.part(Producer).book._leases.values()
    lease.first_token_id = token_id
    consumer.add("c", prompt_of(100), params, max_tokens=4)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert "a first token that is none" in caplog.text


def test_reset_between_token_and_admission(producer: Engine, consumer: Engine) -> None:
    both = Concurrent(producer, consumer, 96, max_tokens=4)
    both.park()
    both.compute_prompt()
    wait_for_token(consumer)
    both.end_load()
    session = session_of(consumer, both.request)
    consumer.run(lambda: not session.parked)
    consumer.scheduler.reset_prefix_cache()
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


# When it is not the consumer's token.


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param({}, {"temperature": 0.5}, id="temperature"),
        pytest.param({}, {"repetition_penalty": 1.2}, id="penalty"),
        pytest.param({}, {"logit_bias": {5: 1.0}}, id="logit bias"),
        pytest.param({}, {"min_tokens": 2}, id="min_tokens"),
        pytest.param({"seed": 3}, {"seed": 3}, id="seed"),
        pytest.param({"logprobs": 1}, {"logprobs": 1}, id="logprobs"),
        pytest.param(
            {"structured_outputs": StructuredOutputsParams(regex="a")}, {}, id="structured there"
        ),
    ],
)
def test_token_of_other_sampling_is_not_taken(
    producer: Engine, consumer: Engine, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    request = producer.add("p", prompt_of(100), {"do_remote_decode": True}, **theirs)
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        request.status = RequestStatus.WAITING
        request.structured_output_request = None
    producer.run(lambda: "p" in producer.params)
    params = {**(producer.params["p"] or {}), "return_provenance": True}
    request = consumer.add("c", prompt_of(100), params, max_tokens=4, **ours)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert ends_as(consumer)["first_token"] == "here"
    assert ends_as(consumer)["num_computed_tokens"] == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(prompt_of(100), prompt_of(104), id="longer in the tail"),
        pytest.param(prompt_of(100), prompt_of(98), id="shorter in the tail"),
        pytest.param(prompt_of(96), prompt_of(100), id="longer by a tail"),
        pytest.param(prompt_of(100), prompt_of(96), id="shorter by a tail"),
        pytest.param(prompt_of(100), [*prompt_of(99), 5], id="another last token"),
        pytest.param(prompt_of(96), [*prompt_of(95), 5], id="another last token of a full block"),
        pytest.param(prompt_of(100), prompt_of(200), id="twice as long"),
    ],
)
def test_token_after_another_prompt_is_not_taken(
    producer: Engine, consumer: Engine, theirs: list[int], ours: list[int]
) -> None:
    params = producer.prefill("p", theirs)
    consumer.add("c", ours, {**params, "return_provenance": True}, max_tokens=4)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert ends_as(consumer)["first_token"] == "here"


def test_samples_of_one_request_have_tokens_of_their_own(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    for name in ("0_c", "1_c"):
        consumer.add(name, prompt_of(100), {**params, "return_provenance": True}, max_tokens=4)
    consumer.run_to_end()
    for name in ("0_c", "1_c"):
        consumer.expect_tokens(name, 4)
        assert ends_as(consumer, name)["first_token"] == "here"


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_either_side_can_switch_it_off(engines: Engines, who: str) -> None:
    modes = {"producer": "auto", "consumer": "auto", who: "compute"}
    producer = engines.make("kv_producer", first_token=modes["producer"])
    consumer = engines.make("kv_consumer", first_token=modes["consumer"])
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), {**params, "return_provenance": True}, max_tokens=4)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert ends_as(consumer)["first_token"] == "here"


def test_answer_to_an_earlier_request_of_the_same_id_is_not_taken(
    producer: Engine, consumer: Engine
) -> None:
    """Aborted and sent again, with another prompt, before the scheduler saw the first answer."""
    first = producer.prefill("p", prompt_of(100))
    second = producer.prefill("q", prompt_of(80, start=400))
    consumer.add("c", prompt_of(100), first, max_tokens=4)
    consumer.wait_for_answer()
    consumer.abort("c")
    consumer.add("c", prompt_of(80, start=400), second, max_tokens=4)
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)
