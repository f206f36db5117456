# SPDX-License-Identifier: Apache-2.0
"""While engines are upgraded one after another: those of two versions of vLLM exchange no KV, say
so by name, and each answers as it does alone. Skipped where there is one environment only.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import Engines
from tests.integration.engines import BLOCK_SIZE, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.moving import Moving
from tests.integration.pairs import ORDERS, Pair
from tests.integration.pool_steps import POOL, provenance, store
from tests.integration.test_forwards import NUM_OUTPUT as NUM_FORWARDED
from tests.integration.test_forwards import forward
from tests.integration.test_made_by import Known
from tests.integration.test_moves import PATIENT
from tests.integration.test_pool import master  # noqa: F401
from tests.integration.test_resume import NUM_OUTPUT, SAMPLING, SEED
from tests.unit.engine.test_registrar import Web

if TYPE_CHECKING:
    from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
PREFIX = 5 * BLOCK_SIZE
NUM_TOKENS = PREFIX + 9
GREEDY = ("greedy", "penalties", "bad words and bias", "min tokens", "json", "regex", "choice")


@pytest.fixture(scope="module")
def other_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Of the environment of another version that `make venv` has made beside this one."""
    for python in sorted(ROOT.glob(".venv*/bin/python")):
        if not python.parents[1].samefile(sys.prefix):
            with Fleet(tmp_path_factory.mktemp("others"), python=python) as fleet:
                yield fleet
            return
    pytest.skip("another version of vLLM: make venv VLLM=VERSION")


@pytest.fixture
def others(other_fleet: Fleet, base_config: EngineConfig) -> Iterator[Engines]:
    engines = Engines(other_fleet, base_config)
    yield engines
    engines.close_own()


@pytest.fixture
def two(
    engines: Engines,
    others: Engines,
    master: EmbeddedMaster,  # noqa: F811
) -> Iterator[tuple[Known, Known]]:
    """One of each version, which share a pool."""
    pool = {**POOL, "master": master.address}
    with ExitStack() as webs:
        yield tuple(  # type: ignore[misc]
            Known(of_version, webs.enter_context(closing(Web())), pool=pool)
            for of_version in (engines, others)
        )


def both_ways(two: tuple[Known, Known]) -> Iterator[tuple[str, Engine, Engine]]:
    """What tells their prompts apart, from which, to which."""
    here, there = (known.engine for known in two)
    yield "there", here, there
    yield "here", there, here


def differing(two: tuple[Known, Known]) -> list[str]:
    """Parts of their fingerprints."""
    one, other = (known.told()["fingerprint"].split() for known in two)
    return [part.partition("=")[0] for part in one if part not in other]


def test_prompts_and_the_pool(two: tuple[Known, Known], prompt_of: PromptOf) -> None:
    for to, producer, consumer in both_ways(two):
        pair = Pair(producer, consumer, prompt_of(40, to))
        for order in ORDERS:
            prompt = prompt_of(NUM_TOKENS, to + order)
            store(producer, prompt)
            answer = pair.ask_in(order, prompt)
            assert answer.outcome == "incompatible"
            assert provenance(answer) == {"computed": NUM_TOKENS}
            consumer.assert_says(answer.token_ids, prompt, order)
        consumer.wait_log("incompatible (the engines differ: vllm=")
    assert differing(two) == ["vllm"], "what else differs would hide it"


def test_running_requests_stay(two: tuple[Known, Known], prompt_of: PromptOf) -> None:
    for to, source, target in both_ways(two):
        prompt = prompt_of(BLOCK_SIZE + 5, to)
        moving = Moving(source, prompt, 40, {})
        moving.decode(3)
        assert moving.refusal_of(target) == "move_incompatible"
        target.wait_log("the engines differ: vllm=")
        source.assert_says(moving.answer().token_ids, prompt)


def test_what_has_broken_off_goes_on_by_its_tokens_if_it_is_greedy(
    two: tuple[Known, Known], prompt_of: PromptOf
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    for first, second in (two, two[::-1]):
        for name in GREEDY:
            asked = SAMPLING[name]
            expected = first.engine.ask(prompt, NUM_OUTPUT, **asked)
            for cut in (1, len(expected.token_ids) - 1):
                answer = second.go_on(first, prompt, expected.token_ids[:cut], **asked)
                assert answer.kv_transfer_params["resume"] == {"outcome": "exact"}, name
                assert answer.token_ids == expected.token_ids, (name, cut)
        seeded = first.engine.ask(prompt, NUM_OUTPUT, **SEED).token_ids
        second.assert_refuses(first, "draws", prompt, seeded[:5], **SEED)


def test_forwards_are_refused_before_they_are_read(
    engines: Engines, others: Engines, prompt_of: PromptOf, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of these two engines " * 3)
    secret.chmod(0o600)
    options: dict[str, Any] = {"secret_file": str(secret), "transfer": PATIENT}
    options["llm"] = json.dumps({"shutdown_timeout": 60})
    for sources, targets in ((engines, others), (others, engines)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        target = targets.own("kv_both", kv_port=port, **options)
        source = sources.own("kv_both", forward_peers=(f"127.0.0.1:{port}",), **options)
        prompt = prompt_of(2 * BLOCK_SIZE + 5)
        answer, outcomes = forward(source, target, prompt)
        assert outcomes == {"incompatible": 1}
        assert len(answer.token_ids) == NUM_FORWARDED
        source.assert_says(answer.token_ids, prompt)
