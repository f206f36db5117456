# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state beside full attention (Qwen3-Next's GDN), against one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineConfig,
    Fleet,
    PromptOf,
    assert_no_leak,
)
from tests.integration.pairs import (
    EVERY_LAYER,
    ORDERS,
    Pair,
    Three,
    abort_early_and_late,
    expect_recovery_and_preemptions,
    run_in_need_of_memory,
)
from tests.integration.test_moves import expect_broken_answers_to_go_on, num_bytes_of_move

pytestmark = pytest.mark.engine

NUM_STATES = 3
PAGE_BYTES = 2 * BLOCK_SIZE * 4 * 256 * 2
"""Of each layer: a state is padded to the size of a page of full attention."""
CHUNKED = 600
"""More tokens than an engine of these tests computes in two steps."""
SHORT, LONG = 20, 300
TIE = 0.15
"""In logprobs, of which bfloat16 tells apart 0.03 or 0.06 here."""
FAULTY = {"staging_slot_bytes": 128 * 1024, "staging_slots": 128}


def num_bytes(num_tokens: int) -> int:
    """What of a prompt moves: all of full attention, and of each other layer the state behind the
    prompt, and that at the last boundary of blocks before, if the producer has stopped there.
    """
    num_states = 2 if num_tokens > BLOCK_SIZE and num_tokens % BLOCK_SIZE else 1
    return (-(-num_tokens // BLOCK_SIZE) + NUM_STATES * num_states) * PAGE_BYTES


class States(Three):
    def assert_right(self, answer: Answer, prompt: list[int]) -> None:
        assert_likeliest(self.single, prompt, answer.token_ids)


def assert_likeliest(single: Engine, prompt: list[int], token_ids: list[int]) -> None:
    """Token by token what one engine says, or as good as that.

    vLLM's kernels for states on a CPU take bfloat16 only, in which two tokens are now and then
    equally likely: then a step of other requests, or one that begins elsewhere, may turn them.
    """
    if single.would_say(token_ids, prompt, TIE):
        return
    known: list[int] = []
    while rest := token_ids[len(known) :]:
        expected = single.ask(prompt + known, len(rest), logprobs=5)
        pairs = enumerate(zip(rest, expected.token_ids, strict=True))
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if first is None:
            return
        likely = expected.logprobs[first]
        assert max(likely.values()) - likely.get(rest[first], -100) < TIE, (prompt, token_ids)
        known += rest[: first + 1]


@pytest.fixture
def states(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[States]:
    config = replace(base_config, model=models("gdn"), dtype="bfloat16")
    yield from States.of(fleet, config, FAULTY)


@pytest.fixture
def pair(states: States, prompt_of: PromptOf) -> Pair:
    return Pair(states.producer, states.consumer, prompt_of(5, "where"))


LENGTHS = [SHORT, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE, LONG, CHUNKED]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_the_state_behind_the_prompt_moves(
    states: States, pair: Pair, prompt_of: PromptOf, num_tokens: int, order: str
) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask_in(order, prompt, 40)
    states.assert_right(answer, prompt)
    assert answer.provenance["first_token"] == "peer"
    assert answer.sources == (0, num_tokens, 0)
    assert answer.provenance["num_peer_bytes"] == num_bytes(num_tokens)


@pytest.mark.parametrize("num_tokens", [SHORT, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1, LONG])
def test_where_the_consumer_samples_the_first_token(
    states: States, prompt_of: PromptOf, num_tokens: int
) -> None:
    """It begins at the last boundary of blocks at which its producer has stopped."""
    consumer = states.other("kv_consumer", {"first_token": "compute"})
    prompt = prompt_of(num_tokens)
    answer = consumer.ask(prompt, 24, states.producer.prefill(prompt))
    states.assert_right(answer, prompt)
    rest = num_tokens % BLOCK_SIZE
    num_loaded = num_tokens - rest if rest else 0
    assert answer.sources == (0, num_loaded, num_tokens - num_loaded)


def test_what_the_consumer_has_is_not_sent(states: States, pair: Pair, prompt_of: PromptOf) -> None:
    """The same prompt twice, and then what a chat makes of it."""
    prompt = prompt_of(3 * BLOCK_SIZE + 6)
    first = pair.ask(prompt, max_tokens=BLOCK_SIZE)
    again = pair.ask(prompt, max_tokens=BLOCK_SIZE)
    assert again.token_ids == first.token_ids
    assert again.sources == (3 * BLOCK_SIZE, 6, 0)
    chat = prompt + first.token_ids + prompt_of(3 * BLOCK_SIZE, "next turn")
    answer = pair.ask(chat)
    states.assert_right(answer, chat)
    assert answer.sources == (4 * BLOCK_SIZE, len(chat) - 4 * BLOCK_SIZE, 0)


def test_samples_of_one_prompt_have_states_of_their_own(
    states: States, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(LONG)
    known = states.producer.prefill(prompt)
    answer = states.consumer.ask(prompt, 16, known, n=3, temperature=0.8, seed=3)
    expected = states.single.ask(prompt, 16, n=3, temperature=0.8, seed=3)
    assert answer.samples == expected.samples


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("script", ["fail", "ok*5,fail", "ok*9,corrupt"])
def test_failed_load_goes_on_from_the_last_whole_boundary(
    states: States, pair: Pair, prompt_of: PromptOf, script: str, order: str
) -> None:
    prefix = prompt_of(3 * BLOCK_SIZE, "prefix")
    states.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(6 * BLOCK_SIZE + 6, "second")
    answer = pair.ask_in(order, prompt, 24, script=f"{script},ok*")
    states.assert_right(answer, prompt)
    local, peer, computed = answer.sources
    assert (local, peer, computed) == (len(prefix), 0, len(prompt) - len(prefix))
    assert answer.outcome != "loaded"


def test_another_prompt_never_gets_the_state(states: States, prompt_of: PromptOf) -> None:
    """One that is a part of it, longer, or differs at the end: the boundary before may do."""
    prompt = prompt_of(4 * BLOCK_SIZE + 9)
    others = [prompt[:-1], prompt[: 4 * BLOCK_SIZE + 1], prompt[: 4 * BLOCK_SIZE], prompt[:-20]]
    others += [[*prompt, 7], [*prompt, *prompt_of(40, "more")], [*prompt[:-1], prompt[-1] ^ 1]]
    for other in others:
        answer = states.consumer.ask(other, 24, states.producer.prefill(prompt))
        states.assert_right(answer, other)
        assert answer.provenance["first_token"] != "peer"


def test_preemption(states: States, prompt_of: PromptOf) -> None:
    consumer = states.other("kv_consumer", num_blocks=50, max_model_len=640)
    prompts = {name: prompt_of(190, name) for name in "abcd"}
    before = consumer.counts()
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 200, states.producer.prefill(prompt))
    answers = run_in_need_of_memory(consumer, prompts)
    for name, prompt in prompts.items():
        states.assert_right(answers[name], prompt)
    assert_no_leak(consumer, before)


def test_abort(pair: Pair, prompt_of: PromptOf) -> None:
    abort_early_and_late(pair, prompt_of)


def test_a_producer_that_would_go_on_keeps_nothing(states: States, prompt_of: PromptOf) -> None:
    """It would write over the state behind the prompt."""
    prompt = prompt_of(LONG)
    states.producer.add("long", prompt, 2, {"do_remote_decode": True})
    assert not states.producer.run()["long"].kv_transfer_params.get("transfer_id")
    states.producer.wait_log("send the producer max_tokens 1")


@pytest.mark.parametrize(
    ("num_tokens", "cut", "runs_ahead"),
    [
        (SHORT, 1, False),
        (BLOCK_SIZE, 4, True),
        (LONG, 3, True),
        (LONG, 5, False),
        (LONG, 20, False),
    ],
)
def test_request_moves_while_it_runs(
    states: Three, prompt_of: PromptOf, num_tokens: int, cut: int, runs_ahead: bool
) -> None:
    """A state only when it has stopped, or is at a boundary of blocks."""
    prompt = prompt_of(num_tokens)
    num_computed, copied = num_bytes_of_move(states, prompt, cut, runs_ahead=runs_ahead)
    num_states = copied // PAGE_BYTES - -(-num_computed // BLOCK_SIZE)
    assert NUM_STATES <= num_states <= 3 * NUM_STATES


@pytest.mark.parametrize("script", ["fail", "ok*3,corrupt,ok*2,fail", "ok*9,corrupt"])
def test_request_moves_after_all_where_loads_have_failed(
    states: Three, prompt_of: PromptOf, script: str
) -> None:
    num_bytes_of_move(states, prompt_of(LONG), 3, f"{script},ok*")


def test_answer_that_broke_off_goes_on_from_its_tokens(states: Three, prompt_of: PromptOf) -> None:
    expect_broken_answers_to_go_on(states, prompt_of(LONG))


def test_states_of_mamba2(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    """An engine hands itself what it has not cached: the state behind the prompt."""
    config = replace(base_config, model=models("mamba2"), dtype="bfloat16")
    single, both = fleet.engines(config, replace(config, role="kv_both"))
    prompt = prompt_of(LONG)
    answer = both.ask(prompt, 40, both.prefill(prompt))
    assert_likeliest(single, prompt, answer.token_ids)
    rest = LONG % BLOCK_SIZE
    assert answer.sources == (LONG - rest, rest, 0)


def test_states_of_mamba2_between_layers_that_keep_nothing(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    """Nemotron-H."""
    config = replace(base_config, model=models("nemotron"), dtype="bfloat16")
    single, producer, consumer = fleet.engines(
        config,
        replace(config, role="kv_producer", faults="ok*"),
        replace(config, role="kv_consumer", num_blocks=50, max_model_len=640),
    )
    prompt = prompt_of(LONG)
    answer = consumer.ask(prompt, 40, producer.prefill(prompt))
    assert_likeliest(single, prompt, answer.token_ids)
    assert answer.sources == (0, LONG, 0)
    expect_recovery_and_preemptions(
        producer,
        consumer,
        lambda answer, prompt: assert_likeliest(single, prompt, answer.token_ids),
        prompt_of,
    )


def test_layers_that_are_not_numbered_as_they_run(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    """Zamba2, whose producer sends each layer when it is computed."""
    config = replace(base_config, model=models("zamba2"), dtype="bfloat16")
    single, producer, consumer = fleet.engines(
        config,
        replace(config, role="kv_producer"),
        replace(config, role="kv_consumer").with_transfer(**EVERY_LAYER),
    )
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    for order in ORDERS:
        prompt = prompt_of(LONG, order)
        answer = pair.ask_in(order, prompt)
        assert_likeliest(single, prompt, answer.token_ids)
        assert answer.sources == (0, LONG, 0)
