# SPDX-License-Identifier: Apache-2.0
"""DRAM of this process, DRAM of others and SSD, as Mooncake's store ties them together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.backends.mooncake_store import (
    DAMAGED,
    MISSING,
    NO_SPACE,
    MooncakeStore,
    StoreOptions,
    available_memory_bytes,
    prepare_store_env,
)
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool.tier import Place, Status, Tier, TierStats, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from vllm_ascend_pd.backends.mooncake_engine import SharedEngine
    from vllm_ascend_pd.config import PoolConfig

logger = logging.getLogger(__name__)

_DRAM_SHARE = 0.25
_CONNECT_TIMEOUT_S = 5.0


class MooncakeTier(Tier):
    """One client of a Mooncake store, which decides by itself what lies in memory and what on SSD.

    The first value of a key stays, also while another client is still writing it.
    """

    def __init__(self, store: MooncakeStore, capacity_bytes: int) -> None:
        self._store = store
        self._capacity_bytes = capacity_bytes

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        exists = self._store.exists(list(keys))
        found = [i for i, is_there in enumerate(exists) if is_there]
        described = self._store.describe([keys[i] for i in found])
        places = [Place.NOWHERE] * len(keys)
        place = Place.SSD
        for i in found:
            # Of very many keys only the first are described; the others are taken to lie with them.
            if (where := described.get(keys[i])) is not None:
                in_memory, own = where
                place = (Place.DRAM if own else Place.REMOTE) if in_memory else Place.SSD
            places[i] = place
        return places

    def put(self, values: Sequence[Value]) -> list[Status]:
        if not values:
            return []
        codes = self._store.put(*_columns(values))
        return [_put_status(code) for code in codes]

    def get(self, values: Sequence[Value]) -> list[Status]:
        if not values:
            return []
        codes = self._store.get(*_columns(values))
        return [_get_status(code, v.num_bytes) for code, v in zip(codes, values, strict=True)]

    def view(self, keys: Sequence[str], num_bytes: int) -> AbstractContextManager[list[int]]:
        return self._store.in_own_memory(keys, num_bytes)

    def remove(self, keys: Sequence[str]) -> None:
        self._store.remove(keys)

    def clear(self) -> int:
        return self._store.remove_all()

    def stats(self) -> TierStats:
        return TierStats(None, None, self._capacity_bytes)

    def is_healthy(self) -> bool:
        return self._store.is_healthy()

    def close(self) -> None:
        self._store.close()


def _columns(values: Sequence[Value]) -> tuple[list[str], list[int], list[int]]:
    return [v.key for v in values], [v.addr for v in values], [v.num_bytes for v in values]


def _put_status(code: int) -> Status:
    if code == 0:
        return Status.OK
    return Status.FULL if code == NO_SPACE else Status.FAILED


def _get_status(code: int, num_bytes: int) -> Status:
    if code == num_bytes:
        return Status.OK
    if code >= 0 or code in DAMAGED:
        return Status.DAMAGED
    return Status.MISSING if code in MISSING else Status.FAILED


@dataclass(frozen=True, slots=True)
class Workers:
    """This worker's place among those of its engine, which use one master."""

    rank: int = 0
    count: int = 1
    from_first: Callable[[Any], Any] = lambda value: value
    """What rank 0 calls it with, for all of them; they call it at the same time."""


ALONE = Workers()


class PoolBackend:
    """What one worker opens: a client that contributes memory, and the first one perhaps a master
    for all workers of its engine.
    """

    def __init__(
        self,
        config: PoolConfig,
        host: str,
        shared: SharedEngine | None = None,
        workers: Workers = ALONE,
    ) -> None:
        config = config.for_worker(workers.rank, workers.count)
        ssd = config.ssd
        if ssd is not None:
            _make_folder(ssd.path)
        prepare_store_env(ssd.size if ssd is not None else 0)
        self.master: EmbeddedMaster | None = None
        if config.master is None and workers.rank == 0:
            self.master = EmbeddedMaster(_master_flags(ssd is not None))
        address, segment_bytes = config.master, config.dram_size
        if self.master is not None:
            address = self.master.address
        if segment_bytes is None:
            segment_bytes = int(available_memory_bytes() * _DRAM_SHARE) // workers.count
        # What is available changes as soon as one of them takes its part.
        address, segment_bytes = workers.from_first((address, segment_bytes))
        # Mooncake aligns segments; a smaller one than this holds nothing.
        segment_bytes &= ~((1 << 20) - 1)
        self.store = MooncakeStore(
            StoreOptions(
                host=host,
                master=address,
                segment_bytes=segment_bytes,
                ssd_path=Path(ssd.path) if ssd is not None else None,
                ssd_bytes=ssd.size if ssd is not None else 0,
                shared=shared,
            )
        )
        if config.master is None:
            self.store.wait_connected(_CONNECT_TIMEOUT_S)
        self.tier = MooncakeTier(self.store, segment_bytes)
        logger.info(
            "KV pool: %s master at %s%s, %.2f GiB of this host's memory (pool.dram_size%s), %s",
            "own" if config.master is None else "shared",
            address,
            f" (http {self.master.http_port})" if self.master is not None else "",
            segment_bytes / (1 << 30),
            f", worker {workers.rank} of {workers.count}" if workers.count > 1 else "",
            f"SSD {ssd.path}, {ssd.size / (1 << 30):.2f} GiB" if ssd is not None else "no SSD",
        )

    def close(self) -> None:
        self.tier.close()
        if self.master is not None:
            self.master.stop()


def _master_flags(ssd: bool) -> list[str]:
    if not ssd:
        return []
    return [
        "--enable_offload=true",
        "--promotion_on_hit=true",
        "--promotion_admission_threshold=1",
    ]


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"pool.ssd.path {path!r} cannot be made: {e}") from e
