#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs the package and ``gpu_check.py`` for a GPU host without a network, with Python and torch.

    python tools/gpu_bundle.py gpu-check.tar.gz

On that host: ``tar xf gpu-check.tar.gz && gpu-check/run --out result.json``. It installs what is
missing beside the torch of its ``python3``, builds the native extension, and runs the check.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

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
export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/wheels" PIP_DISABLE_PIP_VERSION_CHECK=1
[ -d env ] || python3 -m venv --system-site-packages env
env/bin/pip install -q BUILD
PATH="$PWD/env/bin:$PATH" env/bin/pip install -q --no-build-isolation .
exec env/bin/python tools/gpu_check.py "$@"
"""


def make(target: Path, python: str, machine: str) -> None:
    """Writes the bundle. Asks the package registry for wheels."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    build = project["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "gpu-check"
        for name in PACKED:
            source = REPO / name
            if source.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(source, root / name, ignore=skip)
            else:
                shutil.copy2(source, root)
        platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
        command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
        command += ["--python-version", python, *platforms, "-d", str(root / "wheels")]
        wanted = build + project["project"]["dependencies"]
        subprocess.run([*command, *wanted, "wheel"], check=True)
        run = root / "run"
        run.write_text(RUN.replace("BUILD", " ".join(f"'{each}'" for each in [*build, "wheel"])))
        run.chmod(0o755)
        with tarfile.open(target, "w:gz") as archive:
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
    parser.add_argument("--python", default="3.12", help="of the other host (default: %(default)s)")
    parser.add_argument("--machine", default="x86_64", help="of the other host, as uname -m says")
    options = parser.parse_args()
    make(options.target, options.python, options.machine)


if __name__ == "__main__":
    main()
