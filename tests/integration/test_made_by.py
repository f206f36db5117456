# SPDX-License-Identifier: Apache-2.0
"""An answer goes on only where it would have been made: what engines tell a router of what they
compute with, and that they compare it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import Answer, Engine, PromptOf
from tests.integration.moving import Moving
from tests.integration.processors import AllTokens
from tests.integration.test_identity import LORA, adapters, other_model  # noqa: F401
from tests.integration.test_resume import NUM_OUTPUT, begun
from tests.unit.engine.test_registrar import Web, until
from vllm_ascend_pd.resume import made_by

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

Prompt = list[int]
REGEX = {"structured_outputs": {"regex": "[a-z]{90}"}, "ignore_eos": False}
ADAPTERS = json.dumps(LORA)
PROCESSOR = f"{AllTokens.__module__}:{AllTokens.__name__}"


class Known:
    """An engine as a router knows it."""

    def __init__(self, engines: Engines, web: Web, **config: Any) -> None:
        self.engine: Engine = engines.own("kv_both", router=web.url, **config)
        self._web = web

    def told(self) -> dict[str, Any]:
        return self._web.last()

    def made_by(self, model: str = "") -> str:
        told = self.told()
        adapter, grammars = told["adapters"].get(model, ""), told["grammars"]
        return made_by(told["fingerprint"], adapter=adapter, grammars=grammars, **told["sampling"])

    def assert_told_by_metrics(self) -> None:
        """What it registers, but for the fingerprint."""
        told = self.told()
        parts = [(part, "", value) for part, value in told["sampling"].items()]
        parts += [("grammars", "", told["grammars"])] if told["grammars"] else []
        parts += [("adapter", name, digest) for name, digest in told["adapters"].items()]
        series = {f"tokens_made_by/{'/'.join(labels)}" for labels in parts}
        told_now = self.engine.metrics().items()
        assert {
            name for name, value in told_now if value and name.startswith("tokens_made_by")
        } == series

    def go_on(self, begun_by: Known, prompt: Prompt, known: list[int], **more: Any) -> Answer:
        """With what the other one has given."""
        model = Path(more.get("lora") or "").name
        kv = begun(prompt, known, made_by=begun_by.made_by(model))
        return self.engine.ask(prompt, kv=kv, **{"max_tokens": NUM_OUTPUT, **more})

    def assert_refuses(self, begun_by: Known, differing: str, *args: Any, **more: Any) -> None:
        answer = self.go_on(begun_by, *args, **more)
        assert answer.kv_transfer_params["resume"] == {"refused": "made_otherwise"}
        assert answer.token_ids == []
        self.engine.wait_log(f"another engine has made resume.output_token_ids: {differing} differ")


@pytest.fixture
def known(engines: Engines) -> Iterator[Callable[..., Known]]:
    with ExitStack() as webs:
        yield lambda **config: Known(engines, webs.enter_context(closing(Web())), **config)


def test_other_weights_do_not_go_on(
    known: Callable[..., Known],
    prompt_of: PromptOf,
    other_model: str,  # noqa: F811
) -> None:
    """Those of another folder, and those that were changed in place; also while nobody knows what
    they are."""
    first, like, other = known(), known(), known(model=other_model)
    prompt = prompt_of(40)
    expected = first.engine.ask(prompt, NUM_OUTPUT).token_ids
    assert like.go_on(first, prompt, expected[:5]).token_ids == expected
    other.assert_refuses(first, "weights", prompt, expected[:5])
    like.engine.scale_norms(2)
    like.assert_refuses(first, "generation", prompt, expected[:5])
    first.engine.call_workers("reload_weights", weights_path=other_model)
    until(lambda: "generation=files-" in first.told()["fingerprint"])
    anew = first.engine.ask(prompt, NUM_OUTPUT).token_ids
    assert anew != expected
    like.assert_refuses(first, "generation", prompt, anew[:5])
    like.engine.call_workers("reload_weights", weights_path=other_model)
    assert like.go_on(first, prompt, anew[:5]).token_ids == anew


def test_adapter_of_the_same_name_and_other_contents_does_not_go_on(
    known: Callable[..., Known],
    prompt_of: PromptOf,
    adapters: tuple[Path, Path],  # noqa: F811
) -> None:
    first, other = (known(llm=ADAPTERS) for _ in range(2))
    old, new = map(str, adapters)
    prompt = prompt_of(40)
    plain = first.engine.ask(prompt, NUM_OUTPUT).token_ids
    expected = first.engine.ask(prompt, NUM_OUTPUT, lora=old).token_ids
    until(lambda: list(first.told()["adapters"]) == ["adapter"])
    first.assert_told_by_metrics()
    other.assert_refuses(first, "adapter", prompt, expected[:5], lora=new)
    assert other.go_on(first, prompt, plain[:5]).token_ids == plain
    assert other.engine.ask(prompt, NUM_OUTPUT, lora=old).token_ids == expected
    assert other.go_on(first, prompt, expected[:5], lora=old).token_ids == expected


def test_structured_output_of_another_backend_does_not_go_on(
    known: Callable[..., Known], prompt_of: PromptOf
) -> None:
    options = json.dumps({"structured_outputs_config": {"backend": "guidance"}})
    first, like, other = known(llm=options), known(llm=options), known()
    assert first.told()["grammars"] == ""
    prompt = prompt_of(40)
    plain = first.engine.ask(prompt, NUM_OUTPUT).token_ids
    expected = first.engine.ask(prompt, NUM_OUTPUT, **REGEX).token_ids
    until(lambda: "GuidanceBackend" in first.told()["grammars"])
    first.assert_told_by_metrics()
    other.assert_refuses(first, "grammars", prompt, expected[:5], **REGEX)
    assert other.go_on(first, prompt, plain[:5]).token_ids == plain
    assert like.go_on(first, prompt, expected[:5], **REGEX).token_ids == expected


@pytest.mark.parametrize(
    ("differing", "config", "max_tokens"),
    [
        ("defaults", {"llm": '{"override_generation_config": {"repetition_penalty": 1.5}}'}, 8),
        ("processors", {"llm": json.dumps({"logits_processors": [PROCESSOR]})}, 8),
        ("length_limit", {"max_model_len": 512}, 600),
    ],
    ids=["defaults", "processors", "length"],
)
def test_tokens_that_are_sampled_otherwise_do_not_go_on(
    known: Callable[..., Known],
    prompt_of: PromptOf,
    differing: str,
    config: dict[str, Any],
    max_tokens: int,
) -> None:
    """Nor does a request that runs move, but for what its sampling parameters say."""
    first, other = known(), known(**config)
    prompt = prompt_of(40)
    expected = first.engine.ask(prompt, max_tokens).token_ids
    other.assert_refuses(first, differing, prompt, expected[:5], max_tokens=max_tokens)
    moving = Moving(first.engine, prompt, max_tokens, {})
    moving.decode(3)
    if differing == "defaults":
        moving.move(other.engine)
    else:
        assert moving.refusal_of(other.engine) == "move_incompatible"
        other.engine.wait_log(f"the engines differ in {differing}")
    assert moving.answer().token_ids == expected
    if differing == "length_limit":
        assert other.go_on(first, prompt, expected[:5]).token_ids == expected[:NUM_OUTPUT]


def test_tokens_of_a_seed_go_on_only_where_it_gives_the_same_random_numbers(
    known: Callable[..., Known], prompt_of: PromptOf
) -> None:
    """Nor live. Greedy ones do, and such as need only be as likely; these say so. (On a CPU they
    would be the same numbers, but no engine looks at that.)
    """
    first, other = known(), known(llm='{"use_fp64_gumbel": true}')
    prompt, seeded = prompt_of(40), {"temperature": 0.9, "seed": 7}
    expected, greedy = (first.engine.ask(prompt, NUM_OUTPUT, **it) for it in (seeded, {}))
    other.assert_refuses(first, "draws", prompt, expected.token_ids[:5], **seeded)
    moving = Moving(first.engine, prompt, NUM_OUTPUT, seeded)
    moving.decode(3)
    assert moving.refusal_of(other.engine) == "move_incompatible"
    assert moving.answer().token_ids == expected.token_ids

    assert other.go_on(first, prompt, greedy.token_ids[:5]).token_ids == greedy.token_ids
    moving = Moving(first.engine, prompt, NUM_OUTPUT, {})
    moving.decode(3)
    moving.move(other.engine)
    assert moving.answer().token_ids == greedy.token_ids
    for engine, outcome in ((other, "sampled"), (first, "exact")):
        kv = begun(prompt, expected.token_ids[:5], only_exact=False, made_by=first.made_by())
        answer = engine.engine.ask(prompt, NUM_OUTPUT, kv=kv, **seeded)
        assert answer.kv_transfer_params["resume"] == {"outcome": outcome}
