# SPDX-License-Identifier: Apache-2.0
"""An actor of an engine, as far as it needs no Ray."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_ascend_pd.cluster.scaling.keeper import KeeperReport
from vllm_ascend_pd.cluster.scaling.orders import Shared, order_engine
from vllm_ascend_pd.cluster.scaling.ray_actor import EngineHost
from vllm_ascend_pd.cluster.topology import parse

MIG = "MIG-3f9b1c2d-0000-5000-8000-000000000001"
KEEPER = """
print('{"phase": "ready"}')
print("a library that has something to say")
raise SystemExit(3)
"""


def test_keeper_that_ends_after_a_line_of_a_library_is_known_to_have_ended() -> None:
    host = EngineHost()
    with subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE) as keeper:
        host._keeper = keeper
        host._listen()
    assert host.report() == KeeperReport("ended", "its keeper ended with code 3")


@pytest.mark.parametrize("ids", [["0", "3"], ["GPU-5a1c7f00-aaaa"], [MIG]])
def test_accelerators_are_named_as_ray_names_them(
    ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ids}, get_node_id=lambda: "n")
    ray = SimpleNamespace(
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        nodes=lambda: [{"NodeID": "n", "Resources": {"CPU": 2}}],
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    node = EngineHost().describe(1)
    topology = parse({"model": "m", "args": {"tensor-parallel-size": len(ids)}})
    router = "http://10.0.0.1:8000"
    shared = Shared(topology=topology, device="cuda", cores=1, router_url=router, log_dir="/logs")
    made = order_engine(shared, "engine-0", node, place=0)
    assert made.env["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
