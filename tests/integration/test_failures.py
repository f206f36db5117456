# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong with the peer: right tokens by recompute, the cause named, nothing left."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, EngineError, PromptOf
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

NUM_TOKENS = 4 * BLOCK_SIZE + 9
SMALL_PIECES = {"staging_slot_bytes": 64 * 1024, "staging_slots": 256}
"""Four pages a piece: the tail of a prompt of ``NUM_TOKENS`` is one piece, its blocks are four.
So many slots that those in quarantine after a failure are not missed by the next test."""
IMPATIENT = {
    **SMALL_PIECES,
    "peer_timeout_s": 1.5,
    "step_load_timeout_s": 3.0,
}


FEW_BLOCKS = 16


@pytest.fixture
def faulty(engines: Engines) -> Engine:
    """A producer whose writes fail as scripted."""
    engine = engines.shared("kv_producer", faults="ok*", transfer=SMALL_PIECES)
    engine.set_faults("ok*")
    return engine


@pytest.fixture
def consumer(engines: Engines) -> Engine:
    return engines.shared("kv_consumer", transfer=IMPATIENT)


def added(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    """The metrics that have grown since ``before``."""
    now = engine.metrics()
    return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name)}


# Writes that fail.


@pytest.mark.parametrize("place", ["", "ok,", "ok*4,"], ids=["tail", "first layer", "last layer"])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("corrupt", "checksum"),
        ("short", "checksum"),
        ("drop", "checksum"),
        ("fail", "transfer_failed"),
    ],
)
def test_failed_write_is_recomputed(
    faulty: Engine,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    place: str,
    fault: str,
    cause: str,
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = faulty.prefill(prompt)
    faulty.set_faults(place + fault)
    before = consumer.metrics()
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert (answer.outcome, answer.sources) == (cause, (0, 0, NUM_TOKENS))
    assert added(consumer, before)[f"loads/{cause}"] == 1


def test_both_logs_name_the_transfer_that_failed_and_a_counter_its_producer(
    faulty: Engine, consumer: Engine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = faulty.prefill(prompt)
    faulty.set_faults("fail")
    before = consumer.metrics()
    consumer.add("mine", prompt, 2, params)
    consumer.run()
    producer = f"{params['remote_host']}:{params['remote_port']}"
    transfer = f"transfer {params['transfer_id']}"
    assert added(consumer, before)[f"peer_failures/{producer}"] == 1
    [line] = consumer.find_in_log(rf"request mine\S*: a load from {producer}, {transfer} .*")
    assert line.endswith("has failed: transfer_failed")
    assert faulty.find_in_log(f"{transfer}: a write to .* ended with transfer_failed")


@pytest.mark.parametrize("place", ["", "ok*4,"], ids=["tail", "last layer"])
def test_write_that_never_ends_is_given_up(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf, place: str
) -> None:
    producer = engines.own("kv_producer", faults=f"{place}never")
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert (answer.outcome, answer.sources) == ("deadline", (0, 0, NUM_TOKENS))
    engines.kill(producer)  # its slot is busy for as long as the write is


def test_slow_write_is_waited_for(
    faulty: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = faulty.prefill(prompt)
    faulty.set_faults("delay(200)*")
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, NUM_TOKENS, 0)


def test_fault_script_is_read_from_the_environment(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.own("kv_producer", faults="corrupt,ok*", transfer=SMALL_PIECES)
    outcomes = []
    for part in ("first", "second"):
        prompt = prompt_of(NUM_TOKENS, part)
        answer = consumer.ask(prompt, 16, producer.prefill(prompt))
        assert answer.token_ids == single(prompt, 16).token_ids
        outcomes.append(answer.outcome)
    assert outcomes == ["checksum", "loaded"]


def test_failed_load_does_not_disturb_the_requests_of_its_step(
    faulty: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    other, prompt = prompt_of(40, "other"), prompt_of(NUM_TOKENS, "failing")
    params = faulty.prefill(prompt)
    faulty.set_faults("ok,corrupt")
    consumer.add("other", other, 40)
    consumer.step_until("other", "num_output_tokens", 3)
    consumer.add("failing", prompt, 16, params)
    consumer.wait_for("failing", "session", "READY")
    assert sorted(consumer.step()) == ["failing", "other"], "its first token comes from the peer"
    assert list(consumer.step()) == ["other"]
    answers = consumer.run()
    assert answers["other"].token_ids == single(other, 40).token_ids
    assert answers["failing"].token_ids == single(prompt, 16).token_ids


def test_requests_that_share_the_failed_blocks_are_recomputed_too(
    faulty: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    shared = prompt_of(4 * BLOCK_SIZE, "shared")
    with_kv, without = shared + prompt_of(9, "with kv"), shared + prompt_of(20, "without")
    params = faulty.prefill(with_kv)
    faulty.set_faults("ok*2,corrupt")
    consumer.add("with kv", with_kv, 16, params)
    consumer.wait_for("with kv", "session", "READY")
    assert list(consumer.step()) == ["with kv"], "its first token comes from the peer"
    consumer.add("without", without, 16)
    before = consumer.metrics()
    answers = consumer.run()
    assert answers["with kv"].token_ids == single(with_kv, 16).token_ids
    assert answers["without"].token_ids == single(without, 16).token_ids
    assert added(consumer, before)["recovered_requests"] == 2


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("place", ["", "ok*4,"], ids=["first layers", "last layer"])
def test_next_owner_of_a_block_does_not_meet_what_a_failed_load_left_in_it(
    engines: Engines,
    faulty: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    place: str,
    load_mode: str,
) -> None:
    """On a CPU, what is no number stays none when attention masks it by a factor of zero."""
    consumer = engines.shared(
        "kv_consumer",
        transfer={**IMPATIENT, "load_mode": load_mode},
        num_blocks=FEW_BLOCKS,
        max_model_len=256,
    )
    prompt = prompt_of(NUM_TOKENS)
    params = faulty.prefill(prompt)
    faulty.set_faults(f"{place}garbage*")
    consumer.add("failing", prompt, 16, params)
    consumer.wait_for("failing", "session", "READY")
    assert list(consumer.step()) == ["failing"], "its first token comes from the peer"
    consumer.step_until("failing", "session", "FAILED")
    consumer.abort("failing")  # before it fills the blocks again itself
    owners = {f"next {number}": prompt_of(5, f"next {number}") for number in range(FEW_BLOCKS - 1)}
    for name, short in owners.items():  # one each of the others, and none fills its own
        consumer.add(name, short, 4)
    answers = consumer.run()
    for name, short in owners.items():
        assert answers[name].token_ids == single(short, 4).token_ids, name


def test_later_request_does_not_meet_the_failed_blocks(
    faulty: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = faulty.prefill(prompt)
    faulty.set_faults("ok,corrupt")
    consumer.add("failing", prompt, 16, params)
    consumer.wait_for("failing", "session", "READY")
    assert list(consumer.step()) == ["failing"], "its first token comes from the peer"
    assert list(consumer.step()) == []
    consumer.abort("failing")
    assert consumer.ask(prompt, 16).token_ids == single(prompt, 16).token_ids


# A peer that dies, stalls, or comes back as another.


def test_peer_killed_before_it_is_asked(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.own("kv_producer")
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    engines.kill(producer)
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "peer_unreachable"


def test_peer_killed_between_its_answer_and_the_load(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.own("kv_producer")
    prompt = prompt_of(NUM_TOKENS)
    consumer.add("r", prompt, 16, producer.prefill(prompt))
    consumer.wait_for("r", "session", "READY")
    engines.kill(producer)
    answer = consumer.run()["r"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "peer_unreachable"


def test_stopped_peer_is_given_up_and_used_again_when_it_resumes(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.own("kv_producer")
    first, second = prompt_of(NUM_TOKENS, "first"), prompt_of(NUM_TOKENS, "second")
    params = producer.prefill(first)
    producer.signal(signal.SIGSTOP)
    answers = [consumer.ask(first, 16, params)]
    producer.signal(signal.SIGCONT)
    answers.append(consumer.ask(second, 16, producer.prefill(second)))
    assert [a.token_ids for a in answers] == [single(p, 16).token_ids for p in (first, second)]
    assert [answer.outcome for answer in answers] == ["peer_unreachable", "loaded"]


def test_loads_from_a_healthy_peer_go_on_while_another_is_stalled(
    engines: Engines, producer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """What a stalled peer may still write to is set apart, and that must not be everything."""
    consumer = engines.own("kv_consumer", transfer={**IMPATIENT, "staging_slots": 4})
    stalled = engines.own("kv_producer")
    first, second = prompt_of(NUM_TOKENS, "first"), prompt_of(NUM_TOKENS, "second")
    consumer.add("first", first, 2, stalled.prefill(first))
    consumer.wait_for("first", "session", "READY")
    stalled.signal(signal.SIGSTOP)
    assert consumer.run()["first"].outcome == "deadline"
    answer = consumer.ask(second, 16, producer.prefill(second))
    assert answer.token_ids == single(second, 16).token_ids
    assert answer.outcome == "loaded"
    engines.kill(stalled)


def test_peer_stopped_between_its_answer_and_the_load(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.own("kv_producer")
    first, second = prompt_of(NUM_TOKENS, "first"), prompt_of(NUM_TOKENS, "second")
    consumer.add("first", first, 16, producer.prefill(first))
    consumer.wait_for("first", "session", "READY")
    producer.signal(signal.SIGSTOP)
    answer = consumer.run()["first"]
    producer.signal(signal.SIGCONT)
    assert answer.token_ids == single(first, 16).token_ids
    assert answer.outcome == "deadline"
    # What the resumed peer writes late must not reach anything that is in use.
    again = consumer.ask(second, 16, producer.prefill(second))
    assert again.token_ids == single(second, 16).token_ids


def test_restarted_peer_refuses_what_it_promised_before(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    producer = engines.own("kv_producer", kv_port=port)
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    engines.kill(producer)
    engines.own("kv_producer", kv_port=port)
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "wrong_epoch"


def test_lease_that_expired_before_the_consumer_came(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", transfer={"lease_s": 0.3})
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    producer.wait_count("leases", 0)
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "lease_expired"


@pytest.mark.parametrize(
    "difference",
    [{"model_seed": 1}, {"dtype": "bfloat16"}, {"block_size": 2 * BLOCK_SIZE}],
    ids=["weights", "dtype", "block size"],
)
def test_peer_of_another_kind_is_refused(
    engines: Engines,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    tmp_path_factory: pytest.TempPathFactory,
    difference: dict[str, Any],
) -> None:
    if seed := difference.get("model_seed"):
        model = make_tiny_model(tmp_path_factory.getbasetemp() / "other" / "tiny", seed=seed)
        difference = {"model": str(model.path)}
    producer = engines.own("kv_producer", **difference)
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "incompatible"


# What a client may send.


@pytest.mark.parametrize(
    ("forged", "outcome"),
    [
        ({"remote_host": "192.0.2.7"}, "peer_not_allowed"),
        ({"remote_host": "example.com"}, "peer_not_allowed"),
        ({"remote_host": 7}, "bad_params"),
        ({"remote_host": ""}, "bad_params"),
        ({"remote_port": "80"}, "bad_params"),
        ({"remote_port": 0}, "bad_params"),
        ({"remote_port": 65536}, "bad_params"),
        ({"remote_port": None}, "bad_params"),
        ({"transfer_id": 5}, "bad_params"),
        ({"transfer_id": "x" * 10_000}, "bad_params"),
        ({"transfer_id": "no such transfer"}, "lease_expired"),
        ({"remote_epoch": "another"}, "wrong_epoch"),
        ({"remote_epoch": ["list"]}, "bad_params"),
        ({"tp_size": "two"}, "bad_params"),
    ],
    ids=str,
)
def test_forged_reference_is_refused(
    producer: Engine,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    forged: dict[str, Any],
    outcome: str,
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    before = consumer.metrics()
    answer = consumer.ask(prompt, 16, {**params, **forged})
    assert answer.token_ids == single(prompt, 16).token_ids
    assert added(consumer, before).get(f"requests/{outcome}") == 1
    consumer.ask(prompt, 1, params)  # gives the lease back


@pytest.mark.parametrize("missing", ["remote_host", "remote_port", "transfer_id"])
def test_reference_that_lacks_a_field_is_refused(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf, missing: str
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    before = consumer.metrics()
    answer = consumer.ask(prompt, 16, {k: v for k, v in params.items() if k != missing})
    assert answer.token_ids == single(prompt, 16).token_ids
    assert added(consumer, before).get("requests/bad_params") == 1
    consumer.ask(prompt, 1, params)  # gives the lease back


@pytest.mark.parametrize("garbage", ["text", 7, ["do_remote_prefill"], {"x": 1}], ids=repr)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_kv_transfer_params_of_the_wrong_type_do_no_harm(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, role: str, garbage: Any
) -> None:
    engine = engines.shared(role, transfer=IMPATIENT)
    prompt = prompt_of(40)
    try:
        answer = engine.ask(prompt, 8, garbage)
    except EngineError:  # from 0.31 on vLLM itself reads them before it has the request
        assert not isinstance(garbage, dict)
        answer = engine.ask(prompt, 8)
    assert answer.token_ids == single(prompt, 8).token_ids


def test_reference_to_the_kv_of_another_prompt_is_refused(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    params = producer.prefill(prompt_of(NUM_TOKENS, "theirs"))
    prompt = prompt_of(NUM_TOKENS, "mine")
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "hash_mismatch"


def test_of_a_prompt_with_the_same_start_only_the_start_is_used(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    shared = prompt_of(2 * BLOCK_SIZE, "shared")
    params = producer.prefill(shared + prompt_of(70, "theirs"))
    prompt = shared + prompt_of(50, "mine")
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, 2 * BLOCK_SIZE, 50)


def test_port_on_which_nobody_listens(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        answer = consumer.ask(prompt, 16, {**params, "remote_port": taken.getsockname()[1]})
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "peer_unreachable"
    consumer.ask(prompt, 1, params)  # gives the lease back


def test_port_of_something_else(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        answer = consumer.ask(prompt, 16, {**params, "remote_port": silent.getsockname()[1]})
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "peer_unreachable"
    consumer.ask(prompt, 1, params)  # gives the lease back


@pytest.mark.parametrize(
    ("role", "params"),
    [
        ("kv_consumer", {"do_remote_decode": True}),
        (
            "kv_producer",
            {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9},
        ),
    ],
)
def test_request_for_the_other_role_is_served_and_counted(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, role: str, params: dict[str, Any]
) -> None:
    engine = engines.shared(role)
    prompt = prompt_of(NUM_TOKENS)
    before = engine.metrics()
    answer = engine.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.kv_transfer_params == {}
    assert added(engine, before)["requests/wrong_role"] == 1
