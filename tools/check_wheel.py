# SPDX-License-Identifier: Apache-2.0
"""Install the wheels of ``dist`` in a new environment elsewhere, patch its engine, and serve.

    make wheel && python3 tools/check_wheel.py

Nothing of the checkout is used but what ``make wheel`` has put into ``dist``.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import bootstrap_host as host
from bootstrap_install import REPO, Environment, clean_env

PORT = 18231
UP_S = 1200
ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
ENGINE += ["--kv-cache-memory-bytes", str(128 << 20)]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as folder:
        place = Path(folder)
        install(place)
        run(place, "vllm-pd", "patch", "apply")
        run(place, "python", "-m", "vllm_ascend_pd.testing.tiny_model", "--out", "model")
        command = [str(place / ".venv/bin/vllm-pd"), "up", "model", "--port", str(PORT)]
        up = subprocess.Popen([*command, "--", *ENGINE], cwd=place, env=environment())
        try:
            print(complete(up))
            run(place, "vllm-pd", "doctor", "--router", f"http://127.0.0.1:{PORT}")
        finally:
            up.send_signal(signal.SIGINT)
            code = up.wait(300)
    print("the wheels install, patch and serve" if code == 0 else f"vllm-pd up ended with {code}")
    return code


def install(place: Path) -> None:
    dist = REPO / "dist"
    [wheel], [alias] = dist.glob("vllm_ascend_pd-*.whl"), dist.glob("vllm-*.whl")
    fresh = Environment(place / ".venv")
    fresh.make()
    settings = fresh.fetch_uv()
    torch = host.plan_for("cpu").requirements[0]
    fresh.uv_install("torch", [*(fresh.source_of(torch, settings) or []), torch], settings)
    locked = dist / f"cpu-py3{sys.version_info[1]}.txt"
    options = ["--override", str(dist / "left-out.txt"), "--constraint", str(locked)]
    fresh.uv_install("wheels", [*options, f"{wheel}[cpu,cluster]", str(alias)], settings)


def environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return clean_env(offline)


def run(place: Path, program: str, *words: str) -> None:
    command = [str(place / ".venv" / "bin" / program), *words]
    print("$", os.path.relpath(command[0], place), *words, flush=True)
    subprocess.run(command, cwd=place, env=environment(), check=True)


def complete(up: subprocess.Popen[bytes]) -> str:
    """The answer to one request, as soon as the router has a producer and a consumer."""
    body = {"model": "model", "prompt": "Hello, my name is", "max_tokens": 16, "temperature": 0}
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    end = time.monotonic() + UP_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return str(json.load(response)["choices"][0]["text"])
        except OSError:
            if up.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
