# SPDX-License-Identifier: Apache-2.0
"""The part of a Kubernetes API server that lists and watches pods, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from aiohttp import web

OLDEST_KEPT = 100


class FakeKubernetes:
    """One namespace; resource versions, label selectors, watches that start at a version.

    As with a real one, a watch tells of a pod that no longer fits its selector that it is deleted,
    sends bookmarks to who asked for them, and is refused where a verb is not granted.
    """

    def __init__(self) -> None:
        self.version = OLDEST_KEPT
        self.pods: dict[str, dict[str, Any]] = {}
        self.num_lists = 0
        self.num_watches = 0
        self.num_watching = 0
        """Watches that nobody has ended."""
        self.is_broken = False
        self.is_silent = False
        """Lists get no answer."""
        self.denied: set[str] = set()
        """Verbs: ``list``, ``watch``."""
        self._history: list[tuple[int, dict[str, Any] | None, dict[str, Any] | None]] = []
        """Each change: version, the pod before it, the pod after it."""
        self._bookmark = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._ends = 0
        self._ending = False
        self.oldest_kept = OLDEST_KEPT
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self._ending = True
        self.end_watches()
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
        self,
        name: str,
        model: str,
        ready: bool = True,
        ending: bool = False,
        address: str = "127.0.0.1",
        **labels: str,
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
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        pod["spec"] = {"containers": [{"name": "engine"}]}
        self.pods[name] = pod
        self._record(known, pod)

    def delete(self, name: str) -> None:
        self.version += 1
        pod = self.pods.pop(name)
        metadata = {**pod["metadata"], "resourceVersion": str(self.version)}
        self._record({**pod, "metadata": metadata}, None)

    def bookmark(self) -> None:
        """Pods of others have changed: a watch that stands still comes to know the version."""
        self.version += 1
        self._bookmark = self.version
        self._wake()

    def end_watches(self) -> None:
        """As their timeout does."""
        self._ends += 1
        self._wake()

    def forget_history(self) -> None:
        """As a compaction of etcd: a watch may not start before now, and running ones end."""
        self.version += 1
        self.oldest_kept = self.version
        self._wake()

    def _record(self, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        self._history.append((self.version, before, after))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        if self.is_broken:
            return web.json_response({"kind": "Status", "code": 500}, status=500)
        verb = "watch" if request.query.get("watch") in ("true", "True") else "list"
        if verb in self.denied:
            message = f"pods is forbidden: cannot {verb} resource"
            denied = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}
            return web.json_response(denied, status=403)
        selector = request.query.get("labelSelector", "")
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        if verb == "watch":
            self.num_watching += 1
            try:
                return await self._watch(request, wanted)
            finally:
                self.num_watching -= 1
        self.num_lists += 1
        if self.is_silent:
            await asyncio.Event().wait()
        items = [pod for pod in self.pods.values() if _matches(pod, wanted)]
        metadata = {"resourceVersion": str(self.version)}
        body = {"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": items}
        return web.json_response(body)

    async def _watch(self, request: web.Request, wanted: dict[str, str]) -> web.StreamResponse:
        self.num_watches += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)

        async def send(kind: str, what: dict[str, Any]) -> None:
            await response.write(json.dumps({"type": kind, "object": what}).encode() + b"\n")

        after = int(request.query["resourceVersion"])
        bookmarks = request.query.get("allowWatchBookmarks") in ("true", "True")
        while not self.is_broken and not self._ending:
            if after < self.oldest_kept:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                await send("ERROR", gone)
                break
            changed, ends = self._changed, self._ends
            for version, before, now in list(self._history):
                if version > after and (event := _event(before, now, wanted, version)):
                    await send(*event)
            if bookmarks and self._bookmark > after:
                metadata = {"resourceVersion": str(self._bookmark)}
                await send("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata})
            after = self.version
            await changed.wait()
            if self._ends != ends:
                break
        with contextlib.suppress(ConnectionResetError):  # whoever watched may be gone
            await response.write_eof()
        return response


def _event(
    before: dict[str, Any] | None,
    now: dict[str, Any] | None,
    wanted: dict[str, str],
    version: int,
) -> tuple[str, dict[str, Any]] | None:
    """What a watch with this selector tells of a change."""
    was, fits = (pod is not None and _matches(pod, wanted) for pod in (before, now))
    if fits:
        assert now is not None
        return "MODIFIED" if was else "ADDED", now
    if not was:
        return None
    assert before is not None
    metadata = {**before["metadata"], "resourceVersion": str(version)}
    return "DELETED", {**before, "metadata": metadata}


def _matches(pod: dict[str, Any], wanted: dict[str, str]) -> bool:
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in wanted.items())
