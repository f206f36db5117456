# SPDX-License-Identifier: Apache-2.0
"""Connections to one engine: made a few at a time, given on in order, not late by our own fault."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvloop

from tests.router.harness import FAST, run, until
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.router import server as server_module
from vllm_ascend_pd.router.deadlines import Deadline, LoopLag
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.http_client import MAX_CONNECTING, EngineClient, kind_of
from vllm_ascend_pd.router.http_exchange import HIGH_WATER_BYTES
from vllm_ascend_pd.router.server import RouterServer, bind


async def get(client: EngineClient, timeout_s: float = 40.0) -> int | Failure:
    """The status."""
    response = await client.request(
        b"GET", b"/v1/models", (), b"", head_timeout_s=timeout_s, phase="answer"
    )
    if isinstance(response, Failure):
        return response
    try:
        await response.read()
        return response.status
    finally:
        response.close()


@asynccontextmanager
async def engine() -> AsyncIterator[ScriptedEngine]:
    one = ScriptedEngine()
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


@contextmanager
def full_backlog() -> Iterator[str]:
    """Of a server that accepts nobody: its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address):
            yield f"http://127.0.0.1:{address[1]}"


@pytest.mark.parametrize("seed", range(4))
def test_callers_that_leave_cost_nobody_a_turn(seed: int) -> None:
    async def test() -> None:
        chance = random.Random(seed)
        async with engine() as one:
            client = EngineClient(one.url, connect_timeout_s=40)
            asking = [asyncio.ensure_future(get(client)) for _ in range(6 * MAX_CONNECTING)]
            leaving = chance.sample(asking, 4 * MAX_CONNECTING)
            for task in leaving:
                task.cancel()
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            answers = await asyncio.gather(*asking, return_exceptions=True)
            for task, answer in zip(asking, answers, strict=True):
                assert answer == 200 or (task in leaving and task.cancelled())
            again = [get(client) for _ in range(3 * MAX_CONNECTING)]
            assert set(await asyncio.gather(*again)) == {200}
            client.close()

    run(test)


def test_one_connection_serves_those_that_wait_for_a_turn() -> None:
    async def test() -> None:
        async with engine() as one:
            client = EngineClient(one.url, connect_timeout_s=40)
            assert set(await asyncio.gather(*(get(client) for _ in range(400)))) == {200}
            assert client.num_open < 400
            client.close()

    run(test)


def test_no_connection_in_time_says_so_and_all_get_their_turn() -> None:
    async def test() -> None:
        with full_backlog() as url:
            client = EngineClient(url, connect_timeout_s=0.05)
            asked = 3 * MAX_CONNECTING
            answers = await asyncio.gather(*(get(client, 2.0) for _ in range(asked)))
            kinds = {a.kind for a in answers if isinstance(a, Failure)}
            # A few fit into the backlog, and get no answer.
            assert (
                FailureKind.CONNECT_TIMEOUT
                in kinds
                <= {
                    FailureKind.CONNECT_TIMEOUT,
                    FailureKind.TIMEOUT,
                }
            )
            client.close()

    run(test)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_host_that_can_have_no_name_cannot_be_reached(run_loop: Any) -> None:
    async def test() -> int | Failure:
        return await get(EngineClient("http://10.0.0..5:8000", connect_timeout_s=40))

    failure = run_loop(test())
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CONNECT
    assert "'10.0.0..5'" in failure.detail


def test_those_in_line_hear_that_the_engine_is_gone() -> None:
    async def test() -> None:
        with full_backlog() as url:
            client = EngineClient(url, connect_timeout_s=40)
            asking = [asyncio.ensure_future(get(client)) for _ in range(2 * MAX_CONNECTING)]
            await asyncio.sleep(0)
            down = Failure(FailureKind.DOWN, "test")
            client.fail_waiting(down)
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            answers = [task.result() for task in asking if task.done()]
            assert answers.count(down) >= MAX_CONNECTING
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    run(test)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), FailureKind.CONNECT),
        (OSError(errno.EHOSTUNREACH, ""), FailureKind.CONNECT),
        (OSError(errno.EMFILE, ""), FailureKind.ROUTER),
        (OSError(errno.EADDRNOTAVAIL, ""), FailureKind.ROUTER),
        (socket.gaierror(socket.EAI_AGAIN, ""), FailureKind.CONNECT_TIMEOUT),
    ],
)
def test_who_is_to_blame_for_a_connection(error: OSError, kind: FailureKind) -> None:
    assert kind_of(error) is kind


@contextmanager
def answering_thread(num_connections: int = 1) -> Iterator[str]:
    """A server of another thread, whatever this one does: it answers at once, once on each
    connection, and closes it; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(num_connections):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(20)
        assert not thread.is_alive()


def test_answer_that_came_while_the_router_did_something_else_is_in_time() -> None:
    """On uvloop, which looks at its timers before its sockets."""

    async def test() -> int | Failure:
        lag = LoopLag()
        lag.start()
        with answering_thread() as url:
            client = EngineClient(url, connect_timeout_s=0.1, lag=lag)
            asking = asyncio.ensure_future(get(client, 0.1))
            while not asking.done():
                await asyncio.sleep(0.001)
                time.sleep(0.2)
            client.close()
        lag.stop()
        return await asking

    assert uvloop.run(test()) == 200


def test_connection_that_was_closed_while_the_router_did_something_else_is_no_failure() -> None:
    async def test() -> int | Failure:
        lag = LoopLag()
        lag.start()
        with answering_thread(2) as url:
            client = EngineClient(url, connect_timeout_s=40, lag=lag)
            assert await get(client) == 200  # and closed, of which the router has not heard
            asking = asyncio.ensure_future(get(client))
            asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # just after it was sent
            answer = await asking
            client.close()
        lag.stop()
        return answer

    assert uvloop.run(test()) == 200


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def saying(answer: bytes, then: bytes = b"", *, closes: bool = False) -> AsyncIterator[str]:
    """A server that says this to each request, of which ``then`` a moment later; its URL."""

    serving: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                await asyncio.sleep(0.05 if then else 0)
                writer.write(then)
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.wait(filter(None, serving), timeout=1)


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("more", [b"", b"0", b"\r\nx", b"HTTP/1.1 500 ", ANSWER, 2 * ANSWER])
@pytest.mark.parametrize("is_later", [False, True])
def test_what_comes_behind_an_answer_is_none_to_the_next_request(
    more: bytes, is_later: bool, run_loop: Any
) -> None:
    async def test() -> list[tuple[int, bytes] | Failure]:
        said = (ANSWER, more) if is_later else (ANSWER + more, b"")
        async with saying(*said) as url:
            client = EngineClient(url, connect_timeout_s=40)
            answers = []
            for _ in range(3):
                answers.append(await client.fetch(b"GET", b"/health", (), b"", 40.0))
                await until(lambda: client.num_open == (0 if more else 1))
            client.close()
            return answers

    assert run_loop(test()) == [(200, b"ok")] * 3


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_answers_of_other_servers_are_understood(run_loop: Any) -> None:
    """Hints before it, its end told by that of the connection, more than is held at a time."""
    body = b"x" * (3 * HIGH_WATER_BYTES)
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"

    async def test() -> None:
        for answer, closes in (
            (early + b"HTTP/1.1 200 OK\r\n\r\n" + body, True),
            (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body), False),
        ):
            async with saying(answer, closes=closes) as url:
                client = EngineClient(url, connect_timeout_s=40)
                for _ in range(2):
                    assert await client.fetch(b"GET", b"/health", (), b"", 40.0) == (200, body)
                client.close()

    run_loop(test())


def test_deadline_of_a_loop_that_is_in_time_ends() -> None:
    async def test() -> None:
        lag = LoopLag()
        lag.start()
        expired = asyncio.Event()
        Deadline(0.01, lag, expired.set)
        assert await expired.wait()
        lag.stop()

    run(test)


def test_want_of_files_is_told_for_clients_are_cut_off_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "REFRESH_S", 0.0)
    caplog.set_level(logging.INFO)

    async def test() -> None:
        server, sock = RouterServer(FAST), bind("127.0.0.1", 0)
        await server.start(sock)
        counts = server.router.metrics.snapshot
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            await until(lambda: dict(counts().counters["out_of_files"]).get((), 0) >= 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await until(lambda: "clients are taken again" in caplog.text)
        assert caplog.text.count("clients are cut off: this router may open no file more") == 1
        await server.stop()

    run(test)
