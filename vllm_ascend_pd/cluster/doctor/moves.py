# SPDX-License-Identifier: Apache-2.0
"""A real stream that the router moves while it runs."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from vllm_ascend_pd.cluster.doctor.engines import ERRORS, Engine, Web, by_model, not_applicable
from vllm_ascend_pd.cluster.doctor.findings import Finding, fail, ok, reason_of, skipped, warn
from vllm_ascend_pd.cluster.doctor.transfers import make_body, make_prompt
from vllm_ascend_pd.operating import REQUESTS, MoveReport

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_ANSWER_TOKENS = 600
_TIMEOUT_S = 120.0
_FIXES = {
    "off": "start the router with --resume-streams exact",
    "unavailable": "see whether the other engine has room, and is neither drained nor down",
    "incompatible": "requests move between engines of one fingerprint: see what `other properties`,"
    " `model` and `KV layout` say",
    "refused": "give the router and all engines the same secret; the target's log names the cause",
    "timeout": "look at the load of the engines and the network",
    "differs": "in float32 the tokens must be equal: report it with both logs",
}
"""What to do about each cause for which a request has stayed."""


class MoveThroughRouter:
    """Has the router move a stream to another engine, and compares its text with one engine's."""

    name = "move"

    def __init__(self, web: Web, router: str, engines: Sequence[Engine], token: str | None) -> None:
        """``token``: of an operator of the router."""
        self._web = web
        self._token = token
        self._router = router.rstrip("/")
        answering = [one for one in engines if not one.error and one.role != "prefill"]
        decoders = by_model([one for one in answering if one.generates])
        self._others = not_applicable(self.name, answering)
        self._first = [of_model[0] for of_model in decoders.values() if len(of_model) > 1]
        """Of each model that has an engine to move to, one to move from."""

    async def run(self) -> Sequence[Finding]:
        if not self._first:
            reason = "there are no two engines of one model that answer"
            return [skipped(self.name, reason), *self._others]
        several = len(self._first) > 1
        return self._others + [
            await self._examine(engine, f"{engine.model}: " if several else "")
            for engine in self._first
        ]

    async def _examine(self, engine: Engine, what: str) -> Finding:
        try:
            report, is_equal = await self._try(engine)
        except aiohttp.ClientResponseError as e:
            hint = "; name the file with its token with --token-file" if e.status == 403 else ""
            return skipped(self.name, f"{what}the router did not take the order: {e.status}{hint}")
        except (*ERRORS, LookupError, TypeError) as e:
            reason = reason_of(e)
            return fail(self.name, f"{what}{reason}", "see the router's log")
        return self.judge(what, report, is_equal)

    async def _try(self, engine: Engine) -> tuple[MoveReport, bool]:
        """What became of it, and whether its client has noticed nothing."""
        num_tokens = min(NUM_ANSWER_TOKENS, engine.max_model_len // 2)
        body = make_body(engine.model, make_prompt(engine, 50), num_tokens)
        url = f"{self._router}/v1/completions"
        whole = (await self._web.post(url, body, _TIMEOUT_S))["choices"][0]["text"]
        name = f"doctor-{secrets.token_hex(8)}"
        text, report = "", None
        stream = self._web.stream(url, {**body, "stream": True}, name, _TIMEOUT_S)
        async for chunk in stream:
            text += chunk["choices"][0]["text"]
            if report is None:
                order = f"{self._router}{REQUESTS}/{name}/move"
                report = await self._web.order(order, {}, _TIMEOUT_S, self._token)
        [told] = msgspec.convert(report, list[MoveReport])
        return told, text == whole

    def judge(self, what: str, report: MoveReport, is_equal: bool) -> Finding:
        """By what the router says of it."""
        values = msgspec.structs.asdict(report)
        if report.outcome == "not_needed":
            return skipped(self.name, f"{what}the answer was complete before it could move")
        if report.outcome != "moved":
            fix = _FIXES.get(report.cause, "see the logs of the router and of both engines")
            return fail(self.name, f"{what}{report.outcome}: {report.cause}", fix, **values)
        found = f"{what}{report.source} to {report.target} in {report.seconds * 1e3:.0f} ms"
        if not is_equal:
            fix = "in float32 the answers must be equal: report it with all logs"
            return warn(self.name, f"{found}; the answer is not that of one engine", fix, **values)
        return ok(self.name, f"{found}, and its client has noticed nothing", **values)
