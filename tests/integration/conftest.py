# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests of this folder: started on first use, shared, checked for leaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.architectures import make_model
from tests.integration.engines import (
    Answer,
    Engine,
    EngineConfig,
    Fleet,
    PromptOf,
    assert_no_leak,
    make_prompt,
    settled_counts,
)
from vllm_ascend_pd.testing.tiny_model import make_tiny_model


class Engines:
    """The engines of one test. When it ends, each of them must hold nothing more than before."""

    def __init__(self, fleet: Fleet, config: EngineConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._before: dict[Engine, dict[str, int]] = {}
        self._own: list[Engine] = []

    def shared(self, role: str, **options: Any) -> Engine:
        """An engine that other tests use too; ``transfer`` are options of that section."""
        return self._watch(self._fleet.engine(self._configure(role, **options)))

    def own(self, role: str, **options: Any) -> Engine:
        """An engine that this test may kill."""
        engine = self._fleet.start(self._configure(role, **options))
        self._own.append(engine)
        return self._watch(engine)

    def kill(self, engine: Engine) -> None:
        self._fleet.kill(engine)

    def close(self) -> None:
        for engine, before in self._before.items():
            if engine.alive and engine not in self._own:
                try:
                    assert_no_leak(engine, before)
                except BaseException:
                    self._fleet.discard(engine)
                    raise

    def close_own(self) -> None:
        try:
            for engine in self._own:
                if engine.alive:
                    assert_no_leak(engine, self._before[engine])
        finally:
            self._fleet.retire(*self._own)

    def _watch(self, engine: Engine) -> Engine:
        if engine not in self._before:
            self._before[engine] = settled_counts(engine)
        return engine

    def _configure(
        self,
        role: str,
        transfer: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        **options: Any,
    ) -> EngineConfig:
        if pool is not None:
            options["pool"] = json.dumps(pool, sort_keys=True)
        config = replace(self._config, role=role, **options)
        return config.with_transfer(**(transfer or {}))


class SingleEngine:
    """What one ordinary engine answers, each question asked once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[str, Answer] = {}

    def __call__(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> Answer:
        (answer,) = self.beside([(prompt, max_tokens, more)])
        return answer

    def assert_says(
        self, answer: Answer, prompt: list[int], max_tokens: int, about: object = ""
    ) -> None:
        """Greedily; in less time than it takes to ask."""
        assert len(answer.token_ids) == max_tokens, about
        self._engine.assert_says(answer.token_ids, prompt, about)

    def beside(self, questions: Iterable[tuple[list[int], int, dict[str, Any]]]) -> list[Answer]:
        """To each prompt so many tokens, chosen so; all take no longer than the longest of them."""
        asked = {repr((*asked, sorted(more.items()))): (asked, more) for *asked, more in questions}
        new = {f"single-{n}": key for n, key in enumerate(asked) if key not in self._answers}
        for request_id, key in new.items():
            question, more = asked[key]
            self._engine.add(request_id, *question, **more)
        answers = self._engine.run() if new else {}
        self._answers |= {key: answers[request_id] for request_id, key in new.items()}
        return [self._answers[key] for key in asked]


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return EngineConfig(str(model.path))


@pytest.fixture(scope="session")
def models(
    tmp_path_factory: pytest.TempPathFactory, base_config: EngineConfig
) -> Callable[[str], str]:
    """``models(architecture)`` is the folder of one."""
    made: dict[str, Path] = {}

    def make(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("architectures") / name
            made[name] = make_model(name, folder, Path(base_config.model))
        return str(made[name])

    return make


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Fleet]:
    option = pytestconfig.getoption
    gpu_graphs = option("--gpu-graphs") if option("--gpu") else None
    with Fleet(tmp_path_factory.mktemp("engines"), option("--triton"), gpu_graphs) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def no_engine_is_lent(request: pytest.FixtureRequest) -> None:
    """To this test, as yet."""
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").begin_test()


@pytest.fixture(scope="session")
def single(fleet: Fleet, base_config: EngineConfig) -> Iterator[SingleEngine]:
    with fleet.kept(base_config) as engine:
        yield SingleEngine(engine)


@pytest.fixture
def engines(
    request: pytest.FixtureRequest, fleet: Fleet, base_config: EngineConfig
) -> Iterator[Engines]:
    has_worker_process = request.node.get_closest_marker("worker_process") is not None
    engines = Engines(fleet, replace(base_config, executor="mp" if has_worker_process else ""))
    yield engines
    try:
        engines.close()
    finally:
        engines.close_own()


@pytest.fixture
def producer(engines: Engines) -> Engine:
    return engines.shared("kv_producer")


@pytest.fixture
def consumer(engines: Engines) -> Engine:
    return engines.shared("kv_consumer")


@pytest.fixture
def prompt_of(request: pytest.FixtureRequest) -> PromptOf:
    """``prompt_of(num_tokens, part="")``: tokens that no other test has seen."""

    def make(num_tokens: int, part: str = "") -> list[int]:
        return make_prompt(num_tokens, request.node.nodeid + part)

    return make
