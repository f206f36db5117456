#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs the package and ``gpu_check.py`` for a GPU host without a network, with Python and torch.

    python tools/gpu_bundle.py gpu-check.tar.xz

On that host: ``tar xf gpu-check.tar.xz && gpu-check/run --out result.json``. It adds what the
packages of its ``python3`` lack, builds the native extension, and runs the check.

    python tools/gpu_bundle.py gpu-check.tar.xz --engine --has packages.txt

packs vLLM as well, patched, and the tests: ``gpu-check/run-tests tests/integration/test_pool.py``
runs any of tests/integration with engines on that GPU. ``packages.txt`` is what
``python3 -m pip list --format freeze`` says there; without it more is packed than may be carried.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import gpu_engine
from bootstrap_install import PYTHONS, lock_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[1]
PACKED = (
    *("vllm_ascend_pd", "csrc", "patches", "tools", "examples"),
    *("CMakeLists.txt", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"),
)
MAX_BYTES = 64 << 20
GLIBC = (5, 12, 17, 24, 27, 28, 31, 34)
RUN = """#!/bin/sh
set -e
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/site:$PWD" PATH="$PWD/site/bin:$PATH" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$PWD/site/lib"
if ! ls vllm_ascend_pd/_C.*.so > /dev/null 2>&1; then
    for wheel in wheels/*.whl; do
        [ ! -f "$wheel" ] || python3 -m pip install -q --no-index --no-deps --target site "$wheel"
    done
    python3 setup.py -q build_ext --inplace
fi
exec python3 COMMAND "$@"
"""
"""Beside the packages of its ``python3``, an environment with torch."""
COMMANDS = {
    "run": "tools/gpu_check.py",
    "run-tests": "-m pytest --gpu -p no:cacheprovider -p no:benchmark",
}


def make(
    target: Path,
    python: str,
    machine: str,
    architecture: int | None = None,
    has: Path | None = None,
) -> None:
    """Writes the bundle. Asks the package registry for wheels. With an ``architecture`` (90 for
    Hopper) vLLM is in it; ``has`` lists distributions of the other host.
    """
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    there = gpu_engine.read_names(has.read_text()) if has is not None else set()
    build = project["build-system"]["requires"]
    needs = project["project"]["dependencies"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "gpu-check"
        for name in (*PACKED, *(("tests", "Makefile") if architecture is not None else ())):
            source = REPO / name
            if source.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(source, root / name, ignore=skip)
            else:
                shutil.copy2(source, root)
        platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
        download = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
        download += ["--python-version", python, *platforms, "-d", str(root / "wheels")]
        # An engine brings what the package needs.
        wanted = [*build, *(needs if architecture is None else ()), "wheel"]
        wanted = [one for one in wanted if not gpu_engine.is_there(one, there)]
        if wanted:
            subprocess.run([*download, *wanted], check=True)
        if architecture is not None:
            pinned = lock_file(python).read_text()
            mooncake = [line.split()[0] for line in pinned.splitlines() if "mooncake" in line[:8]]
            extra = [*needs, *mooncake, "typer"]
            gpu_engine.add_engine(root / "site", extra, python, machine, architecture, there)
        for name, command in COMMANDS.items():
            if name == "run" or architecture is not None:
                (root / name).write_text(RUN.replace("COMMAND", command))
                (root / name).chmod(0o755)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            archive.add(root, root.name)
    num_bytes = target.stat().st_size
    if num_bytes > MAX_BYTES:
        sys.exit(f"{target}: {num_bytes >> 20} MiB, and {MAX_BYTES >> 20} MiB may be carried")
    print(f"{target}: {num_bytes / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--python",
        default="3.12",
        choices=PYTHONS,
        help="of the other host (default: %(default)s)",
    )
    parser.add_argument("--machine", default="x86_64", help="of the other host, as uname -m says")
    parser.add_argument("--engine", action="store_true", help="with vLLM and the tests")
    parser.add_argument(
        "--architecture",
        type=int,
        default=90,
        help="of the GPU, whose kernels of vLLM are kept (default: %(default)s, Hopper)",
    )
    parser.add_argument("--has", type=Path, metavar="FILE", help="packages of the other host")
    options = parser.parse_args()
    architecture = options.architecture if options.engine else None
    make(options.target, options.python, options.machine, architecture, options.has)


if __name__ == "__main__":
    main()
