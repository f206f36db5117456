# SPDX-License-Identifier: Apache-2.0
"""What a Ray actor does on the node of its engine: it says what there is, and has a keeper run it.

Ray kills the children of a worker that ends, so a keeper, but not theirs, and none when the worker
is killed itself. A keeper sees that by the end of its pipe, and its guard sees either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.cluster.launch import find_programs
from vllm_ascend_pd.cluster.machine import FreePorts, Machine
from vllm_ascend_pd.cluster.scaling import keeper
from vllm_ascend_pd.cluster.scaling.keeper import KeeperReport
from vllm_ascend_pd.cluster.scaling.orders import Node

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.scaling.keeper import KeeperOrder

_OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Begin of what Ray puts into the environment of its workers; no engine's business."""


class EngineHost:
    """One engine's actor: made, asked and ended by ``RayFleet``. Its methods run one at a time, and
    none waits."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
        self._report = KeeperReport("starting")

    def describe(self, cores: float) -> Node:
        """Of this node, what the actor was given; ``cores`` for each engine."""
        import ray

        context = ray.get_runtime_context()
        given = {key: ids for key, ids in context.get_accelerator_ids().items() if ids}
        address, machine, ports = ray.util.get_node_ip_address(), Machine.this(), FreePorts()
        device = "cuda" if "GPU" in given else "npu" if "NPU" in given else "cpu"
        # Numbers, or what the node's Ray was started with: UUIDs of GPUs or of their MIG parts.
        devices = tuple(str(i) for ids in given.values() for i in ids)
        (node,) = [one for one in ray.nodes() if one["NodeID"] == context.get_node_id()]
        return Node(
            address=address,
            machine=dataclasses.replace(machine, device=device, devices=devices, hides_devices=""),
            num_places=max(1, int(node["Resources"].get("CPU", 1) // max(cores, 1))),
            port=ports(address),
            kv_port=ports(address),
            inner_port=ports(address),
            programs=find_programs(),
        )

    def run(self, order: KeeperOrder) -> KeeperReport:
        """Called once."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(_OF_RAY)}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", keeper.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(msgspec.json.encode(order) + b"\n")
        self._keeper.stdin.flush()
        threading.Thread(target=self._listen, name="pd-keeper", daemon=True).start()
        return self._report

    def report(self) -> KeeperReport:
        """What the keeper said last."""
        return self._report

    def stop(self) -> None:
        """The engine ends in good order; ``report`` says when."""
        if self._keeper is None or self._keeper.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            self._keeper.stdin.write(b"stop\n")
            self._keeper.stdin.flush()

    def _listen(self) -> None:
        """Own thread; alone writes ``_report``."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            with contextlib.suppress(msgspec.MsgspecError):  # what a library has printed
                self._report = msgspec.json.decode(line, type=KeeperReport)
        code = self._keeper.wait()
        if self._report.phase != "ended":
            self._report = KeeperReport("ended", f"its keeper ended with code {code}")
