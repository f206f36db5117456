# SPDX-License-Identifier: Apache-2.0
"""The example that ``make demo`` runs says so, by its exit code too, when KV was not moved."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.zygote import forking_plugin
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples/offline_inference"
EXAMPLE = EXAMPLES / "disaggregated_prefill.py"
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Each process of an engine would import vLLM again."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("disaggregated_prefill", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answer(example: ModuleType, outcome: str | None, num_computed: int = 0) -> Any:
    origin = {"outcome": outcome, "num_computed_tokens": num_computed}
    params = {} if outcome is None else {"provenance": origin}
    return example.Answer("text", [1, 2], 300, 5.0, params)


def test_prompts_that_the_consumer_took_from_its_peer_are_handed_over(example: ModuleType) -> None:
    # The last token of a prompt is the consumer's where the producer's sample does not count.
    answers = [answer(example, "loaded"), answer(example, "loaded", 1)]
    assert example.what_was_not_moved(answers) == []


def test_each_prompt_that_was_computed_again_is_named_with_its_cause(example: ModuleType) -> None:
    answers = [
        answer(example, "loaded"),
        answer(example, "lease_expired", 300),
        answer(example, "loaded", 128),
        answer(example, None),
    ]
    missed = example.what_was_not_moved(answers)
    assert len(missed) == 3
    assert "prompt 1: 300 of 300 tokens" in missed[0]
    assert "lease_expired" in missed[0]
    assert "prompt 2: 128 of 300 tokens" in missed[1]
    assert "prompt 3" in missed[2]


@pytest.mark.parametrize("outcome", ["loaded", "lease_expired"])
def test_each_prompt_is_handed_over_before_the_next_is_computed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    asked = []

    class Engine:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def wait_ready(self, started: float) -> None: ...

        def begin_stop(self) -> None: ...

        def wait_stopped(self) -> None: ...

        def generate(self, prompt: str, *_: Any) -> Any:
            asked.append((self.name, prompt))
            return answer(example, outcome if prompt == "b" else "loaded")

    monkeypatch.setattr(example, "Engine", Engine)
    monkeypatch.setattr(example, "print_table", lambda *_: None)
    options = SimpleNamespace(one_device=False, max_tokens=2, verify=False)
    if outcome == "loaded":
        example.run(options, ["a", "b"])
    else:
        with pytest.raises(SystemExit, match="1 of 2 prompts were not handed over"):
            example.run(options, ["a", "b"])
    assert asked == [(name, prompt) for prompt in "ab" for name in ("producer", "consumer")]


def run_example(
    example: Path, folder: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """With a tiny model in ``folder``."""
    model = make_tiny_model(folder / "model").path
    command = [sys.executable, str(example), "--model", str(model), "--kv-cache-mb", "256"]
    environment = {**os.environ, **forking_plugin(folder), **environment}
    return subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=1500
    )


@pytest.mark.engine
@pytest.mark.timeout(1600)
def test_leases_that_run_out_fail_the_example_although_all_tokens_are_right(tmp_path: Path) -> None:
    options = ["--transfer", json.dumps({"lease_s": 1e-6}), "--verify"]
    done = run_example(EXAMPLE, tmp_path, "--max-tokens", "2", *options, **IN_PROCESS)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "error: 4 of 4 prompts were not handed over" in done.stderr
    assert "lease_expired" in done.stderr
    assert "verified" not in done.stdout


@pytest.mark.engine
@pytest.mark.timeout(1600)
def test_answers_that_were_interrupted_go_on_at_another_engine(tmp_path: Path) -> None:
    done = run_example(EXAMPLES / "resume.py", tmp_path, "--max-tokens", "16", **IN_PROCESS)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(": equal") == 9
    assert "verified: 9 answers are those of one engine" in done.stdout


@pytest.mark.engine
@pytest.mark.timeout(1600)
def test_answers_move_to_another_engine_while_they_run(tmp_path: Path) -> None:
    done = run_example(EXAMPLES / "move.py", tmp_path, "--max-tokens", "48")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(": equal") == 9
    assert "verified: 9 answers are those of one engine" in done.stdout
