# SPDX-License-Identifier: Apache-2.0
"""An engine registers, beats, and says goodbye, against a real HTTP server."""

from __future__ import annotations

import http.server
import io
import json
import logging
import re
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.config import RouterLink
from vllm_ascend_pd.engine import registrar as registrar_module
from vllm_ascend_pd.engine.registrar import Registrar, RegistrarState, find_http_url
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.trust import Secret, Trust
from vllm_ascend_pd.registration import Registration, decode


class Web:
    """A router and an engine's front end on one port; ``answers`` scripts the router."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[str, str, dict[str, Any], str | None]] = []
        self.answers: list[tuple[int, bytes]] = []
        self.front_end_is_up = True
        self.sends_on_to = ""
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200 if web.front_end_is_up else 503, b"")

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                decode(body)
                self._note(json.loads(body))
                default = (200, b'{"heartbeat_s": 0.3, "ttl_s": 1}')
                self._answer(*(web.answers.pop(0) if web.answers else default))

            def do_DELETE(self) -> None:
                self._note({})
                self._answer(204, b"")

            def _note(self, body: dict[str, Any]) -> None:
                token = self.headers.get("Authorization")
                web.requests.append((self.command, self.path, body, token))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(302 if web.sends_on_to else status)
                self.send_header("Location", web.sends_on_to)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def last(self) -> dict[str, Any]:
        """What was told last of the engine."""
        return next(body for method, _, body, _ in reversed(self.requests) if method == "PUT")

    def states(self) -> list[str]:
        return [body.get("state", method) for method, _, body, _ in self.requests]

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what they are."""
    for name in ("_RETRY_S", "_START_PROBE_S", "_TURN_S"):
        monkeypatch.setattr(registrar_module, name, getattr(registrar_module, name) / 10)


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


class Engine:
    """The registrar's owner, as far as the registrar sees it."""

    def __init__(self, web: Web, **options: Any) -> None:
        self.draining = False
        self.changes: list[RegistrarState] = []
        config = RouterLink(url=web.url, http_url=web.url, instance_id="p0", **options)
        self.registrar = Registrar(
            config,
            Registration(url=find_http_url(config, "127.0.0.1"), role="prefill", epoch="e1"),
            lambda: self.draining,
            lambda: self.changes.append(self.registrar.state),
        )


@pytest.fixture
def engine(web: Web) -> Iterator[Engine]:
    engine = Engine(web)
    engine.registrar.start()
    yield engine
    engine.registrar.stop()


def until(condition: Callable[[], bool], patience_s: float = 10) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_engine_has_become_is_told_at_once(web: Web, engine: Engine) -> None:
    """Beside a beat that is far away."""
    web.answers = [(200, b'{"heartbeat_s": 3600, "ttl_s": 7200}')] * 9
    until(lambda: engine.registrar.state is RegistrarState.READY)
    for fingerprint, adapters in (("f1", {}), ("f1", {"a": "d1"}), ("f2", {"a": "d2"})):
        engine.registrar.tell(fingerprint=fingerprint)
        engine.registrar.tell(adapters=adapters)
        told = {"fingerprint": fingerprint, "adapters": adapters}
        until(lambda told=told: told.items() <= web.last().items())  # type: ignore[misc]


def test_registers_beats_and_leaves(web: Web, engine: Engine) -> None:
    until(lambda: len(web.requests) >= 3)
    assert engine.registrar.state is RegistrarState.READY
    method, path, body, token = web.requests[0]
    assert (method, path, token) == ("PUT", "/registry/instances/p0", None)
    assert (body["role"], body["epoch"], body["state"]) == ("prefill", "e1", "ready")
    engine.registrar.stop()
    assert web.requests[-1][:2] == ("DELETE", "/registry/instances/p0?epoch=e1")
    assert web.states().count("DELETE") == 1
    assert engine.changes == [RegistrarState.READY, RegistrarState.GONE]


def test_data_parallel_rank_is_an_instance_of_its_own(web: Web) -> None:
    link = RouterLink(url=web.url, http_url=web.url, instance_id="p-dp1")
    described = Registration(url=web.url, role="prefill", epoch="e1", data_parallel_rank=1)
    registrar = Registrar(link, described, lambda: False, lambda: None)
    registrar.start()
    until(lambda: len(web.requests) > 0)
    registrar.stop()
    _, path, body, _ = web.requests[0]
    assert (path, body["data_parallel_rank"]) == ("/registry/instances/p-dp1", 1)


def test_is_starting_until_its_front_end_answers(web: Web) -> None:
    web.front_end_is_up = False
    engine = Engine(web)
    engine.registrar.start()
    until(lambda: len(web.requests) >= 2)
    assert engine.registrar.state is RegistrarState.STARTING
    web.front_end_is_up = True
    until(lambda: engine.registrar.state is RegistrarState.READY)
    engine.registrar.stop()
    assert web.states()[0] == "starting"
    assert web.states()[-2:] == ["ready", "DELETE"]


class HttpsFrontEnd(http.server.ThreadingHTTPServer):
    """Its certificate is its own making, for another name."""

    def __init__(self, trust: Trust) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self._trust = trust
        self.url = f"https://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        stream, address = super().get_request()
        return self._trust.serve(stream), address

    def handle_error(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.mark.parametrize(
    "trust",
    [
        pytest.param(Trust(), id="a certificate of its own"),
        pytest.param(Trust(Secret(bytes(32))), id="and asks its clients for one"),
    ],
)
def test_https_front_end_answers_whoever_has_signed_its_certificate(web: Web, trust: Trust) -> None:
    """Whether the router trusts it is the router's to say."""
    front_end = HttpsFrontEnd(trust)
    description = Registration(url=front_end.url, role="prefill", epoch="e1")
    registrar = Registrar(RouterLink(url=web.url), description, lambda: False, lambda: None)
    registrar.start()
    try:
        until(lambda: registrar.state is RegistrarState.READY)
    finally:
        registrar.stop()
        front_end.close()


def test_https_front_end_that_is_not_there_does_not_answer(web: Web) -> None:
    description = Registration(url="https://127.0.0.1:9", role="prefill", epoch="e1")
    registrar = Registrar(RouterLink(url=web.url), description, lambda: False, lambda: None)
    registrar.start()
    until(lambda: len(web.requests) >= 3)
    assert registrar.state is RegistrarState.STARTING
    registrar.stop()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://[2001:db8::1]:8000", "2001:db8::1:8000"),
        ("http://[::1]:8000", "0::1:8000"),
    ],
)
def test_without_a_name_it_has_that_of_its_address(web: Web, url: str, name: str) -> None:
    description = Registration(url=url, role="prefill", epoch="e1")
    link = RouterLink(url=web.url)
    assert Registrar(link, description, lambda: False, lambda: None).instance_id == name


def test_tells_at_once_that_it_drains(web: Web, engine: Engine) -> None:
    web.answers = [(200, b'{"heartbeat_s": 60, "ttl_s": 240}')]
    until(lambda: engine.registrar.state is RegistrarState.READY)
    engine.draining = True
    until(lambda: engine.registrar.state is RegistrarState.DRAINING)
    assert web.states() == ["ready", "draining"]


def test_router_that_breaks_off_why_it_refuses_is_asked_again(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise ConnectionResetError("Connection reset by peer")

    refusals = [urllib.error.HTTPError(web.url, 503, "no", Message(), Broken())]
    ask = Registrar._request

    def request(self: Registrar, *sent: Any) -> bytes:
        if refusals:
            raise refusals.pop()
        return ask(self, *sent)

    monkeypatch.setattr(Registrar, "_request", request)
    engine = Engine(web)
    engine.registrar.start()
    until(lambda: engine.registrar.state is RegistrarState.READY)
    assert engine.changes == [RegistrarState.REFUSED, RegistrarState.READY]
    engine.registrar.stop()


def test_what_is_in_front_of_a_router_may_send_on_to_no_url(web: Web, engine: Engine) -> None:
    until(lambda: engine.registrar.state is RegistrarState.READY)
    web.sends_on_to = "http://["
    until(lambda: engine.registrar.state is RegistrarState.LOST)
    web.sends_on_to = ""
    until(lambda: engine.registrar.state is RegistrarState.READY)


def test_finds_a_router_that_comes_back(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(web)
    with caplog.at_level(logging.INFO):
        engine.registrar.start()
        until(lambda: caplog.text.count("sends requests to this engine") == 1)
        web.close()
        until(lambda: engine.registrar.state is RegistrarState.LOST)
        again = Web(web.port)
        try:
            until(lambda: engine.registrar.state is RegistrarState.READY)
            engine.registrar.stop()
            assert again.states()[-1] == "DELETE"
        finally:
            again.close()
    assert "does not answer" in caplog.text
    # Said once for each change, not with every beat.
    assert caplog.text.count("sends requests to this engine") == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((403, b'{"error": {"message": "wrong token"}}'), "403: .*wrong token"),
        ((409, b'{"error": {"message": "p0 is another"}}'), "409: .*p0 is another"),
        ((200, b"<html>"), "not as a router does"),
        ((500, b""), "500"),
        ((404, b'{"detail": "Not Found"}'), "404: .*router.url is the URL of a vllm-pd router"),
    ],
)
def test_a_refusal_is_told_once_with_its_reason(
    answer: tuple[int, bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    web = Web()
    web.answers = [answer] * 3
    engine = Engine(web)
    engine.registrar.start()
    try:
        until(lambda: engine.registrar.state is RegistrarState.READY)
        assert engine.changes[0] is RegistrarState.REFUSED
        [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "does not accept this engine" in warning
        assert re.search(reason, warning)
    finally:
        engine.registrar.stop()
        web.close()


def test_sends_its_token_and_never_logs_it(
    web: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    engine = Engine(web, token_file=str(path))
    with caplog.at_level(logging.DEBUG):
        engine.registrar.start()
        until(lambda: bool(web.requests))
        engine.registrar.stop()
    assert web.requests[0][3] == "Bearer s3cret"
    assert "s3cret" not in caplog.text


def test_a_silent_router_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar_module, "_REQUEST_TIMEOUT_S", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        registrar = Registrar(
            RouterLink(url=url, http_url=url),
            Registration(url=url, role="both", epoch="e"),
            lambda: False,
            lambda: None,
        )
        registrar.start()
        asked, _ = deaf.accept()
        started = time.monotonic()
        registrar.stop()
        assert time.monotonic() - started < 3.7  # two of its requests' deadlines, and a slow host
        registrar.join(10)
        asked.close()


@pytest.mark.parametrize(
    ("argv", "url"),
    [
        (["vllm", "serve", "m"], "http://10.0.0.1:8000"),
        (["vllm", "serve", "m", "--port", "81"], "http://10.0.0.1:81"),
        (["vllm", "serve", "m", "--port=82", "--ssl-certfile", "x"], "https://10.0.0.1:82"),
        (["vllm", "serve", "m", "--ssl_certfile", "x"], "https://10.0.0.1:8000"),
        (["vllm", "serve", "m", "--port", "81", "--port", "82"], "http://10.0.0.1:82"),
        (["vllm", "serve", "m", "--por", "84"], "http://10.0.0.1:84"),
        (["vllm", "serve", "m", "--por=85", "--ssl_certf", "x"], "https://10.0.0.1:85"),
        (["/x/api_server.py", "--port", "83"], "http://10.0.0.1:83"),
        (["vllm", "serve", "m", "--host", "10.0.0.2"], "http://10.0.0.2:8000"),
        (["vllm", "serve", "m", "--hos", "10.0.0.2"], "http://10.0.0.2:8000"),
        (["vllm", "serve", "m", "--host=fd00::1", "--port=84"], "http://[fd00::1]:84"),
        (["vllm", "serve", "m", "--host", "127.0.0.1"], "http://10.0.0.1:8000"),
        (["vllm", "serve", "m", "--host", "0.0.0.0"], "http://10.0.0.1:8000"),
        (["vllm", "serve", "m", "--host", "::"], "http://10.0.0.1:8000"),
    ],
)
def test_http_url_from_the_command_line(argv: list[str], url: str) -> None:
    assert find_http_url(RouterLink(url="http://r:1"), "10.0.0.1", argv) == url


@pytest.mark.parametrize(
    ("router", "kv_ip"), [("http://127.0.0.1:1", "10.0.0.1"), ("http://r:1", "127.0.0.1")]
)
def test_server_on_loopback_is_told_to_a_router_on_this_machine(router: str, kv_ip: str) -> None:
    argv = ["vllm", "serve", "m", "--host", "::1"]
    assert find_http_url(RouterLink(url=router), kv_ip, argv) == "http://[::1]:8000"


@pytest.mark.parametrize("argv", [["pytest"], ["vllm", "serve", "m", "--config", "x"], []])
def test_http_url_that_cannot_be_told(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"router.http_url is missing"):
        find_http_url(RouterLink(url="http://r:1"), "10.0.0.1", argv)


def test_ipv6_http_url() -> None:
    argv = ["vllm", "serve", "m"]
    assert find_http_url(RouterLink(url="http://r:1"), "::1", argv) == "http://[::1]:8000"


@pytest.mark.parametrize("content", [None, "", "two\nlines", "ümlaut"])
def test_wrong_token_file_is_named(content: str | None, tmp_path: Path, web: Web) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"router.token_file"):
        Engine(web, token_file=str(path))
