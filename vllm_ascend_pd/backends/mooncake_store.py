# SPDX-License-Identifier: Apache-2.0
"""Mooncake's distributed store, without the ways in which it can crash or hang this process."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_ascend_pd.backends.mooncake_library import IMPORT_HELP, set_mooncake_env
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_ascend_pd.backends.mooncake_engine import SharedEngine

logger = logging.getLogger(__name__)

NOT_CONNECTED = -900
"""What every call answers while there is no connection; Mooncake's own code for it."""
NO_SPACE = -200
MISSING = frozenset({-704})
DAMAGED = frozenset({-600, -801, -1101, -1102})
"""A size or checksum that does not fit, a file that is gone or cut off."""

# Mooncake reads these when a client is set up; a value that the user has set stays.
_ENV_DEFAULTS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(128 << 20),
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(16 << 20),
    # A file holds one value: what waits for its file to fill up is lost when memory evicts it.
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
}
_LOCAL_BUFFER_BYTES = 16 << 20  # for put() and get() of bytes, which are used for probes only
_RETRY_S = 1.0
_CLOSE_TIMEOUT_S = 3.0
_MAX_DESCRIBED = 512  # about 2 ms


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How this process takes part in a store."""

    host: str
    master: str
    """``host:port`` of its RPC."""
    segment_bytes: int
    """Memory that this process contributes; 0 for none."""
    ssd_path: Path | None = None
    shared: SharedEngine | None = None
    """The transfers' engine, to use instead of one of its own."""


class _Store(Protocol):
    """What is used of mooncake.store.MooncakeDistributedStore. Batch calls release the GIL."""

    def setup(self, *args: Any, **kwargs: Any) -> int: ...
    def close(self) -> int: ...
    def health_check(self) -> int: ...
    def get_hostname(self) -> str: ...
    def register_buffer(self, addr: int, num_bytes: int) -> int: ...
    def unregister_buffer(self, addr: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]: ...
    def batch_put_from(
        self, keys: list[str], addrs: list[int], sizes: list[int], config: Any = ...
    ) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addrs: list[int], sizes: list[int]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...


class MooncakeStore:
    """One client of a store; any thread.

    Setting up blocks for seconds when the master cannot be reached, so a thread does it and tries
    again; until then every call answers ``NOT_CONNECTED`` at once. The same after `close`: a call
    on a store that is not set up, or closed, would end the process.

    A call on a dead master blocks for about 4 s. The next ones answer at once, because Mooncake
    knows then; it connects again by itself when the master is back.
    """

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        protocol = "tcp" if options.shared is None else options.shared.protocol
        set_mooncake_env(protocol, options.host)
        self._make = _load_store()
        # All fields below are read and written by any thread, under the lock. Mooncake is called
        # outside it, by callers that are counted.
        self._changed = threading.Condition()
        self._store: _Store | None = None
        self._buffers: dict[int, int] = {}
        self._num_calls = 0
        self._closed = False
        self._down_since: float | None = None
        """Of a master that has answered before and does not now."""
        self._own_endpoint: str | None = None
        self._own_memory = range(0)
        self._put_options: tuple[Any, ...] = ()
        self._thread = threading.Thread(target=self._connect, name="pd-store-setup", daemon=True)
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._store is not None or self._closed, timeout_s)
            return self._store is not None

    def register(self, addr: int, num_bytes: int) -> None:
        """Memory that values are read from and written to; also before there is a connection."""
        if addr <= 0 or num_bytes <= 0:
            raise ValueError(f"cannot register {num_bytes} bytes at {addr:#x}")
        with self._changed:
            self._buffers[addr] = num_bytes
            if self._store is None:
                return  # who connects registers it, and a second time would be refused
        with self._use() as store:
            if store is not None and (rc := store.register_buffer(addr, num_bytes)):
                raise BackendError(f"Mooncake cannot register {num_bytes} bytes: rc {rc}")

    def unregister(self, addr: int) -> None:
        with self._changed:
            del self._buffers[addr]
        with self._use() as store:
            if store is not None:
                store.unregister_buffer(addr)

    def is_healthy(self) -> bool:
        with self._use() as store:
            return store is not None and self._is_up(store)

    def _is_up(self, store: _Store) -> bool:
        """Whether the master is there, as far as Mooncake knows; returns at once."""
        is_up = not store.health_check()
        if is_up is (self._down_since is None):
            return is_up
        with self._changed:
            since, self._down_since = self._down_since, None if is_up else time.monotonic()
        if is_up and since is not None:
            logger.info(
                "the pool's master at %s answers again after %.0f s",
                self.options.master,
                time.monotonic() - since,
            )
        elif not is_up and since is None:
            logger.warning(
                "the pool's master at %s does not answer; serving goes on without the pool, until"
                " it does",
                self.options.master,
            )
        return is_up

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Also protects what it finds from eviction for the master's lease time."""
        with self._use() as store:
            if store is None or not keys or not self._is_up(store):
                return [False] * len(keys)
            return [code == 1 for code in store.batch_is_exist(list(keys))]

    def describe(self, keys: Sequence[str]) -> dict[str, tuple[bool, bool]]:
        """``{key: (in memory, in this process's memory)}`` of the first 512 keys."""
        with self._use() as store:
            if store is None or not keys:
                return {}
            own = self._own_endpoint
            found = {}
            for key, replicas in store.batch_get_replica_desc(list(keys[:_MAX_DESCRIBED])).items():
                endpoints = [
                    replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
                    for replica in replicas
                    if replica.is_memory_replica()
                ]
                found[key] = bool(endpoints), own is None or own in endpoints
            return found

    @contextmanager
    def in_own_memory(self, keys: Sequence[str], num_bytes: int) -> Iterator[list[int]]:
        """Where each value lies in memory that this process contributes; 0 if it does not lie there
        or is not ``num_bytes`` long.

        Inside the context the memory stays mapped, but what it holds may be evicted and replaced
        at any time: whoever copies it must verify the copy.
        """
        with self._use() as store:
            if store is None or not keys or not self._is_up(store) or not self._own_memory:
                yield [0] * len(keys)
                return
            found = store.batch_get_replica_desc(list(keys))
            yield [self._own_address(found.get(key, ()), num_bytes) for key in keys]

    def _own_address(self, replicas: Sequence[Any], num_bytes: int) -> int:
        for replica in replicas:
            if not replica.is_memory_replica():
                continue
            buffer = replica.get_memory_descriptor().buffer_descriptor
            address: int = buffer.buffer_address
            if (
                buffer.transport_endpoint == self._own_endpoint
                and buffer.size == num_bytes
                and address in self._own_memory
                and address + num_bytes <= self._own_memory.stop
            ):
                return address
        return 0

    def put(self, keys: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        """0 or a negative code for each; a key that is there already is 0 and keeps its value.

        Into memory of this process while there is room, where it can be read in place.
        """
        with self._use() as store:
            if store is None or not self._is_up(store):
                return [NOT_CONNECTED] * len(keys)
            return list(store.batch_put_from(keys, addrs, sizes, *self._put_options))

    def get(self, keys: list[str], addrs: list[int], sizes: list[int]) -> list[int]:
        """The number of bytes or a negative code for each."""
        with self._use() as store:
            if store is None or not self._is_up(store):
                return [NOT_CONNECTED] * len(keys)
            return list(store.batch_get_into(keys, addrs, sizes))

    def remove(self, keys: Sequence[str]) -> None:
        with self._use() as store:
            if store is not None and keys and self._is_up(store):
                store.batch_remove(list(keys), True)

    def close(self) -> None:
        """Idempotent. Waits for calls under way for 3 s; then the store is left to the process's
        end, since closing it under a call would end the process now.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            store, self._store = self._store, None
            self._changed.notify_all()
            is_idle = self._changed.wait_for(lambda: not self._num_calls, _CLOSE_TIMEOUT_S)
        if store is None:
            return
        if is_idle:
            store.close()
        else:
            logger.warning("the pool's store is not closed: a call on it does not return")
            _abandoned.append(store)

    @contextmanager
    def _use(self) -> Iterator[_Store | None]:
        with self._changed:
            store = self._store
            self._num_calls += 1
        try:
            yield store
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _connect(self) -> None:
        """Own thread: until it is connected or closed."""
        num_failed = 0
        while (reason := self._try_to_connect()) and not self._closed:
            num_failed += 1
            if num_failed == 1:
                logger.warning(
                    "the pool's master at %s does not answer (%s); serving goes on without the"
                    " pool, and it is tried again",
                    self.options.master,
                    reason,
                )
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, _RETRY_S):
                    return
        if num_failed and not self._closed:
            logger.info("the pool's master at %s answers", self.options.master)

    def _try_to_connect(self) -> str:
        """Why it is not connected; empty if it is, or is closed."""
        try:
            with ExitStack() as undo:
                store = self._make()
                if code := self._set_up(store):
                    return f"rc {code}"
                undo.callback(store.close)
                self._find_own_memory(store)
                with self._changed:
                    if self._closed:
                        return ""
                    for addr, num_bytes in self._buffers.items():
                        if code := store.register_buffer(addr, num_bytes):
                            return f"it cannot register {num_bytes} bytes: rc {code}"
                    self._store = store
                    self._changed.notify_all()
                undo.pop_all()
        except Exception as e:  # noqa: BLE001 - a thread's boundary: it is tried again
            return repr(e)
        return ""

    def _set_up(self, store: _Store) -> int:
        options = self.options
        more: dict[str, Any] = {}
        if options.ssd_path is not None:
            more = {"enable_ssd_offload": True, "ssd_offload_path": str(options.ssd_path)}
        if (shared := options.shared) is not None:
            if shared.bind_thread is not None:
                shared.bind_thread()
            return store.setup(
                local_hostname=shared.session,
                metadata_server="P2PHANDSHAKE",
                global_segment_size=options.segment_bytes,
                local_buffer_size=_LOCAL_BUFFER_BYTES,
                protocol=shared.protocol,
                rdma_devices="",
                master_server_addr=options.master,
                engine=shared.native,
                **more,
            )
        return store.setup(
            options.host,
            "P2PHANDSHAKE",
            options.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            "tcp",
            "",
            options.master,
            **more,
        )

    def _find_own_memory(self, store: _Store) -> None:
        """Learn by which name the master knows our segment, to tell our memory from others', and
        where it lies. Nobody else uses the store yet.
        """
        if not self.options.segment_bytes:
            with self._changed:
                self._own_endpoint = ""
            return
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.preferred_segment = store.get_hostname()
        key = f"pd-probe/{secrets.token_hex(8)}"
        probe: Any = store
        if probe.put(key, b"probe", config):
            return
        for replica in store.batch_get_replica_desc([key]).get(key, []):
            if replica.is_memory_replica():
                descriptor = replica.get_memory_descriptor().buffer_descriptor
                mapped = mapping_of(descriptor.buffer_address)
                with self._changed:
                    self._own_endpoint = str(descriptor.transport_endpoint)
                    self._own_memory = mapped
                    self._put_options = (config,)
        store.batch_remove([key], True)


# Stores that a call is still using.
_abandoned: list[_Store] = []


def prepare_store_env(ssd_bytes: int) -> None:
    """Variables that a client must find when it is set up; what the user has set stays."""
    env = dict(_ENV_DEFAULTS)
    if ssd_bytes:
        env |= {
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(ssd_bytes),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(ssd_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
        }
    for name, value in env.items():
        os.environ.setdefault(name, value)


def mapping_of(address: int) -> range:
    """The addresses of the mapping of this process that holds ``address``; empty if none does."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split(maxsplit=1)[0].partition("-")
        mapped = range(int(start, 16), int(end, 16))
        if address in mapped:
            return mapped
    return range(0)


def _load_store() -> Callable[[], _Store]:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ImportError(IMPORT_HELP.format(error=error)) from error
    make: Callable[[], _Store] = MooncakeDistributedStore
    return make
