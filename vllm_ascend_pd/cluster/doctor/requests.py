# SPDX-License-Identifier: Apache-2.0
"""Whether engines of one model take the same requests, and make the same prompt of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.cluster.doctor.engines import ERRORS, Engine, Web, by_model, each
from vllm_ascend_pd.cluster.doctor.findings import Finding, fail, ok, reason_of, skipped, warn
from vllm_ascend_pd.resume import prompt_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TIMEOUT_S = 30.0
_NONE = "no tokens"
_TEXT = "Grüße, 世界! def f(x):\n    return x  # 1234567"
_ASKED: dict[str, dict[str, Any]] = {
    "a text": {"prompt": _TEXT},
    "a chat": {
        "messages": [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": _TEXT},
        ]
    },
}
"""What all are to make the same tokens of."""


class SameRequests:
    """P computes the prompt that it makes of a request, and D takes the KV of the one that it makes
    itself: of another one it takes nothing."""

    name = "requests"

    def __init__(self, web: Web, engines: Sequence[Engine]) -> None:
        self._web = web
        self._models = by_model([engine for engine in engines if not engine.error])

    async def run(self) -> Sequence[Finding]:
        findings: list[Finding] = []
        for model, known in self._models.items():
            if len(known) > 1:
                where = f"{model}: " if len(self._models) > 1 else ""
                findings += self._once(where, known)
                findings += await self._prompts(where, known)
                findings.append(self._lengths(where, known))
                findings += self._names(where, known)
        return findings or [skipped(self.name, "no two engines of one model answer")]

    def _once(self, where: str, known: Sequence[Engine]) -> list[Finding]:
        """Of each two that are one."""
        findings = []
        seen: dict[tuple[str, int | None], Engine] = {}
        for engine in known:
            if not (epoch := engine.info.get("epoch")):
                continue
            other = seen.setdefault((epoch, engine.rank), engine)
            if other is not engine:
                found = f"{where}{other} at {other.url} and {engine} at {engine.url} are one engine"
                fix = "give it once, with role both if it is to do both (--instances)"
                findings.append(fail(self.name, found, fix))
        return findings

    async def _prompts(self, where: str, known: Sequence[Engine]) -> list[Finding]:
        findings = []
        for what, asked in _ASKED.items():
            told = await each(partial(self._tokens, asked), known)
            if all(one.startswith(_NONE) for one in told):
                findings.append(skipped(self.name, f"{where}engines make {told[0]} of {what}"))
            elif len(set(told)) == 1:
                findings.append(ok(self.name, f"{where}all make {told[0]} of {what}"))
            else:
                found = f"{where}of {what} they make different prompts: {_listed(known, told)}"
                fix = "give all the same --tokenizer, --tokenizer-mode and --chat-template"
                findings.append(fail(self.name, found, fix))
        return findings

    async def _tokens(self, asked: Mapping[str, Any], engine: Engine) -> str:
        """What is the same where the tokens are."""
        try:
            body = {"model": engine.model, **asked}
            answer = await self._web.post(f"{engine.url}/tokenize", body, _TIMEOUT_S)
            tokens: list[int] = answer["tokens"]
            digest = prompt_digest(tokens)[:8]
        except (*ERRORS, KeyError, TypeError, OverflowError) as e:
            return f"{_NONE} ({reason_of(e)[:100]})"
        return f"{len(tokens)} tokens ({digest})"

    def _lengths(self, where: str, known: Sequence[Engine]) -> Finding:
        lengths = [str(engine.max_model_len) for engine in known]
        if len(set(lengths)) == 1:
            return ok(self.name, f"{where}all take up to {lengths[0]} tokens")
        found = f"{where}they take up to so many tokens: {_listed(known, lengths)}"
        fix = (
            "give all the same --max-model-len: what a P refuses D computes alone, and what a D"
            " refuses is refused"
        )
        return warn(self.name, found, fix)

    def _names(self, where: str, known: Sequence[Engine]) -> list[Finding]:
        """Adapters, and further names of the model."""
        findings = []
        for name in sorted(set[str]().union(*(engine.models for engine in known))):
            without = [str(engine) for engine in known if name not in engine.models]
            if without:
                found = f"{where}{name} is not served by {', '.join(without)}"
                fix = "give all the same --served-model-name and --lora-modules"
                findings.append(warn(self.name, found, fix))
        return findings


def _listed(engines: Sequence[Engine], told: Sequence[str]) -> str:
    return ", ".join(f"{engine} {one}" for engine, one in zip(engines, told, strict=True))
