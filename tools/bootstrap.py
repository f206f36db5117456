# SPDX-License-Identifier: Apache-2.0
"""Make .venv: the pinned engine, Mooncake, this package with its native extension, and the patches.

Standard library only, so that the system's python3 (3.10 to 3.12) can run it in a fresh checkout.
It looks at the host, says which wheels it takes and why, fetches uv with pip, and lets uv install
what is missing. A second run takes about a second and changes nothing.
"""

# Up to the import of bootstrap_install this file runs on older Pythons too, to say what is wrong.
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

OLDEST, NEWEST = (3, 10), (3, 12)
EXAMPLES = """\
examples:
  python3 tools/bootstrap.py               look at the host and make .venv for it
  python3 tools/bootstrap.py --plan        say what would be installed, and stop
  python3 tools/bootstrap.py --device cpu  a host with an accelerator, used as a CPU host
  python3 tools/bootstrap.py --vllm 0.32.0 another supported vLLM, in .venv-0.32.0
  . .venv/bin/activate                     afterwards: `vllm`, `pytest` and so on

Where packages come from is pip's own configuration (`pip config`, PIP_* variables), which uv is
told; UV_* variables come before it.
"""


def find_supported_python() -> str | None:
    """Another interpreter on PATH that will do; a pyenv shim of an inactive version will not."""
    for minor in (11, 12, 10):
        path = shutil.which(f"python3.{minor}")
        if path is not None:
            probe = subprocess.run([path, "-c", "import venv"], stderr=subprocess.DEVNULL)
            if probe.returncode == 0:
                return path
    return None


def go_on_with_supported_python() -> None:
    found = ".".join(str(number) for number in sys.version_info[:2])
    other = find_supported_python()
    if other is None:
        print(
            f"error: {sys.executable} is Python {found}; 3.10, 3.11 or 3.12 is needed.\n"
            "fix: install one (Debian 12: apt-get install python3 python3-venv python3-dev; or,"
            " with pyenv: pyenv shell 3.11)\n"
            "     and run python3.11 tools/bootstrap.py",
            file=sys.stderr,
        )
        raise SystemExit(1)
    print(f"{sys.executable} is Python {found}: going on with {other}", flush=True)
    os.execv(other, [other, *sys.argv])


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=["auto", "cpu", "cuda", "ascend"], default="auto", help="kind of host")
    add("--vllm", metavar="VERSION", help="of the directories of patches/; default: 0.30.0")
    add("--venv", metavar="DIR", help="the environment (default: .venv, with --vllm .venv-VERSION)")
    add("--plan", action="store_true", help="say what would be installed, and stop")
    add("--yes", action="store_true", help="go on with a plan that was not yet run on hardware")
    add("--lock", action="store_true", help="choose the versions in tools/requirements anew")
    add("--no-system-check", action="store_true", help="do not look for Debian packages")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        go_on_with_supported_python()
    from bootstrap_install import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
