# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd router`` in front of real patched engines, with the transfers that it asks for."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
import requests

from tests.e2e.load import Load
from tests.e2e.router_cluster import (
    LONG,
    SHORT,
    Cluster,
    cluster,
    pair,
    recording,
    routing,
    scraped,
    texts,
    until,
)
from tests.router.engine_contract import check_consumer, check_producer, check_release
from vllm_ascend_pd.router.transcript import hide_token_ids

__all__ = ["cluster", "pair"]

pytestmark = pytest.mark.engine

NOT_ARRIVED = 'requests_total{engine="0",model_name="tiny",outcome="not_arrived"}'


def test_engines_pass_the_contract_that_the_scripted_engine_passes(cluster: Cluster) -> None:
    params = check_producer(cluster.engines["p0"].url)
    check_release(cluster.engines["p0"].url)
    check_consumer(cluster.engines["d0"].url, params)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_tokens_and_usage_equal_a_single_engines(cluster: Cluster, prompt: str) -> None:
    loads = cluster.count("d", "loads_total")
    got = cluster.complete(cluster.router, prompt)
    assert cluster.count("d", "loads_total") == loads + 1
    alone = cluster.complete(cluster.single, prompt)
    assert texts(got) == texts(alone)
    assert got["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert got["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"] == 24
    assert set(got) == set(alone)


def test_several_samples(cluster: Cluster) -> None:
    options = {"n": 3, "temperature": 0.8, "seed": 7}
    prompt = "Three samples. " + LONG[:1500]
    got = cluster.complete(cluster.router, prompt, **options)
    assert texts(got) == texts(cluster.complete(cluster.single, prompt, **options))
    assert got["usage"]["completion_tokens"] == 72


def test_several_prompts(cluster: Cluster) -> None:
    prompts = ["First. " + SHORT, "Second. " + LONG[:600]]
    got = cluster.complete(cluster.router, prompts)
    assert texts(got) == texts(cluster.complete(cluster.single, prompts))


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_stream_has_the_events_of_a_single_engine(cluster: Cluster, chat: bool) -> None:
    """Bytes, less what differs between any two requests: id, time, fingerprint of the system."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompt = f"Streamed {chat}. " + LONG[:900]
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    seen = []
    for url in (cluster.router, cluster.single):
        with requests.post(url + path, json=body, timeout=120, stream=True) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            raw = b"".join(response.iter_content(None))
        assert raw.endswith(b"data: [DONE]\n\n")
        events = [json.loads(e[6:]) for e in raw.decode().split("\n\n") if e.startswith("data: {")]
        assert len({event["id"] for event in events}) == 1
        field = "message" if not chat else "delta"
        text = "".join(
            (choice[field].get("content") or "") if chat else choice["text"]
            for event in events
            for choice in event["choices"]
        )
        seen.append((text, events[-1]["usage"]["completion_tokens"], set(events[0])))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("may_go_on", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_stream_is_byte_for_byte_what_the_engine_sent(
    cluster: Cluster, chat: bool, may_go_on: bool
) -> None:
    """But for the token ids, of one that could go on from another engine."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = f"Byte for byte {chat} {may_go_on}. " + LONG[:700]
    body = {"model": "tiny", "max_tokens": 24, "temperature": float(not may_go_on), "stream": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    loads = cluster.count("d", "loads_total")
    with recording(cluster.engines["d0"].url) as (url, bodies):
        instances = [
            next(i for i in cluster.instances if i["id"] == "p0"),
            {"id": "recorded", "url": url, "role": "decode"},
        ]
        with (
            routing(cluster.folder, instances) as router,
            requests.post(router + path, json=body, timeout=120, stream=True) as response,
        ):
            received = b"".join(response.iter_content(None))
    assert received.endswith(b"data: [DONE]\n\n")
    (sent,) = bodies
    assert received == (hide_token_ids(sent) if may_go_on else sent)
    assert (b'"token_ids":[' in sent) == may_go_on
    assert cluster.count("d", "loads_total") == loads + 1


def test_32_at_once(cluster: Cluster) -> None:
    prompts = [f"Number {i}. " + LONG[: 200 + 40 * i] for i in range(32)]
    alone = {p: texts(cluster.complete(cluster.single, p, max_tokens=8)) for p in prompts}
    with ThreadPoolExecutor(32) as pool:
        got = list(
            pool.map(lambda p: texts(cluster.complete(cluster.router, p, max_tokens=8)), prompts)
        )
    assert got == [alone[p] for p in prompts]
    assert cluster.routed('requests_total{outcome="failed"}') == 0


def test_several_processes_give_the_same_tokens(cluster: Cluster) -> None:
    prompts = [f"Worker {i}. " + LONG[: 200 + 40 * i] for i in range(16)]
    alone = [texts(cluster.complete(cluster.single, prompt, max_tokens=8)) for prompt in prompts]
    with routing(cluster.folder, cluster.instances, "--workers", "2") as url:
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda p: texts(cluster.complete(url, p, max_tokens=8)), prompts))
        assert got == alone
        metrics = requests.get(f"{url}/metrics", timeout=10).text
        assert 'requests_total{outcome="ok"} 16.0' in metrics


def test_openai_client(cluster: Cluster) -> None:
    messages: Any = [{"role": "user", "content": "A chat. " + LONG[:500]}]
    answers = []
    for url in (cluster.router, cluster.single):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            answer = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_completion_tokens=12
            )
            answers.append(answer.choices[0].message.content)
            pieces = client.chat.completions.create(
                model="tiny",
                messages=messages,
                temperature=0,
                max_completion_tokens=12,
                stream=True,
            )
            streamed = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
            assert streamed == answers[-1]
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="no-such-model", prompt="x")
    assert answers[0] == answers[1]


def chat_about(text: str) -> Any:
    return [{"role": "user", "content": f"{text}. " + LONG[:900]}]


def responses(url: str, stream: bool) -> tuple[str, int, int]:
    """Text, and tokens of prompt and answer."""
    asked: Any = {
        "model": "tiny",
        "input": chat_about(f"Responses {stream}"),
        "max_output_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if stream:
            events = list(client.responses.create(**asked, stream=True))
            answer = events[-1].response
            said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert said == answer.output_text
        else:
            answer = client.responses.create(**asked)
    return answer.output_text, answer.usage.input_tokens, answer.usage.output_tokens


def messages(url: str, stream: bool) -> tuple[str, int, int]:
    chat = chat_about(f"Messages {stream}")
    asked: Any = {"model": "tiny", "messages": chat, "max_tokens": 12}
    asked["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                answer: Any = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
    (text,) = (block.text for block in answer.content)
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return text, usage.input_tokens + cached, usage.output_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ask", [responses, messages])
def test_other_apis_give_the_tokens_of_a_single_engine(
    cluster: Cluster, ask: Any, stream: bool
) -> None:
    loads = cluster.count("d", "loads_total")
    got = ask(cluster.router, stream)
    assert cluster.count("d", "loads_total") == loads + 1
    for _ in range(2):  # the second time it has the prompt
        assert got == ask(cluster.single, stream)
    assert got[2] > 0


def test_each_chat_of_a_batch_is_handed_over(cluster: Cluster) -> None:
    body = {
        "model": "tiny",
        "messages": [
            [{"role": "user", "content": f"Chat {i} of a batch. " + LONG[: 300 * i + 400]}]
            for i in range(3)
        ],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    loads = cluster.count("d", "loads_total")
    got, alone = (
        requests.post(f"{url}/v1/chat/completions/batch", json=body, timeout=120).json()
        for url in (cluster.router, cluster.single)
    )
    assert cluster.count("d", "loads_total") == loads + 3
    assert got["choices"] == alone["choices"]
    assert set(got) == set(alone)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got["usage"][name] == alone["usage"][name]


@pytest.mark.parametrize("background", [False, True], ids=["waited", "background"])
def test_stored_response_is_gone_on_from_where_it_is(cluster: Cluster, background: bool) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}
    told = []
    loads = cluster.count("d", "loads_total")
    for url in (cluster.router, cluster.single):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            first = client.responses.create(
                **asked, input=f"Stored {background}. " + LONG[:700], background=background
            )
            while first.status in ("queued", "in_progress"):
                time.sleep(0.05)
                first = client.responses.retrieve(first.id)
            again = client.responses.retrieve(first.id)
            assert again.output_text == first.output_text
            second = client.responses.create(**asked, input="More.", previous_response_id=first.id)
            told.append((first.output_text, second.output_text))
            with pytest.raises(openai.NotFoundError):
                client.responses.create(**asked, input="x", previous_response_id="resp_unknown")
        if url == cluster.router:
            assert cluster.count("d", "loads_total") == loads + 1
    assert told[0] == told[1]


def test_engine_that_computes_in_the_background_is_not_idle(cluster: Cluster) -> None:
    def num_left() -> int:
        listed = requests.get(f"{cluster.router}/instances", timeout=10).json()
        return sum(one["num_background"] for one in listed)

    with openai.OpenAI(base_url=f"{cluster.router}/v1", api_key="none", max_retries=0) as client:
        until(lambda: num_left() == 0)  # those of other tests
        asked = {"model": "tiny", "max_output_tokens": 1500, "input": "At length. " + LONG[:700]}
        first = client.responses.create(**asked, extra_body={"ignore_eos": True}, background=True)
        assert num_left() == 1
        assert client.responses.retrieve(first.id).status in ("queued", "in_progress")
        until(lambda: num_left() == 0)
        ended = client.responses.retrieve(first.id)
        assert (ended.status, ended.usage.output_tokens) == ("incomplete", 1500)


def test_every_lease_is_given_back(cluster: Cluster) -> None:
    for i in range(4):
        cluster.complete(cluster.router, f"Lease {i}. " + LONG[:700])
    for name in ("p0", "p1"):  # an engine counts what was released when it steps next
        cluster.complete(cluster.engines[name].url, "A step.", max_tokens=1)
    granted = cluster.count("p", "leases_granted_total")
    assert granted > 0
    assert cluster.count("p", "leases_closed_total") == granted


def expect_given_back(cluster: Cluster, router: str, num: int) -> None:
    until(lambda: scraped(router, 'pd_router_releases_total{outcome="ok"}') == num)
    producer = cluster.engines["p0"].url
    cluster.complete(producer, "A step.", max_tokens=1)  # in which it counts what was released
    assert scraped(producer, "kv_cache_usage_perc") == 0
    granted = scraped(producer, "pd_leases_granted_total")
    assert granted == scraped(producer, "pd_leases_closed_total")


def test_prompt_that_the_decode_engine_refuses_is_given_back(cluster: Cluster, pair: str) -> None:
    for i in range(3):
        body = {"model": "tiny", "prompt": f"Refused {i}. " + LONG, "max_tokens": 4097}
        answer = requests.post(f"{pair}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 400
        assert "Please request fewer output tokens" in answer.json()["error"]["message"]
    expect_given_back(cluster, pair, 3)


def test_prompt_of_a_client_that_has_left_is_given_back(cluster: Cluster, pair: str) -> None:
    prompt = "Left. " + LONG
    producer, consumer = cluster.engines["p0"], cluster.engines["d0"]
    os.killpg(consumer.pid, signal.SIGSTOP)
    try:
        asked = socket.create_connection(("127.0.0.1", int(pair.rpartition(":")[2])))
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 24}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        asked.sendall(head.encode() + body)
        until(lambda: scraped(producer.url, "kv_cache_usage_perc") > 0)
        until(lambda: scraped(producer.url, "num_requests_running") == 0)
        assert scraped(producer.url, "kv_cache_usage_perc") > 0  # the prompt is kept
        asked.close()
        expect_given_back(cluster, pair, 1)
    finally:
        os.killpg(consumer.pid, signal.SIGCONT)
    until(lambda: {"p0", "d0"} <= cluster.healthy())
    alone = texts(cluster.complete(cluster.single, prompt))
    assert texts(cluster.complete(cluster.router, prompt)) == alone


def test_both_orders_give_the_same_tokens(cluster: Cluster) -> None:
    prompts = [f"Order {i}. " + LONG[: 400 * i + 20] for i in range(4)]
    for i in range(4):  # the router learns from a producer's first answer that it can
        cluster.complete(cluster.router, f"Learning {i}. " + SHORT, max_tokens=1)
    before = cluster.routed('orders_total{order="concurrent"}')
    concurrent = [texts(cluster.complete(cluster.router, p)) for p in prompts]
    assert cluster.routed('orders_total{order="concurrent"}') == before + 4
    with routing(cluster.folder, cluster.instances, "--order", "prefill-first") as url:
        first = [texts(cluster.complete(url, p)) for p in prompts]
    assert first == concurrent
    assert first == [texts(cluster.complete(cluster.single, p)) for p in prompts]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_of_one_role_answer_alone_with_the_same_tokens(cluster: Cluster, role: str) -> None:
    prompts = [SHORT, "Alone. " + LONG]
    instances = [i for i in cluster.instances if i["role"] == role]
    loads = cluster.count("d", "loads_total")
    with routing(cluster.folder, instances) as url:
        assert requests.get(f"{url}/health", timeout=30).json() == {"status": "degraded"}
        got = [texts(cluster.complete(url, prompt)) for prompt in prompts]
    assert got == [texts(cluster.complete(cluster.single, prompt)) for prompt in prompts]
    assert cluster.count("d", "loads_total") == loads


def test_decode_engine_does_not_wait_for_a_prefill_that_failed(cluster: Cluster) -> None:
    not_arrived = cluster.count("d0", NOT_ARRIVED)
    with recording(cluster.engines["p0"].url, num_posts=1) as (url, _):
        instances = [
            {"id": "failing", "url": url, "role": "prefill"},
            next(i for i in cluster.instances if i["id"] == "d0"),
        ]
        with routing(cluster.folder, instances) as router:
            cluster.complete(router, "It can be asked at the same time. " + SHORT, max_tokens=1)
            prompt = "It fails now. " + LONG
            got = texts(cluster.complete(router, prompt))
            metrics = requests.get(f"{router}/metrics", timeout=30).text
    assert 'orders_total{order="concurrent"} 1.0' in metrics
    assert 'prefill_skips_total{reason="prefill_failed"} 1.0' in metrics
    assert got == texts(cluster.complete(cluster.single, prompt))
    assert cluster.count("d0", NOT_ARRIVED) == not_arrived


def test_prefix_aware_skips_prefill_when_decode_holds_the_prompt(cluster: Cluster) -> None:
    with routing(cluster.folder, cluster.instances, "--policy", "prefix-aware") as url:

        def state() -> dict[str, Any]:
            found: dict[str, Any] = requests.get(f"{url}/status", timeout=10).json()
            return found

        prompt = "Prefix aware. " + LONG
        first = texts(cluster.complete(url, prompt))
        end = time.monotonic() + 60
        metrics = ""
        # Until the router has heard what the engines hold.
        while 'prefill_skips_total{reason="decode_holds_prefix"} 1.0' not in metrics:
            assert time.monotonic() < end, metrics
            assert texts(cluster.complete(url, prompt)) == first
            metrics = requests.get(f"{url}/metrics", timeout=10).text
        assert {i["prefix_index"] for i in state()["instances"]} <= {"exact", "fallback"}
        expected = re.findall(
            r'prefix_expected_tokens_total{role="decode",told="true"} (.*)', metrics
        )
        cached = re.findall(r'prefix_cached_tokens_total{role="decode"} (.*)', metrics)
        assert expected == cached  # the index is exact
        assert float(cached[0]) > 0
    assert first == texts(cluster.complete(cluster.single, prompt))


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_killed_engine_under_32_requests(cluster: Cluster, victim: str) -> None:
    load = Load(cluster.router, f"Killing {victim}")
    load.start()
    time.sleep(0.4)
    cluster.engines[victim].kill()
    load.check(lambda prompt: texts(cluster.complete(cluster.single, prompt, max_tokens=48))[0])
    until(lambda: victim not in cluster.healthy())
    cluster.engines[victim].start()
    cluster.engines[victim].wait_ready()
    until(lambda: cluster.healthy() == set(cluster.engines))
    # Sent to both of its role: the new one works, too.
    for i in range(4):
        prompt = f"After {victim} {i}. " + LONG[:500]
        assert texts(cluster.complete(cluster.router, prompt)) == texts(
            cluster.complete(cluster.single, prompt)
        )
