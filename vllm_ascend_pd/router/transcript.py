# SPDX-License-Identifier: Apache-2.0
"""What a client has of a stream, in a form from which another engine can go on.

The engine is asked for token ids. The client gets its bytes without them, unless it asked itself.
They are cut out of the bytes, since to parse each chunk would cost too much beside relaying it: in
a JSON string their names would have escaped quotes. The chunks are kept as they came, compressed to
some ten bytes a token, and read when the stream has broken.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections import defaultdict
from http import HTTPStatus
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.router.apis import payload
from vllm_ascend_pd.router.failures import Failure, FailureKind, failed_with

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = b"data: "
DONE = b"data: [DONE]\n\n"
PACKED_AT_BYTES = 64 << 10
"""Compressed at a time: some hundred chunks. They differ by little, so the fastest level does."""

Chunk = dict[str, Any]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, gc=False):
    index: int
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Nothing else that a client could get twice is known."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[_Call, ...] = ()


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...]
    usage: dict[str, Any] | None = None


class _End(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None

    @property
    def is_abort(self) -> bool:
        """Within a tool call chats of vLLM before 0.32 call it the call's end: no token has ended
        it."""
        is_call = self.finish_reason == "tool_calls" and self.stop_reason is None
        return self.finish_reason == "abort" or (is_call and self.token_ids == [])


class _Told(msgspec.Struct, gc=False):
    """Of a whole answer, or of an event."""

    choices: tuple[_End, ...] = ()
    type: str | None = None
    """Of Anthropic's API, as the next ones."""
    stop_reason: str | None = None
    delta: dict[str, Any] | str | None = None

    @property
    def is_abort(self) -> bool:
        if self.type == "message":
            return self.stop_reason is None
        if self.type == "message_delta" and isinstance(self.delta, dict):
            return self.delta.get("stop_reason") is None
        return any(end.is_abort for end in self.choices)


_chunks_decoder: msgspec.json.Decoder[list[_Chunk]] = msgspec.json.Decoder(list[_Chunk])
_decoder: msgspec.json.Decoder[Chunk] = msgspec.json.Decoder(Chunk)
_told_decoder: msgspec.json.Decoder[_Told] = msgspec.json.Decoder(_Told)
_sub_token_ids = re.compile(rb'token_ids":\s*\[[\d,\s]*\]').sub
_sub_comments = re.compile(rb"(?:\A|(?<=\n\n)):[^\n]*\n\n").sub
_HIDDEN = b'token_ids":null'
REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("content", *REASONING)
_NO_DELTA = b'"delta":{},"logprobs":null,"finish_reason":null,'
_ERROR = b'{"error"'
_MESSAGE_ERROR = b'{"type":"error"'
_ABORT = b'"abort"'
_ABORTED_CALL = b'"finish_reason":"tool_calls","stop_reason":null,"token_ids":[]'
_MESSAGE = b'"message'
"""Of Anthropic's API: the type of an answer, or ``message_delta``."""
_SIGNS = (DATA + _ERROR, _ABORT, _ABORTED_CALL, _MESSAGE)
"""See ``_may_tell_of_failure``."""
_GIVEN_UP = Failure(FailureKind.STATUS, "the engine gave the request up")


class Transcript:
    """Event loop thread. Of a stream of one choice."""

    def __init__(self, shows_token_ids: bool) -> None:
        self.shows_token_ids = shows_token_ids
        """To the client, which asked for them."""
        self._packed: list[bytes] = []
        self._raw: list[bytes] = []
        """What came after those."""
        self._num_raw_bytes = 0
        self.token_ids = array("I")
        self.prompt_token_ids = array("I")
        self.envelope: Chunk = {}
        self.num_reasoning_tokens = 0
        """Up to the last chunk that told of nothing else."""
        self.texts: defaultdict[str, StringIO] = defaultdict(StringIO)
        """By field, see ``texts``; at their ends."""
        self.num_calls = 0
        """Tool calls whose id the client has."""
        self.has_role = False
        self.has_finished = False
        self.has_usage = False
        self.is_done = False
        self.failure: Failure | None = None
        self.is_readable = True

    def take(self, events: bytes) -> bytes:
        """Whole events of the engine, about to be sent; what the client gets of them."""
        events, self.failure = until_failure(events)
        told = without_comments(events)
        self._raw.append(told)
        self._num_raw_bytes += len(told)
        if self._num_raw_bytes > PACKED_AT_BYTES:
            self._packed.append(zlib.compress(b"".join(self._raw), 1))
            self._raw, self._num_raw_bytes = [], 0
        if events.endswith(DONE):
            self.is_done = True
        return events if self.shows_token_ids else hide_token_ids(events)

    def read(self) -> None:
        """All that was taken. Nothing is taken after it."""
        raw = b"".join([*map(zlib.decompress, self._packed), *self._raw])
        self._packed, self._raw = [], []
        try:
            if raw:
                self._read_first(raw[len(DATA) : raw.index(b"\n\n")])
            for chunk in _decode(raw):
                self.has_usage |= chunk.usage is not None and not chunk.choices
                for choice in chunk.choices:
                    self._read(choice)
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError):
            self.is_readable = False  # not as vLLM writes it

    def so_far(self) -> Transcript:
        """What is known of it now, read; it grows on, if it was not read itself."""
        if not self._raw and not self._packed:
            return self
        now = Transcript(self.shows_token_ids)
        now._packed, now._raw = self._packed.copy(), self._raw.copy()
        now.read()
        return now

    def obstacle(self) -> str | None:
        """Why no engine can go on, of what was read."""
        if not self.is_readable:
            return "protocol"
        has_text = any(text.tell() for text in self.texts.values())
        if bool(self.token_ids) < has_text or bool(self.prompt_token_ids) < bool(self.token_ids):
            return "no_token_ids"
        return None

    @property
    def to_tell(self) -> array[int]:
        """Tokens with which an engine makes the same stream. vLLM's parsers may make less of the
        blanks between reasoning and answer where these come at once with what is before them, so
        until there is more than those, they are computed again."""
        content = self.texts["content"]
        if self.num_reasoning_tokens and not self.num_calls and not content.getvalue().strip():
            return self.token_ids[: self.num_reasoning_tokens]
        return self.token_ids

    def _read_first(self, event: bytes) -> None:
        chunk = _decoder.decode(event)
        self.envelope = envelope(chunk)
        prompt = chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids")
        self.prompt_token_ids.extend(prompt or ())

    def _read(self, choice: _Choice) -> None:
        if choice.token_ids is not None:
            self.token_ids.extend(choice.token_ids)
        if choice.finish_reason is not None:
            self.has_finished = True
        if choice.text:
            self._add("text", choice.text)
        delta = choice.delta
        if delta is None:
            return
        for name in _TEXTS:
            if value := getattr(delta, name):
                self._add(name, value)
        if any(getattr(delta, name) for name in REASONING) and not delta.content:
            self.num_reasoning_tokens = len(self.token_ids)
        for call in delta.tool_calls:
            self.num_calls = max(self.num_calls, call.index + 1)
            if call.function is not None:
                self._add(f"tool_calls[{call.index}].name", call.function.name or "")
                self._add(f"tool_calls[{call.index}].arguments", call.function.arguments or "")
        if delta.role is not None:
            self.has_role = True

    def _add(self, field: str, value: str) -> None:
        self.texts[field].write(value)


def told_token_ids(events: bytes, has_told: bool = False) -> list[int] | None:
    """By whole events; ``None`` if they are not understood, or have text and tell none, nor did
    those before them (``has_told``). A chat begins with an event that has neither."""
    try:
        choices = [choice for one in _decode(events) for choice in one.choices]
    except UNREADABLE:
        return None
    ids = [i for choice in choices for i in choice.token_ids or ()]
    return ids if ids or has_told or not any(map(_has_text, choices)) else None


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta or _Delta()
    texts = (choice.text, delta.content, delta.reasoning, delta.reasoning_content)
    return any(texts) or bool(delta.tool_calls)


def _decode(events: bytes) -> list[_Chunk]:
    """``MsgspecError`` unless they are as vLLM writes them."""
    chunks = (
        without_comments(events).removesuffix(DONE)[len(DATA) : -2].replace(b"\n\n" + DATA, b",")
    )
    return _chunks_decoder.decode(b"[" + chunks + b"]")


def without_comments(events: bytes) -> bytes:
    """Whole ones. An engine may send comments while it has nothing else to send."""
    if not events.startswith(b":") and b"\n\n:" not in events:
        return events
    return _sub_comments(b"", events)


def envelope(chunk: Chunk) -> Chunk:
    """What is the same in all chunks of one stream."""
    return {name: chunk[name] for name in ("id", "created", "model") if name in chunk}


def texts(choice: Chunk) -> Iterator[tuple[str, Chunk, str]]:
    """Where a chunk's choice has text that goes on in the next one: the field, and the object and
    key that hold it."""
    delta = choice.get("delta")
    if delta is None:
        yield "text", choice, "text"
        return
    for name in _TEXTS:
        if delta.get(name) is not None:
            yield name, delta, name
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        for name in ("name", "arguments"):
            if function.get(name) is not None:
                yield f"tool_calls[{call['index']}].{name}", function, name


def hide_token_ids(events: bytes) -> bytes:
    """As the engine writes them when nobody asks for token ids."""
    hidden = _sub_token_ids(_HIDDEN, events)
    if _NO_DELTA not in hidden:
        return hidden
    return b"\n\n".join(event for event in hidden.split(b"\n\n") if _NO_DELTA not in event)


def is_error(events: bytes) -> bool:
    """Whether a stream begins with what its engine has to say against the request, or against
    itself, or has ended already."""
    told = payload(without_comments(events))
    return told.startswith((_ERROR, _MESSAGE_ERROR)) or until_failure(events)[1] is not None


def until_failure(events: bytes, at_least: int = 500) -> tuple[bytes, Failure | None]:
    """What an engine's server sent before it said, within the stream, that its engine has failed,
    or another one has the request; and what it said. ``at_least`` 400: or that it refuses it, as
    one may that is to go on with what another one has begun."""
    if not _may_tell_of_failure(events):
        return events, None
    end = 0
    for event in events.split(b"\n\n"):
        if (failure := _failure_of(payload(event), at_least)) is not None:
            return events[:end], failure
        end += len(event) + len(b"\n\n")
    return events, None


def _may_tell_of_failure(data: bytes) -> bool:
    """If not, no event of it does. If so it is decoded: engines repeat some of what clients say."""
    for sign in _SIGNS:  # noqa: SIM110 - `any` takes twice as long, for every piece of a stream
        if sign in data:
            return True
    return False


def _failure_of(told: bytes, at_least: int) -> Failure | None:
    if not told.startswith(_ERROR):
        return why_incomplete(told)
    try:
        error = _decoder.decode(told)["error"]
        if error["code"] < at_least and error["code"] != HTTPStatus.CONFLICT:
            return None
        return failed_with(error["code"], error["message"])
    except (*UNREADABLE, LookupError, TypeError):
        return Failure(FailureKind.PROTOCOL, "an error that is not understood")


def why_incomplete(body: bytes) -> Failure | None:
    """Of a whole answer, or an event: that the engine has ended it before its time, as one does
    that stops."""
    if not _may_tell_of_failure(body):
        return None
    try:
        told = _told_decoder.decode(body)
    except UNREADABLE:
        return None  # nothing that ends one
    return _GIVEN_UP if told.is_abort else None
