# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to requests, in whatever order: answers are one engine's, and nothing is left.

``--stress-seed`` repeats a run, ``--stress-seconds`` makes it long; see docs/testing.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import SingleEngine
from tests.integration.engines import Answer, Engine, EngineConfig, Fleet
from tests.integration.stress.rounds import Rounds
from tests.integration.stress.workload import MAX_LENGTH, Spec, make_specs
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
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
WRITE_FAULTS = ("fail", "drop", "short", "corrupt", "garbage", "delay(3)")
POOL_FAULTS = ("get:{}fail", "get:{}missing", "get:{}corrupt", "put:{}fail", "put:{}full")
PATIENT = {
    "peer_timeout_s": 30.0,
    "load_timeout_s": 60.0,
    "step_load_timeout_s": 30.0,
    "arrival_timeout_s": 1.0,  # nobody brings some transfer ids
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
    return prefiller, engines.own("kv_both", kv_port=0, **options)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["steps", "ahead"])
@pytest.mark.parametrize("with_pool", [False, True], ids=["peers", "pool"])
def test_random_operations(
    engines: Engines,
    request: pytest.FixtureRequest,
    runs_ahead: bool,
    with_pool: bool,
) -> None:
    option = request.config.getoption
    seed, seconds = option("--stress-seed"), option("--stress-seconds")
    options: dict[str, Any] = {"runs_ahead": runs_ahead}
    if with_pool:
        options["pool"] = _pool(request.getfixturevalue("master"))
        options["pool_faults"] = "get:ok*;put:ok*"
    name = request.node.callspec.id
    again = f"--stress-seed {seed} -k {name}"
    print(f"again: make test TESTS=tests/integration/stress PYTEST_ARGS='{again}'")
    draw = Random(f"{seed} {name}")
    llm: dict[str, Any] = {"scheduling_policy": draw.choice(["fcfs", "priority"])}
    loras: list[str | None] = [None]
    with_adapters = with_pool != runs_ahead
    if with_adapters:
        # All have one: vLLM's CPU kernels give a request without the adapter of the last slot when
        # others of its batch have one.
        llm |= LORA
        loras = request.getfixturevalue("adapters")
    single = request.getfixturevalue("single_with_adapters" if with_adapters else "single")
    options["llm"] = json.dumps(llm)
    specs = make_specs(draw, NUM_SPECS, loras)
    prefiller, decoder = _pair(engines, **options)
    rounds = Rounds(prefiller, decoder, specs, _asking(single), draw)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        prefiller.set_faults(_script(draw, WRITE_FAULTS))
        if with_pool:
            for engine in (prefiller, decoder):
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
