# SPDX-License-Identifier: Apache-2.0
"""The engine tells a router that it is there, and keeps telling it.

The messages are in ``vllm_ascend_pd.registration``. Everything happens on one thread of the
EngineCore process; the scheduler only reads ``state``.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import msgspec

from vllm_ascend_pd import registration
from vllm_ascend_pd.engine.front_end import is_server, options
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.direct_http import direct_opener
from vllm_ascend_pd.private_file import read_token
from vllm_ascend_pd.registration import Registered, Registration, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.config import RouterLink

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 2.0
_RETRY_S = 1.0
_START_PROBE_S = 0.5
_TURN_S = 0.25
_DEFAULT_HTTP_PORT = "8000"
_EVERYWHERE = ("", "0.0.0.0", "::")
_UNREACHABLE = (OSError, http.client.HTTPException, ValueError)
"""The last one: sent on to what is no URL."""


class RegistrarState(Enum):
    """What the router knows of this engine, as far as the engine knows."""

    NEW = "has not answered yet"
    STARTING = "knows this engine, which is not ready for requests yet"
    READY = "sends requests to this engine"
    DRAINING = "knows that this engine takes no more requests"
    LOST = "does not answer"
    REFUSED = "does not accept this engine"
    GONE = "was told that this engine ends"

    @property
    def registered(self) -> bool:
        return self in (RegistrarState.STARTING, RegistrarState.READY, RegistrarState.DRAINING)


_ANSWERED: dict[registration.State, RegistrarState] = {
    "starting": RegistrarState.STARTING,
    "ready": RegistrarState.READY,
    "draining": RegistrarState.DRAINING,
}


def find_http_url(config: RouterLink, host: str, argv: list[str] | None = None) -> str:
    """``router.http_url``, or the ``--host`` and ``--port`` that this engine was started with;
    ``host`` where it listens at every address, or where no router can find it.

    The front end's command line is also that of its EngineCore process.

    Raises:
        ConfigError: it cannot be told from the command line.
    """
    if config.http_url:
        return config.http_url.rstrip("/")
    words = sys.argv if argv is None else argv
    if not is_server(words):
        raise ConfigError(
            "router.http_url is missing: this engine was not started with `vllm serve`, so the URL"
            " of its OpenAI server is not known"
        )
    given = options(words)
    if "--config" in given or "--uds" in given:
        raise ConfigError(
            "router.http_url is missing: with --config or --uds the port of the OpenAI server"
            " cannot be told from the command line"
        )
    port = given.get("--port", _DEFAULT_HTTP_PORT)
    scheme = "https" if "--ssl-certfile" in given else "http"
    served = given.get("--host", "")
    routers = (urllib.parse.urlsplit(url).hostname or "" for url in config.urls)
    is_alone = is_loopback(host) or all(map(is_loopback, routers))
    if served not in _EVERYWHERE and (is_alone or not is_loopback(served)):
        host = served
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Registrar(threading.Thread):
    """Registers one engine with one router, and beats until ``stop`` (EngineCore, own thread)."""

    def __init__(
        self,
        config: RouterLink,
        description: Registration,
        is_draining: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called on this thread after each change of ``state``.

        Raises:
            ConfigError: a value of ``config`` or ``description`` is not acceptable.
        """
        super().__init__(name="pd-registrar", daemon=True)
        assert config.url is not None
        registration.decode(msgspec.json.encode(description))
        self.state = RegistrarState.NEW
        self.instance_id = config.instance_id or registration.default_id(description.url)
        registration.check_instance_id(self.instance_id)
        self.router = config.url.rstrip("/")
        self._resource = f"{self.router}{registration.PATH}/{self.instance_id}"
        path = config.token_file
        self._token = read_token("router.token_file", path) if path is not None else None
        self._description = self._told = description
        """What the engine is, and what the router was told last."""
        self._is_draining = is_draining
        self._on_change = on_change
        self._stopping = threading.Event()
        self._serving = False
        self._detail = ""
        self._opener = direct_opener()
        self._probe = direct_opener(urllib.request.HTTPSHandler(context=_trusting()))

    def run(self) -> None:
        beat_s = _RETRY_S
        while not self._stopping.is_set():
            draining = self._is_draining()
            if not self._serving and not draining:
                self._serving = self._front_end_answers()
            answer = self._put("draining" if draining else "ready" if self._serving else "starting")
            if answer is None:
                beat_s = _RETRY_S
            else:
                beat_s = answer.heartbeat_s if self._serving or draining else _START_PROBE_S
            self._rest(max(beat_s, _TURN_S), draining)
        if self.state.registered:
            self._say_goodbye()

    def tell(self, **changes: Any) -> None:
        """What the engine is from now on: fields of ``Registration``. The router hears of it at
        once. Scheduler thread."""
        self._description = msgspec.structs.replace(self._description, **changes)

    def stop(self, timeout: float = 5.0) -> None:
        """Tell the router that this engine ends, and end the thread. Idempotent."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout)

    def _rest(self, beat_s: float, was_draining: bool) -> None:
        """Until the next beat, or until there is news for the router."""
        turns = max(1, round(beat_s / _TURN_S))
        for _ in range(turns):
            if self._stopping.wait(_TURN_S) or self._is_draining() != was_draining:
                return
            if self._description is not self._told:
                return

    def _front_end_answers(self) -> bool:
        try:
            with self._probe.open(f"{self._description.url}/health", timeout=_REQUEST_TIMEOUT_S):
                return True
        except _UNREACHABLE as e:
            return urlsplit(self._description.url).scheme == "https" and _broke_off(e)

    def _put(self, state: registration.State) -> Registered | None:
        """Register or renew; the router's answer, or ``None`` when it did not accept."""
        self._told = self._description
        description = msgspec.structs.replace(self._told, state=state)
        body = msgspec.json.encode(description)
        try:
            answer = msgspec.json.decode(self._request("PUT", body), type=Registered)
        except urllib.error.HTTPError as e:
            is_router = e.code not in (404, 405)
            hint = "" if is_router else "; router.url is the URL of a vllm-pd router: is this one?"
            self._change(RegistrarState.REFUSED, f"{e.code}: {_text_of(e)}{hint}")
        except msgspec.MsgspecError as e:
            self._change(RegistrarState.REFUSED, f"it answers, but not as a router does ({e})")
        except _UNREACHABLE as e:
            self._change(RegistrarState.LOST, str(getattr(e, "reason", e)))
        else:
            self._change(_ANSWERED[state], "")
            return answer
        return None

    def _say_goodbye(self) -> None:
        query = urlencode({"epoch": self._description.epoch})
        try:
            self._request("DELETE", None, f"?{query}")
        except _UNREACHABLE as e:
            logger.info("router %s was not told that %s ends: %s", self.router, self.instance_id, e)
        self._change(RegistrarState.GONE, "")

    def _request(self, method: str, body: bytes | None, query: str = "") -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        url = self._resource + query
        request = urllib.request.Request(url, body, headers, method=method)
        with self._opener.open(request, timeout=_REQUEST_TIMEOUT_S) as response:
            answer: bytes = response.read(registration.MAX_BODY_BYTES)
        return answer

    def _change(self, state: RegistrarState, detail: str) -> None:
        if (state, detail) == (self.state, self._detail):
            return
        same_state = state is self.state
        self.state, self._detail = state, detail
        failed = state in (RegistrarState.LOST, RegistrarState.REFUSED)
        logger.log(
            logging.WARNING if failed else logging.INFO,
            "registration of %s: router %s %s%s",
            self.instance_id,
            self.router,
            state.value,
            f" ({detail}); trying on" if detail else "",
        )
        if not same_state:
            self._on_change()


def _trusting() -> ssl.SSLContext:
    """For an engine that asks itself, and says nothing secret: whoever signed its certificate, and
    whatever name is in it, it is the router that has to trust it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _broke_off(error: Exception) -> bool:
    """Whether a server was there, as one that asks its clients for certificates is."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, ssl.SSLError | ConnectionResetError)


def _text_of(error: urllib.error.HTTPError) -> str:
    """What the router says of it, as far as it comes."""
    with error:
        try:
            return error.read(500).decode(errors="replace")
        except _UNREACHABLE as e:
            return str(e)
