# SPDX-License-Identifier: Apache-2.0
"""Instances from flags, and from a file that is read again when it changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import msgspec

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import (
    EngineDescription,
    KVEvents,
    check_instance_id,
    check_url,
    default_id,
    name_of_rank,
)
from vllm_ascend_pd.router.instances import InstanceSpec
from vllm_ascend_pd.router.watched_file import WatchedFile

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import Backend, RouterConfig
    from vllm_ascend_pd.router.instances import Registry

logger = logging.getLogger(__name__)

SOURCE = "static"
OPTION = "--instances"
LocalZmqAddress = Annotated[str, msgspec.Meta(pattern="^(tcp|ipc)://")]


class FileKVEvents(KVEvents, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator may also name a file of this host, which who registers may not."""

    endpoint: LocalZmqAddress
    replay_endpoint: LocalZmqAddress | None = None


class FileInstance(EngineDescription, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``--instances``."""

    id: str | None = None
    kv_events: FileKVEvents | None = None

    def spec(self) -> InstanceSpec:
        check_url(self.url)
        instance_id = self.id or name_of_rank(default_id(self.url), self.data_parallel_rank)
        check_instance_id(instance_id)
        return InstanceSpec.of(self, instance_id, SOURCE)


class InstancesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``{"instances": [{"url": ..., "role": "prefill"}, ...]}``"""

    instances: list[FileInstance]


class StaticDiscovery:
    """Event loop thread."""

    def __init__(self, config: RouterConfig, registry: Registry) -> None:
        self._registry = registry
        self._flags = [
            *(FileInstance(url=url, role="prefill").spec() for url in config.prefills),
            *(FileInstance(url=url, role="decode").spec() for url in config.decodes),
            *(_backend(backend, config).spec() for backend in config.backends),
        ]
        self._file: WatchedFile | None = None
        if (path := config.instances_file) is not None:
            name = str(path)
            self._file = WatchedFile(
                OPTION, path, path.read_bytes, lambda raw: self._put(decode_instances(raw, name))
            )

    def read(self) -> None:
        """``ConfigError`` if the file is wrong."""
        if self._file is None:
            self._put([])
        else:
            self._file.read()

    def refresh(self) -> None:
        if self._file is not None:
            self._file.refresh()

    def _put(self, instances: list[FileInstance]) -> None:
        """These are all that the file has."""
        specs = [*self._flags, *(instance.spec() for instance in instances)]
        seen: set[str] = set()
        for spec in specs:
            if spec.instance_id in seen:
                raise ConfigError(f"instance {spec.instance_id!r} is given twice")
            seen.add(spec.instance_id)
        self._registry.replace(SOURCE, specs)


def _backend(backend: Backend, config: RouterConfig) -> FileInstance:
    models = (backend.model,) if backend.model else ()
    if backend.label is None:
        return FileInstance(url=backend.url, role="both", models=models)
    role = config.role_of(backend.label)
    if role is None:
        raise ConfigError(
            f"--static-model-labels: {backend.label!r} is none of --prefill-model-labels and"
            " --decode-model-labels"
        )
    return FileInstance(url=backend.url, role=role, models=models, labels={"model": backend.label})


def decode_instances(raw: bytes, name: str) -> list[FileInstance]:
    """JSON; ``ConfigError`` names the wrong field."""
    try:
        return msgspec.json.decode(raw, type=InstancesFile).instances
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ConfigError(f"{OPTION}: {name}: {e}") from e
