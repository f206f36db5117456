# SPDX-License-Identifier: Apache-2.0
"""Engines with a drafter: its KV is moved with the model's.

At temperature 0 tokens are equal whatever is drafted, so it is the acceptance rate that tells
whether a drafter has read the KV of its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import copy_with_more_heads
from tests.integration.conftest import SingleEngine
from tests.integration.drafters import PAGE_BYTES, START, WINDOW, make_drafted
from tests.integration.engines import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineConfig,
    Fleet,
    PromptOf,
    make_prompt,
)
from tests.integration.moving import coming
from tests.integration.pairs import CHUNKED, EVERY_LAYER, ORDERS, Pair, run_in_need_of_memory
from tests.integration.pool_steps import POOL, delta, provenance, settle, store
from tests.integration.test_moves import move, outcome_of, two
from tests.integration.test_moves_with_grammars import structured
from tests.integration.test_preemption import NAMES, NUM_OUTPUT, NUM_TOKENS, SMALL
from tests.integration.test_states import TIE, assert_likeliest
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

NUM_ANSWER = 128
"""What vLLM counts as rejected in the first step of a request whose prompt is loaded, and is
placeholders for drafts, makes two percent of so many tokens."""
MLA = "deepseek"
STATES = "gdn"
NUM_BLOCKS = {"windows": 29, STATES: 36}
"""Of several groups, so few that requests are preempted."""
KINDS = ("draft_model", "eagle", "eagle3", "mimo", MLA, "windows", STATES)
Prompt = list[int]


@dataclass
class Drafting:
    """Engines of one model with one drafter, and what one engine of them answers."""

    kind: str
    options: dict[str, Any]
    single: SingleEngine
    engine: Engine
    """That one."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Of each answer that was ``expected``: how many it accepted, of how many."""
    _known: dict[str, tuple[Answer, tuple[int, int]]] = field(default_factory=dict)

    @property
    def plain(self) -> dict[str, Any]:
        """Of engines without the drafter."""
        return {name: value for name, value in self.options.items() if name != "llm"}

    @property
    def block_size(self) -> int:
        return int(self.options.get("block_size", BLOCK_SIZE))

    def rates(self, *engines: Engine, least: float = 0.93) -> Rates:
        """``least``: of that of the one engine."""
        # In bfloat16 answers part where two tokens are as likely, and other drafts follow.
        return Rates(self, engines, 0.9 if self.is_bfloat16 else least)

    def expected(self, prompt: Prompt, num_tokens: int) -> Answer:
        """Of the one engine, which is asked once, alone."""
        key = repr((prompt, num_tokens))
        if key not in self._known:
            before = self.engine.metrics()
            answer = self.engine.ask(prompt, num_tokens)
            counts = self.engine.metrics()
            names = ("accepted_tokens", "draft_tokens")
            accepted, drafted = (int(delta(before, counts, name)) for name in names)
            self._known[key] = answer, (accepted, drafted)
        answer, drafts = self._known[key]
        self.drafts.append(drafts)
        return answer

    @property
    def is_bfloat16(self) -> bool:
        return self.options.get("dtype") == "bfloat16"

    def assert_all_right(
        self, answers: Mapping[str, Answer], prompts: Mapping[str, Prompt]
    ) -> None:
        """The one engine decodes them beside each other, too: other drafts are accepted then."""
        lengths = {name: len(answers[name].token_ids) for name in prompts}
        expected = self.single.beside((prompts[name], lengths[name], {}) for name in prompts)
        for (name, prompt), one in zip(prompts.items(), expected, strict=True):
            self._assert_same(answers[name], one, prompt, name)

    def assert_right(self, answer: Answer, prompt: Prompt, name: str = "") -> None:
        self._assert_same(answer, self.expected(prompt, len(answer.token_ids)), prompt, name)

    def _assert_same(self, answer: Answer, one: Answer, prompt: Prompt, name: str) -> None:
        expected = one.token_ids
        if answer.token_ids != expected and self.is_bfloat16:
            assert_likeliest(self.engine, prompt, answer.token_ids)
        else:
            assert answer.token_ids == expected, name


class Rates:
    """Acceptance rates from here on."""

    def __init__(self, drafting: Drafting, engines: tuple[Engine, ...], least: float) -> None:
        self._drafting = drafting
        self._num_before = len(drafting.drafts)
        self._engines = engines
        self._least = least
        self._before = [engine.metrics() for engine in engines]

    def assert_like_one_engine(self) -> None:
        rates = [
            delta(before, (after := engine.metrics()), "accepted_tokens")
            / delta(before, after, "draft_tokens")
            for engine, before in zip(self._engines, self._before, strict=True)
        ]
        drafts = self._drafting.drafts[self._num_before :]
        expected = sum(accepted for accepted, _ in drafts) / sum(drafted for _, drafted in drafts)
        assert expected > 0.5, "a drafter that does not agree shows nothing"
        for rate in rates:
            assert rate >= self._least * expected, (rates, expected)


def make_options(
    kind: str, folder: Path, base: EngineConfig, seed: int = 0, num_drafts: int = 2
) -> dict[str, Any]:
    if kind == "draft_model":
        model = base.model
        speculative: dict[str, Any] = {"method": kind, "model": model}
    else:
        drafted = make_drafted(kind, folder / kind, Path(base.model), seed)
        model, speculative = drafted.model, drafted.speculative
    speculative["num_speculative_tokens"] = num_drafts
    options = {"model": model, "llm": json.dumps({"speculative_config": speculative})}
    # On a CPU MLA has its own blocks, and one ordinary engine computes a prompt in one piece.
    if kind == MLA:
        options |= {"block_size": 16, "max_num_batched_tokens": 1024}
    return options | ({"dtype": "bfloat16"} if kind == STATES else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


@pytest.fixture(scope="module")
def drafting(
    request: pytest.FixtureRequest, fleet: Fleet, base_config: EngineConfig, folder: Path
) -> Iterator[Drafting]:
    options = make_options(request.param, folder, base_config)
    with fleet.kept(replace(base_config, **options)) as engine:
        yield Drafting(request.param, options, SingleEngine(engine), engine)


each_kind = pytest.mark.parametrize("drafting", KINDS, indirect=True)
without_drafter = pytest.mark.parametrize(
    "drafting", ["draft_model", "eagle", "eagle3", "mimo", MLA, "even_windows"], indirect=True
)
some_kinds = pytest.mark.parametrize(
    "drafting", ["eagle", "draft_model", "windows", STATES], indirect=True
)


@pytest.fixture
def started(prompt_of: PromptOf) -> PromptOf:
    """Prompts that all drafters of these tests see in full."""

    def make(num_tokens: int, part: str = "") -> Prompt:
        return START + prompt_of(num_tokens - len(START), part)

    return make


def same(num_tokens: int, part: str = "") -> Prompt:
    """One that several tests ask for, so that the one engine answers it once."""
    return START + make_prompt(num_tokens - len(START), f"drafts {num_tokens} {part}")


def forget(*engines: Engine) -> None:
    for engine in engines:
        assert engine.reset_prefix_cache()


@each_kind
def test_prefill_first_is_like_one_engine(engines: Engines, drafting: Drafting) -> None:
    producer = engines.shared("kv_producer", **drafting.options)
    consumer = engines.shared("kv_consumer", transfer={"load_mode": "step"}, **drafting.options)
    rates = drafting.rates(consumer)
    for num_tokens in (3 * BLOCK_SIZE, CHUNKED):
        forget(producer, consumer)
        prompt = same(num_tokens)
        answer = consumer.ask(prompt, NUM_ANSWER, producer.prefill(prompt))
        drafting.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens, 0)
        assert answer.provenance["first_token"] == "peer"
        assert answer.outcome == "loaded"
    rates.assert_like_one_engine()


@pytest.mark.parametrize("drafting", ["windows"], indirect=True)
def test_of_windows_only_the_last_blocks_move(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """Two layers have windows, one has none, and so has the drafter's."""
    producer = engines.shared("kv_producer", **drafting.options)
    consumer = engines.shared("kv_consumer", **drafting.options)
    prompt = started(CHUNKED)
    answer = consumer.ask(prompt, 20, producer.prefill(prompt))
    num_blocks = -(-CHUNKED // BLOCK_SIZE)
    num_pages = 2 * num_blocks + 2 * (num_blocks - (CHUNKED - WINDOW + 1) // BLOCK_SIZE)
    assert answer.provenance["num_peer_bytes"] == num_pages * PAGE_BYTES


@some_kinds
def test_engines_that_run_ahead_are_like_one_engine(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    options = {**drafting.options, "runs_ahead": True}
    pair = Pair(
        engines.shared("kv_producer", **options),
        engines.shared("kv_consumer", transfer=EVERY_LAYER, **options),
        started(2 * BLOCK_SIZE, "where"),
    )
    rates = drafting.rates(pair.consumer)
    prompt = same(CHUNKED)
    for order in ORDERS:
        forget(pair.producer, pair.consumer)
        answer = pair.ask_in(order, prompt, NUM_ANSWER)
        drafting.assert_right(answer, prompt, order)
        assert answer.outcome == "loaded"
    rates.assert_like_one_engine()
    if drafting.is_bfloat16:  # where a seed draws one token as well as another
        return
    seeded = {"temperature": 0.9, "seed": 11}
    expected = drafting.single(prompt, NUM_ANSWER, **seeded)
    for order in ORDERS:
        forget(pair.producer, pair.consumer)
        answer = pair.ask_in(order, prompt, NUM_ANSWER, **seeded)
        assert answer.token_ids == expected.token_ids, order
        assert answer.outcome == "loaded"


@pytest.mark.parametrize("drafting", [STATES], indirect=True)
def test_states_beside_requests_that_end_and_join_while_an_engine_runs_ahead(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """A prompt that gets the row of a request that has ended goes behind the other one, of which
    drafts were accepted.
    """
    llm = {**json.loads(drafting.options["llm"]), "max_num_seqs": 2}
    options = {**drafting.options, "llm": json.dumps(llm), "runs_ahead": True}
    engine = engines.shared("kv_both", **options)
    lengths = [NUM_OUTPUT // 2, *[NUM_OUTPUT] * 7]  # so that no two end at once
    prompts = {f"{n}": started(NUM_TOKENS, f"{n}") for n in range(len(lengths))}
    for (name, prompt), length in zip(prompts.items(), lengths, strict=True):
        engine.add(name, prompt, length)
    answers = engine.run()
    drafting.assert_all_right(answers, prompts)


@pytest.mark.parametrize("drafting", [STATES], indirect=True)
def test_states_behind_steps_that_get_no_draft_or_fewer(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """A grammar refuses drafts behind others that were accepted, and then there is no room for them
    before the longest length. A state of other tokens shows in logprobs: the grammar leaves little
    choice.
    """
    short = {"max_model_len": 128}
    engine = engines.shared("kv_both", **short, **drafting.options)
    plain = engines.shared("kv_both", **short, **drafting.plain)
    prompt, fourth = started(50), structured(regex="([a-z ]{4}Z)*")
    answer = engine.ask(prompt, 78, logprobs=5, **fourth)
    expected = plain.ask(prompt, 78, logprobs=5, **fourth)
    assert len(answer.token_ids) == len(expected.token_ids) == 78
    for number, (token, one) in enumerate(zip(answer.token_ids, expected.token_ids, strict=True)):
        likely = expected.logprobs[number]
        assert abs(likely.get(token, -100) - answer.logprobs[number][token]) < TIE, number
        if token != one:  # as likely, as that says of both
            break


@each_kind
def test_decode_first_is_like_one_engine(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    producer = engines.shared("kv_producer", **drafting.options)
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER, **drafting.options)
    pair = Pair(producer, consumer, started(5, "where"))
    rates = drafting.rates(consumer)
    for num_tokens in (3 * BLOCK_SIZE + 5, CHUNKED):
        forget(producer, consumer)
        prompt = same(num_tokens)
        answer = pair.ask(prompt, max_tokens=NUM_ANSWER)
        drafting.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens, 0)
    rates.assert_like_one_engine()


@each_kind
def test_pool_hit_is_like_one_engine(engines: Engines, drafting: Drafting) -> None:
    options = {"pool": POOL, "transfer": {"load_mode": "park"}, **drafting.options}
    engine = engines.shared("kv_both", **options)
    prompts = [same(3 * BLOCK_SIZE + 5), same(CHUNKED)]
    for prompt in prompts:
        store(engine, prompt)
    rates = drafting.rates(engine)
    for prompt in prompts:
        answer = engine.ask(prompt, NUM_ANSWER, {"return_provenance": True})
        drafting.assert_right(answer, prompt)
        num_full = len(prompt) // drafting.block_size * drafting.block_size
        num_hit = num_full - drafting.block_size * (drafting.kind == STATES)
        assert provenance(answer) == {"dram": num_hit, "computed": len(prompt) - num_hit}
    rates.assert_like_one_engine()


@pytest.mark.parametrize("drafting", [STATES], indirect=True)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_decoded_states_and_failed_loads_beside_a_pool(
    engines: Engines, drafting: Drafting, started: PromptOf, runs_ahead: bool
) -> None:
    """Then, too, requests that are preempted, of which the pool has what they have decoded."""
    small = SMALL | {"num_blocks": NUM_BLOCKS[STATES]}
    options = {"pool": POOL, "pool_faults": "get:ok*", **small, **drafting.options}
    engine = engines.shared(
        "kv_both", transfer={"load_mode": "step"}, runs_ahead=runs_ahead, **options
    )
    engine.set_pool_faults("")
    turn = started(NUM_TOKENS)
    turn += store(engine, turn, NUM_OUTPUT).token_ids
    hits = []
    for faults in ("", "get:ok*2,corrupt"):
        engine.set_pool_faults(faults)
        answer = engine.ask(turn, 2 * BLOCK_SIZE, {"return_provenance": True})
        drafting.assert_right(answer, turn)
        hits.append(provenance(answer).get("dram", 0))
        settle(engine)
        assert engine.reset_prefix_cache()
    # vLLM keeps a state at a boundary of decoded blocks if a step ends there or a token before,
    # and of a prompt at the last but one.
    whole, failed = hits
    assert NUM_TOKENS - 2 * BLOCK_SIZE < whole < len(turn)
    assert whole % BLOCK_SIZE == failed == 0
    engine.set_pool_faults("")
    before = engine.metrics()
    prompts = {name: started(NUM_TOKENS, name) for name in NAMES}
    for name, prompt in prompts.items():
        engine.add(name, prompt, NUM_OUTPUT)
    answers = engine.run()
    after = engine.metrics()
    assert delta(before, after, "preemptions") > 0
    assert delta(before, after, "pool_loads/ok") > 0
    drafting.assert_all_right(answers, prompts)
    settle(engine)


@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
def test_each_of_two_workers_has_its_heads_of_the_drafter(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    producer = engines.shared("kv_producer", **drafting.options)
    llm = {**json.loads(drafting.options["llm"]), "tensor_parallel_size": 2}
    options = {**drafting.options, "llm": json.dumps(llm)}
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER, **options)
    rates = drafting.rates(consumer)
    for num_tokens in (3 * BLOCK_SIZE + 5, CHUNKED):
        forget(producer, consumer)
        prompt = same(num_tokens)
        answer = consumer.ask(prompt, NUM_ANSWER, producer.prefill(prompt))
        drafting.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens, 0)
    rates.assert_like_one_engine()


@some_kinds
def test_prompt_whose_begin_is_cached_here(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """All of it counts, also the last block, which vLLM would compute anew for a drafter."""
    producer = engines.shared("kv_producer", **drafting.options)
    consumer = engines.shared("kv_consumer", **drafting.options)
    prompt = same(CHUNKED)
    begin = prompt[: 4 * BLOCK_SIZE]
    prompts = (prompt, begin + started(CHUNKED))
    forget(producer, consumer)
    consumer.ask(begin + START, 1)
    rates = drafting.rates(consumer)
    for prompt in prompts:
        answer = consumer.ask(prompt, NUM_ANSWER, producer.prefill(prompt))
        drafting.assert_right(answer, prompt)
        assert answer.sources == (len(begin), len(prompt) - len(begin), 0)
    rates.assert_like_one_engine()


@pytest.mark.parametrize(
    ("drafting", "load_mode"),
    [("eagle", "step"), ("eagle", "park"), ("windows", "step"), (STATES, "park")],
    indirect=["drafting"],
)
def test_load_that_fails_is_computed(
    engines: Engines, drafting: Drafting, started: PromptOf, load_mode: str
) -> None:
    """By model and drafter; the drafts of another request are verified as ever."""
    producer = engines.shared("kv_producer", faults="ok*", **drafting.options)
    consumer = engines.shared("kv_consumer", transfer={"load_mode": load_mode}, **drafting.options)
    forget(producer, consumer)
    prompts = {name: same(NUM_TOKENS, name) for name in ("first", "second")}
    rates = drafting.rates(consumer)
    consumer.add("first", prompts["first"], NUM_ANSWER, producer.prefill(prompts["first"]))
    consumer.step_until("first", "status", "RUNNING")
    for _ in range(5):
        consumer.step()
    producer.set_faults("corrupt,ok*")
    consumer.add("second", prompts["second"], NUM_ANSWER, producer.prefill(prompts["second"]))
    answers = consumer.run()
    for name, prompt in prompts.items():
        drafting.assert_right(answers[name], prompt, name)
    assert answers["second"].sources == (0, 0, NUM_TOKENS)
    rates.assert_like_one_engine()


@some_kinds
def test_preempted_requests_get_their_tokens(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    producer = engines.shared("kv_producer", **drafting.options)
    small = SMALL | {"num_blocks": NUM_BLOCKS.get(drafting.kind, SMALL["num_blocks"])}
    consumer = engines.shared("kv_consumer", **small, **drafting.options)
    prompts = {name: started(NUM_TOKENS, name) for name in NAMES}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, NUM_OUTPUT, producer.prefill(prompt))
    answers = run_in_need_of_memory(consumer, prompts)
    drafting.assert_all_right(answers, prompts)


@pytest.mark.parametrize("drafting", ["eagle", "windows"], indirect=True)
def test_running_request_moves_with_the_kv_of_its_drafter(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    source, target = two(engines, **drafting.options)
    prompt = started(CHUNKED)
    rates = drafting.rates(target)
    expected = drafting.expected(prompt, 2 * NUM_ANSWER)
    source.add("r", prompt, 2 * NUM_ANSWER)
    for _ in range(10):
        source.step()
    left, right = move(source, target, prompt, 2 * NUM_ANSWER)
    assert right.token_ids == expected.token_ids
    assert right.sources == (0, len(prompt) + len(left.token_ids) - 1, 1)
    rates.assert_like_one_engine()


@pytest.mark.parametrize("drafting", [STATES], indirect=True)
def test_running_request_with_states_behind_drafts_stays(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    source, target = two(engines, **drafting.options)
    prompt = started(CHUNKED)
    source.add("r", prompt, NUM_TOKENS)
    source.step_until("r", "num_output_tokens", 5)
    target.add("r", prompt, NUM_TOKENS, coming(prompt, source))
    left, right = dict[str, Answer](), dict[str, Answer]()
    while "r" not in right and "r" not in left:
        left |= source.drive(1)
        right |= target.drive(5)
    assert outcome_of(right["r"]) == {"refused": "move_incompatible"}
    drafting.assert_right((left | source.run())["r"], prompt)


@each_kind
def test_kv_of_an_engine_without_the_drafter_is_refused_by_name(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """The prompt is computed, by model and drafter."""
    producer = engines.shared("kv_producer", **drafting.plain)
    consumer = engines.shared("kv_consumer", transfer={"load_mode": "step"}, **drafting.options)
    forget(producer, consumer)
    rates = drafting.rates(consumer)
    prompt = same(NUM_TOKENS, "first")
    answer = consumer.ask(prompt, NUM_ANSWER, producer.prefill(prompt))
    drafting.assert_right(answer, prompt)
    assert (answer.outcome, answer.sources) == ("incompatible", (0, 0, NUM_TOKENS))
    consumer.wait_log("draft=")
    rates.assert_like_one_engine()


@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
def test_kv_of_an_engine_with_another_drafter_is_refused_by_name(
    engines: Engines,
    drafting: Drafting,
    started: PromptOf,
    base_config: EngineConfig,
    folder: Path,
) -> None:
    """The prompt is computed. How many tokens are drafted makes no difference."""
    differing = engines.shared("kv_both", **make_options("eagle", folder, base_config, seed=1))
    pairs = (
        (differing, engines.shared("kv_consumer", **drafting.options)),
        (engines.shared("kv_producer", **drafting.options), differing),
    )
    for number, (producer, consumer) in enumerate(pairs):
        prompt = started(NUM_TOKENS, str(number))
        answer = consumer.ask(prompt, 20, producer.prefill(prompt))
        assert answer.token_ids == drafting.single(prompt, 20).token_ids
        assert (answer.outcome, answer.sources) == ("incompatible", (0, 0, NUM_TOKENS))
        consumer.wait_log("draft=eagle-")


# Only the producer has a drafter.


@without_drafter
def test_engine_without_a_drafter_takes_the_layers_of_the_model(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """In both orders, and of a prompt that is computed in chunks."""
    producer = engines.shared("kv_producer", **drafting.options)
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER, **drafting.plain)
    pair = Pair(producer, consumer, started(5, "where"))
    questions = {
        (name := f"{order} {length}"): (order, started(length, name))
        for length in (3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5, CHUNKED)
        for order in ORDERS
    }
    answers = pair.ask_beside(questions, 20)
    prompts = {name: prompt for name, (_, prompt) in questions.items()}
    drafting.assert_all_right(answers, prompts)
    for name, answer in answers.items():
        assert answer.sources == (0, len(prompts[name]), 0)
        assert (answer.outcome, answer.provenance["first_token"]) == ("loaded", "peer")


@pytest.mark.parametrize("drafting", ["eagle", "even_windows"], indirect=True)
def test_engines_of_which_only_the_producer_drafts_run_ahead(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    producer = engines.shared("kv_producer", runs_ahead=True, **drafting.options)
    consumer = engines.shared(
        "kv_consumer", transfer=EVERY_LAYER, runs_ahead=True, **drafting.plain
    )
    pair = Pair(producer, consumer, started(2 * BLOCK_SIZE, "where"))
    prompt = started(CHUNKED)
    answer = pair.ask(prompt, max_tokens=NUM_OUTPUT)
    drafting.assert_right(answer, prompt)
    assert answer.sources == (0, CHUNKED, 0)


@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_of_two_workers_without_a_drafter_takes_its_part_of_the_model(
    engines: Engines, drafting: Drafting, started: PromptOf, parallel: str
) -> None:
    producer = engines.shared("kv_producer", **drafting.options)
    llm = json.dumps({parallel: 2})
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER, llm=llm, **drafting.plain)
    pair = Pair(producer, consumer, started(5, "where"))
    for num_tokens in (3 * BLOCK_SIZE + 5, CHUNKED):
        prompt = started(num_tokens, str(num_tokens))
        answer = pair.ask(prompt, max_tokens=20)
        drafting.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens, 0)


@pytest.mark.parametrize("drafting", ["eagle", "even_windows"], indirect=True)
@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_load_from_an_engine_that_drafts_fails_and_is_computed(
    engines: Engines, drafting: Drafting, started: PromptOf, load_mode: str
) -> None:
    """Then requests are preempted."""
    small = SMALL | {"num_blocks": 17 if drafting.kind == "eagle" else 29}
    producer = engines.shared("kv_producer", faults="ok*", **drafting.options)
    consumer = engines.shared(
        "kv_consumer", transfer={"load_mode": load_mode}, **small, **drafting.plain
    )
    prompt = started(NUM_TOKENS)
    params = producer.prefill(prompt)
    producer.set_faults("corrupt,ok*")
    answer = consumer.ask(prompt, 20, params)
    drafting.assert_right(answer, prompt)
    assert (answer.outcome, answer.sources) == ("checksum", (0, 0, NUM_TOKENS))
    prompts = {name: started(NUM_TOKENS, name) for name in NAMES}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, NUM_OUTPUT, producer.prefill(prompt))
    answers = run_in_need_of_memory(consumer, prompts)
    drafting.assert_all_right(answers, prompts)


@pytest.mark.parametrize("drafting", ["eagle"], indirect=True)
def test_a_pool_is_shared_by_engines_that_draft_alike_only(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """P/D between the two goes on beside it, and each finds what it has computed itself."""
    master = EmbeddedMaster()
    try:
        pool = {**POOL, "master": master.address}
        producer = engines.own("kv_both", pool=pool, **drafting.options)
        consumer = engines.own("kv_both", pool={**pool, "dram_size": 0}, **drafting.plain)
        prompt, found = started(NUM_TOKENS), []
        for engine in (producer, producer, consumer, consumer):
            answer = engine.ask(prompt, 20, {"return_provenance": True})
            drafting.assert_right(answer, prompt)
            found.append(provenance(answer))
            settle(engine)
            assert engine.reset_prefix_cache()
        none, rest = {"computed": NUM_TOKENS}, {"computed": NUM_TOKENS - 3 * BLOCK_SIZE}
        hits = ({place: 3 * BLOCK_SIZE} | rest for place in ("dram", "remote"))
        assert found == [none, next(hits), none, next(hits)]
        prompt = started(NUM_TOKENS, "handed over")
        answer = consumer.ask(prompt, 20, producer.prefill(prompt))
        drafting.assert_right(answer, prompt)
        assert provenance(answer) == {"peer": NUM_TOKENS}
        settle(producer)
    finally:
        engines.close_own()
        master.stop()


@pytest.mark.parametrize("drafting", ["eagle", "even_windows"], indirect=True)
def test_running_request_moves_from_an_engine_that_drafts_to_one_that_does_not(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """And not back."""
    source, _ = two(engines, **drafting.options)
    target, _ = two(engines, **drafting.plain)
    prompt = started(CHUNKED)
    source.add("r", prompt, NUM_ANSWER)
    for _ in range(10):
        source.step()
    left, right = move(source, target, prompt, NUM_ANSWER)
    drafting.assert_right(right, prompt)
    assert right.sources == (0, len(prompt) + len(left.token_ids) - 1, 1)
    prompt = started(NUM_TOKENS)
    target.add("r", prompt, NUM_OUTPUT)
    target.step_until("r", "num_output_tokens", 5)
    source.add("r", prompt, NUM_OUTPUT, coming(prompt, target))
    answers = dict[str, Answer]()
    while "r" not in answers:
        target.drive(1)
        answers |= source.drive(5)
    assert outcome_of(answers["r"]) == {"refused": "move_incompatible"}
    source.wait_log("draft=eagle-")
    target.run()


@pytest.mark.parametrize("drafting", ["windows", STATES], indirect=True)
def test_layers_that_a_drafter_divides_otherwise_are_refused_by_name(
    engines: Engines, drafting: Drafting, started: PromptOf
) -> None:
    """Of windows vLLM makes other groups, and states have room for drafts."""
    producer = engines.shared("kv_producer", **drafting.options)
    consumer = engines.shared("kv_consumer", **drafting.plain)
    prompt = started(NUM_TOKENS)
    answer = consumer.ask(prompt, 20, producer.prefill(prompt))
    drafting.assert_right(answer, prompt)
    assert (answer.outcome, answer.sources) == ("incompatible", (0, 0, NUM_TOKENS))
    consumer.wait_log("the engines differ")
    assert len(consumer.find_in_log(r" reach=(\S+)")) == 2, "of the producer and of this one"


@pytest.mark.parametrize("drafting", ["windows"], indirect=True)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_windows_without_groups_of_their_own_fit_any_drafter(
    engines: Engines,
    drafting: Drafting,
    started: PromptOf,
    base_config: EngineConfig,
    folder: Path,
    num_layers: int,
) -> None:
    """Beside one of several layers vLLM's hybrid manager is off by itself."""
    off = {"disable_hybrid_kv_cache_manager": True}
    drafts = json.loads(drafting.options["llm"]) | off
    if num_layers > 1:
        drafts = json.loads(make_options("eagle", folder, base_config)["llm"])
    producer = engines.shared("kv_producer", **drafting.plain, llm=json.dumps(drafts))
    outcomes = []
    for options in ({}, off):
        llm = json.dumps(options)
        consumer = engines.shared("kv_consumer", **drafting.plain, llm=llm)
        prompt = started(CHUNKED, llm)
        answer = consumer.ask(prompt, 20, producer.prefill(prompt))
        drafting.assert_right(answer, prompt)
        outcomes.append(answer.outcome)
    assert outcomes == ["incompatible", "loaded"]


@pytest.mark.parametrize("is_larger", [False, True])
def test_drafter_with_pages_of_another_size_is_like_one_engine(
    fleet: Fleet,
    engines: Engines,
    base_config: EngineConfig,
    started: PromptOf,
    tmp_path: Path,
    is_larger: bool,
) -> None:
    """The same model, but that it, or the drafter, has each KV head twice."""
    more = str(copy_with_more_heads(Path(base_config.model), tmp_path / "model"))
    model, drafter = (base_config.model, more) if is_larger else (more, base_config.model)
    drafts = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2}
    options = {"model": model, "llm": json.dumps({"speculative_config": drafts})}
    engine = fleet.engine(replace(base_config, **options))
    drafting = Drafting("draft_model", options, SingleEngine(engine), engine)
    producer = engines.shared("kv_producer", faults="ok*", **options)
    producer.set_faults("ok*")
    transfer = {**EVERY_LAYER, "load_mode": "step"}
    consumer = engines.shared("kv_consumer", transfer=transfer, **options)
    pooled = engines.shared("kv_both", pool=POOL, **options)
    pair = Pair(producer, consumer, started(5, "where"))
    rates = drafting.rates(consumer, pooled)
    for num_tokens in (3 * BLOCK_SIZE, CHUNKED):
        prompt = same(num_tokens)
        for order in ORDERS:
            forget(producer, consumer)
            answer = pair.ask_in(order, prompt, NUM_ANSWER)
            drafting.assert_right(answer, prompt)
            assert answer.sources == (0, num_tokens, 0)
        store(pooled, prompt)
        answer = pooled.ask(prompt, NUM_ANSWER, {"return_provenance": True})
        drafting.assert_right(answer, prompt)
        assert provenance(answer)["dram"]
    rates.assert_like_one_engine()
    plain = engines.shared("kv_consumer", model=model)
    prompt = started(NUM_TOKENS, "plain")
    answer = plain.ask(prompt, 20, producer.prefill(prompt))
    drafting.assert_right(answer, prompt)
    assert answer.outcome == "incompatible"
    prompt = started(CHUNKED, "fails")
    answer = pair.ask_in("prefill first", prompt, 20, script="corrupt,ok*")
    drafting.assert_right(answer, prompt)
    assert answer.outcome == "checksum"


def test_producer_may_draft_less(
    engines: Engines, started: PromptOf, base_config: EngineConfig, folder: Path
) -> None:
    less, more = (make_options("eagle", folder, base_config, num_drafts=n) for n in (1, 3))
    producer = engines.shared("kv_producer", **less)
    consumer = engines.shared("kv_consumer", **more)
    prompt = started(NUM_TOKENS)
    answer = consumer.ask(prompt, 20, producer.prefill(prompt))
    assert answer.sources == (0, NUM_TOKENS, 0)


def test_states_are_as_large_as_what_is_drafted(
    engines: Engines, started: PromptOf, base_config: EngineConfig, folder: Path
) -> None:
    less, more = (make_options(STATES, folder, base_config, num_drafts=n) for n in (1, 2))
    producer = engines.shared("kv_producer", **less)
    consumer = engines.shared("kv_consumer", **more)
    prompt = started(NUM_TOKENS)
    answer = consumer.ask(prompt, 20, producer.prefill(prompt))
    assert (answer.outcome, answer.sources) == ("incompatible", (0, 0, NUM_TOKENS))
    consumer.wait_log("reach=state-gdn")
