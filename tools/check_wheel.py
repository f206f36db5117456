# SPDX-License-Identifier: Apache-2.0
"""Install the wheels of ``dist`` in a new environment elsewhere, patch its engine, and serve.

    make wheel && python3 tools/check_wheel.py

What is run is what ``docs/install.md`` says, line by line, in a copy of ``dist``. Nothing else of
the checkout is used.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from bootstrap_install import REPO, clean_env, pip_settings

PORT = 18231
UP_S = 1200


def main() -> int:
    *steps, serve = documented((REPO / "docs" / "install.md").read_text())
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as folder:
        place = Path(folder) / "dist"
        shutil.copytree(REPO / "dist", place)
        for step in steps:
            run(place, step)
        up = subprocess.Popen(["sh", "-c", f"exec {serve}"], cwd=place, env=environment())
        try:
            print(complete(up))
            run(place, f".venv/bin/vllm-pd doctor --router http://127.0.0.1:{PORT}")
        finally:
            up.send_signal(signal.SIGINT)
            code = up.wait(300)
    print("the wheels install, patch and serve" if code == 0 else f"vllm-pd up ended with {code}")
    return code


def documented(page: str) -> list[str]:
    """The page's lines for a machine without a checkout, for this Python and our port."""
    found = re.findall(r"^```\n(python3 -m venv .*?)^```$", page, re.MULTILINE | re.DOTALL)
    block: str = found[0].replace("python3 -m venv", f"{sys.executable} -m venv")
    block = block.replace("cpu-py311.txt", f"cpu-py3{sys.version_info[1]}.txt")
    return block.replace("up model", f"up model --port {PORT}").splitlines()


def environment() -> dict[str, str]:
    """uv takes packages from where pip is told to look, as in ``make venv``."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return clean_env({**pip_settings([sys.executable, "-m", "pip"]), **offline})


def run(place: Path, line: str) -> None:
    print("$", line, flush=True)
    subprocess.run(["sh", "-c", line], cwd=place, env=environment(), check=True)


def complete(up: subprocess.Popen[bytes]) -> str:
    """The answer to one request, as soon as the router has a producer and a consumer."""
    body = {"model": "model", "prompt": "Hello, my name is", "max_tokens": 16}
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + UP_S
    while True:
        try:
            with opener.open(request, timeout=300) as response:
                return str(json.load(response)["choices"][0]["text"])
        except OSError:
            if up.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
