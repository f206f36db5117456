# SPDX-License-Identifier: Apache-2.0
"""The example that ``make demo`` runs says so, by its exit code too, when KV was not moved."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.zygote import forking_plugin
from vllm_ascend_pd.cluster.doctor.findings import Finding, fail
from vllm_ascend_pd.cluster.doctor.host import Patches
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples/offline_inference"
EXAMPLE = EXAMPLES / "disaggregated_prefill.py"
PATIENCE_S = 100.0
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


NO_ENGINE = """
import multiprocessing, time
from types import SimpleNamespace

SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, kv_transfer_config, **options):
        self.role = kv_transfer_config.kv_role
        self.core = multiprocessing.Process(target=time.sleep, args=(600,))
        self.core.start()
        self.llm_engine = SimpleNamespace(engine_core=self)
        try:
            self.start()
        except BaseException:
            self.shutdown(None)
            raise

    def start(self):
        pass

    def shutdown(self, timeout):
        self.core.terminate()
        self.core.join(timeout)

    def generate(self, *args, **options):
        raise ValueError("no engine answers this")
"""
"""In the place of vLLM: a process beside it has to be stopped, as that of an engine."""
FAILS_AT_ITS_START = """
    def start(self):
        if self.role == "kv_producer":
            raise ValueError("there is no room")
        time.sleep(600)
"""
ANSWERS_TOO_LATE = """
    def generate(self, *args, **options):
        multiprocessing.parent_process().join()
        metrics = SimpleNamespace(first_token_latency=1.0)
        answers = [SimpleNamespace(text="", token_ids=[1])]
        return [
            SimpleNamespace(
                outputs=answers, prompt_token_ids=[1], metrics=metrics, kv_transfer_params={}
            )
        ]
"""
MAIN = """
import sys
import disaggregated_prefill as example
example.refuse_unpatched_engine = lambda: None
example.STOP_S = 1.0
example.main()
"""


@contextmanager
def without_engines(folder: Path, more: str = "") -> Iterator[subprocess.Popen[str]]:
    """The example. Its output ends when the last of its processes has."""
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text(NO_ENGINE + more)
    (folder / "vllm/config.py").write_text(
        "from types import SimpleNamespace\nKVTransferConfig = SimpleNamespace\n"
    )
    path = os.pathsep.join([str(folder), str(EXAMPLES), str(EXAMPLES.parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "--model", "tiny"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_engine_that_refuses_a_prompt_leaves_no_process(tmp_path: Path) -> None:
    with without_engines(tmp_path) as process:
        told, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
    assert "ValueError: no engine answers this" in told
    assert "error: the producer engine ended; its messages are above" in told


def test_engine_that_does_not_start_takes_the_other_one_with_it(tmp_path: Path) -> None:
    with without_engines(tmp_path, FAILS_AT_ITS_START) as process:
        told, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
    assert "ValueError: there is no room" in told
    assert "error: the producer engine ended; its messages are above" in told


def test_engines_end_with_the_process_that_asks_them(tmp_path: Path) -> None:
    with without_engines(tmp_path, ANSWERS_TOO_LATE) as process:
        assert process.stdout is not None
        assert any("consumer engine ready" in line for line in process.stdout)
        process.kill()
        told, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--model", "models/of/mine"], "there is no folder models/of/mine"),
        (["--transfer", "{"], "--transfer: this is no JSON"),
        (["--transfer", "[]"], "--transfer: give a JSON object"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--max-model-len", "51"], "--max-model-len 51 leaves no room for a prompt: give 52"),
        (["--kv-cache-mb", "0"], "--kv-cache-mb: give 1 or more"),
    ],
)
def test_option_that_cannot_be_is_refused_before_an_engine_starts(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--model", "tiny", *options])
    monkeypatch.setattr(example, "run", None)
    monkeypatch.setattr(example, "refuse_unpatched_engine", None)
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("name", "least"), [("resume.py", 13), ("move.py", 2)])
def test_answer_too_short_for_two_engines_is_refused(name: str, least: int) -> None:
    command = [sys.executable, str(EXAMPLES / name), "--model", "m", "--max-tokens"]
    done = subprocess.run([*command, str(least - 1)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"--max-tokens: give {least} or more" in done.stderr


def test_engine_without_the_patches_is_refused_with_the_command_that_mends_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: Patches) -> list[Finding]:
        return [fail("patches", "vllm-0.30.0: pristine", "python apply_patches.py apply")]

    monkeypatch.setattr(Patches, "run", run)
    monkeypatch.setattr(example, "run", None)
    monkeypatch.setattr(sys, "argv", ["example", "--model", "tiny"])
    with pytest.raises(SystemExit, match="pristine; fix: python apply_patches"):
        example.main()


@pytest.mark.parametrize("max_tokens", [20, 1016, 8160])
def test_long_prompt_has_room(example: ModuleType, tmp_path: Path, max_tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny_model(tmp_path).path / "tokenizer.json"))
    num_tokens = len(tokenizer.encode(example.long_prompt(max_tokens)).ids)
    assert min(max_tokens, 6000) / 2 < num_tokens <= max_tokens


def test_answer_that_is_shorter_differs_where_it_ends(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = example.Answer("text", [1, 2, 3], 300, 5.0)
    assert not example.compare([answer(example, None)], [longer])
    assert "prompt 0: DIFFERENT from output token 2 on" in capsys.readouterr().out
    assert example.compare([longer], [longer])


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
    done = run_example(EXAMPLES / "resume.py", tmp_path, "--max-tokens", "16")
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
