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


class _Version(msgspec.Struct, rename="camel"):
    resource_version: str


class _PodList(msgspec.Struct):
    metadata: _Version
    items: list[Pod] | None = None


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
        self._specs: dict[str, InstanceSpec] = {}
        """By the pod's uid."""
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
        """Until an error. Bookmarks tell how far the server is while no pod changes.

        The client would make objects of all that a pod says, of hundreds for seconds, in which the
        router relays nothing: so it gives text.
        """
        client, watch = (
            import_module("kubernetes.aio.client"),
            import_module("kubernetes.aio.watch"),
        )
        api: Any = client.CoreV1Api(api_client)
        scope: dict[str, Any] = {
            "namespace": self._kubernetes.namespace,
            "label_selector": self._kubernetes.label_selector,
        }
        listed = await self._list(api, scope)
        self._specs.clear()
        for pod in listed.items or ():
            self._know(pod)
        self._publish()
        version = listed.metadata.resource_version
        scope |= {
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_S,
            "_request_timeout": WATCH_S + ANSWER_S,
        }
        while True:
            async with watch.Watch(return_type="object") as watching:
                pods = api.list_namespaced_pod
                async for event in watching.stream(pods, **scope, resource_version=version):
                    version = event["raw_object"]["metadata"]["resourceVersion"]
                    self._apply(event["type"], event["raw_object"])
            self._backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(MIN_BACKOFF_S)  # also where something ends every watch at once

    async def _list(self, api: Any, scope: dict[str, Any]) -> _PodList:
        exceptions = import_module("kubernetes.aio.client.exceptions")
        async with await api.list_namespaced_pod_without_preload_content(
            **scope, _request_timeout=ANSWER_S
        ) as response:
            if response.status != 200:
                raise exceptions.ApiException(status=response.status, reason=response.reason)
            return msgspec.json.decode(await response.read(), type=_PodList)

    def _apply(self, kind: str, raw: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        pod = msgspec.convert(raw, Pod)
        if kind == "DELETED":
            self._specs.pop(pod.metadata.uid, None)
        else:
            self._know(pod)
        self._publish()

    def _know(self, pod: Pod) -> None:
        spec = self._spec(pod)
        if spec is None:
            self._specs.pop(pod.metadata.uid, None)
        else:
            self._specs[pod.metadata.uid] = spec

    def _publish(self) -> None:
        self._registry.replace(SOURCE, self._specs.values())

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
