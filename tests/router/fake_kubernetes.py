# SPDX-License-Identifier: Apache-2.0
"""The part of a Kubernetes API server that lists and watches pods, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

OLDEST_KEPT = 100


class FakeKubernetes:
    """One namespace; resource versions, label selectors, watches that start at a version."""

    def __init__(self) -> None:
        self.version = OLDEST_KEPT
        self.pods: dict[str, dict[str, Any]] = {}
        self.num_lists = 0
        self.is_broken = False
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._ending = False
        self.oldest_kept = OLDEST_KEPT
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self._ending = True
        self._wake()
        assert self._runner is not None
        await self._runner.cleanup()
        self._ending = False

    def kubeconfig(self, path: Path) -> Path:
        server = {"server": f"http://127.0.0.1:{self.port}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": {"token": "secret"}}],
        }
        path.write_text(json.dumps(config))
        return path

    def put(
        self, name: str, model: str, ready: bool = True, ending: bool = False, **labels: str
    ) -> None:
        self.version += 1
        known = self.pods.get(name)
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": "engines",
            "uid": known["metadata"]["uid"] if known else f"uid-{name}-{self.version}",
            "resourceVersion": str(self.version),
            "labels": {"model": model, **labels},
        }
        if ending:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        pod["spec"] = {"containers": [{"name": "engine"}]}
        self.pods[name] = pod
        self._record("MODIFIED" if known else "ADDED", pod)

    def delete(self, name: str) -> None:
        self.version += 1
        pod = self.pods.pop(name)
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._record("DELETED", pod)

    def forget_history(self) -> None:
        """As a compaction of etcd: a watch may not start before now, and running ones end."""
        self.version += 1
        self.oldest_kept = self.version
        self._wake()

    def _record(self, kind: str, pod: dict[str, Any]) -> None:
        self._history.append((self.version, kind, pod))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        if self.is_broken:
            return web.json_response({"kind": "Status", "code": 500}, status=500)
        selector = request.query.get("labelSelector", "")
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        if request.query.get("watch") in ("true", "True"):
            return await self._watch(request, wanted)
        self.num_lists += 1
        items = [pod for pod in self.pods.values() if _matches(pod, wanted)]
        metadata = {"resourceVersion": str(self.version)}
        body = {"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": items}
        return web.json_response(body)

    async def _watch(self, request: web.Request, wanted: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        after = int(request.query["resourceVersion"])
        while not self._ending and not self.is_broken:
            if after < self.oldest_kept:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                break
            changed = self._changed
            for version, kind, pod in list(self._history):
                if version > after and _matches(pod, wanted):
                    event = json.dumps({"type": kind, "object": pod}).encode()
                    await response.write(event + b"\n")
            after = self.version
            await changed.wait()
        await response.write_eof()
        return response


def _matches(pod: dict[str, Any], wanted: dict[str, str]) -> bool:
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in wanted.items())
