# SPDX-License-Identifier: Apache-2.0
"""DRAM of this process, DRAM of others and SSD, as Mooncake's store ties them together."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.backends.mooncake_store import (
    DAMAGED,
    MISSING,
    NO_SPACE,
    MooncakeStore,
    StoreOptions,
    prepare_store_env,
)
from vllm_ascend_pd.pool.folder import lock_folder, make_folder
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from vllm_ascend_pd.config import SsdConfig

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0


class MooncakeTier(Tier):
    """One client of a Mooncake store, which decides by itself what lies in memory and what on SSD.

    The first value of a key stays, also while another client is still writing it.
    """

    is_shared = True

    def __init__(
        self,
        store: MooncakeStore,
        master: EmbeddedMaster | None = None,
        held: ExitStack | None = None,
    ) -> None:
        """``master`` is that of all workers of this engine, if it is this one that keeps it;
        ``held``: what is given back when the store is closed."""
        self.store = store
        self.master = master
        self._held = held or ExitStack()

    @classmethod
    def open(cls, opening: Opening) -> MooncakeTier:
        """A client that contributes memory; the first worker perhaps keeps a master for all."""
        config = opening.config
        ssd = config.ssd if "fs" not in config.tiers else None
        with ExitStack() as held:
            if ssd is not None:
                # A client takes all files there for its own, also in folders, and deletes others'.
                held.callback(os.close, lock_folder(make_folder(ssd.path), whole=True))
            return cls._open(opening, ssd, held)

    @classmethod
    def _open(cls, opening: Opening, ssd: SsdConfig | None, held: ExitStack) -> MooncakeTier:
        config = opening.config
        if ssd is not None:
            opening.warn_of_no_room("pool.ssd.size", ssd.size)
        prepare_store_env(ssd.size if ssd is not None else 0)
        master = None
        if config.master is None and opening.rank == 0:
            master = EmbeddedMaster(_master_flags(ssd is not None))
        address = opening.from_first(master.address if master is not None else config.master)
        # Mooncake aligns segments; a smaller one than this holds nothing.
        segment_bytes = opening.memory_bytes() & ~((1 << 20) - 1)
        store = MooncakeStore(
            StoreOptions(
                host=opening.host,
                master=address,
                segment_bytes=segment_bytes,
                ssd_path=Path(ssd.path) if ssd is not None else None,
                shared=opening.shared,
            )
        )
        if config.master is None:
            store.wait_connected(_CONNECT_TIMEOUT_S)
        logger.info(
            "KV pool: %s master at %s%s, %.2f GiB of this host's memory (pool.dram_size), %s",
            "own" if config.master is None else "shared",
            address,
            f" (http {master.http_port})" if master is not None else "",
            segment_bytes / (1 << 30),
            f"SSD {ssd.path}, {ssd.size / (1 << 30):.2f} GiB" if ssd is not None else "no SSD",
        )
        return cls(store, master, held.pop_all())

    def register(self, addr: int, num_bytes: int) -> None:
        self.store.register(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        self.store.unregister(addr)

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        exists = self.store.exists(list(keys))
        found = [i for i, is_there in enumerate(exists) if is_there]
        described = self.store.describe([keys[i] for i in found])
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
        codes = self.store.put(*_columns(values))
        return [_put_status(code) for code in codes]

    def get(self, values: Sequence[Value]) -> list[Status]:
        if not values:
            return []
        codes = self.store.get(*_columns(values))
        return [_get_status(code, v.num_bytes) for code, v in zip(codes, values, strict=True)]

    def view(self, keys: Sequence[str], num_bytes: int) -> AbstractContextManager[list[int]]:
        return self.store.in_own_memory(keys, num_bytes)

    def remove(self, keys: Sequence[str]) -> None:
        self.store.remove(keys)

    def is_healthy(self) -> bool:
        return self.store.is_healthy()

    def close(self) -> None:
        self.store.close()
        if self.master is not None:
            self.master.stop()
        self._held.close()


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


def _master_flags(ssd: bool) -> list[str]:
    if not ssd:
        return []
    return [
        "--enable_offload=true",
        "--promotion_on_hit=true",
        "--promotion_admission_threshold=1",
    ]
