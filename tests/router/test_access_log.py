# SPDX-License-Identifier: Apache-2.0
"""The line that the router writes for each request."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.router.harness import FAST, deployed, run, until
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.access_log import AccessLog, as_json, as_text, describe
from vllm_ascend_pd.router.config import set_up_logging
from vllm_ascend_pd.router.trace import Trace

ACCESS = "vllm_ascend_pd.router.access"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == ACCESS]


def test_json_line_says_who_served_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)

    async def test() -> None:
        async with deployed(config=replace(FAST, access_log="json")) as d:
            status, _, body = await d.post(headers={"X-Request-Id": "mine"})
            assert status == 200
            [line] = map(json.loads, lines(caplog))
            names = {i.spec.role: i.instance_id for i in d.router.registry}
            assert line.pop("duration_ms") >= line.pop("ttft_ms") > 0
            assert line.pop("time").endswith("+00:00")
            assert line == {
                "request_id": "mine",
                "method": "POST",
                "path": "/v1/completions",
                "status": 200,
                "outcome": "ok",
                "num_bytes": len(body),
                "num_attempts": 1,
                "remote": "127.0.0.1",
                "order": "prefill-first",
                "prefill": names["prefill"],
                "decode": names["decode"],
            }

    run(test)


def test_line_names_each_engine_that_failed_the_request_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, ACCESS)

    async def test() -> None:
        config = replace(FAST, access_log="json", order="prefill-first")
        async with deployed(2, 1, config) as d:
            d.prefills[0].script("status(500)")
            d.prefills[1].script("close")
            status, _, _ = await d.post()
            assert status == 200
            [line] = map(json.loads, lines(caplog))
            told = {one.split(" ", 2)[1]: one.split(" ", 2)[::2] for one in line["failed_legs"]}
            p0, p1 = (f"127.0.0.1:{one.port}:" for one in d.prefills)
            assert told.keys() == {p0, p1}
            assert told[p0][0] == told[p1][0] == "prefill"
            assert told[p0][1].startswith("status: status 500")
            assert told[p1][1].startswith("disconnect: ")

    run(test)


def test_line_of_a_batch_says_how_long_its_answer_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)

    async def test() -> None:
        async with deployed(config=replace(FAST, access_log="json")) as d:
            chats = [[{"role": "user", "content": content}] for content in ("one", "two")]
            _, _, body = await d.post("/v1/chat/completions/batch", messages=chats)
            [line] = map(json.loads, lines(caplog))
            assert line["num_bytes"] == len(body)
            assert line["num_attempts"] == 2

    run(test)


def test_line_of_a_batch_whose_client_has_left_says_who_had_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, ACCESS)

    async def test() -> None:
        async with deployed(config=replace(FAST, access_log="json")) as d:
            d.decodes[0].script("hang, hang")
            chats = [[{"role": "user", "content": content}] for content in ("one", "two")]
            posting = asyncio.ensure_future(d.post("/v1/chat/completions/batch", messages=chats))
            await until(lambda: d.decodes[0].num_in_progress == 2)
            posting.cancel()
            await until(lambda: bool(lines(caplog)))
            [line] = map(json.loads, lines(caplog))
            assert (line["outcome"], line["num_attempts"]) == ("disconnected", 2)
            names = {i.spec.role: i.instance_id for i in d.router.registry}
            assert (line["prefill"], line["decode"]) == (names["prefill"], names["decode"])

    run(test)


def test_json_lines_stand_alone_on_the_standard_output(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    logger = logging.getLogger(ACCESS)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    set_up_logging(replace(FAST, access_log="json"))
    request = SimpleNamespace(method="GET", path="/v1/x", remote=None)
    AccessLog("json").write(Trace(request, "id"))  # type: ignore[arg-type]
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["path"] == "/v1/x"
    assert not caplog.records  # what the rest of the log gets


def test_text_of_a_client_cannot_begin_a_line_or_colour_a_terminal() -> None:
    path = "/v1/x\nforged\x1b[31m\x85\u2028é"
    request = SimpleNamespace(method="GET", path=path, remote=None)
    line = describe(Trace(request, "id\r\n", error="an\nerror"))  # type: ignore[arg-type]
    assert as_text(line).isprintable()
    assert r"/v1/x\nforged\x1b[31m\x85\u2028é" in as_text(line)
    assert ' id "GET /v1/é" ' in as_text({**line, "path": "/v1/é", "request_id": "id"})
    assert "\n" not in as_json(line)
    assert json.loads(as_json(line))["path"] == path


def test_off_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)

    async def test() -> None:
        async with deployed(config=replace(FAST, access_log="off")) as d:
            assert (await d.post())[0] == 200
        assert not lines(caplog)

    run(test)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="--access-log 'xml': one of text, json, off"):
        replace(FAST, access_log="xml")  # type: ignore[arg-type]
