# SPDX-License-Identifier: Apache-2.0
"""What it costs the router that a broken stream can go on: ``--resume-streams`` against off.

The engine writes chunks as vLLM does, with token ids if it is asked for them; engine and clients
are one process on core 1, the router runs alone on core 0. ``paced``: every stream gets a chunk
each ``--itl-ms``, each a piece of its own. ``flat out``: as many as the other process can take. The
router's processor time per chunk says what it could relay, whoever is the slower one.

    .venv/bin/python benchmarks/router_streams.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from typing import TYPE_CHECKING

from router import ROUTER_CORE, free_port, process, rss_mib, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAME = (
    b'data: {"id":"chatcmpl-0f3c5a1e9d7b4c2a8e6f","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"tiny","choices":[{"index":0,"delta":{"content":" %d"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":%s}]}\n\n'
)
LAST = FRAME.replace(b'"finish_reason":null', b'"finish_reason":"length","stop_reason":null')
ROLE = (
    b'data: {"id":"chatcmpl-0f3c5a1e9d7b4c2a8e6f","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant",'
    b'"content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":%s,'
    b'"prompt_text":null}\n\n'
)
MODELS = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """One connection; every request is a stream of ``num_tokens``, or about the models."""

    itl_s = 0.0
    num_tokens = 64

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, body = self.buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self.buffer = b""
        if not head.startswith(b"POST"):
            kind = b"application/json"
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(answer % (kind, len(MODELS)) + MODELS)
            return
        self.tells = b'"return_token_ids":true' in body
        self.num_left = self.num_tokens
        prompt = json.dumps(list(range(1000, 1512)), separators=(",", ":")).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        self.transport.write(head + b"\r\n\r\n" + chunk(ROLE % (prompt if self.tells else b"null")))
        self.send()

    def send(self) -> None:
        if self.transport.is_closing():
            return
        self.num_left -= 1
        ids = b"[%d]" % (20000 + self.num_left) if self.tells else b"null"
        data = chunk((FRAME if self.num_left else LAST) % (time.perf_counter_ns(), ids))
        if not self.num_left:
            data += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.transport.write(data)
        loop = asyncio.get_running_loop()
        if self.num_left and self.itl_s:
            loop.call_later(self.itl_s, self.send)
        elif self.num_left:
            loop.call_soon(self.send)


class Client(asyncio.Protocol):
    """Stream after stream on one connection, until told to stop."""

    is_stopping = False
    latencies_ns: ClassVar[list[int]] = []
    num_streams = 0
    num_chunks = 0

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.done = asyncio.get_running_loop().create_future()
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        at = data.rfind(b'"content":" ')
        Client.num_chunks += data.count(b'"content":" ')
        if at >= 0:
            Client.latencies_ns.append(now - int(data[at + 12 : data.find(b'"', at + 12)]))
        self.tail = (self.tail + data)[-16:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            Client.num_streams += 1
            if Client.is_stopping:
                self.transport.close()
                self.done.set_result(None)
            else:
                self.transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("closed"))


@dataclass
class Result:
    cpu_us: float
    """Of the router, per chunk."""
    latency_us: float
    """p50 of a chunk's way."""
    chunks_per_s: float
    streams_per_s: float
    mib: float


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def load(port: int, pid: int, num_clients: int, seconds: float, warm_s: float) -> Result:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello " * 50}]}
    body |= {"stream": True, "temperature": 0, "max_tokens": Engine.num_tokens}
    sent = json.dumps(body).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    request = request % len(sent) + sent
    loop = asyncio.get_running_loop()
    Client.is_stopping = False
    clients = []
    for _ in range(num_clients):
        _, client = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
        clients.append(client)
    await asyncio.sleep(warm_s)
    Client.latencies_ns, Client.num_streams, Client.num_chunks = [], 0, 0
    before, started = cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    used, passed = cpu_s(pid) - before, time.monotonic() - started
    result = Result(
        used / Client.num_chunks * 1e6,
        statistics.median(Client.latencies_ns) / 1e3,
        Client.num_chunks / passed,
        Client.num_streams / passed,
        rss_mib(pid),
    )
    Client.is_stopping = True
    await asyncio.gather(*(client.done for client in clients))
    return result


@contextmanager
def router(mode: str, engine: int, folder: Path) -> Iterator[tuple[int, int]]:
    """Its port and process id."""
    port, log = free_port(), folder / "router.log"
    command = [str(Path(sys.executable).with_name("vllm-pd")), "router", "--port", str(port)]
    command += ["--decode", f"http://127.0.0.1:{engine}", "--access-log", "off"]
    command += ["--resume-streams", mode, "--probe-interval", "60", "--skip-prefill", "never"]
    with process(command, ROUTER_CORE, log) as started:
        yield port, started.pid


async def run(options: argparse.Namespace, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "127.0.0.1", 0)
    engine = server.sockets[0].getsockname()[1]
    Engine.num_tokens = options.tokens
    results: dict[tuple[str, str], list[Result]] = {}
    for turn in range(options.rounds):
        for mode in ("off", "exact") if turn % 2 == 0 else ("exact", "off"):
            with router(mode, engine, folder) as (port, pid):
                url = f"http://127.0.0.1:{port}/health"
                await asyncio.to_thread(wait_for, url, folder / "router.log", None)
                for case, itl_s, num in (("paced", options.itl_ms / 1e3, options.streams),
                                         ("flat out", 0.0, options.streams)):  # fmt: skip
                    Engine.itl_s = itl_s
                    found = await load(port, pid, num, options.seconds, options.seconds / 3)
                    results.setdefault((case, mode), []).append(found)
    server.close()
    names = ("cpu_us", "latency_us", "chunks_per_s", "streams_per_s", "mib")
    print(f"{'':18}" + "".join(f"{name:>15}" for name in names))
    for case in ("paced", "flat out"):
        medians = {}
        for mode in ("off", "exact"):
            rounds = results[case, mode]
            medians[mode] = [statistics.median(getattr(r, n) for r in rounds) for n in names]
            print(f"{case + ', ' + mode:18}" + "".join(f"{value:15.1f}" for value in medians[mode]))
        pairs = zip(medians["exact"], medians["off"], strict=True)
        ratios = [on / off if off else 0.0 for on, off in pairs]
        print(f"{'  exact / off':18}" + "".join(f"{ratio:15.3f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--itl-ms", type=float, default=20)
    options = parser.parse_args()
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(run(options, Path(folder)))


if __name__ == "__main__":
    main()
