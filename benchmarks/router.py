# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd router`` against other P/D routers: requests per second and added latency.

The engines are one nginx that answers at once, the load is wrk: what is left is the router. Each
router runs alone on core 0; nginx and wrk share core 1. ``direct`` is wrk on nginx without a
router, and shows that neither is the limit. Needs ``wrk`` and ``nginx`` (Debian packages).

    .venv/bin/python benchmarks/router.py
    .venv/bin/python benchmarks/router.py --demo disagg_proxy_demo.py --rust .../bin/vllm-router
    .venv/bin/python benchmarks/router.py --soak 100000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
TOY_PROXY = ROOT / "tests/e2e/third_party/toy_proxy_server.py"
BODY = {"model": "tiny", "prompt": "Hello, my name is " * 20, "max_tokens": 16, "temperature": 0}
ROUTER_CORE, OTHER_CORE = "0", "1"
NGINX_PROGRAM = "/usr/sbin/nginx"

LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = %s
done = function(summary, latency)
  io.write(string.format('RESULT {"rps": %%f, "p50_ms": %%f, "p99_ms": %%f, "errors": %%d}\\n',
    summary.requests / summary.duration * 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, summary.errors.status + summary.errors.connect
    + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
"""

NGINX = """
daemon off; worker_processes 1; pid %(folder)s/pid; error_log %(folder)s/error.log;
events { worker_connections 4096; }
http {
  access_log off; keepalive_requests 100000000; client_max_body_size 8m;
  client_body_temp_path %(folder)s/a; proxy_temp_path %(folder)s/b; fastcgi_temp_path %(folder)s/c;
  uwsgi_temp_path %(folder)s/d; scgi_temp_path %(folder)s/e;
  default_type application/json;
  server { listen 127.0.0.1:%(prefill)d backlog=4096; location / { return 200 '%(models)s'; }
           location ~ completions$ { return 200 '%(prefilled)s'; } }
  server { listen 127.0.0.1:%(decode)d backlog=4096; location / { return 200 '%(models)s'; }
           location ~ completions$ { return 200 '%(decoded)s'; } }
}
"""


def completion(text: str, **more: object) -> str:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 80, "completion_tokens": 16, "total_tokens": 96}
    return json.dumps(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "tiny",
            "choices": [choice],
            "usage": usage,
            **more,
        }
    )


PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_host": "127.0.0.1",
    "remote_port": 14579,
    "remote_block_ids": list(range(8)),
    "tp_size": 1,
}


@dataclass
class Result:
    rps: float
    p50_ms: float
    p99_ms: float
    errors: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(command: list[str], core: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(
            ["taskset", "-c", core, *command], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_for(url: str, log: Path, body: bytes | None = json.dumps(BODY).encode()) -> None:
    end = time.monotonic() + 60
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            if time.monotonic() > end:
                raise RuntimeError(f"{url}: {log.read_text()[-2000:]}") from None
            time.sleep(0.2)


def wrk(url: str, connections: int, seconds: float, script: Path) -> Result:
    command = ["taskset", "-c", OTHER_CORE, "wrk", "-t1", f"-c{connections}"]
    command += [f"-d{seconds:g}s", "--timeout", "20s", "-s", str(script), url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return Result(**json.loads(line.removeprefix("RESULT ")))


def commands(options: argparse.Namespace, prefill: int, decode: int, port: int) -> dict[str, list]:
    """Each router's command line."""
    python, at = sys.executable, "http://127.0.0.1:"
    ours = [str(Path(python).with_name("vllm-pd")), "router", "--port", str(port)]
    ours += ["--prefill", f"{at}{prefill}", "--decode", f"{at}{decode}"]
    ours += ["--policy", options.policy]
    toy = [python, str(TOY_PROXY), "--port", str(port)]
    toy += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefill)]
    toy += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decode)]
    found = {"ours": [*ours, "--access-log", "off"], "ours with access log": ours, "toy proxy": toy}
    if options.demo:
        found["disagg_proxy_demo"] = [python, str(options.demo), "--model", "tiny"]
        found["disagg_proxy_demo"] += ["--prefill", f"127.0.0.1:{prefill}"]
        found["disagg_proxy_demo"] += ["--decode", f"127.0.0.1:{decode}", "--port", str(port)]
    if options.rust:
        found["vllm-router (Rust)"] = [str(options.rust), "--vllm-pd-disaggregation"]
        found["vllm-router (Rust)"] += ["--kv-connector", "nixl", "--policy", "round_robin"]
        found["vllm-router (Rust)"] += ["--prefill", f"{at}{prefill}", "--decode", f"{at}{decode}"]
        found["vllm-router (Rust)"] += ["--host", "127.0.0.1", "--port", str(port)]
        found["vllm-router (Rust)"] += ["--log-level", "warning"]
        found["vllm-router (Rust)"] += ["--prometheus-port", str(free_port())]
    return {k: v for k, v in found.items() if not options.only or k in options.only.split(",")}


def compare(options: argparse.Namespace, folder: Path, prefill: int, decode: int) -> None:
    script = folder / "post.lua"
    script.write_text(LUA % json.dumps(json.dumps(BODY)))
    path = "/v1/completions"
    direct = f"http://127.0.0.1:{decode}{path}"
    results: dict[str, list[tuple[Result, Result]]] = {}
    for turn in range(options.rounds):
        names = list(commands(options, prefill, decode, 0))
        shift = turn % len(names)
        pairs = [(wrk(direct, 1, 1, script), wrk(direct, 32, 1, script))]
        results.setdefault("direct", []).extend(pairs)
        for name in names[shift:] + names[:shift]:
            port = free_port()
            command = commands(options, prefill, decode, port)[name]
            log = folder / "router.log"
            url = f"http://127.0.0.1:{port}{path}"
            with process(command, ROUTER_CORE, log):
                wait_for(url, log)
                wrk(url, 8, 1, script)
                one = wrk(url, 1, options.seconds, script)
                many = wrk(url, 32, options.seconds, script)
            results.setdefault(name, []).append((one, many))
    base = statistics.median(one.p50_ms for one, _ in results["direct"])
    print(f"{'':24}{'1 conn p50':>12}{'added p50':>12}{'p99':>9}{'32 conn rps':>14}{'p50':>9}"
          f"{'errors':>8}")  # fmt: skip
    for name, rounds in results.items():
        p50 = statistics.median(one.p50_ms for one, _ in rounds)
        p99 = statistics.median(one.p99_ms for one, _ in rounds)
        rps = statistics.median(many.rps for _, many in rounds)
        many50 = statistics.median(many.p50_ms for _, many in rounds)
        errors = sum(one.errors + many.errors for one, many in rounds)
        added = p50 - 2 * base if name != "direct" else 0.0
        print(f"{name:24}{p50:12.3f}{added:12.3f}{p99:9.3f}{rps:14.0f}{many50:9.2f}{errors:8d}")


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def soak(options: argparse.Namespace, folder: Path, prefill: int, decode: int) -> None:
    """Memory over many requests."""
    script = folder / "post.lua"
    script.write_text(LUA % json.dumps(json.dumps(BODY)))
    port = free_port()
    command = commands(options, prefill, decode, port)["ours"]
    url = f"http://127.0.0.1:{port}/v1/completions"
    with process(command, ROUTER_CORE, folder / "router.log") as router:
        wait_for(url, folder / "router.log")
        done = 0.0
        while done < options.soak:
            result = wrk(url, 32, 5, script)
            done += result.rps * 5
            print(f"{done:10.0f} requests, {rss_mib(router.pid):7.1f} MiB, {result.rps:.0f} rps")


def hold(options: argparse.Namespace, folder: Path) -> None:
    """Many streams at once, each a token every second."""
    sys.path.insert(0, str(ROOT))
    from tests.router.scripted_engine import ScriptedEngine

    async def one(port: int) -> int:
        body = json.dumps({**BODY, "max_tokens": 8, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        writer.close()
        return answer.count(b'"text"') if b"[DONE]" in answer else -1

    async def run() -> None:
        engines = [ScriptedEngine("p", token_s=0.001), ScriptedEngine("d", token_s=1.0)]
        for engine in engines:
            await engine.start()
        port = free_port()
        command = [str(Path(sys.executable).with_name("vllm-pd")), "router", "--port", str(port)]
        command += ["--prefill", engines[0].url, "--decode", engines[1].url, "--access-log", "off"]
        with process(command, ROUTER_CORE, folder / "router.log") as router:
            await asyncio.to_thread(
                wait_for, f"http://127.0.0.1:{port}/health", folder / "router.log", None
            )
            before = rss_mib(router.pid)
            started = time.monotonic()
            streams = [asyncio.ensure_future(one(port)) for _ in range(options.streams)]
            most = 0
            while not all(stream.done() for stream in streams):
                most = max(most, engines[1].num_in_progress)
                await asyncio.sleep(0.2)
            answers = [stream.result() for stream in streams]
            print(
                f"{options.streams} streams: {answers.count(8)} whole, {most} at once, "
                f"{time.monotonic() - started:.1f} s for 8 tokens of 1 s each, "
                f"memory {before:.0f} -> {rss_mib(router.pid):.0f} MiB"
            )
        for engine in engines:
            await engine.stop()

    asyncio.run(run())


def burst(options: argparse.Namespace, folder: Path) -> None:
    """Many streams begun at once, in front of two engines of one uvicorn process each."""

    async def one(port: int, results: Counter[str]) -> float | None:
        body = json.dumps({**BODY, "max_tokens": 8, "stream": True}).encode()
        started = time.monotonic()
        first = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = await reader.read(1 << 16)
            first = time.monotonic() - started
            answer += await reader.read()
            writer.close()
            is_whole = answer.count(b'"text"') == 8 and b"[DONE]" in answer
            results["whole" if is_whole else answer[9:12].decode() or "nothing"] += 1
        except OSError as e:
            results[type(e).__name__] += 1
        return first

    async def run(port: int) -> None:
        results: Counter[str] = Counter()
        started = time.monotonic()
        waits = await asyncio.gather(*(one(port, results) for _ in range(options.burst)))
        seconds = time.monotonic() - started
        found = sorted(wait for wait in waits if wait is not None)
        p50, p99 = found[len(found) // 2], found[int(len(found) * 0.99)]
        told = ", ".join(f"{count} {what}" for what, count in results.most_common())
        print(f"{options.burst} at once: {told}; {seconds:.1f} s in all, "
              f"first byte after {p50:.2f} s (p50), {p99:.2f} s (p99)")  # fmt: skip

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    engine = [sys.executable, str(ROOT / "benchmarks/uvicorn_engine.py")]
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        for name, port, token_s in zip("pd", ports, ("0", "0.02"), strict=True):
            log = folder / f"{name}.log"
            stack.enter_context(process([*engine, str(port), "1e-5", token_s], OTHER_CORE, log))
            wait_for(f"http://127.0.0.1:{port}/health", log, None)
        port, log = free_port(), folder / "router.log"
        command = commands(options, *ports, port)["ours"] + options.router_option
        stack.enter_context(process(command, ROUTER_CORE, log))
        wait_for(f"http://127.0.0.1:{port}/health", log, None)
        for _ in range(options.rounds):
            asyncio.run(run(port))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            text = response.read().decode()
        print(*(line for line in text.splitlines() if re.match(SHOWN, line)), sep="\n")
        print(log.read_text()[-1500:])


SHOWN = (
    "vllm:pd_router_(requests_total|retries_total|queue|legs_total|prefill_skips|refused).* [^0]"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--policy", default="round-robin")
    parser.add_argument("--only", default="", help="names of routers, with commas")
    parser.add_argument("--demo", type=Path, help="vLLM's disagg_proxy_demo.py")
    parser.add_argument("--rust", type=Path, help="the vllm-router command of the package")
    parser.add_argument("--soak", type=int, default=0, help="requests; memory instead of speed")
    parser.add_argument("--streams", type=int, default=0, help="streams to hold at once")
    parser.add_argument("--burst", type=int, default=0, help="streams to begin at once")
    parser.add_argument("--router-option", action="append", default=[], help="for --burst")
    options = parser.parse_args()
    needed = () if options.burst or options.streams else ("wrk", NGINX_PROGRAM)
    if missing := [name for name in needed if shutil.which(name) is None]:
        parser.error(f"needs {' and '.join(missing)}: apt-get install wrk nginx-light")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.burst:
            burst(options, folder)
            return
        if options.streams:
            hold(options, folder)
            return
        prefill, decode = free_port(), free_port()
        models = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        values = {
            "folder": folder,
            "prefill": prefill,
            "decode": decode,
            "models": models,
            "prefilled": completion(" a", kv_transfer_params=PARAMS),
            "decoded": completion(" a" * 16),
        }
        config = folder / "nginx.conf"
        config.write_text(NGINX % values)
        os.chmod(folder, 0o755)
        nginx = [NGINX_PROGRAM, "-p", str(folder), "-c", str(config)]
        with process(nginx, OTHER_CORE, folder / "nginx.log"):
            wait_for(f"http://127.0.0.1:{decode}/v1/completions", folder / "error.log")
            if options.soak:
                soak(options, folder, prefill, decode)
            else:
                compare(options, folder, prefill, decode)


if __name__ == "__main__":
    main()
