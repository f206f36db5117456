# SPDX-License-Identifier: Apache-2.0
"""Engines that fail, clients that leave. ``deployed`` proves after each that nothing is left."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.harness import FAST, JSON_POST, STRICT, deployed, events, run, until
from vllm_ascend_pd.kv.breaker import BreakerState
from vllm_ascend_pd.router.config import Probes, Retries, Timeouts
from vllm_ascend_pd.router.instances import MAX_UNEXPLAINED

PATIENT = replace(FAST, timeouts=Timeouts())
BEFORE_THE_FIRST_BYTE = (
    "close",
    "reset",
    "half_close",
    "status(500)",
    "status(503)",
    "garbage",
    "bad_json",
    "huge_head",
    "truncate",
)
CAUSES = ("busy", "disconnect", "status", "protocol", "truncated", "no_kv_transfer_params")
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def error(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


@pytest.mark.parametrize("fault", [*BEFORE_THE_FIRST_BYTE, "no_params"])
def test_failed_prefill_is_repeated_with_another_pair(fault: str) -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            d.prefills[0].script(fault)
            status, _, _ = await d.post()
            assert status == 200
            assert len(d.prefills[1].received) == 1
            assert sum(len(e.received) for e in d.decodes) == 1
            assert sum(d.count("retries_total", cause=cause) for cause in CAUSES) == 1

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_without_an_event_is_repeated_with_another_pair(path: str) -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            d.decodes[0].script("end(0)")
            status, _, body = await d.post(path, stream=True)
            assert status == 200
            assert len(events(body)) >= 5
            assert len(d.decodes[1].received) == 1
            assert d.count("retries_total", cause="truncated") == 1

    run(test)


@STREAMED
@pytest.mark.parametrize("fault", [f for f in BEFORE_THE_FIRST_BYTE if f != "bad_json"])
def test_failed_decode_is_repeated_with_another_pair(fault: str, stream: bool) -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            d.decodes[0].script("break(0)" if stream and fault == "truncate" else fault)
            status, _, body = await d.post(stream=stream)
            assert status == 200
            assert len(d.decodes[1].received) == 1
            if stream:
                assert len(events(body)) == 5
            assert d.count("requests_total", outcome="ok") == 1

    run(test)


@STREAMED
def test_concurrent_decode_that_fails_aborts_its_prefill(stream: bool) -> None:
    async def test() -> None:
        async with deployed(1, 2, supports_concurrent=True) as d:
            await d.post()
            d.prefills[0].script("hang")
            d.decodes[1].script("close")
            status, _, _ = await d.post(stream=stream)
            assert status == 200
            await until(lambda: d.prefills[0].num_given_up == 1)
            assert d.count("orders_total", order="concurrent") == 2

    run(test)


@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
@pytest.mark.parametrize("legs", [("prefill", "decode"), ("decode",)], ids=str)
def test_client_error_goes_to_the_client_and_counts_against_nobody(
    legs: tuple[str, ...], order: str
) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, order=order), supports_concurrent=True) as d:
            for _ in range(5):
                d.decodes[0].script("status(422)")
                d.prefills[0].script("status(400)" if "prefill" in legs else "ok")
                status, _, body = await d.post()
                assert status == 422
                assert error(body)["message"] == "scripted"
                d.decodes[0].script_nothing()
            assert d.count("requests_total", outcome="client_error") == 5
            assert all(i.breaker.state.value == "closed" for i in d.router.registry)

    run(test)


@STREAMED
def test_engine_that_takes_no_more_is_passed_by_and_stays_in(stream: bool) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            d.decodes[0].script(", ".join(["status(503)"] * 8))
            for _ in range(16):
                status, _, _ = await d.post(stream=stream)
                assert status == 200
            assert d.count("retries_total", cause="busy") > d.router.config.probes.failure_threshold
            assert all(i.breaker.state.value == "closed" for i in d.router.registry)

    run(test)


@STREAMED
@pytest.mark.parametrize("fault", ["status(500)", "truncate"])
def test_request_that_fails_everywhere_takes_no_engine_out(fault: str, stream: bool) -> None:
    """Of a streamed response that it refuses vLLM closes the connection."""

    async def test() -> None:
        async with deployed(2, 2) as d:
            for _ in range(4):
                for engine in (*d.prefills, *d.decodes):
                    engine.script_nothing()
                    engine.script(", ".join([fault] * 3))
                assert (await d.post(stream=stream))[0] == 502
            for engine in (*d.prefills, *d.decodes):
                engine.script_nothing()
            async with d.http.get(f"{d.url}/v1/models/nothing") as response:
                assert response.status == 200
            assert all(i.breaker.closed for i in d.router.registry)
            assert any(i.num_failures > 3 for i in d.router.registry)

    run(test)


def test_stream_that_begins_with_an_error_is_no_answer_that_blames_others() -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            for _ in range(4):
                for engine in (*d.prefills, *d.decodes):
                    engine.script_nothing()
                for engine in d.prefills:
                    engine.script(", ".join(["status(500)"] * 3))
                for engine in d.decodes:
                    engine.script(", ".join(["dead(0)"] * 3))
                await d.post(stream=True, temperature=0)
            assert all(i.breaker.closed for i in d.router.registry)

    run(test)


def test_engine_that_answers_5xx_to_everything_is_out_though_there_is_no_other() -> None:
    async def test() -> None:
        async with deployed(0, 1) as d:
            (engine,) = d.decodes
            (instance,) = d.router.registry
            for number in range(MAX_UNEXPLAINED + 2):
                assert instance.breaker.closed, number
                engine.script("status(500)")
                assert (await d.post())[0] == 502
            assert not instance.breaker.closed

    run(test)


@STREAMED
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
def test_engine_that_fails_what_others_answer_is_out(leg: str, order: str, stream: bool) -> None:
    async def test() -> None:
        config = replace(FAST, order=order)
        async with deployed(2, 2, config, supports_concurrent=True) as d:
            await d.post()
            failing = (d.prefills if leg == "prefill" else d.decodes)[0]
            failing.script(", ".join(["status(500)"] * 3))
            instance = next(i for i in d.router.registry if i.spec.url == failing.url)
            for _ in range(12):
                assert instance.breaker.closed or instance.num_failures == 3
                assert (await d.post(stream=stream))[0] == 200
                if not instance.breaker.closed:
                    break
            assert not instance.breaker.closed
            await until(lambda: instance.breaker.state is BreakerState.HALF_OPEN)

    run(test)


@pytest.mark.parametrize("fault", ["dead(0)", "abort(0)"])
@pytest.mark.parametrize("fields", [{"temperature": 1}, {"temperature": 0, "n": 2}], ids=str)
def test_stream_that_begins_with_its_end_is_another_engines(
    fault: str, fields: dict[str, Any]
) -> None:
    """Of one that could not go on elsewhere once it has begun."""

    async def test() -> None:
        async with deployed(1, 2) as d:
            d.decodes[0].script(fault)
            for _ in range(2):
                status, headers, body = await d.post(stream=True, **fields)
                assert (status, headers["x-resumes"][:4]) == (200, "none")
                assert events(body)[-1] == "[DONE]"
                assert b"error" not in body
                assert b"abort" not in body
            assert d.count("requests_total", outcome="ok") == 2
            assert d.count("retries_total", cause="status") == 1
            await until(lambda: not any(engine.kept for engine in d.prefills))

    run(test)


@pytest.mark.parametrize("fault", ["dead(2)", "abort(2)"])
def test_stream_within_which_its_engine_ends_is_broken(fault: str) -> None:
    async def test() -> None:
        async with deployed(token_s=0.02) as d:
            d.decodes[0].script(fault)
            _, _, body = await d.post(stream=True, temperature=1)
            *begun, end = events(body)
            assert len(begun) == 2
            assert end["error"]["type"] == "broken_stream"
            assert d.count("requests_total", outcome="broken_stream") == 1
            assert d.count("requests_total", outcome="ok") == 0

    run(test)


@pytest.mark.parametrize("temperature", [0, 1])
def test_whole_answer_that_its_engine_gave_up_is_another_engines(temperature: int) -> None:
    """As one that stops gives them up."""

    async def test() -> None:
        async with deployed(1, 2) as d:
            d.decodes[0].script("abort(0)")
            for _ in range(2):
                status, _, body = await d.post(temperature=temperature)
                assert status == 200
                assert json.loads(body)["choices"][0]["finish_reason"] == "length"
            assert d.count("retries_total", cause="status") == 1

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/busy"])
def test_client_is_told_to_come_again_where_no_engine_takes_more(path: str) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            for engine in d.decodes:
                engine.script("status(503)")
            for engine in d.prefills:
                engine.script("ok, status(503)")
            status, headers, body = await d.post(path)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert error(body)["type"] == "busy"
            assert "scripted" in error(body)["message"]
            assert d.count("requests_total", outcome="unavailable") == 1

    run(test)


def test_missing_params_everywhere_is_an_error_that_says_so() -> None:
    async def test() -> None:
        async with deployed(config=STRICT) as d:
            d.prefills[0].script("no_params")
            status, _, body = await d.post()
            assert status == 502
            assert error(body)["type"] == "no_kv_transfer_params"
            assert "--kv-transfer-config" in error(body)["message"]
            assert not d.decodes[0].received

    run(test)


def test_attempts_end() -> None:
    async def test() -> None:
        async with deployed(4, 4, STRICT) as d:
            for engine in d.prefills:
                engine.script("status(500)")
            status, _, body = await d.post()
            assert status == 502
            assert error(body)["type"] == "status"
            assert sum(len(e.received) for e in d.prefills) == 3
            assert d.count("requests_total", outcome="failed") == 1

    run(test)


def test_retry_budget_ends() -> None:
    async def test() -> None:
        config = replace(
            STRICT,
            retries=Retries(max_attempts=3, budget_ratio=0, budget_burst=1),
            probes=Probes(interval_s=0.05, timeout_s=0.2, failure_threshold=100),
        )
        async with deployed(1, 2, config) as d:
            for engine in d.decodes:
                engine.script("close, close, close")
            assert [(await d.post())[0] for _ in range(2)] == [502, 502]
            assert sum(len(e.received) for e in d.decodes) == 3
            assert d.count("retry_budget_exhausted_total") == 1

    run(test)


@pytest.mark.parametrize(
    ("leg", "fault", "stream"),
    [
        ("prefill", "hang", False),
        ("decode", "hang", True),
        ("decode", "stall(0)", True),
        ("decode", "hang", False),
    ],
)
def test_deadline_of_each_phase(leg: str, fault: str, stream: bool) -> None:
    async def test() -> None:
        timeouts = Timeouts(prefill_s=0.1, first_token_s=0.15, answer_s=0.2)
        async with deployed(2, 2, replace(STRICT, timeouts=timeouts)) as d:
            for engine in d.prefills if leg == "prefill" else d.decodes:
                engine.script(fault)
            status, _, body = await d.post(stream=stream)
            assert status == 504
            assert "took longer than" in error(body)["message"]
            assert d.count("requests_total", outcome="timeout") == 1
            engines = (*d.prefills, *d.decodes)
            await until(lambda: sum(e.num_given_up for e in engines) == 1)

    run(test)


def test_deadline_of_what_is_passed_on() -> None:
    async def test() -> None:
        timeouts = replace(FAST.timeouts, answer_s=0.2)
        async with deployed(config=replace(FAST, timeouts=timeouts)) as d:
            async with d.http.post(f"{d.url}/v1/hangs", json={"model": "tiny"}) as response:
                assert response.status == 504
                assert "took longer than" in error(await response.read())["message"]
            assert d.count("requests_total", outcome="timeout") == 1

    run(test)


@pytest.mark.parametrize("fault", ["break(2)", "stall(2)", "end(2)", "comments(2)", "trickle(2)"])
def test_stream_that_breaks_ends_with_an_error_event(fault: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            d.decodes[0].script(fault)
            status, _, body = await d.post(stream=True)
            assert status == 200
            got = events(body)
            assert [len(event.get("choices", ())) for event in got] == [1, 1, 0]
            assert got[-1]["error"]["type"] == "broken_stream"
            assert d.count("requests_total", outcome="broken_stream") == 1

    run(test)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, False), ({"include_reasoning": False}, True), ({"stream_interval": 200}, True)],
    ids=str,
)
def test_stream_may_be_silent_as_its_client_asked(fields: dict[str, Any], ends: bool) -> None:
    """vLLM sends nothing while it hides reasoning, nor until so many tokens are there."""

    async def test() -> None:
        config = replace(FAST, timeouts=replace(FAST.timeouts, idle_s=0.1, answer_s=20))
        async with deployed(config=config, token_s=0.4) as d:
            _, _, body = await d.post("/v1/chat/completions", stream=True, max_tokens=2, **fields)
            assert (events(body)[-1] == "[DONE]") is ends

    run(test)


@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
@pytest.mark.parametrize("moment", ["prefill", "decode", "stream"])
def test_client_that_leaves_ends_both_legs(order: str, moment: str) -> None:
    async def test() -> None:
        async with deployed(config=PATIENT, supports_concurrent=order == "concurrent") as d:
            await d.post()
            prefill, decode = d.prefills[0], d.decodes[0]
            if moment == "prefill":
                prefill.script("hang")
            decode.script("stall(2)" if moment == "stream" else "hang")
            leaving = asyncio.ensure_future(d.post(stream=True))
            waiting = prefill if moment == "prefill" else decode
            await until(lambda: waiting.num_in_progress == 1)
            if moment == "stream":
                await asyncio.sleep(0.05)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await until(lambda: not prefill.num_in_progress and not decode.num_in_progress)
            assert prefill.num_given_up + decode.num_given_up >= 1
            await until(lambda: d.count("requests_total", outcome="disconnected") == 1)

    run(test)


def test_client_that_leaves_while_it_is_written_to_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave(*_: Any) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", leave)

    async def test() -> None:
        async with deployed() as d:
            with pytest.raises(aiohttp.ClientError):
                await d.post(stream=True)
            assert d.count("requests_total", outcome="disconnected") == 1
        assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]

    run(test)


def test_client_that_half_closes_is_gone() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script("hang")
            reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
            body = b'{"model": "tiny", "prompt": "x"}'
            head = JSON_POST + b"Content-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await until(lambda: d.prefills[0].num_in_progress == 1)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await until(lambda: d.prefills[0].num_given_up == 1)

    run(test)


def test_client_that_does_not_read_is_cut_off() -> None:
    async def test() -> None:
        async with deployed() as d:
            reader, writer = await asyncio.open_connection("127.0.0.1", d.port, limit=1024)
            body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 150_000}).encode()
            head = JSON_POST + b"Content-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            try:
                await until(lambda: d.decodes[0].num_in_progress == 1)
                await until(lambda: d.decodes[0].num_given_up == 1)
            finally:  # or what is not closed is an error of another test
                writer.transport.abort()
            del reader

    run(test)


def test_client_that_does_not_read_the_end_is_cut_off() -> None:
    """Its engine has done its part, and is not kept for it."""

    async def test() -> None:
        async with deployed(0, 1, token_s=0.0005) as d:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", d.port))
                body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 550}).encode()
                head = JSON_POST + b"Content-Length: %d\r\n\r\n"
                sock.sendall(head % len(body) + body)
                running = d.router.moves.running
                await until(lambda: bool(running))
                (answering,) = running
                sent = answering.job.trace.request.transport.get_extra_info("socket")
                sent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                await until(lambda: not running)
            assert d.decodes[0].num_given_up == 0
            assert d.count("requests_total", outcome="disconnected") == 1

    run(test)


def test_refused_connection_takes_an_instance_out_at_once() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            await d.decodes[0].stop()
            for _ in range(6):
                status, _, _ = await d.post()
                assert status == 200
            legs = d.count(
                "legs_total",
                instance=f"127.0.0.1:{d.decodes[0].port}",
                leg="decode",
                outcome="connect",
            )
            assert legs <= 1

    run(test)


def test_restarted_instance_comes_back() -> None:
    async def test() -> None:
        async with deployed(config=STRICT) as d:
            await d.decodes[0].stop()
            await until(lambda: not d.router.registry.decodes[0].is_available)
            status, headers, body = await d.post()
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert "no decode instance" in error(body)["message"]
            async with d.http.get(f"{d.url}/health") as response:
                assert response.status == 503
            await d.decodes[0].start()
            await until(lambda: d.router.registry.decodes[0].is_available)
            status, _, _ = await d.post()
            assert status == 200

    run(test)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_instance_of_a_role_is_503_if_both_are_required(role: str) -> None:
    async def test() -> None:
        async with deployed(int(role == "decode"), int(role == "prefill"), STRICT) as d:
            status, headers, body = await d.post()
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert error(body)["message"] == f"no {role} instance is known"
            assert d.count("requests_total", outcome="unavailable") == 1

    run(test)


def test_instance_that_fails_requests_gets_one_at_a_time_until_one_succeeds() -> None:
    async def test() -> None:
        async with deployed(1, 1, STRICT) as d:
            instance = d.router.registry.decodes[0]
            for _ in range(3):
                d.decodes[0].script("reset")
                assert (await d.post())[0] == 502
            assert instance.breaker.state.value != "closed"
            assert (await d.post())[0] in (200, 503)
            await until(lambda: instance.breaker.state.value != "open")
            assert (await d.post())[0] == 200
            assert instance.breaker.state.value == "closed"

    run(test)


@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
def test_instance_that_is_tried_waits_for_the_request_that_tries_it(order: str) -> None:
    """Also while its prompt is computed elsewhere, and one that finds it busy tells nothing."""

    async def test() -> None:
        async with deployed(1, 2, replace(FAST, order=order), supports_concurrent=True) as d:
            failing = d.decodes[0]
            instance = d.router.registry.decodes[0]
            failing.script("status(500), status(500), status(500), status(503)")
            while len(failing.received) < 3:
                assert (await d.post())[0] == 200
            await until(lambda: instance.breaker.state is BreakerState.HALF_OPEN)
            d.prefills[0].script(", ".join(["delay(0.1)"] * 12))
            answers = await asyncio.gather(*(d.post() for _ in range(12)))
            assert [status for status, *_ in answers] == [200] * 12
            assert len(failing.received) == 4
            assert instance.breaker.state is BreakerState.HALF_OPEN
            while instance.breaker.state is BreakerState.HALF_OPEN:
                assert (await d.post())[0] == 200
            assert (len(failing.received), instance.breaker.closed) == (5, True)

    run(test)


def test_requests_of_an_instance_that_hangs_go_elsewhere() -> None:
    async def test() -> None:
        config = replace(FAST, timeouts=replace(FAST.timeouts, answer_s=30, prefill_s=30))
        async with deployed(1, 2, config) as d:
            d.decodes[0].health_hangs = True
            d.decodes[0].script("hang")
            status, _, _ = await d.post()
            assert status == 200
            assert d.count("retries_total", cause="down") == 1

    run(test)


def test_dead_engine_under_32_streams() -> None:
    async def test() -> None:
        async with deployed(1, 2, replace(PATIENT, policy="least-loaded")) as d:
            d.decodes[0].script(", ".join(["hang"] * 32))
            posts = [asyncio.ensure_future(d.post(stream=True, prompt=f"{i}")) for i in range(32)]
            await until(lambda: d.decodes[0].num_in_progress >= 10)
            await d.decodes[0].stop()
            for status, _, body in await asyncio.gather(*posts):
                assert status == 200
                assert events(body)[-1] == "[DONE]"

    run(test)


def test_connection_closed_while_idle_is_no_failure() -> None:
    async def test() -> None:
        async with deployed() as d:
            await d.post()
            port = d.decodes[0].port
            await d.decodes[0].stop()
            await d.decodes[0].start()
            assert d.decodes[0].port == port
            assert (await d.post())[0] == 200

    run(test)


def test_router_that_stops_ends_what_it_began() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.decodes[0].script("delay(0.3)")
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.decodes[0].num_in_progress == 1)
            await d.server.stop()
            status, _, _ = await posting
            assert status == 200
            with pytest.raises(aiohttp.ClientError):
                await d.post()

    run(test)


def test_where_an_engine_kept_kv_is_forgotten_once_its_process_is_gone() -> None:
    """It may listen elsewhere when it is back, or be another one."""

    async def test() -> None:
        async with deployed(supports_concurrent=True) as d:
            (producer,) = d.router.registry.prefills
            for _ in range(2):
                await d.post()
            assert d.count("orders_total", order="concurrent") == 1
            await d.prefills[0].stop()
            await until(lambda: not producer.is_available, "down")
            await d.prefills[0].start()
            await until(lambda: producer.is_available, "up")
            await d.post()
            assert d.count("orders_total", order="concurrent") == 1
            await d.post()
            assert d.count("orders_total", order="concurrent") == 2

    run(test)
