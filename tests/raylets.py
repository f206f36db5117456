# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this host's own raylets, as small as they get."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from ray.cluster_utils import Cluster

ADDRESS = "127.0.0.2"
"""Ray takes 127.0.0.1 for the network card's."""
NUM_TRIES = 4
NODE = {
    "node_ip_address": ADDRESS,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_storage": "rocksdb",  # a head that is restarted knows its cluster
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "20",
}


class Raylets:
    """A head without room, and nodes that a test adds."""

    def __init__(self, *, has_jobs: bool) -> None:
        head = {**NODE, "num_cpus": 0, "include_dashboard": has_jobs}
        head |= {"dashboard_port": None, "dashboard_agent_listen_port": 0}
        self._cluster = Cluster()
        self._start(**head)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def jobs_url(self) -> str:
        """Where jobs are submitted."""
        return f"http://{self._cluster.webui_url}"

    def add(self, num_cpus: int, address: str = ADDRESS) -> Any:
        return self._start(**{**NODE, "node_ip_address": address}, num_cpus=num_cpus)

    def _start(self, **options: Any) -> Any:
        """Ray gives a node 30 s to come up, which on a slow host it does not always do."""
        for _ in range(NUM_TRIES - 1):
            before = psutil.Process().children(recursive=True)
            try:
                return self._cluster.add_node(**options)
            except Exception as e:  # Ray has no class for it
                if "timed out during startup" not in str(e):
                    raise
            for process in psutil.Process().children(recursive=True):
                if process not in before:
                    process.kill()
        return self._cluster.add_node(**options)

    def remove(self, node: Any) -> None:
        """As when its host dies."""
        self._cluster.remove_node(node, allow_graceful=False)

    def restart_head(self) -> None:
        self._cluster.head_node.kill_gcs_server()
        self._cluster.head_node.start_gcs_server()

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def raylets(*, has_jobs: bool = False, **environment: str) -> Iterator[Raylets]:
    """``environment`` of all that runs there. ``has_jobs``: the head takes jobs."""
    before = dict(os.environ)
    try:
        # Not pytest's folder: the paths of its sockets may not be long.
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
            own = {"RAY_TMPDIR": folder, "RAY_gcs_storage_path": f"{folder}/gcs"}
            os.environ.update({**ENVIRONMENT, **environment, **own})
            cluster = Raylets(has_jobs=has_jobs)
            try:
                yield cluster
            finally:
                cluster.close()
    finally:
        os.environ.clear()
        os.environ.update(before)
