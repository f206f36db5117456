# SPDX-License-Identifier: Apache-2.0
"""A producer and a consumer that get their requests at once, and what each such pair must do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.integration.engines import Answer, Engine, EngineConfig, Fleet, PromptOf, assert_no_leak

if TYPE_CHECKING:
    from typing_extensions import Self

    from tests.integration.conftest import SingleEngine

CHUNKED = 700
"""More tokens than an engine of these tests computes in one step."""
EVERY_LAYER = {"push_mode": "layer"}
ORDERS = ("prefill first", "decode first")


class Pair:
    """What a router does: it knows where the producer is, and chooses the transfer ids."""

    def __init__(self, producer: Engine, consumer: Engine, prompt: list[int]) -> None:
        """``prompt`` is one that nobody else asks for."""
        self.producer = producer
        self.consumer = consumer
        known = producer.prefill(prompt)
        assert known["supports_concurrent"]
        consumer.ask(prompt, 1, known)
        producer.wait_count("leases", 0)
        names = ("remote_engine_id", "remote_host", "remote_port", "remote_key")
        self._where = {name: known[name] for name in names}
        self._num_transfers = 0

    def new_id(self) -> str:
        self._num_transfers += 1
        return f"{id(self)}-{self._num_transfers}"

    def add_prefill(self, name: str, prompt: list[int], transfer_id: str, **more: Any) -> None:
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        self.producer.add(name, prompt, 1, params, **more)

    def add_decode(
        self, name: str, prompt: list[int], transfer_id: str, max_tokens: int = 16, **more: Any
    ) -> None:
        params = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "return_provenance": True,
            **self._where,
        }
        self.consumer.add(name, prompt, max_tokens, params, **more)

    def run(self) -> dict[str, Answer]:
        """Both engines at once; what the consumer answered."""
        self.consumer.start_run()
        self.producer.run()
        return self.consumer.join_run()

    def ask(self, prompt: list[int], prefill: dict[str, Any] | None = None, **more: Any) -> Answer:
        """``prefill`` are options of the producer's request, ``more`` of the consumer's."""
        self._add_both("both", prompt, prefill, **more)
        return self.run()["both"]

    def _add_both(
        self, name: str, prompt: list[int], prefill: dict[str, Any] | None = None, **more: Any
    ) -> None:
        transfer_id = self.new_id()
        self.add_decode(name, prompt, transfer_id, **more)
        self.add_prefill(name, prompt, transfer_id, **(prefill or {}))

    def ask_beside(
        self, questions: Mapping[str, tuple[str, list[int]]], max_tokens: int = 16
    ) -> dict[str, Answer]:
        """Several prompts at once, each in one of ``ORDERS``: in the time of one."""
        for name, (order, prompt) in questions.items():
            if order == "prefill first":
                self.consumer.add(name, prompt, max_tokens, self.producer.prefill(prompt))
        for name, (order, prompt) in questions.items():
            if order == "decode first":
                self._add_both(name, prompt, max_tokens=max_tokens)
        return self.run()

    def ask_in(
        self,
        order: str,
        prompt: list[int],
        max_tokens: int = 16,
        prefill: dict[str, Any] | None = None,
        script: str = "",
        **more: Any,
    ) -> Answer:
        """In one of ``ORDERS``, with the producer's writes going as the ``script`` says, if any."""
        is_prefilled = order == "prefill first"
        known = self.producer.prefill(prompt, **(prefill or {})) if is_prefilled else None
        if script:
            self.producer.set_faults(script)
        if known is not None:
            return self.consumer.ask(prompt, max_tokens, known, **more)
        return self.ask(prompt, prefill, max_tokens=max_tokens, **more)


@dataclass
class Three:
    """An ordinary engine, a producer and a consumer of one model."""

    fleet: Fleet
    config: EngineConfig
    faulty: dict[str, Any]
    """Options of transfers of many pieces, of which some may fail."""
    single: Engine
    producer: Engine
    consumer: Engine

    @classmethod
    def of(cls, fleet: Fleet, config: EngineConfig, faulty: dict[str, Any]) -> Iterator[Self]:
        """For a fixture: nothing is left in them in the end."""
        engines = fleet.engines(
            config,
            replace(config, role="kv_producer", faults="ok*").with_transfer(**faulty),
            replace(config, role="kv_consumer").with_transfer(**EVERY_LAYER, **faulty),
        )
        before = [engine.counts() for engine in engines]
        engines[1].set_faults("ok*")
        yield cls(fleet, config, faulty, *engines)
        for engine, counts in zip(engines, before, strict=True):
            assert_no_leak(engine, counts)

    def other(self, role: str, transfer: dict[str, Any] | None = None, **options: Any) -> Engine:
        config = replace(self.config, role=role, **options)
        return self.fleet.engine(config.with_transfer(**self.faulty, **(transfer or {})))

    def assert_right(self, answer: Answer, prompt: list[int]) -> None:
        self.single.assert_says(answer.token_ids, prompt)


def run_in_need_of_memory(consumer: Engine, names: Iterable[str]) -> dict[str, Answer]:
    """The consumer's requests ``names``, of which some are preempted: each has the blocks of its
    prompt before another decodes, however slowly these come.
    """
    before = consumer.metrics()["preemptions"]
    for name in names:
        consumer.wait_for(name, "session", "READY")
    assert consumer.drive(2) == {}  # they join the queue, and their loads start
    consumer.wait_count("worker_loads_under_way", 0)
    answers = consumer.run()
    assert consumer.metrics()["preemptions"] > before
    return answers


def expect_recovery_and_preemptions(
    producer: Engine,
    consumer: Engine,
    assert_right: Callable[[Answer, list[int]], None],
    prompt_of: PromptOf,
) -> None:
    """The consumer computes what fails to come, and has too little memory for four requests."""
    prompt = prompt_of(190, "fails")
    params = producer.prefill(prompt)
    producer.set_faults("fail,ok*")
    answer = consumer.ask(prompt, 24, params)
    assert_right(answer, prompt)
    assert (answer.outcome, answer.sources) == ("transfer_failed", (0, 0, 190))
    prompts = {name: prompt_of(190, name) for name in "abcd"}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 200, producer.prefill(prompt))
    answers = run_in_need_of_memory(consumer, prompts)
    for name, prompt in prompts.items():
        assert_right(answers[name], prompt)


def expect_tokens_of_one_worker(pair: Pair, single: SingleEngine, prompt_of: PromptOf) -> None:
    """Prompts of several lengths, in both orders; all of their KV comes from the producer."""
    for num_tokens, order in itertools.product((40, 96, CHUNKED), ORDERS):
        prompt = prompt_of(num_tokens, f"{order} {num_tokens}")
        answer = pair.ask_in(order, prompt)
        assert answer.token_ids == single(prompt, 16).token_ids
        assert answer.sources == (0, num_tokens, 0)


def expect_recovery(
    pair: Pair, single: SingleEngine, prompt: list[int], script: str, worker: int | None = None
) -> None:
    """From writes of one worker, or of each, that go as the script says; the first ones fail."""
    params = pair.producer.prefill(prompt)
    pair.producer.set_faults(script, worker)
    answer = pair.consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids, (script, worker)
    if not script.startswith("ok"):
        assert answer.outcome in ("checksum", "transfer_failed")
    pair.producer.set_faults("ok*")


def expect_abort_of_a_load(pair: Pair, single: SingleEngine, prompt_of: PromptOf) -> None:
    """Every worker gives it up, and the engines go on."""
    before = pair.consumer.counts()
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    pair.consumer.step_until("both", "loads", 1)
    pair.producer.step()
    pair.consumer.abort("both")
    pair.consumer.run()
    pair.producer.run()
    assert_no_leak(pair.consumer, before)
    again = prompt_of(97)
    assert pair.ask(again).token_ids == single(again, 16).token_ids


def abort_early_and_late(pair: Pair, prompt_of: PromptOf) -> None:
    """The consumer's request, before its prompt is computed and while its load is under way."""
    for part in ("early", "late"):
        prompt, transfer_id = prompt_of(CHUNKED, part), pair.new_id()
        pair.add_decode("r", prompt, transfer_id)
        pair.add_prefill("r", prompt, transfer_id)
        pair.consumer.step_until("r", "loads", 1)
        if part == "late":
            pair.producer.step()
        pair.consumer.abort("r")
        pair.run()
