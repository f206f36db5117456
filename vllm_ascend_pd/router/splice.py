# SPDX-License-Identifier: Apache-2.0
"""The stream of an engine that goes on with what another one began, cut to what the client lacks.

The engine's stream tells the whole answer: it begins with the tokens that it was given, in chunks
of its own. Its server has made the text of them anew, and may hold back other parts of it than the
first one did, so each field is cut by the characters that the client has of it.
"""

from __future__ import annotations

from array import array
from http import HTTPStatus
from io import SEEK_END
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.transcript import (
    DATA,
    DONE,
    REASONING,
    Chunk,
    envelope,
    texts,
    until_failure,
    without_comments,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.router.transcript import Transcript

_decoder: msgspec.json.Decoder[Chunk] = msgspec.json.Decoder(Chunk)
_encoder = msgspec.json.Encoder()


class Splice:
    """One engine's part of a stream. ``transcript`` grows with what the client gets of it."""

    def __init__(
        self, transcript: Transcript, provenance: dict[str, Any], began: Callable[[], None]
    ) -> None:
        """``provenance``: for the last chunks. ``began`` is called when there is something new."""
        self._client = transcript
        self._provenance = provenance
        self._began: Callable[[], None] | None = began
        self.num_tokens = 0
        """Of this engine's stream, until now."""
        self._num_chars: dict[str, int] = {}
        self.failure: Failure | None = None

    def take(self, events: bytes) -> bytes:
        """Whole events of the engine; what the client gets of them."""
        events, self.failure = until_failure(events, HTTPStatus.BAD_REQUEST)
        kept: list[bytes] = []
        for event in events.split(b"\n\n")[:-1]:
            cut = self._take_one(event)
            if isinstance(cut, Failure):
                self.failure = cut
                break
            kept.append(cut)
        taken = b"".join(kept)
        if self._began is not None and without_comments(taken):
            self._began()
            self._began = None
        return taken

    def _take_one(self, event: bytes) -> bytes | Failure:
        if not event.startswith(DATA + b"{"):
            event += b"\n\n"
            self._client.is_done |= event == DONE
            return event
        try:
            chunk = self._cut(_decoder.decode(event[len(DATA) :]))
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError) as e:
            self._client.is_readable = False  # it may have been half taken
            return Failure(FailureKind.PROTOCOL, f"a chunk that is not understood: {e!r}")
        if isinstance(chunk, Failure):
            return chunk
        return b"" if chunk is None else DATA + _encoder.encode(chunk) + b"\n\n"

    @property
    def is_done(self) -> bool:
        return self._client.is_done

    def _cut(self, chunk: Chunk) -> Chunk | Failure | None:
        client = self._client
        client.envelope = client.envelope or envelope(chunk)
        chunk.update(client.envelope)
        if not chunk.get("choices"):
            is_new = not client.has_usage
            client.has_usage |= bool(chunk.get("usage"))
            return {**chunk, "provenance": self._provenance} if is_new else None
        choice = chunk["choices"][0]
        for field, holder, name in texts(choice):
            if not self._fits(field, holder[name]):
                return Failure(FailureKind.DIFFERS, f"the engine began with another {field}")
        new_ids = self._new_ids(choice.get("token_ids") or [])
        if new_ids is None:
            return Failure(FailureKind.DIFFERS, "the engine began with other tokens")
        ends = choice.get("finish_reason") is not None
        if ends and self.num_tokens < len(client.token_ids):
            return Failure(FailureKind.DIFFERS, "the engine ended within what it was given")
        for holder in (chunk, choice):
            if holder.get("prompt_token_ids"):
                self._cut_prompt(holder)
        is_new = self._cut_texts(choice)
        if delta := choice.get("delta"):
            is_new |= self._cut_delta(delta)
            if any(map(delta.get, REASONING)) and not delta.get("content"):
                client.num_reasoning_tokens = len(client.token_ids)
        if ends:
            is_new |= not client.has_finished
            client.has_finished = True
            chunk["provenance"] = self._provenance
        if client.shows_token_ids:
            is_new |= bool(new_ids)
            choice["token_ids"] = new_ids
        else:
            is_new |= bool(new_ids) and choice.get("delta") != {}
            choice["token_ids"] = None
        return chunk if is_new else None

    def _new_ids(self, token_ids: list[int]) -> list[int] | None:
        """Of a chunk, those that the client does not have; ``None`` if the others are not those
        that it has."""
        has, start = self._client.token_ids, self.num_tokens
        num_had = max(0, len(has) - start)
        self.num_tokens += len(token_ids)
        if has[start : self.num_tokens] != array("I", token_ids[:num_had]):
            return None
        has.extend(token_ids[num_had:])
        return token_ids[num_had:]

    def _cut_prompt(self, holder: Chunk) -> None:
        client = self._client
        if client.prompt_token_ids or not client.shows_token_ids:
            prompt, holder["prompt_token_ids"] = holder["prompt_token_ids"], None
        else:
            prompt = holder["prompt_token_ids"]
        client.prompt_token_ids = client.prompt_token_ids or array("I", prompt)

    def _fits(self, field: str, text: str) -> bool:
        """Whether the client has nothing else at this place: tokens may be equal, and what another
        parser makes of them may not."""
        return text.startswith(self._known(field, len(text)))

    def _known(self, field: str, num_chars: int) -> str:
        """What the client has of the next characters of this field."""
        has = self._client.texts[field]
        has.seek(self._num_chars.get(field, 0))
        known = has.read(num_chars)
        has.seek(0, SEEK_END)
        return known

    def _cut_texts(self, choice: Chunk) -> bool:
        """Whether something is left."""
        is_new = False
        for field, holder, name in texts(choice):
            text = holder[name]
            new = text[len(self._known(field, len(text))) :]
            self._num_chars[field] = self._num_chars.get(field, 0) + len(text)
            if new:
                is_new = True
                self._client.texts[field].write(new)
                holder[name] = new
            elif holder is choice:
                holder[name] = ""
            elif text:
                del holder[name]
        return is_new

    def _cut_delta(self, delta: Chunk) -> bool:
        """What comes once in a message, or once in a tool call."""
        client = self._client
        is_new = "role" in delta and not client.has_role
        if client.has_role:
            delta.pop("role", None)
        client.has_role |= is_new
        calls = []
        for call in delta.pop("tool_calls", None) or ():
            if call["index"] < client.num_calls:
                call = {k: v for k, v in call.items() if k not in ("id", "type")}
                if not call.get("function"):
                    continue
            else:
                client.num_calls, is_new = call["index"] + 1, True
            calls.append(call)
        if calls:
            delta["tool_calls"] = calls
        return is_new
