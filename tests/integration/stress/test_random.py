# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to requests, in whatever order: answers are one engine's, and nothing is left.

``--stress-seed`` repeats a run, ``--stress-rounds`` makes it long; see docs/testing.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import SingleEngine
from tests.integration.engines import Answer, Engine, EngineConfig, Fleet
from tests.integration.stress.rounds import Rounds
from tests.integration.stress.workload import DRAFTED, KINDS, MAX_LENGTH, Spec, make_specs
from tests.integration.test_drafts import make_options
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.testing.tiny_lora import make_tiny_lora

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.worker_process,
    pytest.mark.timeout(0),  # each wait has a deadline of its own
]

NUM_SPECS = 48
POLICIES = ["fcfs", "priority"]
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
WRITE_FAULTS = ("fail", "drop", "short", "corrupt", "garbage", "delay(3)")
POOL_FAULTS = ("get:{}fail", "get:{}missing", "get:{}corrupt", "put:{}fail", "put:{}full")
PATIENT = {
    "peer_timeout_s": 30.0,
    "load_timeout_s": 60.0,
    "step_load_timeout_s": 30.0,
    "arrival_timeout_s": 1.0,  # nobody brings some transfer ids
    "max_freeze_s": 60.0,
}
SMALL = {
    "num_blocks": 40,
    "max_model_len": MAX_LENGTH,
    "max_num_batched_tokens": 128,
    "executor": "uni",
}
"""So little memory that requests wait for it, preempt each other, and are evicted."""


@pytest.fixture(scope="module")
def adapters(base_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    model = Path(base_config.model)
    return [str(make_tiny_lora(folder / name, model, seed)) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def single_with_adapters(fleet: Fleet, base_config: EngineConfig) -> Iterator[SingleEngine]:
    with fleet.kept(replace(base_config, llm=json.dumps(LORA))) as engine:
        yield SingleEngine(engine)


def _asking(single: SingleEngine) -> Callable[[Spec], Answer]:
    def ask(spec: Spec) -> Answer:
        options = {"cache_salt": spec.salt, "lora": spec.lora, **spec.sampling}
        return single(list(spec.prompt), spec.max_tokens, **options)

    return ask


@pytest.fixture(scope="module")
def master() -> Iterator[EmbeddedMaster]:
    master = EmbeddedMaster()
    yield master
    master.stop()


def _pool(master: EmbeddedMaster) -> dict[str, Any]:
    """Too small for all that is computed, and asked even where computing would be quicker."""
    return {
        "master": master.address,
        "dram_size": "16MiB",
        "load": "all",
        "lookup_timeout_ms": 5000,
        "breaker_slow_ms": 60000,
    }


def _pair(engines: Engines, **options: Any) -> tuple[Engine, Engine]:
    options = {**SMALL, "transfer": PATIENT, **options}
    prefiller = engines.own("kv_both", faults="ok*", **options)
    return prefiller, engines.own("kv_both", kv_port=0, faults="ok*", **options)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["steps", "ahead"])
@pytest.mark.parametrize("with_pool", [False, True], ids=["peers", "pool"])
def test_random_operations(
    engines: Engines,
    request: pytest.FixtureRequest,
    runs_ahead: bool,
    with_pool: bool,
) -> None:
    draw = _begin(request)
    llm: dict[str, Any] = {"scheduling_policy": draw.choice(POLICIES)}
    loras: list[str | None] = [None]
    with_adapters = with_pool != runs_ahead
    if with_adapters:
        # All have one: vLLM's CPU kernels give a request without the adapter of the last slot when
        # others of its batch have one.
        llm |= LORA
        loras = request.getfixturevalue("adapters")
    single = request.getfixturevalue("single_with_adapters" if with_adapters else "single")
    specs = make_specs(draw, NUM_SPECS, loras)
    options = {"runs_ahead": runs_ahead, "llm": json.dumps(llm)}
    _run(request, engines, draw, specs, single, with_pool, options)


@pytest.mark.parametrize(
    ("shape", "with_pool", "runs_ahead"),
    [
        ("drafts", True, True),
        ("windows", False, True),
        ("windows with drafts", True, False),
        ("mla", True, True),
    ],
)
def test_random_operations_on_engines_of_other_shapes(
    engines: Engines,
    fleet: Fleet,
    base_config: EngineConfig,
    models: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    shape: str,
    with_pool: bool,
    runs_ahead: bool,
) -> None:
    if request.config.getoption("--triton"):
        pytest.skip("Triton's interpreter would take minutes for a round")
    draw = _begin(request)
    with_drafts = "drafts" in shape
    if not with_drafts:
        options: dict[str, Any] = {"model": models(shape)}
    else:
        kind = "eagle" if shape == "drafts" else "windows"
        options = make_options(kind, tmp_path_factory.mktemp("drafters"), base_config)
    kinds = DRAFTED if with_drafts else list(KINDS)
    specs = make_specs(draw, NUM_SPECS, kinds=kinds)
    with fleet.kept(replace(base_config, **options)) as engine:
        llm = {**json.loads(options.get("llm", "{}")), "scheduling_policy": draw.choice(POLICIES)}
        options |= {"llm": json.dumps(llm), "runs_ahead": runs_ahead}
        if "windows" in shape:
            options["num_blocks"] = 90  # four groups share them
        _run(request, engines, draw, specs, SingleEngine(engine), with_pool, options)


def _begin(request: pytest.FixtureRequest) -> Random:
    seed, name = request.config.getoption("--stress-seed"), request.node.callspec.id
    again = f"--stress-seed {seed} -k '{name}'"
    print(f'again: make test TESTS=tests/integration/stress PYTEST_ARGS="{again}"')
    return Random(f"{seed} {name}")


def _run(
    request: pytest.FixtureRequest,
    engines: Engines,
    draw: Random,
    specs: list[Spec],
    single: SingleEngine,
    with_pool: bool,
    options: dict[str, Any],
) -> None:
    if with_pool:
        master = request.getfixturevalue("master")
        options |= {"pool": _pool(master), "pool_faults": "get:ok*;put:ok*"}
    pair = prefiller, decoder = _pair(engines, **options)
    rounds = Rounds(prefiller, decoder, specs, _asking(single), draw)
    for _ in range(request.config.getoption("--stress-rounds")):
        for engine in pair:
            engine.set_faults(_script(draw, WRITE_FAULTS))
            if with_pool:
                engine.set_pool_faults(_pool_script(draw))
        rounds.run()
    print(dict(sorted(rounds.seen.items())))
    assert rounds.seen.total() > 0


def _script(draw: Random, faults: tuple[str, ...]) -> str:
    """Mostly well; two things go wrong."""
    steps = [f"ok*{draw.randrange(1, 30)},{draw.choice(faults)}" for _ in range(2)]
    return ",".join([*steps, "ok*"])


def _pool_script(draw: Random) -> str:
    return draw.choice(POOL_FAULTS).format(f"ok*{draw.randrange(1, 30)},") + ",ok*"
