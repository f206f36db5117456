# SPDX-License-Identifier: Apache-2.0
"""Instances that are pods: found by label, followed with a watch (Kubernetes' official client).

A pod's role follows from its label ``model``, as in vLLM's production-stack: one of
``--prefill-model-labels`` makes it a prefill instance, one of ``--decode-model-labels`` a decode
instance.
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.instances import InstanceSpec

if TYPE_CHECKING:
    from vllm_ascend_pd.registration import State
    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.instances import Registry

logger = logging.getLogger(__name__)

SOURCE = "kubernetes"
LABEL = "model"
WATCH_S = 300
"""Then the server ends a watch, and the next one goes on from where it ended."""
ANSWER_S = 30.0
"""For a list, and beside ``WATCH_S`` for a watch: the client's own limit of 300 s in all would end
every watch before the server does, and have all pods listed again."""
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
GONE = 410
"""The API server has forgotten the version that the watch was to start from: list again."""
DENIED = (401, 403)


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    phase: str | None = None
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct):
    """What is read of a pod."""

    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)

    @property
    def is_ready(self) -> bool:
        conditions = self.status.conditions or ()
        return any(c.type == "Ready" and c.status == "True" for c in conditions)


class KubernetesDiscovery:
    """One task on the event loop. While the API server is away, what was known stays."""

    def __init__(self, config: RouterConfig, registry: Registry) -> None:
        assert config.kubernetes is not None
        if not config.prefill_labels or not config.decode_labels:
            raise ConfigError(
                "--service-discovery k8s needs --prefill-model-labels and --decode-model-labels"
            )
        self._kubernetes = config.kubernetes
        self._role_of = config.role_of
        self._registry = registry
        self._pods: dict[str, Pod] = {}
        self._task: asyncio.Task[None] | None = None
        self._backoff_s = MIN_BACKOFF_S

    async def start(self) -> None:
        """``ConfigError`` if there is no cluster to speak to."""
        try:
            client = import_module("kubernetes.aio.client")
            config = import_module("kubernetes.aio.config")
        except ImportError as e:
            message = "--service-discovery k8s: pip install 'kubernetes>=37'"
            raise ConfigError(message) from e
        configuration = client.Configuration()
        try:
            if self._kubernetes.kubeconfig is not None:
                await config.load_kube_config(
                    str(self._kubernetes.kubeconfig), client_configuration=configuration
                )
            else:
                config.load_incluster_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as e:
            where = self._kubernetes.kubeconfig or "in no pod of a cluster; give --kubeconfig FILE"
            raise ConfigError(f"--service-discovery k8s: {where} ({e})") from e
        self._task = asyncio.ensure_future(self._follow(client.ApiClient(configuration)))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self, api_client: Any) -> None:
        exceptions = import_module("kubernetes.aio.client.exceptions")
        async with api_client:
            while True:
                try:
                    await self._list_and_watch(api_client)
                except exceptions.ApiException as e:
                    need = f"; allow it to list and watch pods in {self._kubernetes.namespace}"
                    if e.status != GONE:
                        fix = need if e.status in DENIED else ""
                        logger.warning("Kubernetes: %s %s%s", e.status, e.reason, fix)
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as e:
                    logger.warning("Kubernetes does not answer: %s", e)
                except Exception:
                    logger.exception("following pods")
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)

    async def _list_and_watch(self, api_client: Any) -> None:
        """Until an error. Bookmarks tell how far the server is while no pod changes."""
        client, watch = (
            import_module("kubernetes.aio.client"),
            import_module("kubernetes.aio.watch"),
        )
        api: Any = client.CoreV1Api(api_client)
        scope: dict[str, Any] = {
            "namespace": self._kubernetes.namespace,
            "label_selector": self._kubernetes.label_selector,
        }
        listed = await api.list_namespaced_pod(**scope, _request_timeout=ANSWER_S)
        raw = api_client.sanitize_for_serialization(listed)
        pods = [msgspec.convert(pod, Pod) for pod in raw.get("items", ())]
        self._pods = {pod.metadata.uid: pod for pod in pods}
        self._publish()
        version = raw["metadata"]["resourceVersion"]
        scope |= {
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_S,
            "_request_timeout": WATCH_S + ANSWER_S,
        }
        while True:
            events = watch.Watch().stream(
                api.list_namespaced_pod, **scope, resource_version=version
            )
            async for event in events:
                version = event["raw_object"]["metadata"]["resourceVersion"]
                self._apply(event["type"], event["raw_object"])
            self._backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(MIN_BACKOFF_S)  # also where something ends every watch at once

    def _apply(self, kind: str, raw: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        pod = msgspec.convert(raw, Pod)
        if kind == "DELETED":
            self._pods.pop(pod.metadata.uid, None)
        else:
            self._pods[pod.metadata.uid] = pod
        self._publish()

    def _publish(self) -> None:
        specs = [spec for pod in self._pods.values() if (spec := self._spec(pod)) is not None]
        self._registry.replace(SOURCE, specs)

    def _spec(self, pod: Pod) -> InstanceSpec | None:
        labels = pod.metadata.labels or {}
        role = self._role_of(labels.get(LABEL, ""))
        address = pod.status.pod_ip
        if role is None or address is None or pod.status.phase in ("Succeeded", "Failed"):
            return None
        state: State = "ready" if pod.is_ready else "starting"
        if pod.metadata.deletion_timestamp is not None:
            state = "draining"
        host = f"[{address}]" if ":" in address else address
        return InstanceSpec(
            instance_id=pod.metadata.name,
            url=f"http://{host}:{self._kubernetes.port}",
            role=role,
            source=SOURCE,
            state=state,
            epoch=pod.metadata.uid,
            labels=labels,
        )
