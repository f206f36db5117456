# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on from another engine, against the same stream of one engine: each split of
texts whose characters take several tokens, whose ends are held back, and that parsers divide."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.resumable import tokens_to_tell
from vllm_ascend_pd.router.splice import Splice
from vllm_ascend_pd.router.transcript import DONE, PACKED_AT_BYTES, Transcript, hide_token_ids

TEXTS = {
    "completion": 'Zwölf Boxkämpfer 🥊🇩🇪 漢字 STO STOP? "token_ids":[1,2] \\ \n\n data: {"error"',
    "chat": '👩‍👩‍👧 you said data: [DONE]\n\n and "delta":{} then 你好 STO',
    "parsed": 'hm 🤔 "quoted"</think>I look </tool that up.<tool>find\n'
    '{"q": "日本 🗾 \\"x\\"", "n": [1, 2]}<tool>clock\n{"tz": "UTC"}',
}
STOP = "STOP!"


def token_bytes(text: str) -> list[bytes]:
    """Two bytes each, so characters are cut."""
    data = text.encode()
    return [data[at : at + 2] for at in range(0, len(data), 2)]


def decoded(tokens: list[bytes]) -> str:
    """What a detokenizer tells of so many tokens: whole characters."""
    return b"".join(tokens).decode(errors="ignore")


def held_back(text: str, ends: tuple[str, ...]) -> str:
    """Without an end that one of ``ends`` may begin with."""
    return next(
        (
            text[:-size]
            for size in range(max(map(len, ends)) - 1, 0, -1)
            if any(end.startswith(text[-size:]) for end in ends)
        ),
        text,
    )


def fields(form: str, text: str, ended: bool) -> dict[str, str]:
    """What an API's server has told of a text, in the order of telling."""
    if form != "parsed":
        return {"text": text if ended else held_back(text, (STOP,))}
    text = text if ended else held_back(text, ("</think>", "<tool>"))
    reasoning, _, rest = text.partition("</think>")
    told = {"reasoning": reasoning}
    content, *calls = rest.split("<tool>")
    told["content"] = content
    for index, call in enumerate(calls):
        name, newline, arguments = call.partition("\n")
        if newline:
            told |= {f"{index} name": name, f"{index} arguments": arguments}
    return told


def delta(form: str, before: dict[str, str], after: dict[str, str], stream: str) -> dict[str, Any]:
    """The chunk's part that tells the difference; empty if a parser has nothing to say."""
    new = {name: value[len(before.get(name, "")) :] for name, value in after.items()}
    if form == "completion":
        return {"text": new["text"], "logprobs": None}
    if form == "chat":
        return {"delta": {"content": new["text"]}, "logprobs": None}
    said: dict[str, Any] = {k: new[k] for k in ("reasoning", "content") if new.get(k)}
    calls = []
    for index in range(2):
        function = {
            k: new[f"{index} {k}"] for k in ("name", "arguments") if new.get(f"{index} {k}")
        }
        call: dict[str, Any] = {"index": index, "function": function}
        if "name" in function:
            call |= {"id": f"call-{stream}-{index}", "type": "function"}
        if function:
            calls.append(call)
    return {"delta": said | ({"tool_calls": calls} if calls else {}), "logprobs": None}


def event(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


def stream_events(form: str, groups: list[int], name: str, tells: bool = True) -> Iterator[bytes]:
    """As vLLM's server writes them; ``groups``: tokens of each chunk."""
    tokens = token_bytes(TEXTS[form])
    frame: dict[str, Any] = {"id": f"id-{name}", "object": "o", "created": len(name), "model": "m"}
    prompt = {"prompt_token_ids": [7, 8, 9] if tells else None}
    if form != "completion":
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield event({**frame, "choices": [role], **prompt, "prompt_text": None})
    at, told = 0, dict[str, str]()
    for size in groups:
        ids = [int.from_bytes(token, "big") for token in tokens[at : at + size]]
        at += size
        ended = at == len(tokens)
        now = fields(form, decoded(tokens[:at]), ended)
        choice = {
            "index": 0,
            **delta(form, told, now, name),
            "finish_reason": "stop" if ended else None,
        }
        told = now
        if form == "completion":
            choice |= prompt
            prompt = {"prompt_token_ids": None}
        choice |= {"token_ids": ids if tells else None}
        if tells or ended or choice.get("delta") != {}:
            yield event({**frame, "choices": [choice]})
    num_tokens = len(tokens)
    yield event({**frame, "choices": [], "usage": {"completion_tokens": num_tokens}})
    yield DONE


def merged(body: bytes) -> dict[str, Any]:
    """All that a client has of a stream in the end."""
    assert body.endswith(b"\n\n")
    found: dict[str, Any] = {"ids": [], "done": 0, "frames": set()}

    def add(name: str, value: Any) -> None:
        found[name] = found[name] + value if name in found else value

    for line in body.decode().removesuffix("\n\n").split("\n\ndata: "):
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            found["done"] += 1
            continue
        chunk = json.loads(data)
        found["frames"].add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
        if not chunk["choices"]:
            add("usage", [chunk["usage"]])
            continue
        (choice,) = chunk["choices"]
        found["ids"] += choice.get("token_ids") or []
        for holder in (chunk, choice):
            add("prompt", holder.get("prompt_token_ids") or [])
        if choice["finish_reason"]:
            add("finish", [choice["finish_reason"]])
        said = choice.get("delta", {"text": choice.get("text")})
        for name in said.keys() - {"tool_calls"}:
            add(name, said[name])
        for call in said.get("tool_calls", ()):
            for name, value in {**call, **call["function"]}.items():
                if name == "id":  # any engine's, and once
                    value = re.sub("call-[abc]-", "call-", value)
                if name not in ("index", "function"):
                    add(f"{call['index']} {name}", value)
    return found


def groups_of(rng: random.Random, total: int, first: int = 0) -> list[int]:
    """Sizes of chunks, the first with at least so many tokens."""
    sizes = [first + rng.randint(0, 2)] if first else []
    while sum(sizes) < total:
        sizes.append(rng.choice((1, 1, 1, 2, 5)))
    sizes[-1] -= sum(sizes) - total
    return sizes


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("form", TEXTS)
def test_stream_goes_on_at_every_event(form: str, shows: bool) -> None:
    total = len(token_bytes(TEXTS[form]))
    rng = random.Random(form)
    began = list(stream_events(form, [1] * total, "a"))
    expected = merged(b"".join(began if shows else map(hide_token_ids, began)))
    for num_had in range(1, len(began)):
        transcript = Transcript(shows)
        got = transcript.take(b"".join(began[:num_had]))
        transcript.read()
        assert transcript.obstacle() is None
        for attempt in ("b", "c"):  # the second engine dies within its stream, too
            groups = groups_of(rng, total, len(transcript.to_tell))
            resumed = list(stream_events(form, groups, attempt))
            cut_at = rng.randint(0, len(resumed) - 2) if attempt == "b" else len(resumed)
            splice = Splice(transcript, {"resumed": 1}, lambda: None)
            for part in resumed[:cut_at]:
                taken = splice.take(part)
                assert isinstance(taken, bytes), (num_had, taken)
                got += taken
        assert merged(got) == expected, (num_had, groups)


@pytest.mark.parametrize("form", TEXTS)
def test_stream_without_token_ids_is_as_the_engine_writes_it_unasked(form: str) -> None:
    groups = groups_of(random.Random(1), len(token_bytes(TEXTS[form])))
    plain = b"".join(stream_events(form, groups, "a", tells=False))
    transcript = Transcript(shows_token_ids=False)
    assert b"".join(map(transcript.take, stream_events(form, groups, "a"))) == plain
    whole = Transcript(shows_token_ids=False)
    assert whole.take(b"".join(stream_events(form, groups, "a"))) == plain
    assert whole.is_done
    shown = Transcript(shows_token_ids=True)
    events = b"".join(stream_events(form, groups, "a"))
    assert shown.take(events) == events


def test_transcript_keeps_some_bytes_a_token() -> None:
    rng = random.Random(2)
    num_tokens = 10_000
    chunks = []
    for _ in range(num_tokens):
        choice = {"index": 0, "text": f" {rng.randbytes(2).hex()}", "finish_reason": None}
        choice["token_ids"] = [rng.randrange(150_000)]
        chunks.append(event({"id": "x", "filler": "f" * 150, "choices": [choice]}))
    tracemalloc.start()
    transcript = Transcript(shows_token_ids=False)
    for chunk in chunks:
        transcript.take(chunk)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 * PACKED_AT_BYTES + 25 * num_tokens


def test_transcript_of_a_long_stream_is_read_whole() -> None:
    transcript = Transcript(shows_token_ids=False)
    choice = {"index": 0, "text": " a", "finish_reason": None, "token_ids": [5]}
    first = event({"id": "x", "choices": [{**choice, "prompt_token_ids": [1]}]})
    chunk = event({"id": "x", "choices": [choice], "filler": "f" * 200})
    transcript.take(first)
    for _ in range(2000):
        transcript.take(chunk)
    transcript.read()
    assert list(transcript.token_ids) == [5] * 2001
    assert {name: text.getvalue() for name, text in transcript.texts.items()} == {
        "text": " a" * 2001
    }


@pytest.mark.parametrize(
    ("last", "num_again"),
    [({"content": "\n"}, 2), ({}, 2), ({"reasoning": "."}, 0), ({"content": "\na"}, 0)],
)
def test_blanks_after_reasoning_are_computed_again(last: dict[str, str], num_again: int) -> None:
    """What parsers make of them depends on whether they come at once with what is before them. Not
    where the tokens would only be as likely."""
    transcript = Transcript(shows_token_ids=False)
    for token, delta in enumerate(({"reasoning": "hm"}, {}, last)):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [token]}
        transcript.take(event({"id": "x", "choices": [choice], "prompt_token_ids": [1]}))
    transcript.read()
    assert list(tokens_to_tell(transcript, "exact")) == [0, 1, 2][: 3 - num_again]
    assert list(tokens_to_tell(transcript, "sampled")) == [0, 1, 2]


@pytest.mark.parametrize("where", [0, 3, 6])
def test_engine_that_goes_on_with_other_tokens_is_found_out(where: int) -> None:
    began = list(stream_events("completion", [1] * len(token_bytes(TEXTS["completion"])), "a"))
    transcript = Transcript(shows_token_ids=True)
    transcript.take(b"".join(began[:8]))
    transcript.read()
    other = json.loads(began[where][len(b"data: ") :])
    other["choices"][0]["token_ids"] = [1]
    splice = Splice(transcript, {}, lambda: None)
    taken = [splice.take(part) for part in (*began[:where], event(other))]
    assert splice.failure is not None
    assert splice.failure.kind is FailureKind.DIFFERS
    assert set(taken) == {b""}
    assert len(transcript.token_ids) == 8


def test_engine_that_makes_another_text_of_the_tokens_is_found_out() -> None:
    """As one with another tool parser does."""
    began = list(stream_events("completion", [1] * len(token_bytes(TEXTS["completion"])), "a"))
    transcript = Transcript(shows_token_ids=True)
    transcript.take(b"".join(began[:8]))
    transcript.read()
    other = json.loads(began[3][len(b"data: ") :])
    other["choices"][0]["text"] = "#" * len(other["choices"][0]["text"])
    splice = Splice(transcript, {}, lambda: None)
    assert splice.take(b"".join([*began[:3], event(other)])) == b""
    assert splice.failure == Failure(FailureKind.DIFFERS, "the engine began with another text")
    assert transcript.obstacle() is None


def test_comment_is_passed_on_and_begins_nothing() -> None:
    begun: list[bool] = []
    splice = Splice(Transcript(shows_token_ids=True), {}, lambda: begun.append(True))
    assert splice.take(b": keep-alive\n\n") == b": keep-alive\n\n"
    assert not begun
    splice.take(next(iter(stream_events("completion", [1] * 99, "a"))))
    assert begun


def test_engine_that_ends_within_what_it_was_given_is_found_out() -> None:
    began = list(stream_events("completion", [1] * len(token_bytes(TEXTS["completion"])), "a"))
    transcript = Transcript(shows_token_ids=True)
    transcript.take(b"".join(began[:8]))
    transcript.read()
    early = json.loads(began[2][len(b"data: ") :])
    early["choices"][0]["finish_reason"] = "length"
    splice = Splice(transcript, {}, lambda: None)
    assert splice.take(b"".join([*began[:2], event(early)])) == b""
    assert splice.failure is not None
    assert splice.failure.kind is FailureKind.DIFFERS


def test_what_comes_before_a_failure_is_not_lost() -> None:
    """The client gets it, since the next engine is told that the client has it."""
    total = len(token_bytes(TEXTS["completion"]))
    began = list(stream_events("completion", [1] * total, "a"))
    transcript = Transcript(shows_token_ids=True)
    got = transcript.take(b"".join(began[:8]))
    transcript.read()
    splice = Splice(transcript, {}, lambda: None)
    taken = splice.take(b"".join(began[:10]) + b'data: {"choices":7}\n\n')
    assert merged(got + taken)["ids"] == list(transcript.token_ids)
    assert splice.failure is not None
    assert splice.failure.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize(
    "end",
    [
        {"finish_reason": "abort", "stop_reason": None, "token_ids": []},
        {"finish_reason": "tool_calls", "stop_reason": None, "token_ids": []},
    ],
)
@pytest.mark.parametrize("also", [b"", b'data: {"error":{"message":"died","code":500}}\n\n'])
def test_abort_is_no_end_of_an_answer(end: dict[str, Any], also: bytes) -> None:
    """Before 0.32 vLLM calls it the end of the tool call that it cuts."""
    total = len(token_bytes(TEXTS["parsed"]))
    began = b"".join(list(stream_events("parsed", [1] * total, "a"))[: total - 4])
    aborted = event({"id": "x", "choices": [{"index": 0, "delta": {}, "logprobs": None, **end}]})
    transcript = Transcript(shows_token_ids=True)
    assert transcript.take(began + aborted + also + DONE) == began
    assert transcript.failure is not None
    transcript.read()
    assert not transcript.has_finished
    assert not transcript.is_done


def test_tool_call_that_ends_with_a_token_has_ended() -> None:
    transcript = Transcript(shows_token_ids=True)
    end = {"finish_reason": "tool_calls", "stop_reason": None, "token_ids": [2]}
    ended = event({"id": "x", "choices": [{"index": 0, "delta": {}, "logprobs": None, **end}]})
    assert transcript.take(ended + DONE) == ended + DONE
    assert transcript.failure is None


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        (b'data: {"choices":[{"index":0,"text":"a","token_ids":null}]}\n\n', "no_token_ids"),
        (b'data: {"choices":[{"index":0,"text":"a","token_ids":[1]}]}\n\n', "no_token_ids"),
        (b'data: {"choices": 7}\n\n', "protocol"),
        (b"data: {broken\n\n", "protocol"),
    ],
)
def test_what_an_engine_writes_otherwise_is_no_ground_to_go_on_from(
    events: bytes, cause: str
) -> None:
    transcript = Transcript(shows_token_ids=False)
    transcript.take(events)
    transcript.read()
    assert transcript.obstacle() == cause
