# SPDX-License-Identifier: Apache-2.0
"""vLLM's parsers of tool calls and of reasoning, whose streams are cut at every token and go on
with what came before as one chunk: those of which that is said make the same of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.request import Request

from vllm_ascend_pd.engine.vllm_api.grammars import is_behind_reasoning
from vllm_ascend_pd.router.resumable import EXACT_TOOL_PARSERS
from vllm_ascend_pd.router.splice import Splice
from vllm_ascend_pd.router.transcript import DONE, Transcript
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

SAID = {"q": 'a "b" <c> 漢字 🗾', "n": 12, "deep": {"list": [1.5, True, None, "x"], "no": {}}}
TOLD = {"tz": "UTC"}


def as_json(start: str, end: str) -> str:
    calls = [("look_up", SAID), ("clock", TOLD), ("look_up", {})]
    told = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
    return "I look that up.\n" + "\n".join(f"{start}\n{call}\n{end}" for call in told)


PYTHONIC = (
    "look_up(q='a \"b\" <c> 漢字 🗾', n=12, deep={'list': [1.5, True, None, 'x'], 'no': {}})",
    "clock(tz='UTC')",
    "look_up()",
)
QWEN3 = (
    'I look that up.\n<tool_call>\n<function=look_up>\n<parameter=q>\na "b" <c> 漢字 🗾\n'
    "</parameter>\n<parameter=n>\n12\n</parameter>\n<parameter=deep>\n"
    + json.dumps(SAID["deep"])
    + "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n<parameter=tz>\n"
    "UTC\n</parameter>\n</function>\n</tool_call>"
)
TEXTS = {
    "glm47": 'I look that up.<tool_call>look_up<arg_key>q</arg_key><arg_value>a "b" <c> 漢字 🗾'
    "</arg_value><arg_key>n</arg_key><arg_value>12</arg_value><arg_key>deep</arg_key><arg_value>"
    + json.dumps(SAID["deep"])
    + "</arg_value></tool_call><tool_call>clock<arg_key>tz</arg_key><arg_value>UTC</arg_value>"
    "</tool_call>",
    "hermes": as_json("<tool_call>", "</tool_call>"),
    "llama4_pythonic": f"<|python_start|>[{', '.join(PYTHONIC)}]<|python_end|>",
    "longcat": as_json("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": 'I look that up.\n<minimax:tool_call>\n<invoke name="look_up">\n'
    '<parameter name="q">a "b" <c> 漢字 🗾</parameter>\n<parameter name="n">12</parameter>\n'
    '<parameter name="deep">' + json.dumps(SAID["deep"]) + "</parameter>\n</invoke>\n"
    '<invoke name="clock">\n<parameter name="tz">UTC</parameter>\n</invoke>\n</minimax:tool_call>',
    "olmo3": "<function_calls>" + "\n".join(PYTHONIC) + "</function_calls>",
    "pythonic": f"[{', '.join(PYTHONIC)}]",
    "qwen3_coder": QWEN3,
    "qwen3_xml": QWEN3,
}
"""What a model of each says: words, and calls with all kinds of values."""
INEXACT = ("ernie45", "granite4")
"""Whitespace before a call depends on how many tokens come at once."""
IN_VOCABULARY = ("llama4_pythonic",)
"""What is there always: the marks of their calls."""
THOUGHT = "<think>\nI wonder. 漢字 🗾 <b> so\n</think>\n\n"
ANSWER = 'The answer is "4".\n'
REASONING = {
    "deepseek_r1": ("", THOUGHT.removeprefix("<think>") + ANSWER),
    "deepseek_r1 and calls": ("hermes", THOUGHT.removeprefix("<think>") + TEXTS["hermes"]),
    "glm45": ("", THOUGHT + ANSWER),
    "glm45 and calls": ("glm47", THOUGHT + TEXTS["glm47"]),
    "kimi_k2": ("", THOUGHT + ANSWER),
    "mimo": ("", THOUGHT + ANSWER),
    "minimax_m2 and calls": ("minimax_m2", THOUGHT + TEXTS["minimax_m2"]),
    "nemotron_v3": ("", THOUGHT + ANSWER),
    "qwen3": ("", THOUGHT + ANSWER),
    "qwen3 and calls": ("hermes", THOUGHT + TEXTS["hermes"]),
    "qwen3 and only calls": ("hermes", THOUGHT + TEXTS["hermes"].partition("\n")[2]),
    "qwen3 and other calls": ("qwen3_coder", THOUGHT + QWEN3),
}
"""The parser of tool calls beside it, and what a model says."""
MARKS = [
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<longcat_tool_call>", "</longcat_tool_call>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", "<|python_start|>", "<|python_end|>", "</think>", "<think>"),
    *("<response>", "</response>"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string"},
                    "n": {"type": "integer"},
                    "deep": {"type": "object"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "parameters": {"type": "object", "properties": {"tz": {"type": "string"}}},
        },
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    """Of which marks of calls are several tokens."""
    return get_cached_tokenizer(AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def marking_tokenizer(folder: Path) -> Any:
    """Of which they are tokens of their own."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(MARKS, special_tokens=True)
    return get_cached_tokenizer(tokenizer)


class Server:
    """vLLM's, as far as it makes chunks of tokens."""

    def __init__(
        self, tokenizer: Any, parser: str, text: str, reasoning: str = "", **template: Any
    ) -> None:
        """``template``: options of a chat template."""
        self._tokenizer = tokenizer
        self._template = template
        self.token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self._texts = [self._decoded(n) for n in range(len(self.token_ids) + 1)]
        made = ParserManager.get_parser(parser or None, reasoning, enable_auto_tools=True)
        assert made is not None
        self._parser = made
        messages = [{"role": "user", "content": "Where?"}]
        body = {"model": "tiny", "messages": messages, "stream": True}
        body |= {"tools": TOOLS} if parser else {}
        self._request = ChatCompletionRequest(**body, return_token_ids=True)

    def _decoded(self, num_tokens: int) -> str:
        """Characters of which all bytes are there."""
        text: str = self._tokenizer.decode(self.token_ids[:num_tokens])
        return text.rstrip("�")

    def stream(self, sizes: list[int]) -> Iterator[bytes]:
        """``sizes``: tokens of each chunk."""
        options = {"chat_template_kwargs": self._template} if self._template else {}
        parser = self._parser(self._tokenizer, self._request.tools, **options)
        request = parser.adjust_request(self._request)
        prompt = [1, 2, 3]
        yield event(DeltaMessage(role="assistant", content=""), None, None, prompt)
        at, has_calls = 0, False
        for size in sizes:
            before, at = at, at + size
            has_ended = at == len(self.token_ids)
            delta = parser.parse_delta(
                self._texts[at][len(self._texts[before]) :],
                self.token_ids[before:at],
                request,
                prompt,
                finished=has_ended,
            )
            has_calls |= bool(delta and delta.tool_calls)
            reason = ("tool_calls" if has_calls else "stop") if has_ended else None
            yield event(delta or DeltaMessage(), reason, self.token_ids[before:at])
        yield DONE


def event(
    delta: DeltaMessage,
    finish_reason: str | None,
    token_ids: list[int] | None,
    prompt: list[int] | None = None,
) -> bytes:
    choice = ChatCompletionResponseStreamChoice(
        index=0, delta=delta, logprobs=None, finish_reason=finish_reason, token_ids=token_ids
    )
    more = {"prompt_token_ids": prompt} if prompt else {}
    chunk = ChatCompletionStreamResponse(
        id="chatcmpl-1", created=1, choices=[choice], model="tiny", **more
    )
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()


def had(body: bytes) -> dict[str, Any]:
    """What a client has in the end; each call has one id."""
    found: dict[str, Any] = {"reasoning": "", "content": ""}
    found |= {"finish": [], "token_ids": [], "calls": []}
    *chunks, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    for chunk in chunks:
        (choice,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
        for name in ("reasoning", "content"):
            found[name] += choice["delta"].get(name) or ""
        found["token_ids"] += choice.get("token_ids") or []
        if choice["finish_reason"]:
            found["finish"].append(choice["finish_reason"])
        for call in choice["delta"].get("tool_calls") or ():
            if call["index"] == len(found["calls"]):
                found["calls"].append({"ids": 0, "name": "", "arguments": ""})
            of_client = found["calls"][call["index"]]
            of_client["ids"] += bool(call.get("id"))
            for name in ("name", "arguments"):
                of_client[name] += call["function"].get(name) or ""
    return found


def groups_of(rng: random.Random, total: int, first: int) -> list[int]:
    """Sizes of chunks, as of an engine with drafts."""
    sizes = [first]
    while sum(sizes) < total:
        sizes.append(rng.choice((1, 1, 2, 5)))
    sizes[-1] -= sum(sizes) - total
    return sizes


def first_difference(server: Server, one_by_one: bool = False) -> str:
    """Where a stream that goes on, in pieces of one token or of several, is not that of one engine;
    empty if it is nowhere."""
    total = len(server.token_ids)
    whole = list(server.stream([1] * total))
    expected = had(b"".join(whole))
    rng = random.Random(total)
    for cut in range(1, total):
        transcript = Transcript(shows_token_ids=True)
        got = transcript.take(b"".join(whole[: cut + 1]))
        transcript.read()
        splice = Splice(transcript, {}, lambda: None)
        told = len(transcript.to_tell)
        sizes = [told, *[1] * (total - told)] if one_by_one else groups_of(rng, total, told)
        got += splice.take(b"".join(server.stream(sizes)))
        if splice.failure is not None:
            return f"{cut}: {splice.failure}"
        if had(got) != expected:
            return f"{cut}: {had(got)}, and not {expected}"
    return ""


def test_each_parser_that_is_said_to_be_exact_is_tried() -> None:
    assert set(TEXTS) == EXACT_TOOL_PARSERS


def expect_the_same_wherever_it_is_cut(tokenizer: Any, parser: str) -> None:
    server = Server(tokenizer, parser, TEXTS[parser])
    calls = had(b"".join(server.stream([1] * len(server.token_ids))))["calls"]
    assert [call["name"] for call in calls][:2] == ["look_up", "clock"]
    assert [json.loads(call["arguments"]) for call in calls][:2] == [SAID, TOLD]
    assert not first_difference(server)


@pytest.mark.parametrize("parser", TEXTS)
def test_parser_makes_the_same_of_a_stream_wherever_it_was_cut(
    marking_tokenizer: Any, parser: str
) -> None:
    expect_the_same_wherever_it_is_cut(marking_tokenizer, parser)


@pytest.mark.parametrize("parser", sorted(TEXTS.keys() - IN_VOCABULARY))
def test_stream_may_be_cut_within_a_mark(tokenizer: Any, parser: str) -> None:
    expect_the_same_wherever_it_is_cut(tokenizer, parser)


@pytest.mark.parametrize("name", REASONING)
def test_parser_tells_reasoning_and_answer_apart_wherever_it_was_cut(
    marking_tokenizer: Any, name: str
) -> None:
    parser, text = REASONING[name]
    server = Server(marking_tokenizer, parser, text, name.partition(" ")[0])
    whole = had(b"".join(server.stream([1] * len(server.token_ids))))
    assert whole["reasoning"].strip() == "I wonder. 漢字 🗾 <b> so"
    assert bool(whole["calls"]) is bool(parser)
    assert not first_difference(server, one_by_one=True)


@pytest.mark.parametrize("name", REASONING)
def test_stream_that_would_lose_blanks_does_not_move_live(
    marking_tokenizer: Any, name: str
) -> None:
    """All that is known comes in one chunk then, and perhaps the next token."""
    parser, text = REASONING[name]
    reasoning = name.partition(" ")[0]
    server = Server(marking_tokenizer, parser, text, reasoning)
    expect_no_live_move_that_loses_blanks(marking_tokenizer, server, reasoning)


@pytest.mark.parametrize("option", ["thinking", "enable_thinking"])
def test_stream_that_reasons_by_its_chat_template_does_not_move_live_either(
    marking_tokenizer: Any, option: str
) -> None:
    text = THOUGHT.removeprefix("<think>") + ANSWER
    server = Server(marking_tokenizer, "", text, "deepseek_v3", **{option: True})
    expect_no_live_move_that_loses_blanks(marking_tokenizer, server, "deepseek_v3")


def expect_no_live_move_that_loses_blanks(
    marking_tokenizer: Any, server: Server, reasoning: str
) -> None:
    total = len(server.token_ids)
    expected = had(b"".join(server.stream([1] * total)))
    reasoner = ReasoningParserManager.get_reasoning_parser(reasoning)
    manager = SimpleNamespace(reasoner_cls=reasoner, tokenizer=marking_tokenizer)
    scheduler: Any = SimpleNamespace(structured_output_manager=manager)
    refused, right = [], set()
    for cut in range(1, total):
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        request: Any = Request("r", [1, 2, 3], params, None)
        request.append_output_token_ids(server.token_ids[:cut])
        if is_behind_reasoning(scheduler, request):
            refused.append(cut)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            assert not is_behind_reasoning(scheduler, request)
        else:
            for first in {cut, cut + 1} - right:
                got = had(b"".join(server.stream([first, *[1] * (total - first)])))
                assert got == expected, first
                right.add(first)
    assert len(refused) == 3  # its end, and two line breaks


@pytest.mark.parametrize("parser", INEXACT)
def test_parser_that_is_not_exact_is_found_out(marking_tokenizer: Any, parser: str) -> None:
    text = as_json("<tool_call>", "</tool_call>")
    assert first_difference(Server(marking_tokenizer, parser, text))
    assert parser not in EXACT_TOOL_PARSERS
