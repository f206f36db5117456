# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd up`` as far as it starts nothing, and ``vllm-pd doctor``'s options."""

from __future__ import annotations

import json
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from vllm_ascend_pd.cli import main, up
from vllm_ascend_pd.cluster import launch, topology
from vllm_ascend_pd.cluster.doctor import host
from vllm_ascend_pd.cluster.doctor.findings import fail
from vllm_ascend_pd.cluster.log_rotation import Rotation
from vllm_ascend_pd.cluster.machine import FreePorts
from vllm_ascend_pd.cluster.up_socket import socket_path

TOPOLOGY = """
model: m
device: cpu
hosts:
  a: {address: 203.0.113.1}
  b: {address: 203.0.113.2}
prefill: [{host: a}]
decode: [{host: b}]
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(main.app, ["up", *words])


def test_is_a_subcommand() -> None:
    assert "up" in main.SUBCOMMANDS
    result = CliRunner().invoke(main.app, ["up", "--help"])
    assert result.exit_code == 0
    assert "--dry-run" in result.output


def test_dry_run_prints_commands_that_a_shell_reads() -> None:
    result = run(
        "m", "--prefill", "2", "--dry-run", "--", "--dtype", "float32", "--max-model-len=9"
    )
    assert result.exit_code == 0, result.output
    title, *lines = result.output.splitlines()
    assert title == "# host localhost (127.0.0.1)"
    commands = [shlex.split(line) for line in lines]
    serves = [words for words in commands if "serve" in words]
    assert len(serves) == 3
    assert all("--max-model-len=9" in words and "float32" in words for words in serves)
    assert commands[-1][:2] == ["vllm-pd", "router"]
    result = run("m", "--access-log", "json", "--dry-run")
    assert "--access-log json" in result.output.splitlines()[-1]


@pytest.mark.parametrize("address", ["127.0.0.1", "{own}"])
def test_dry_run_prints_what_would_start_with_its_secrets(address: str, tmp_path: Path) -> None:
    """Who copies it has engines that believe each other alone."""
    path, logs = tmp_path / "topology.yaml", tmp_path / "all logs"
    address = address.format(own=own_address())
    path.write_text(f"model: m\ndevice: cpu\nhosts: {{here: {{address: {address}}}}}\n")
    result = run("--config", str(path), "--log-dir", str(logs), "--dry-run")
    assert result.exit_code == 0, result.output
    assert not logs.exists()
    _, *lines = result.output.splitlines()
    for line in lines[:2]:
        subprocess.run(["bash", "-c", line], check=True)
    for name in (".secret", ".token"):
        assert stat.S_IMODE((logs / name).stat().st_mode) == 0o600
        assert len((logs / name).read_text().strip()) == 64
    prefill, decode, router = (shlex.split(line) for line in lines[2:])
    for engine, role in ((prefill, "kv_producer"), (decode, "kv_both")):
        config = json.loads(engine[engine.index("--kv-transfer-config") + 1])
        extra = config["kv_connector_extra_config"]
        assert config["kv_role"] == role
        assert extra["security"]["secret_file"] == str(logs / ".secret")
        assert "allow_non_loopback" not in extra["security"]
        assert extra["router"]["token_file"] == str(logs / ".token")
    assert router[router.index("--registration-token-file") + 1] == str(logs / ".token")
    assert router[router.index("--secret-file") + 1] == str(logs / ".secret")


def own_address() -> str:
    found = [a for addresses in psutil.net_if_addrs().values() for a in addresses]
    mine = [a.address for a in found if a.family == socket.AF_INET]
    return next((a for a in mine if not a.startswith("127.")), "127.0.0.2")


def test_sizes_of_logs_are_taken() -> None:
    manner = up._manner(topology.parse({"model": "m"}), Path("logs"), 1, "2KiB", 3)
    assert manner.rotation == Rotation(2048, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ray", "auto", "--dry-run"), "need to know where engines run"),
        (("--ray", "auto", "--prefill", "2"), "say how many engines --ray has"),
        (("--pd-ratio", "1:2"), "need --ray"),
    ],
)
def test_options_of_a_cluster_and_of_one_host_are_not_mixed(
    words: tuple[str, ...], message: str
) -> None:
    result = run("m", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("\u2502", " ").split())


def test_a_wrong_ratio_is_named() -> None:
    result = run("m", "--ray", "auto", "--pd-ratio", "1")
    assert result.exit_code == 2
    assert "--pd-ratio: '1' is not two positive numbers" in result.output


def test_dry_run_of_several_hosts(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY)
    result = run("--config", str(path), "--host", "a", "--dry-run", "--", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    titles = [line for line in result.output.splitlines() if line.startswith("#")]
    assert titles == ["# host a (203.0.113.1)", "# host b (203.0.113.2)"]
    assert result.output.count("--dtype float32") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a model, or --config"),
        (["m", "--config", "{topology}"], "the topology file names the model"),
        (["--config", "{topology}"], "say so with --host"),
        (["--config", "{topology}", "--host", "c"], "--host: 'c' is not in hosts ['a', 'b']"),
        (["--config", "/no/such/file"], "/no/such/file: cannot be read"),
        (["m", "--prefill", "0"], "prefill: at least one engine is needed"),
        (["m", "--dry-run", "--", "--port", "9000"], "after --: --port is set by vllm-pd itself"),
        (
            ["m", "--dry-run", "--", "--kv_transfer_config={{}}"],
            "after --: --kv_transfer_config is set by",
        ),
        (["m", "--both", "1"], "both: at least two engines are needed"),
        (["--config", "{topology}", "-p", "2"], "--prefill: the topology file says it"),
        (["--config", "{topology}", "--port", "8000"], "--port: the topology file says it"),
        (["--config", "{topology}", "--access-log", "json"], "--access-log: the topology file"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY)
    result = run(*(word.format(topology=path) for word in words))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_router_port_that_is_taken_is_named_with_its_owner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = run("m", "--port", port)
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1, for router, is used by" in result.output
    assert "with --port" in result.output
    assert list(tmp_path.iterdir()) == []  # no folder for its logs


@pytest.mark.parametrize("field", ["port", "kv_port"])
def test_a_port_of_an_engine_that_is_taken_is_named(
    field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "topology.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        router_port = FreePorts()("127.0.0.1")
        path.write_text(
            f"{{model: m, device: cpu, router: {{port: {router_port}}},"
            f" prefill: [{{{field}: {port}}}]}}"
        )
        result = run("--config", str(path))
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", " ").split())
    assert f"port {port} of 127.0.0.1, for prefill-0, is used by" in output
    assert f"choose another one with {field} of its group in prefill of the topology" in output


@pytest.mark.parametrize("taken", ["8000", "14500", "14501"])
def test_a_port_that_is_taken_is_named_as_the_topology_names_it(
    taken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the pool's master are no field: nobody chooses them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "can_listen", lambda _, port: str(port) != taken)
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY + "extra_config: {pool: {dram_size: 64MiB}}")
    result = run("--config", str(path), "--host", "a")
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", " ").split())
    fix = "with router.port in the topology" if taken == "8000" else "as extra_config.pool.master"
    assert f"port {taken} of 203.0.113.1, for" in output
    assert fix in output


def test_a_router_port_of_another_up_on_another_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = FreePorts()("127.0.0.1")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(socket_path(port)))
        other.listen()
        result = run("m", "--port", str(port))
    assert result.exit_code == 2
    assert "another `vllm-pd up` of this user listens at" in result.output
    assert not Path("vllm-pd-logs").exists()


def launch_by(
    monkeypatch: pytest.MonkeyPatch, folder: Path, launched: Callable[[launch.Manner], None]
) -> None:
    """Instead of processes, in this folder."""

    async def is_patched() -> None: ...

    async def launches(*what: object) -> int:
        assert isinstance(what[-1], launch.Manner)
        launched(what[-1])
        return 0

    monkeypatch.chdir(folder)
    monkeypatch.setattr(launch, "refuse_unpatched_engine", is_patched)
    monkeypatch.setattr(launch, "launch", launches)


def test_two_that_start_in_the_same_second_have_logs_and_tokens_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manners: list[launch.Manner] = []
    launch_by(monkeypatch, tmp_path, manners.append)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    port = str(FreePorts()("127.0.0.1"))
    for _ in range(3):
        result = run("m", "--port", port)
        assert result.exit_code == 0, result.output
    folder = Path("vllm-pd-logs")
    assert [one.log_dir for one in manners] == [folder / n for n in ("now", "now-2", "now-3")]
    assert len({one.token_file.read_text() for one in manners if one.token_file}) == 3


def test_a_second_one_in_the_same_folder_leaves_the_first_one_its_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ports = FreePorts()
    words = [("m", "--log-dir", "logs", "--port", str(ports("127.0.0.1"))) for _ in range(3)]

    def second(manner: launch.Manner) -> None:
        assert manner.token_file is not None
        token = manner.token_file.read_text()
        monkeypatch.setattr(launch, "launch", None)
        result = run(*words[1])
        assert result.exit_code == 2
        assert "has its secret and its token in logs: choose another folder with --log-dir" in (
            " ".join(result.output.replace("│", " ").split())
        )
        assert manner.token_file.read_text() == token

    launch_by(monkeypatch, tmp_path, second)
    result = run(*words[0])
    assert result.exit_code == 0, result.output
    launch_by(monkeypatch, tmp_path, lambda manner: None)
    result = run(*words[2])  # when the first one has ended
    assert result.exit_code == 0, result.output


def test_an_engine_without_patches_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pristine(self: host.Patches) -> list[object]:
        return [fail("patches", "vllm-0.30.0: pristine", "apply_patches.py apply")]

    monkeypatch.setattr(host.Patches, "run", pristine)
    result = run("m", "--port", "1024")
    assert result.exit_code == 2
    assert "vllm-0.30.0: pristine; fix: apply_patches.py apply" in result.output


@pytest.mark.parametrize("option", ["--router", "--prefill", "--decode"])
def test_doctor_names_a_wrong_url(option: str) -> None:
    result = CliRunner().invoke(main.app, ["doctor", option, "localhost:8000"])
    assert result.exit_code == 2
    assert "is not http://HOST:PORT" in result.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "--router"),
        (["--router", "http://127.0.0.1:1"], "hosts: with --ray the cluster says"),
    ],
)
def test_doctor_of_a_topology_on_ray(tmp_path: Path, more: list[str], said: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("{model: m, hosts: {a: {address: 10.0.0.1}}}")
    words = ["doctor", "--config", str(file), "--ray", *more]
    result = CliRunner().invoke(main.app, words)
    assert result.exit_code == 2
    assert said in result.output
