# SPDX-License-Identifier: Apache-2.0
"""Requests whose engine dies within their stream, and what one engine would have streamed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from tests.router.harness import FAST, Deployment, events, until
from tests.router.scripted_answers import Answer
from tests.router.scripted_engine import Received, ScriptedEngine
from vllm_ascend_pd.router.config import Retries

GREEDY: dict[str, Any] = {"stream": True, "temperature": 0, "max_tokens": 6}
PATIENT = replace(FAST, timeouts=replace(FAST.timeouts, first_token_s=20))
"""An engine may take long to go on where much else runs."""
ANY = replace(PATIENT, retries=Retries(resume="any"))


def uninterrupted(sent: Received) -> list[Any]:
    """What one engine would have streamed."""
    body = {k: v for k, v in sent.json.items() if k != "kv_transfer_params"}
    asked = Received("POST", sent.path, {}, json.dumps(body).encode())
    return events(b"".join(Answer.make(ScriptedEngine(), asked).events()))


def text(got: list[Any]) -> str:
    choices = [chunk["choices"][0] for chunk in got if chunk != "[DONE]" and chunk.get("choices")]
    return "".join(choice.get("text", choice.get("delta", {}).get("content")) for choice in choices)


def told_ids(chunk: Any) -> list[Any]:
    return [choice.get("token_ids") for choice in chunk["choices"]]


async def sent(d: Deployment, **fields: Any) -> Received:
    """A decode leg of a request that goes well."""
    await d.post(**{**GREEDY, **fields})
    return next(e.received.pop() for e in d.decodes if e.received)


def resumes(d: Deployment) -> list[Received]:
    return [r for e in (*d.prefills, *d.decodes) for r in e.received if r.params.get("resume")]


async def broken(d: Deployment, fault: str, **fields: Any) -> list[Any]:
    """The events of a stream whose first engine does this."""
    d.decodes[0].script(fault)
    status, _, body = await d.post(**{**GREEDY, **fields})
    assert status == 200
    return events(body)


class Fingerprints:
    """What a deployment's decode engines are, as they said when they registered, or in metrics."""

    def __init__(self, d: Deployment, *told: str) -> None:
        self._d = d
        self._told = told

    async def registered(self) -> None:
        for engine, fingerprint in zip(self._d.decodes, self._told, strict=True):
            (instance,) = (i for i in self._d.router.registry if i.spec.url == engine.url)
            spec = msgspec.structs.replace(instance.spec, fingerprint=fingerprint)
            self._d.router.registry.put(spec)

    async def in_metrics(self) -> None:
        for engine, fingerprint in zip(self._d.decodes, self._told, strict=True):
            labels = f'engine="0",epoch="e",fingerprint="{fingerprint}",kv_endpoint=""'
            engine.metrics = f"vllm:pd_engine_info{{{labels}}} 1.0\n"
        await until(lambda: all(i.fingerprint for i in self._d.router.registry))
