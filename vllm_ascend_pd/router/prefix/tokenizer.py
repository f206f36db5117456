# SPDX-License-Identifier: Apache-2.0
"""Token ids of a prompt, asked of an engine: its tokenizer, its chat template."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.router.apis import CHAT, COMPLETIONS, GENERATE
from vllm_ascend_pd.router.failures import Failure
from vllm_ascend_pd.router.prefix.index import TokenId

if TYPE_CHECKING:
    from vllm_ascend_pd.router.bodies import Body
    from vllm_ascend_pd.router.http_client import Headers
    from vllm_ascend_pd.router.instances import Instance

TIMEOUT_S = 0.5
MAX_CACHED_TOKENS = 8 << 20
_COMPLETION = ("model", "prompt", "add_special_tokens")
_CHAT = (
    "model",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
_OF_TEMPLATE = ("documents", "reasoning_effort")
"""What a chat's server tells its template beside ``chat_template_kwargs``, and ``/tokenize``
does not."""
_has_media = re.compile(
    rb'"(?:(?:image|audio|video|prompt)_(?:url|embeds)|input_(?:image|audio))"'
).search
"""Which an engine would fetch and prepare once more, and whose blocks are in no index."""

_ids_decoder: msgspec.json.Decoder[tuple[int, ...]] = msgspec.json.Decoder(tuple[TokenId, ...])


class _Tokenized(msgspec.Struct):
    tokens: tuple[TokenId, ...]


class Tokenizer:
    """Remembers what it asked, least recently used forgotten first. Event loop thread."""

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    async def token_ids(
        self, body: Body, instance: Instance, headers: Headers
    ) -> tuple[int, ...] | None:
        """``None`` if the engine does not say, or a number can be none; then the request is routed
        without."""
        if body.path not in (CHAT, COMPLETIONS, GENERATE) or body.says("truncate_prompt_tokens"):
            return None
        if body.says("features") or body.says("content_parts"):  # whose blocks are in no index
            return None
        if body.path != CHAT and body.prompt.startswith(b"["):
            try:
                return _ids_decoder.decode(body.prompt)
            except msgspec.MsgspecError:
                return None
        asked = question(body)
        if asked is None:
            return None
        # Another model may get the name of this one while the router runs.
        model = (instance.told_fingerprint or "").encode(errors="replace")
        # Who has a salt learns by timing of no prompt of another one.
        salt = bytes(body.fields.get("cache_salt", b""))
        key = hashlib.blake2b(b"\0".join((model, salt, asked)), digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        answer = await instance.client.fetch(b"POST", b"/tokenize", headers, asked, TIMEOUT_S)
        if isinstance(answer, Failure) or answer[0] != 200:
            return None
        try:
            tokens = msgspec.json.decode(answer[1], type=_Tokenized).tokens
        except UNREADABLE:
            return None
        self._remember(key, tokens)
        return tokens

    def _remember(self, key: bytes, tokens: tuple[int, ...]) -> None:
        if key in self._known:  # another request asked the same meanwhile
            return
        self._known[key] = tokens
        self._num_tokens += len(tokens)
        while self._num_tokens > self._max_tokens:
            _, forgotten = self._known.popitem(last=False)
            self._num_tokens -= len(forgotten)


def question(body: Body) -> bytes | None:
    """To ``/tokenize``, of a chat or a completion; ``None`` if no engine could answer it, or none
    should.
    """
    if body.path == CHAT and _has_media(body.fields.get("messages", b"")):
        return None
    names = _CHAT if body.path == CHAT else _COMPLETION
    asked = {name: body.fields[name] for name in names if name in body.fields}
    told = {name: body.fields[name] for name in _OF_TEMPLATE if body.says(name)}
    if body.path == CHAT and told:
        own = asked.get("chat_template_kwargs", msgspec.Raw(b"null"))
        try:
            options = msgspec.json.decode(own, type=dict[str, msgspec.Raw] | None) or {}
        except UNREADABLE:
            return None
        if effort := told.get("reasoning_effort"):
            thinks = b"false" if bytes(effort) == b'"none"' else b"true"
            options.setdefault("enable_thinking", msgspec.Raw(thinks))
        asked["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode({**options, **told}))
    return msgspec.json.encode(asked)
