# SPDX-License-Identifier: Apache-2.0
"""An engine whose workers are on two hosts (``--nnodes 2``), with an address for each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.servers import free_port
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

PROMPT = " ".join(f"This is sentence {i} of a story." for i in range(60))
NUM_NODES = 2


class Nodes:
    """Starts engines, and their other nodes."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self.folder = folder
        self._model = make_tiny_model(folder / "tiny").path
        (folder / "secret").write_text("ab" * 32)
        (folder / "secret").chmod(0o600)

    def transfer(self, address: str, port: int) -> str:
        extra = {
            "transfer": {"transport": "mooncake"},  # as between hosts
            "security": {"secret_file": str(self.folder / "secret")},
        }
        config = {"kv_connector": "InEngine", "kv_role": "kv_both", "kv_ip": address}
        return json.dumps({**config, "kv_port": port, "kv_connector_extra_config": extra})

    def start(self, name: str, *more: str) -> ForkedEngine:
        engine = self._launcher.engine(name, self._model, self.folder, free_port(), *more)
        engine.start()
        return engine

    def start_two(self, name: str, *of_second: str) -> tuple[ForkedEngine, ForkedEngine]:
        together = ["--nnodes", str(NUM_NODES), "--tensor-parallel-size", str(NUM_NODES)]
        together += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        first = ["--node-rank", "0", "--kv-transfer-config", self.transfer("127.0.0.1", 0)]
        second = self.start(f"{name}-1", *together, "--node-rank", "1", "--headless", *of_second)
        return self.start(f"{name}-0", *together, *first), second


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    launcher = Launcher()
    try:
        yield Nodes(launcher, tmp_path)
    finally:
        launcher.close()


def complete(engine: ForkedEngine, num_tokens: int = 16, **kv: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
    sent = {**body, "kv_transfer_params": kv} if kv else {**body, "cache_salt": "alone"}
    answer = requests.post(f"{engine.url}/v1/completions", json=sent, timeout=120)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_kv_comes_from_both_nodes_and_goes_to_both(nodes: Nodes) -> None:
    config = "--kv-transfer-config"
    two, _ = nodes.start_two("two", config, nodes.transfer("127.0.0.2", 0))
    one = nodes.start("one", config, nodes.transfer("127.0.0.1", 0))
    for engine in (two, one):
        engine.wait_ready()
    (expected,) = complete(one)["choices"]
    for first, second in ((two, one), (one, two)):
        params = complete(first, 1, do_remote_decode=True)["kv_transfer_params"]
        got = complete(second, **params, return_provenance=True)
        told = got["kv_transfer_params"]["provenance"]
        assert (told["outcome"], told["transport"]) == ("loaded", "mooncake")
        assert told["num_computed_tokens"] == 0
        assert got["choices"][0]["text"] == expected["text"]
        requests.post(f"{one.url}/reset_prefix_cache", timeout=60)


def test_node_that_was_started_without_it_is_told(nodes: Nodes) -> None:
    """What its workers have would never arrive."""
    first, _ = nodes.start_two("two")
    with pytest.raises(RuntimeError, match="did not come up"):
        first.wait_ready()
    assert "worker 1 was started without kv_connector InEngine" in first.log.read_text()
