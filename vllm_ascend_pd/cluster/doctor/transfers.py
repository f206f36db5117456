# SPDX-License-Identifier: Apache-2.0
"""Real requests: does KV move from P to D, and does the router make it move."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.cluster.doctor.engines import (
    ERRORS,
    Engine,
    Web,
    by_model,
    count,
    each,
    not_applicable,
)
from vllm_ascend_pd.cluster.doctor.findings import (
    Finding,
    Verdict,
    fail,
    ok,
    reason_of,
    skipped,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_PROMPT_TOKENS = 700
NUM_ANSWER_TOKENS = 4
_TIMEOUT_S = 120.0
_COUNTED = "vllm:pd_requests"
_LOADED = ("loaded", "local")

_FIXES = {
    "bad_params": "on P, put D's address into security.allowed_peers",
    "wrong_role": "give P kv_role kv_producer and D kv_consumer, or both kv_both",
    "peer_not_allowed": "on D, put P's address into security.allowed_peers",
    "peer_unreachable": "see that P runs, its kv_ip, its kv_port and the firewall",
    "unauthenticated": "give P and D the same security.secret_file",
    "incompatible": "see the check that failed above, or the warning in D's log",
    "wrong_epoch": "P was restarted meanwhile; run the doctor again",
    "lease_expired": "give P and D one transfer.lease_s, a higher one, or see what holds D up",
    "not_arrived": "see why the router's request did not reach P",
    "hash_mismatch": "start both sides with the same hash algorithm and PYTHONHASHSEED",
    "checksum": "look at the network and the memory of both hosts",
    "transfer_failed": "open Mooncake's ports (15000-17000) between the hosts",
    "deadline": "look at the load of P and the network",
}
"""What to do about each outcome of a request that should have been loaded."""


def make_prompt(engine: Engine, num_tokens: int = NUM_PROMPT_TOKENS) -> list[int]:
    """Token ids that no prefix cache holds, and that every vocabulary has."""
    room = max(2, engine.max_model_len - NUM_ANSWER_TOKENS - 1)
    return [random.randrange(10, 250) for _ in range(min(num_tokens, room))]


def make_body(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """A completion without chance in it."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def make_pairs(engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
    """Of each model, every engine once or more, as P or D; with itself only if it is alone."""
    return [pair for of_model in by_model(engines).values() for pair in _pairs_of(of_model)]


def _pairs_of(engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
    producers = [engine for engine in engines if engine.role != "decode"]
    consumers = [engine for engine in engines if engine.role != "prefill"]
    if not producers or not consumers:
        return []
    pairs = []
    for i in range(max(len(producers), len(consumers))):
        p = producers[i % len(producers)]
        start = i % len(consumers)
        turn = consumers[start:] + consumers[:start]
        pair = (p, next((d for d in turn if d is not p), p))
        if pair not in pairs:
            pairs.append(pair)
    return [(p, d) for p, d in pairs if p is not d] or pairs


class Transfer:
    """Sends a prompt to P, then to D, and reads in D's answer where its KV came from."""

    name = "P/D request"

    def __init__(self, web: Web, engines: Sequence[Engine]) -> None:
        self._web = web
        self._engines = [engine for engine in engines if not engine.error]
        self._pairs = make_pairs([engine for engine in self._engines if engine.generates])

    async def run(self) -> Sequence[Finding]:
        others = not_applicable(self.name, self._engines)
        if not self._pairs:
            reason = "there is no pair of engines of one model that answers"
            return [skipped(self.name, reason), *others]
        tried = [(p, d, await self._try(p, d)) for p, d in self._pairs]
        return others + [
            await self._with_blame(p, d, finding, tried)
            if finding.verdict is Verdict.FAIL
            else finding
            for p, d, finding in tried
        ]

    async def _with_blame(
        self, p: Engine, d: Engine, failed: Finding, tried: Sequence[tuple[Engine, Engine, Finding]]
    ) -> Finding:
        """Which of the two it is, as each does with an engine of a pair that works."""
        for good_p, good_d, found in tried:
            is_apart = good_p is not p and good_d is not d and good_p.model == p.model
            if not is_apart or found.verdict is Verdict.FAIL:
                continue
            words = {True: "fails", False: "works"}
            fails = [
                (await self._try(*pair)).verdict is Verdict.FAIL
                for pair in ((p, good_d), (good_p, d))
            ]
            told = f"; {p} {words[fails[0]]} with {good_d}, {d} {words[fails[1]]} with {good_p}"
            return replace(failed, found=failed.found + told)
        return failed

    async def _try(self, p: Engine, d: Engine) -> Finding:
        pair = f"{p} to {d}"
        prompt = make_prompt(p)
        try:
            sent = time.perf_counter()
            params, _ = await self._complete(p, prompt, 1, {"do_remote_decode": True})
            if not params or not params.get("do_remote_prefill"):
                fix = "see that P is patched and its kv_role is kv_producer or kv_both"
                return fail(self.name, f"{pair}: P returned no kv_transfer_params", fix)
            params["return_provenance"] = True
            answer, text = await self._complete(d, prompt, NUM_ANSWER_TOKENS, params)
            elapsed_s = time.perf_counter() - sent
            _, alone = await self._complete(p, prompt, NUM_ANSWER_TOKENS, None)
        except (*ERRORS, KeyError, IndexError, TypeError) as e:
            reason = reason_of(e)
            return fail(self.name, f"{pair}: {reason}", f"see the logs of {p} and {d}")
        return self.judge(pair, (answer or {}).get("provenance"), elapsed_s, text == alone)

    async def _complete(
        self, engine: Engine, prompt: list[int], max_tokens: int, params: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, str]:
        body = make_body(engine.model, prompt, max_tokens)
        if params is not None:
            body["kv_transfer_params"] = params
        url = f"{engine.url}/v1/completions"
        answer = await self._web.post(url, body, _TIMEOUT_S, engine.headers)
        return answer.get("kv_transfer_params"), answer["choices"][0]["text"]

    def judge(
        self, pair: str, provenance: dict[str, Any] | None, elapsed_s: float, equal: bool
    ) -> Finding:
        """By what D says of the prompt, and whether its answer is P's own."""
        if provenance is None:
            fix = "see that D is patched and its kv_role is kv_consumer or kv_both"
            return fail(self.name, f"{pair}: D does not say where its KV came from", fix)
        values = {**provenance, "elapsed_s": elapsed_s}
        outcome = provenance["outcome"]
        if outcome != "loaded" or not provenance["num_peer_tokens"]:
            fix = _FIXES.get(outcome, "see the warning in D's log")
            return fail(self.name, f"{pair}: no transfer, {outcome}", fix, **values)
        num_bytes, ms = provenance["num_peer_bytes"], provenance["transfer_ms"]
        found = (
            f"{pair}: {provenance['num_peer_tokens']} of {provenance['num_prompt_tokens']} tokens,"
            f" {num_bytes / 1e6:.1f} MB in {ms:.0f} ms ({num_bytes / max(ms, 1e-3) / 1e6:.2f} GB/s)"
        )
        if not equal:
            fix = "in float32 the answers must be equal: report it with both logs"
            return warn(
                self.name, f"{found}; D's answer is not the one that P gives", fix, **values
            )
        return ok(self.name, found, **values)


class ThroughRouter:
    """Sends the router a prompt for each model, and looks whether an engine counts a transfer."""

    name = "router request"

    def __init__(self, web: Web, router: str, engines: Sequence[Engine]) -> None:
        self._web = web
        self._router = router.rstrip("/")
        self._engines = [engine for engine in engines if not engine.error]

    async def run(self) -> Sequence[Finding]:
        others = not_applicable(self.name, self._engines)
        decoders = [one for one in self._engines if one.role != "prefill" and one.generates]
        consumers = by_model(decoders)
        if not consumers:
            return [skipped(self.name, "the router has no decode engine that answers"), *others]
        several = len(consumers) > 1
        return others + [
            await self._try(of_model, f"{model}: " if several else "")
            for model, of_model in consumers.items()
        ]

    async def _try(self, consumers: Sequence[Engine], what: str) -> Finding:
        d = consumers[0]
        # Over 2,048 tokens, up to which a router may find that D is sooner by itself.
        prompt = make_prompt(d, 3 * NUM_PROMPT_TOKENS)
        try:
            before = await self._count(consumers)
            body = make_body(d.model, prompt, NUM_ANSWER_TOKENS)
            sent = time.perf_counter()
            answer = await self._web.post(f"{self._router}/v1/completions", body, _TIMEOUT_S)
            elapsed_s = time.perf_counter() - sent
            answer["choices"][0]["text"]
            after = await self._settled(consumers, before)
        except (*ERRORS, KeyError, IndexError, TypeError) as e:
            reason = reason_of(e)
            fix = f"curl -i {self._router}/health; then see the router's log"
            return fail(self.name, f"{what}{reason}", fix)
        return self.judge(what, before, after, elapsed_s)

    async def _settled(
        self, consumers: Sequence[Engine], before: dict[str, float]
    ) -> dict[str, float]:
        """The counters once they have changed; engines hand them out a step later."""
        after = before
        for _ in range(20):
            after = await self._count(consumers)
            if after != before:
                break
            await asyncio.sleep(0.1)
        return after

    async def _count(self, engines: Sequence[Engine]) -> dict[str, float]:
        """Requests that asked for a peer's KV, by outcome, added up over the engines."""

        async def of(engine: Engine) -> dict[str, float]:
            page = await self._web.text(f"{engine.url}/metrics")
            return count(page, _COUNTED, engine.rank)

        counts: dict[str, float] = {}
        for counted in await each(of, engines):
            for outcome, number in counted.items():
                counts[outcome] = counts.get(outcome, 0) + number
        return counts

    def judge(
        self, what: str, before: dict[str, float], after: dict[str, float], elapsed_s: float
    ) -> Finding:
        """By what the decode engines counted meanwhile. Other clients' requests count too."""
        new = {k: v - before.get(k, 0) for k, v in after.items() if v > before.get(k, 0)}
        if any(outcome in _LOADED for outcome in new):
            found = f"{what}answered in {elapsed_s:.2f} s, KV was transferred"
            return ok(self.name, found, **new)
        if not new:
            return warn(
                self.name,
                f"{what}answered, but no decode engine was asked to take KV from a prefill engine",
                "see whether the router skips prefill for such prompts (--skip-prefill), or does"
                " not pass kv_transfer_params on",
            )
        outcome = next(iter(new))
        fix = _FIXES.get(outcome, "see the warnings in the decode engines' logs")
        found = f"{what}answered, but KV was not transferred: {outcome}"
        return fail(self.name, found, fix, **new)
