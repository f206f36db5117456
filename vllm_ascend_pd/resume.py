# SPDX-License-Identifier: Apache-2.0
"""What says that a request goes on which another engine has begun: ``kv_transfer_params.resume``.

Who has seen the tokens of a broken answer sends the request again, unchanged, with these tokens.
The engine takes them as its own first output and computes the next one. A client could make an
engine say anything in that way, so all of it is signed with the secret of the installation, and the
router lets no client's ``resume`` through. Without a secret nothing is signed; then only an engine
whose own ``kv_ip`` is a loopback address resumes at all.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vllm_ascend_pd.errors import TransferError, brief
from vllm_ascend_pd.wire import Name, Port, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.net.trust import Secret

RESUME = "resume"
"""The field of ``kv_transfer_params``."""
MOVED = "moved"
"""In those of an answer, where it has ended because another engine goes on."""
HAS_MOVED = "the request has moved to another engine"
"""What a server says then, with 409."""
_MODEL_PARTS = (
    *("config", "arch", "weights", "generation", "load", "quant", "dtype", "kv_dtype"),
    *("length", "window", "media", "code"),
)
"""Parts of a fingerprint, see ``engine.fingerprint``, that decide which token is next. How KV lies
in memory, how it travels and what is drafted do not."""
DRAWS = "draws"
_OTHER_PARTS = (
    *("processors", "watermark", "defaults", "parsing", "adapter", "grammars"),
    *(DRAWS, "logprobs"),
)
_LENGTH = "length_limit"
_IS_LIMIT = re.compile("[0-9]{1,18}").fullmatch
_MAX_TOKENS = 1 << 24
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class RunningAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that runs the request, and is to hand it over: what its registration says in
    ``kv`` and as its ``epoch``.
    """

    host: Name
    port: Port
    key: Name
    epoch: Name


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``ResumeKey.sign`` makes it."""

    request_id: Name
    """Of the request at the engine that has begun it, as its client knows it."""
    output_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=_MAX_TOKENS)]
    """All that are known, in order. With ``source`` there may be none: it knows them all."""
    prompt_digest: Name
    """See ``prompt_digest``: of what they are the answer to. Empty where nobody was told: the
    ``source`` compares the prompts.
    """
    only_exact: bool = True
    """Refuse rather than go on where the next tokens are only as likely as the lost ones were: with
    a temperature and no seed, or with a seed and drafts.
    """
    source: RunningAt | None = None
    """Set where the request still runs."""
    made_by: Text = ""
    """See ``made_by``: what made the tokens. Empty where nobody knows; the ``source`` compares it
    itself."""
    proof: Name = ""

    def to_params(self) -> dict[str, Any]:
        """The value of ``kv_transfer_params["resume"]``, as plain JSON values."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params

    @classmethod
    def from_params(cls, value: object) -> Resume:
        """``TransferError`` names the wrong field."""
        try:
            resume = msgspec.convert(value, cls)
        except msgspec.ValidationError as e:
            raise TransferError(f"kv_transfer_params.{RESUME}: {brief(e)}") from e
        if not resume.output_token_ids and resume.source is None:
            raise TransferError(
                f"kv_transfer_params.{RESUME}: output_token_ids and source are none"
            )
        return resume


class ResumeKey:
    """Signs, and knows what was signed with the same secret. Any thread."""

    def __init__(self, secret: Secret | None) -> None:
        """Without a secret proofs are empty, and all of them are accepted."""
        self._key = None if secret is None else secret.derive(b"resume key 1")

    def sign(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        output_token_ids: Sequence[int],
        only_exact: bool = True,
        source: RunningAt | None = None,
        made_by: str = "",
    ) -> Resume:
        """For the answer to this prompt that has begun with these tokens; ``None`` if only the
        ``source`` knows it."""
        digest = "" if prompt_token_ids is None else prompt_digest(prompt_token_ids)
        unsigned = Resume(request_id, tuple(output_token_ids), digest, only_exact, source, made_by)
        return msgspec.structs.replace(unsigned, proof=self._proof(unsigned))

    def accepts(self, resume: Resume) -> bool:
        """Whether its proof was made with this key, for all that it says."""
        expected = self._proof(resume).encode()
        return self._key is None or hmac.compare_digest(expected, resume.proof.encode())

    def _proof(self, resume: Resume) -> str:
        if self._key is None:
            return ""
        said = msgspec.json.encode(
            (
                *(resume.request_id, resume.prompt_digest, resume.only_exact, resume.source),
                resume.made_by,
            )
        )
        said += array("I", resume.output_token_ids).tobytes()
        return hmac.new(self._key, said, "sha256").hexdigest()


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Of all token ids of a prompt, as the first chunk of an answer has them
    (``return_token_ids``).
    """
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).hexdigest()


def made_by(fingerprint: str, /, **others: str) -> str:
    """What decides beside a request which answer an engine gives: parts of one line. Of the
    ``others`` those are left out that are empty, for there is none, or nobody knows it:

        processors      its own logits processors
        watermark       how it marks what it samples
        defaults        what it takes for sampling parameters that a request has not
        length_limit    at which it ends an answer: ``--max-model-len``
        parsing         by which options its server makes text and tool calls of tokens
        adapter         a digest of the request's
        grammars        how it makes those of structured output
        draws           which random numbers it makes of a seed
        logprobs        of what it tells logprobs: ``--logprobs-mode``
    """
    known = _parts(fingerprint)
    parts = {name: known[name] for name in _MODEL_PARTS if name in known}
    parts |= {name: others[name] for name in (*_OTHER_PARTS, _LENGTH) if others.get(name)}
    return " ".join(f"{name}={value}" for name, value in parts.items())


def completed(begun: str, now: str) -> str:
    """What has made an answer: what its engine had told when it began, and what that one tells now
    of the rest. An adapter is known once its files have been read."""
    known = _parts(begun)
    told = {*known, *(_MODEL_PARTS if any(name in known for name in _MODEL_PARTS) else ())}
    more = {name: value for name, value in _parts(now).items() if name not in told}
    return " ".join(f"{name}={value}" for name, value in {**known, **more}.items())


def other_parts(theirs: str, ours: str, num_tokens: int = 0) -> list[str]:
    """Names of the parts in which these two differ, so that one may go on otherwise than the other
    began. Not compared are the model's parts if one has none of them, others that one has not, and
    a limit that a request of ``num_tokens`` does not come to.
    """
    one, other = _parts(theirs), _parts(ours)
    found: list[str] = []
    if all(any(name in parts for name in _MODEL_PARTS) for parts in (one, other)):
        found += [name for name in _MODEL_PARTS if one.get(name) != other.get(name)]
    both = one.keys() & other.keys()
    found += [name for name in _OTHER_PARTS if name in both and one[name] != other[name]]
    if _LENGTH in both and one[_LENGTH] != other[_LENGTH]:
        limits = [int(p[_LENGTH]) if _IS_LIMIT(p[_LENGTH]) else 0 for p in (one, other)]
        found += [_LENGTH] if num_tokens >= min(limits) else []
    return found


@lru_cache(maxsize=1024)
def _parts(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in line.split() if "=" in part)
