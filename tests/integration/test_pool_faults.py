# SPDX-License-Identifier: Apache-2.0
"""No fault of the pool loses a request, gives a wrong token, or leaves a block or pin behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.disk import wait_on_disk
from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf
from tests.integration.pool_steps import POOL, delta, provenance, settle, store
from vllm_ascend_pd.backends.mooncake_master import (
    EmbeddedMaster,
    free_port,
    master_command,
    master_program,
)

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

FULL = 6 * BLOCK_SIZE
NUM_TOKENS = FULL + 9
ASK = {"return_provenance": True}
BREAKER = {"breaker_failures": 2, "probe_interval_s": 0.2}


@pytest.fixture
def scripted(engines: Engines) -> Callable[..., Engine]:
    """Gives engines whose pool can be scripted; the arguments are options of ``transfer``."""

    def give(**transfer: Any) -> Engine:
        engine = engines.shared(
            "kv_both", pool={**POOL, **BREAKER}, pool_faults="get:ok*", transfer=transfer
        )
        engine.set_pool_faults("")
        return engine

    return give


@pytest.fixture
def engine(scripted: Callable[..., Engine]) -> Engine:
    """A scripted one whose breakers are closed."""
    engine = scripted()
    wait_breakers(engine, "closed")
    return engine


def wait_breakers(engine: Engine, state: str, timeout: float = 60.0) -> None:
    """Until both have it; a bypassed pool is tried when the engine steps."""
    deadline = time.monotonic() + timeout
    while set(engine.pool_breakers().values()) != {state}:
        assert time.monotonic() < deadline, engine.pool_breakers()
        engine.ask(os_random_prompt())
        time.sleep(0.05)
    settle(engine)


def wait_until_used(engine: Engine, prompt: list[int], token_ids: list[int]) -> None:
    """The client finds a new master by itself, a second or two after its breakers are closed."""
    deadline = time.monotonic() + 60
    while True:
        store(engine, prompt)
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == token_ids
        settle(engine, 20)
        if "dram" in provenance(answer):
            return
        assert time.monotonic() < deadline, provenance(answer)
        time.sleep(0.3)


def os_random_prompt() -> list[int]:
    return [300 + byte for byte in os.urandom(BLOCK_SIZE + 1)]


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("corrupt", "checksum"),
        ("short", "checksum"),
        ("missing", "evicted"),
        ("fail", "pool_failed"),
    ],
)
def test_block_that_cannot_be_read_is_computed_with_those_after_it(
    scripted: Callable[..., Engine],
    single: SingleEngine,
    prompt_of: PromptOf,
    load_mode: str,
    script: str,
    cause: str,
) -> None:
    engine = scripted(load_mode=load_mode)
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.set_pool_faults(f"get:ok*3,{script}")
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert answer.outcome == cause
    assert provenance(answer) == {"dram": 3 * BLOCK_SIZE, "computed": NUM_TOKENS - 3 * BLOCK_SIZE}
    settle(engine)


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("script", ["get:ok*5,corrupt", "get:ok*2,missing,ok*2,corrupt"])
def test_tail_block_that_cannot_be_read_is_computed(
    scripted: Callable[..., Engine],
    single: SingleEngine,
    prompt_of: PromptOf,
    load_mode: str,
    script: str,
) -> None:
    engine = scripted(load_mode=load_mode)
    prompt = prompt_of(FULL)
    store(engine, prompt)
    engine.set_pool_faults(script)
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    origin = provenance(answer)
    assert sum(origin.values()) == FULL
    assert origin["computed"] >= BLOCK_SIZE
    settle(engine)


def test_damaged_value_is_replaced_by_a_good_one(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.set_pool_faults("get:corrupt")
    store(engine, prompt)
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids


def test_bit_flipped_in_memory_is_found(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared("kv_both", pool=POOL)
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    assert engine.flip_pool_bits() >= 6
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert (answer.outcome, provenance(answer)) == ("checksum", {"computed": NUM_TOKENS})
    settle(engine)


def test_slow_pool_is_given_up_at_the_deadline(
    scripted: Callable[..., Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = scripted(step_load_timeout_s=0.5, load_mode="step")
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.set_pool_faults("get:delay(3000)")
    started = time.monotonic()
    answer = engine.ask(prompt, 8, ASK)
    assert time.monotonic() - started < 2.5
    assert answer.token_ids == single(prompt).token_ids
    assert answer.outcome == "deadline"
    settle(engine)


def test_lookup_that_is_not_answered_is_given_up(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    pool = {**POOL, **BREAKER, "lookup_timeout_ms": 100}
    engine = engines.shared("kv_both", pool=pool, pool_faults="lookup:delay(800),ok*")
    prompt = prompt_of(NUM_TOKENS)
    before = engine.metrics()
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert delta(before, engine.metrics(), "pool_lookups/deadline") == 1
    settle(engine)


def test_failing_pool_is_bypassed_and_used_again_when_it_works(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine.set_pool_faults("put:fail*")
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(4)]
    for prompt in prompts:
        assert engine.ask(prompt).token_ids == single(prompt).token_ids
        settle(engine)
    assert engine.pool_breakers()["put"] != "closed"
    engine.set_pool_faults("")
    wait_breakers(engine, "closed")
    store(engine, prompts[0])
    store(engine, prompts[0])
    assert provenance(engine.ask(prompts[0], 8, ASK)) == {"dram": FULL, "computed": 9}


def test_full_pool_holds_no_request_back(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine.set_pool_faults("put:full*")
    prompt = prompt_of(NUM_TOKENS)
    before = engine.metrics()
    answer = engine.ask(prompt, 3 * BLOCK_SIZE)
    assert answer.token_ids == single(prompt, 3 * BLOCK_SIZE).token_ids
    settle(engine)
    assert delta(before, engine.metrics(), "pool_put_blocks/full") > 0
    assert engine.pool_breakers()["put"] == "closed"


def test_segment_that_holds_little_is_used_for_what_fits(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared("kv_both", pool={**POOL, "dram_size": "16MiB"})
    for part in range(6):
        prompt = prompt_of(40 * BLOCK_SIZE, str(part))
        assert engine.ask(prompt).token_ids == single(prompt).token_ids
        settle(engine)
    assert engine.metrics()["pool_put_blocks/ok"] > 0


def test_engine_starts_and_serves_without_its_master(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.own("kv_both", pool={**POOL, "master": f"127.0.0.1:{free_port()}"})
    prompt = prompt_of(NUM_TOKENS)
    for _ in range(2):
        assert engine.ask(prompt).token_ids == single(prompt).token_ids
    settle(engine)
    engine.wait_log("the pool's master at", timeout=60)


def test_killed_master_costs_no_token_and_is_started_again(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.own("kv_both", pool={**POOL, **BREAKER, "lookup_timeout_ms": 300})
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(3)]
    store(engine, prompts[0])
    for name, prompt in enumerate(prompts):
        engine.add(str(name), prompt, 3 * BLOCK_SIZE)
    engine.step()
    os.kill(engine.pool_master_id(), signal.SIGKILL)
    answers = engine.run()
    for name, prompt in enumerate(prompts):
        expected = single(prompt, 3 * BLOCK_SIZE).token_ids
        assert answers[str(name)].token_ids == expected
    engine.wait_log("starting it again")
    wait_breakers(engine, "closed")
    wait_until_used(engine, prompts[1], single(prompts[1]).token_ids)


class JoinedMaster:
    """A master that nobody but the test starts."""

    def __init__(self) -> None:
        self._port, self._http_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        command = master_command(master_program(), "127.0.0.1", self._port, self._http_port)
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/health"):
                    return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def joined_master() -> Iterator[JoinedMaster]:
    master = JoinedMaster()
    yield master
    master.kill()


def test_joined_master_is_killed_and_another_takes_its_place(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, joined_master: JoinedMaster
) -> None:
    pool = {**POOL, **BREAKER, "lookup_timeout_ms": 300, "master": joined_master.address}
    engine = engines.own("kv_both", pool=pool)
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(3)]
    store(engine, prompts[0])
    assert provenance(engine.ask(prompts[0], 8, ASK)) == {"dram": FULL, "computed": 9}
    for name, prompt in enumerate(prompts):
        engine.add(str(name), prompt, 3 * BLOCK_SIZE)
    engine.step()
    joined_master.kill()
    answers = engine.run()
    for name, prompt in enumerate(prompts):
        expected = single(prompt, 3 * BLOCK_SIZE).token_ids
        assert answers[str(name)].token_ids == expected
    # With no master at all requests are served, and soon none waits for it.
    started = time.monotonic()
    for prompt in prompts:
        engine.reset_prefix_cache()
        assert engine.ask(prompt).token_ids == single(prompt).token_ids
    assert time.monotonic() - started < 15
    joined_master.start()
    wait_breakers(engine, "closed")
    wait_until_used(engine, prompts[1], single(prompts[1]).token_ids)


@pytest.fixture
def master() -> EmbeddedMaster:
    return EmbeddedMaster()


def test_killed_owner_costs_no_token(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, master: EmbeddedMaster
) -> None:
    owner = engines.own("kv_both", pool={**POOL, "master": master.address})
    guest = engines.own("kv_both", pool={**POOL, "master": master.address, "dram_size": 0})
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(2)]
    for prompt in prompts:
        store(owner, prompt)
    assert "remote" in provenance(guest.ask(prompts[0], 8, ASK))
    engines.kill(owner)
    started = time.monotonic()
    answer = guest.ask(prompts[1], 8, ASK)
    assert time.monotonic() - started < 10
    assert answer.token_ids == single(prompts[1]).token_ids
    assert "remote" not in provenance(answer)
    settle(guest, 20)
    master.stop()


def test_stopped_owner_costs_no_token_and_its_late_bytes_spoil_none(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, master: EmbeddedMaster
) -> None:
    owner = engines.own("kv_both", pool={**POOL, "master": master.address})
    guest = engines.own(
        "kv_both",
        pool={**POOL, **BREAKER, "master": master.address, "dram_size": 0},
        transfer={"step_load_timeout_s": 1.0, "load_mode": "step"},
    )
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(3)]
    for prompt in prompts:
        store(owner, prompt)
    assert "remote" in provenance(guest.ask(prompts[0], 8, ASK))
    owner.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        answer = guest.ask(prompts[1], 8, ASK)
        assert time.monotonic() - started < 8
        assert answer.token_ids == single(prompts[1]).token_ids
        assert "remote" not in provenance(answer)
    finally:
        owner.signal(signal.SIGCONT)
    for prompt in prompts:
        assert guest.ask(prompt).token_ids == single(prompt).token_ids
    settle(guest, 20)
    master.stop()


@pytest.mark.parametrize("harm", ["flip", "truncate"])
def test_harmed_file_is_found(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, tmp_path: Path, harm: str
) -> None:
    folder = tmp_path / "ssd"
    ssd = {"path": str(folder), "size": "64MiB"}
    engine = engines.own("kv_both", pool={**POOL, "dram_size": "16MiB", "ssd": ssd})
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    wait_on_disk(folder, FULL // BLOCK_SIZE)
    for part in range(9):
        # More than the disk may hold, too: the oldest goes, and nothing is held back.
        store(engine, prompt_of(40 * BLOCK_SIZE, str(part)))
        time.sleep(0.5)
    for file in folder.rglob("*.bucket"):
        data = bytearray(file.read_bytes())
        for position in range(500, len(data), 1000):
            data[position] ^= 1
        file.write_bytes(data if harm == "flip" else data[: len(data) // 2])
    answer = engine.ask(prompt, 8, ASK)
    assert answer.token_ids == single(prompt).token_ids
    assert provenance(answer) == {"computed": NUM_TOKENS}
    settle(engine)


def begin_load(engine: Engine, prompt: list[int]) -> None:
    """Add the request ``loading`` and step until its load is under way."""
    engine.add("loading", prompt, 8, ASK)
    deadline = time.monotonic() + 60
    while not engine.counts()["loads"]:
        assert time.monotonic() < deadline, engine.requests()
        engine.step()


def test_prefix_cache_is_reset_during_a_load(
    scripted: Callable[..., Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = scripted(load_mode="park")
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.set_pool_faults("get:delay(1000)")
    begin_load(engine, prompt)
    engine.reset_prefix_cache()
    answer = engine.run()["loading"]
    assert answer.token_ids == single(prompt).token_ids
    settle(engine)


def test_aborted_request_gives_its_parked_load_back(
    scripted: Callable[..., Engine], single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = scripted(load_mode="park")
    prompt = prompt_of(NUM_TOKENS)
    store(engine, prompt)
    engine.set_pool_faults("get:delay(1000)")
    begin_load(engine, prompt)
    engine.abort("loading")
    engine.run()
    assert engine.ask(prompt).token_ids == single(prompt).token_ids
    settle(engine)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_consumer_whose_peer_fails_takes_the_prompt_from_the_pool(
    engines: Engines,
    single: SingleEngine,
    prompt_of: PromptOf,
    master: EmbeddedMaster,
    load_mode: str,
) -> None:
    pool = {**POOL, "master": master.address}
    owner = engines.own("kv_both", pool=pool)
    producer = engines.own("kv_producer", pool={**pool, "dram_size": 0}, faults="corrupt,ok*")
    consumer = engines.own(
        "kv_consumer", pool={**pool, "dram_size": 0}, transfer={"load_mode": load_mode}
    )
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(2)]
    for prompt in prompts:
        store(owner, prompt)
    params = [producer.prefill(prompt) for prompt in prompts]
    # The first load fails on its way; for the second the producer is gone.
    for prompt, one, cause in zip(prompts, params, ("checksum", "peer_unreachable"), strict=True):
        if cause == "peer_unreachable":
            engines.kill(producer)
        before = consumer.metrics()
        answer = consumer.ask(prompt, 8, one)
        after = consumer.metrics()
        assert answer.token_ids == single(prompt).token_ids
        assert answer.outcome == cause
        origin = provenance(answer)
        assert origin.pop("local", 0) + origin["remote"] == FULL
        assert origin["computed"] == 9
        counted = [
            delta(before, after, f"prompt_tokens/{source}")
            for source in ("local", "peer", "remote", "computed")
        ]
        assert sum(counted) == NUM_TOKENS
        settle(consumer)
    master.stop()


def test_preempted_consumer_comes_back_with_what_the_pool_has(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, master: EmbeddedMaster
) -> None:
    pool = {**POOL, "master": master.address}
    producer = engines.own("kv_producer", pool=pool)
    consumer = engines.own(
        "kv_consumer", pool={**pool, "dram_size": 0}, num_blocks=25, max_model_len=512
    )
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in ("a", "b", "c")}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 3 * BLOCK_SIZE, producer.prefill(prompt))
    settle(producer)
    answers = consumer.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 3 * BLOCK_SIZE).token_ids, name
        assert sum(provenance(answers[name]).values()) == NUM_TOKENS
        assert provenance(answers[name])["peer"] > 0
    metrics = consumer.metrics()
    assert delta({}, metrics, "preemptions") > 0
    assert delta({}, metrics, "pool_loads/ok") > 0
    settle(consumer)
    master.stop()


@pytest.mark.parametrize("interruption", ["abort", "reset"])
def test_step_whose_blocks_are_packed_meanwhile_is_interrupted(
    engine: Engine, single: SingleEngine, prompt_of: PromptOf, interruption: str
) -> None:
    """Slow puts, so that steps run ahead of what is stored."""
    engine.set_pool_faults("put:delay(20)*")
    prompts = [prompt_of(20 * BLOCK_SIZE + 3, str(i)) for i in range(3)]  # two chunks each
    for i, prompt in enumerate(prompts):
        name = f"interrupted-{i}"
        engine.add(name, prompt, 8)
        engine.step_until(name, "status", "RUNNING")
        if interruption == "abort":
            engine.abort_in_step(name)
        else:
            engine.reset_prefix_cache()
        answers = engine.run()
        if interruption == "reset":
            assert answers[name].token_ids == single(prompt).token_ids
    engine.set_pool_faults("")
    settle(engine)
    for prompt in prompts:
        store(engine, prompt)
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        assert provenance(answer) == {"dram": 20 * BLOCK_SIZE, "computed": 3}
    settle(engine)
