# SPDX-License-Identifier: Apache-2.0
"""An engine that is about to end has another one compute its requests, with all that they have
beside tokens; every token is that of one engine.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.architectures import IMAGE_TOKEN
from tests.integration.engines import BLOCK_SIZE, Answer, Engine, PromptOf
from tests.integration.pool_steps import delta
from tests.integration.test_identity import LORA
from tests.integration.test_images import colors
from tests.integration.test_moves import NUM_LOOKS, PATIENT
from tests.integration.test_resume import SEED
from vllm_ascend_pd.testing.tiny_lora import make_tiny_lora

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

Prompt = list[int]
NUM_OUTPUT = 100


@pytest.fixture
def two(engines: Engines, tmp_path: Path) -> Callable[..., tuple[Engine, Engine]]:
    """A source and its only peer."""

    def make(
        llm: dict[str, Any], there: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Engine, Engine]:
        """``there``: options of the peer, where it has others."""
        secret = tmp_path / "secret"
        secret.write_text("of these two engines " * 3)
        secret.chmod(0o600)
        options |= {"secret_file": str(secret), "transfer": PATIENT}
        ours, theirs = (json.dumps({**it, "shutdown_timeout": 60}) for it in (llm, there or llm))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        target = engines.own("kv_both", kv_port=port, llm=theirs, **options)
        peers = (f"127.0.0.1:{port}",)
        return engines.own("kv_both", forward_peers=peers, llm=ours, **options), target

    return make


def forward(
    source: Engine,
    target: Engine,
    prompt: Prompt,
    then: Callable[[], object] = lambda: None,
    **more: Any,
) -> tuple[Answer, dict[str, float]]:
    """A request that has begun; its answer, and how its forward did. ``then`` once it is decided
    who computes it.
    """
    before = source.metrics()
    source.add("r", prompt, NUM_OUTPUT, **more)
    source.step_until("r", "num_output_tokens", 5)
    source.set_ending(True)
    while source.counts()["forwards"] and source.requests()["r"]["status"] == "RUNNING":
        for _ in range(NUM_LOOKS):
            source.counts()  # it answers, and computes nothing
            target.drive(2)
        source.step()
    then()
    source.start_run()
    target.run()
    answer = source.join_run()["r"]
    source.set_ending(False)
    after = source.metrics()
    outcomes = {n.partition("/")[2] for n in after if n.startswith("forwards/")}
    counts = {name: delta(before, after, f"forwards/{name}") for name in outcomes}
    return answer, {name: count for name, count in counts.items() if count}


def test_adapter_is_the_targets_own(
    two: Callable[..., tuple[Engine, Engine]], prompt_of: PromptOf, tmp_path: Path
) -> None:
    """Which it knows by another number and path, and whose content is that of the source's."""
    source, target = two({**LORA, "max_cpu_loras": 2})
    model = Path(source.config.model)
    here, there = ({n: tmp_path / side / n for n in "abcde"} for side in ("here", "there"))
    for seed, name in enumerate("abcde"):
        shutil.copytree(make_tiny_lora(here[name], model, seed), there[name])
    shutil.rmtree(there["c"])
    make_tiny_lora(there["c"], model, 9)
    for name in "edcba":
        target.add_lora(str(there[name]))
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    said = set[tuple[int, ...]]()

    def outcomes(name: str, **more: Any) -> dict[str, float]:
        asked = {**more, "lora": str(here[name])}
        expected = source.ask(prompt, NUM_OUTPUT, **asked).token_ids
        said.add(tuple(expected))
        answer, outcomes = forward(source, target, prompt, **asked)
        assert answer.token_ids == expected
        return outcomes

    assert outcomes("a") == outcomes("b", **SEED) == {"ended": 1}
    assert outcomes("c") == {"hash_mismatch": 1}
    # The target's workers have let go of it; once more its files are there, and once not.
    assert outcomes("d") == {"ended": 1}
    shutil.rmtree(there["e"])
    assert outcomes("e") == {"no_adapter": 1}
    stranger = make_tiny_lora(tmp_path / "stranger", model, 8)
    here["stranger"] = stranger
    assert outcomes("stranger") == {"no_adapter": 1}
    assert len(said) == 6
    target.wait_log("adapter e could not be loaded")


def test_images_go_with_their_request(
    two: Callable[..., tuple[Engine, Engine]], models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    """The target encodes them only if it has to compute the prompt anew."""
    source, target = two({"limit_mm_per_prompt": {"image": 2}}, model=models("images"))
    text = [prompt_of(40, part) for part in "abc"]
    prompt = [*text[0], IMAGE_TOKEN, *text[1], IMAGE_TOKEN, *text[2]]
    said = set[tuple[int, ...]]()

    def reset() -> None:
        target.step()
        assert target.reset_prefix_cache(running=True)

    for number, then in enumerate((lambda: None, reset), 1):
        images = colors(number)[:2]
        expected = source.ask(prompt, NUM_OUTPUT, images=images).token_ids
        said.add(tuple(expected))
        answer, outcomes = forward(source, target, prompt, then, images=images)
        assert (answer.token_ids, outcomes) == (expected, {"ended": 1})
        assert len(target.encoded_images()) == 2 * (then is reset)
    assert len(said) == 2


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
def test_logprobs_of_tokens_come_with_them(
    two: Callable[..., tuple[Engine, Engine]], prompt_of: PromptOf, runs_ahead: bool
) -> None:
    """Beside requests that ask for more of them, or for none."""
    source, target = two({}, runs_ahead=runs_ahead)
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    target.add("more", prompt_of(40, "more"), 500, logprobs=5)
    target.add("none", prompt_of(40, "none"), 500)
    target.drive(3)
    for asked in ({"logprobs": 2}, {"logprobs": 0, **SEED}):
        expected = source.ask(prompt, NUM_OUTPUT, **asked)
        answer, outcomes = forward(source, target, prompt, **asked)
        assert outcomes == {"ended": 1}
        assert answer.token_ids == expected.token_ids
        assert len(answer.logprobs) == NUM_OUTPUT
        for got, one in zip(answer.logprobs, expected.logprobs, strict=True):
            assert got == pytest.approx(one, abs=1e-4)


def test_logprobs_of_another_kind_stay(
    two: Callable[..., tuple[Engine, Engine]], prompt_of: PromptOf
) -> None:
    source, target = two({}, {"logprobs_mode": "raw_logits"})
    prompt = prompt_of(40)
    expected = source.ask(prompt, NUM_OUTPUT, logprobs=2)
    answer, outcomes = forward(source, target, prompt, logprobs=2)
    assert outcomes == {"incompatible": 1}
    assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
    target.wait_log("the engines differ in logprobs")
    assert forward(source, target, prompt)[1] == {"ended": 1}


def test_structured_output_of_another_backend_stays(
    two: Callable[..., tuple[Engine, Engine]], prompt_of: PromptOf
) -> None:
    """Else it would become that of all requests of the peer, which has had none yet."""
    guidance, xgrammar = (
        {"structured_outputs_config": {"backend": backend}} for backend in ("guidance", "xgrammar")
    )
    source, target = two(guidance, xgrammar)
    asked = {"structured_outputs": {"regex": "[a-z]{90}"}, "ignore_eos": False}
    prompt = prompt_of(40)
    expected = source.ask(prompt, NUM_OUTPUT, **asked)
    answer, outcomes = forward(source, target, prompt, **asked)
    assert (answer.token_ids, outcomes) == (expected.token_ids, {"incompatible": 1})
    source.wait_log("structured output is made by guidance there, and by xgrammar here")
