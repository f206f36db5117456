# SPDX-License-Identifier: Apache-2.0
"""What the Prometheus of ``vllm-pd up --observe`` is told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from vllm_ascend_pd.cluster import topology
from vllm_ascend_pd.cluster.commands import Deployment, make_deployment
from vllm_ascend_pd.cluster.machine import Machine
from vllm_ascend_pd.cluster.observe import with_prometheus
from vllm_ascend_pd.errors import ConfigError

ON_TWO_HOSTS = {
    "model": "m",
    "device": "cpu",
    "hosts": {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}},
    "prefill": [{"host": "a"}],
    "decode": [{"host": "b"}],
}


def deployment() -> Deployment:
    machine = Machine("cpu", (0, 1), (), 1 << 30)
    return make_deployment(topology.parse(ON_TWO_HOSTS), machine, "a", lambda address: 1)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = tmp_path / "bin" / "prometheus"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return str(program)


def test_it_scrapes_router_and_engines_of_all_hosts_by_name(tmp_path: Path, program: str) -> None:
    made = with_prometheus(deployment(), "a", tmp_path / "p", lambda address: 9)
    assert made.on("b") == deployment().on("b")
    command = made.commands[-1]
    assert (command.argv[0], command.url) == (program, "http://127.0.0.1:9")
    written = yaml.safe_load((tmp_path / "p" / "prometheus.yml").read_text())
    assert {
        one["labels"]["instance"]: one["targets"]
        for one in written["scrape_configs"][0]["static_configs"]
    } == {
        "prefill-0": ["10.0.0.1:8100"],
        "decode-0": ["10.0.0.2:8101"],
        "router": ["10.0.0.1:8000"],
    }
    assert Path(written["rule_files"][0]).read_text()


def test_it_runs_beside_the_router_alone(tmp_path: Path) -> None:
    assert with_prometheus(deployment(), "b", tmp_path, lambda address: 9) == deployment()


def test_missing_program_is_an_error_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install"):
        with_prometheus(deployment(), "a", tmp_path, lambda address: 9)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)
def test_prometheus_takes_it(tmp_path: Path) -> None:
    with_prometheus(deployment(), "a", tmp_path, lambda address: 9)
    config = str(tmp_path / "prometheus.yml")
    done = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True)
    assert done.returncode == 0, done
