# SPDX-License-Identifier: Apache-2.0
"""The live page, in a real browser without a screen."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.router.broken_streams import PATIENT
from tests.router.harness import FAST, deployed, run, until
from tests.router.moving import SLOW, Client, move
from vllm_ascend_pd.router.bodies import COMPLETIONS, Body, parse
from vllm_ascend_pd.router.config import Retries
from vllm_ascend_pd.router.policies import Routed
from vllm_ascend_pd.router.snapshot import RecentError, Snapshot

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs a browser: apt-get install chromium"
)


async def rendered(url: str, profile: Path) -> str:
    """What the page shows after its script ran."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=1500",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    return output.decode()


@needs_browser
def test_page_shows_instances_requests_and_errors(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed(2, 1) as d:
            d.prefills[0].script("status(500)")
            await d.post()
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            for engine in (*d.prefills, *d.decodes):
                assert f"<td>127.0.0.1:{engine.port}</td>" in dom
            assert len(re.findall('class="up"', dom)) == 3
            assert "status 500" in dom
            counts = re.search(r'id="counts">(.*?)</tr>', dom)
            assert counts is not None
            assert '<td class="n">1</td>' in counts[1]

    run(test)


@needs_browser
def test_page_shows_instances_that_are_out_before_the_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            await d.prefills[1].stop()
            out = f"127.0.0.1:{d.prefills[1].port}"
            breaker = d.router.registry.get(out).breaker
            await until(lambda: not breaker.closed, "the engine is out")
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            assert 'Instances<span id="ready">: 3 of 4 ready</span>' in dom
            rest = [d.prefills[0], *d.decodes]
            names = [out, *(f"127.0.0.1:{engine.port}" for engine in rest)]
            assert re.findall(r"<tr><td>(127[^<]*)</td>", dom)[:4] == names

    run(test)


@needs_browser
def test_page_shows_what_was_measured(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed() as d:
            for _ in range(5):
                d.router.skipper.learn(*request(100), None, 0.2)
                d.router.skipper.learn(*request(100), "measuring", 0.1)
            d.router.metrics.prefix("prefill", 640, (700, 512))
            d.router.metrics.prefix("prefill", 64, None)
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            tokens = int(d.count("break_even_tokens", model="tiny"))
            assert 100 <= tokens < 150
            assert f"tiny: D computes prompts of up to {tokens} tokens itself" in dom
            assert "prefix caches: 640 tokens expected, 512 found" in dom

    run(test)


@needs_browser
@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ((1, 1), None),
        ((0, 1), "tiny: no prefill engine, decode engines compute the prompts"),
        ((1, 0), "tiny: no decode engine, prefill engines answer alone"),
    ],
)
def test_page_says_what_is_degraded(
    tmp_path: Path, roles: tuple[int, int], told: str | None
) -> None:
    async def test() -> None:
        async with deployed(*roles) as d:
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            shown = re.search(r'<div id="degraded"([^>]*)>(.*?)</div>', dom)
            assert shown is not None
            if told is None:
                assert "hidden" in shown[1]
            else:
                assert "hidden" not in shown[1]
                assert shown[2] == f"degraded: {told}"

    run(test)


def request(num_tokens: int) -> tuple[Body, Routed]:
    body = parse(COMPLETIONS, b'{"model": "tiny", "prompt": "x"}')
    return body, Routed(num_tokens, 1)


@needs_browser
def test_page_shows_the_way_of_each_request_and_filters_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed(2, 1, replace(FAST, order="prefill-first")) as d:
            d.prefills[0].script("status(500)")
            for name in ("first", "second"):
                await d.post(headers={"X-Request-Id": name})
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            rows = ways(dom)
            assert list(rows) == ["second", "first"]  # the latest on top
            decode = f"127.0.0.1:{d.decodes[0].port}"
            for row, kinds in zip(
                rows.values(),
                (["queue", "prefill"], ["queue", "prefill", "queue", "prefill"]),
                strict=True,
            ):
                bars = re.findall(r'title="(\w+) (\S*) ([\d.]+) ms to ([\d.]+) ms', row)
                assert [bar[0] for bar in bars] == [*kinds, "handover", "tokens"]
                assert {bar[1] for bar in bars[-2:]} == {decode}
                assert all(float(start) <= float(end) for *_, start, end in bars)
                assert bars[-2][3] == bars[-1][2]  # the first token
            assert "ok, 2 attempts" in rows["first"]
            assert (
                len(re.findall(r'title="prefill [^"]* ms, status: status 500', rows["first"])) == 1
            )
            assert "status: " not in rows["second"]

            profile = tmp_path / "profile"
            dom = await rendered(f"{d.url}/#filter=SECOND+{decode}+prefill-first", profile)
            assert list(ways(dom)) == ["second"]
            assert not ways(await rendered(f"{d.url}/#filter=nothing+%", profile))

    run(test)


@needs_browser
def test_page_shows_where_a_request_has_moved_to(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d, request_id="mover")
            await client.has(2)
            [report] = await move(d, "mover")
            assert report["outcome"] == "moved"
            await client.events()
            dom = await rendered(f"{d.url}/#filter=mover", tmp_path / "profile")
            [row] = ways(dom).values()
            bars = dict(re.findall(r'title="(\w+) (\S*) [\d.]+ ms to', row))
            assert bars["moved"] == report["target"] != bars["prefill"]
            assert re.search('class="[^"]*moved', row)
            engines = [f"127.0.0.1:{d.prefills[0].port}", bars["handover"], bars["moved"]]
            assert cells(row)[1:3] == ["mover\ntiny", " →\n".join(engines)]

    run(test)


def ways(dom: str) -> dict[str, str]:
    """Rows of the last requests, by the request's name."""
    body = re.search(r'<tbody id="timelines">(.*?)</tbody>', dom, re.S)
    assert body is not None
    rows = re.findall("<tr>.*?</tr>", body[1], re.S)
    return {cells(row)[1].partition("\n")[0]: row for row in rows}


def cells(row: str) -> list[str]:
    return re.findall("<td.*?>(.*?)</td>", row, re.S)


@needs_browser
def test_page_says_why_a_request_failed(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, retries=Retries(max_attempts=1))) as d:
            for one in (*d.prefills, *d.decodes):
                one.script("status(500)")
            status, _, _ = await d.post(headers={"X-Request-Id": "mine"})
            [timeline] = d.router.metrics.snapshot().timelines
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            assert f'title="status {status}: {timeline.error}">' in unescape(ways(dom)["mine"])

    run(test)


@needs_browser
def test_page_runs_nothing_that_an_engine_says(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed() as d:
            instance = d.router.registry.decodes[0]
            text = "<img src=x onerror=document.title='broken'>"
            instance.errors.append(RecentError(time.time(), text))
            dom = await rendered(f"{d.url}/", tmp_path / "profile")
            assert "<title>vllm-pd router</title>" in dom
            assert "&lt;img src=x" in dom

    run(test)


def test_page_is_one_file_and_its_data_needs_a_key(tmp_path: Path) -> None:
    async def test() -> None:
        keys = tmp_path / "keys"
        keys.write_text("key\n")
        async with deployed(config=replace(FAST, api_keys_file=keys)) as d:
            async with d.http.get(f"{d.url}/") as response:
                text = await response.text()
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert not re.search(r"https?://|<link|<script src", text)
            async with d.http.get(f"{d.url}/status") as response:
                assert response.status == 401
            headers = {"Authorization": "Bearer key"}
            async with d.http.get(f"{d.url}/status", headers=headers) as response:
                assert len((await response.json())["instances"]) == 2

    run(test)


def test_metrics_of_many_engines_are_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expose, threads = Snapshot.expose, []

    def seen(self: Snapshot) -> bytes:
        threads.append(threading.get_ident())
        return expose(self)

    monkeypatch.setattr(Snapshot, "expose", seen)

    async def test() -> None:
        async with deployed(1, 1) as d, d.http.get(f"{d.url}/metrics") as response:
            assert b"vllm:pd_router_instance_up{" in await response.read()

    run(test)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
