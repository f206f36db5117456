# SPDX-License-Identifier: Apache-2.0
"""Responses, messages and batches of chats go over a prefill and a decode engine, too."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.router.harness import FAST, deployed, run
from tests.router.scripted_answers import FORMS, REFUSED_MESSAGE, Answer
from tests.router.scripted_engine import Received, ScriptedEngine
from vllm_ascend_pd.router.answers import _stops_message
from vllm_ascend_pd.router.apis import GENERATE
from vllm_ascend_pd.router.generation import ADAPTER

CHAT = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "top_logprobs": 1, "include": []},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4, "system": "Be short."},
    "/inference/v1/generate": {
        "token_ids": [7, 8, 9],
        "sampling_params": {"max_tokens": 4, "min_tokens": 2, "n": 2, "logprobs": 1, "seed": 5},
    },
    "/invocations": {"prompt": "Hello", "max_tokens": 4, "logprobs": 1},
}
PATHS = pytest.mark.parametrize("path", list(BODIES))
LIMIT = {"/v1/responses": "max_output_tokens"}


@PATHS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_is_computed_by_the_prefill_engine(path: str, stream: bool) -> None:
    async def test() -> None:
        async with deployed() as d:
            body = BODIES[path] | {"model": "tiny", "stream": stream}
            async with d.http.post(d.url + path, json=body) as response:
                assert response.status == 200, await response.text()
                raw = await response.read()
            (prefill,), (decode,) = d.prefills[0].received, d.decodes[0].received
            sent_to = "/v1/completions" if path == "/invocations" else path
            assert prefill.path == decode.path == sent_to
            assert prefill.params == {"do_remote_decode": True, "do_remote_prefill": False}
            asked = prefill.json.get("sampling_params", prefill.json)
            assert (asked[LIMIT.get(path, "max_tokens")], prefill.json["stream"]) == (1, False)
            assert not {"request_id", "top_logprobs", "include", "background"} & set(prefill.json)
            assert "logprobs" not in asked
            assert asked.get("n", 1) == asked.get("min_tokens", 1) == 1
            assert prefill.json.get("store") is (False if "responses" in path else None)
            assert decode.params["remote_engine_id"] == "p0"
            sent = decode.json
            added = {"request_id"} if "responses" in path else set()
            assert set(sent) - set(body) == {"kv_transfer_params", *added}
            assert {name: sent[name] for name in body} == body
            if stream:
                request = Received("POST", sent_to, {}, decode.body)
                assert raw == b"".join(Answer.make(ScriptedEngine(), request).events())
            assert d.count("orders_total", order="prefill-first") == 1

    run(test)


@PATHS
def test_concurrent_order(path: str) -> None:
    async def test() -> None:
        async with deployed(supports_concurrent=True) as d:
            for _ in range(2):
                async with d.http.post(d.url + path, json=BODIES[path]) as response:
                    assert response.status == 200
            assert d.count("orders_total", order="concurrent") == 1
            prefill, decode = d.prefills[0].received[1].params, d.decodes[0].received[1].params
            assert len(prefill["transfer_id"]) == 32
            assert prefill["transfer_id"] == decode["transfer_id"]

    run(test)


@PATHS
def test_prefill_that_ended_at_its_first_token_needs_no_transfer(path: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script("stopped")
            async with d.http.post(d.url + path, json=BODIES[path]) as response:
                assert response.status == 200
            assert d.decodes[0].received[0].params == {}
            d.prefills[0].script("no_params")
            async with d.http.post(d.url + path, json=BODIES[path]) as response:
                assert response.status == 200
            told = dict.fromkeys(("ended_at_first_token", "prefill_failed"), 1.0)
            assert {r: d.count("prefill_skips_total", reason=r) for r in told} == told

    run(test)


@PATHS
def test_prefill_engine_tells_what_it_had_of_the_prompt(path: str) -> None:
    async def test() -> None:
        async with deployed(num_cached_tokens=1) as d:
            async with d.http.post(d.url + path, json=BODIES[path]) as response:
                assert response.status == 200
            assert d.count("prefix_cached_tokens_total", role="prefill") == 1
            num_tokens = d.count("prefix_prompt_tokens_total", role="prefill")
            body = BODIES[path]
            sent = json.dumps(body.get("input") or body.get("messages") or body.get("prompt"))
            assert num_tokens == len(body.get("token_ids") or range(len(sent) // 4))

    run(test)


def test_stream_without_a_token_yet_is_answered_by_another_engine() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            for engine in d.decodes:
                engine.script("break(2)")  # after response.created and response.in_progress
            d.decodes[1].script("ok")
            body = BODIES["/v1/responses"] | {"stream": True}
            for _ in range(2):
                async with d.http.post(f"{d.url}/v1/responses", json=body) as response:
                    raw = await response.read()
                assert b"response.completed" in raw
                assert raw.count(b"event: response.created") == 1

    run(test)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_a_client_says_that_its_engine_repeats_is_no_failure(stream: bool) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            told = {"finish_reason": "abort", "choices": [{"finish_reason": "abort"}]}
            body = BODIES["/v1/responses"] | {"stream": stream, "metadata": told}
            async with d.http.post(f"{d.url}/v1/responses", json=body) as response:
                assert response.status == 200, await response.text()
                raw = await response.read()
            assert b"output_text" in raw
            assert b"broken_stream" not in raw
            assert d.count("requests_total", outcome="ok") == 1
            assert not any(instance.num_failures for instance in d.router.registry)

    run(test)


@pytest.mark.parametrize("fault", ["abort(0)", "abort(3)"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_message_that_its_engine_gave_up_is_not_whole(stream: bool, fault: str) -> None:
    async def test() -> None:
        async with deployed(1, 2, token_s=0.02) as d:
            d.decodes[0].script(fault)
            body = BODIES["/v1/messages"] | {"stream": stream}
            async with d.http.post(f"{d.url}/v1/messages", json=body) as response:
                assert response.status == 200
                raw = await response.read()
            has_begun = stream and fault == "abort(3)"
            assert (b"broken_stream" in raw) == has_begun
            assert (b"max_tokens" in raw) != has_begun
            assert (b"message_stop" in raw) == (stream and not has_begun)
            assert d.count("retries_total", cause="status") == 1 - has_begun

    run(test)


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/v1/responses", b"data: {"),
        ("/v1/messages", b"event: error\ndata: {"),
        ("/inference/v1/generate", b"data: {"),
        ("/invocations", b"data: {"),
    ],
)
def test_broken_stream_ends_with_an_error_that_clients_of_the_api_read(
    path: str, start: bytes
) -> None:
    async def test() -> None:
        async with deployed() as d:
            d.decodes[0].script("break(3)")
            body = BODIES[path] | {"stream": True}
            async with d.http.post(d.url + path, json=body) as response:
                last = (await response.read()).removesuffix(b"\n\n").rpartition(b"\n\n")[2]
            assert last.startswith(start)
            assert b"after part of the answer" in last
            assert d.count("requests_total", outcome="broken_stream") == 1

    run(test)


@pytest.mark.parametrize("path", ["/v1/messages", "/inference/v1/generate", "/invocations"])
def test_stream_that_ends_before_its_last_event_is_not_whole(path: str) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, retries=replace(FAST.retries, resume="off"))) as d:
            d.decodes[0].script("end(3)")
            body = BODIES[path] | {"stream": True}
            async with d.http.post(d.url + path, json=body) as response:
                raw = await response.read()
            assert b"broken_stream" in raw
            assert d.count("requests_total", outcome="broken_stream") == 1

    run(test)


@pytest.mark.parametrize("order", ["auto", "prefill-first"])
def test_refused_message_tells_its_error_once(order: Any) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, order=order), supports_concurrent=True) as d:
            async with d.http.post(f"{d.url}/v1/messages", json=BODIES["/v1/messages"]) as response:
                assert response.status == 200
            d.decodes[0].script("refused(0)")
            body = BODIES["/v1/messages"] | {"stream": True}
            async with d.http.post(f"{d.url}/v1/messages", json=body) as response:
                raw = await response.read()
            assert raw == REFUSED_MESSAGE
            assert d.count("requests_total", outcome="ok") == 2
            assert not any(one.num_failures for one in d.router.registry)

    run(test)


def test_text_that_says_so_does_not_stop_a_message() -> None:
    told = json.dumps({"type": "content_block_delta", "delta": {"text": "\nevent: message_stop"}})
    text = f"event: content_block_delta\ndata: {told}\n\n".encode()
    assert not _stops_message(text)
    assert _stops_message(text + b"event: message_stop\ndata: {}\n\n")
    assert _stops_message(b"event: message_stop\r\n")


@pytest.mark.parametrize(
    "smuggled",
    [
        {"kv_transfer_params": {"remote_host": "evil"}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "evil"}}}},
        {"sampling_params": {"extra_args": {"ec_transfer_params": {"remote_host": "evil"}}}},
    ],
    ids=["field", "extra_args", "encoder"],
)
@pytest.mark.parametrize("skip", ["never", "always"])
def test_who_sends_token_ids_chooses_no_peer(smuggled: dict[str, Any], skip: Any) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, skip=skip)) as d:
            body = BODIES[GENERATE] | smuggled
            async with d.http.post(d.url + GENERATE, json=body) as response:
                assert response.status == 200, await response.text()
            received = [one for engine in (*d.prefills, *d.decodes) for one in engine.received]
            assert len(received) == (1 if skip == "always" else 2)
            assert not any(b"evil" in one.body for one in received)

    run(test)


@pytest.mark.parametrize("sampling", [{}, {"sampling_params": [1]}, {"sampling_params": None}])
def test_token_ids_without_a_way_to_sample_are_400(sampling: dict[str, Any]) -> None:
    async def test() -> None:
        async with deployed() as d:
            body = {"token_ids": [1, 2], **sampling}
            async with d.http.post(d.url + GENERATE, json=body) as response:
                assert response.status == 400
                assert "sampling_params" in (await response.json())["error"]["message"]
            assert not d.prefills[0].received

    run(test)


def test_what_is_invoked_is_found_by_its_fields() -> None:
    async def test() -> None:
        async with deployed(1, 1, models=("tiny", "adapter")) as d:
            url, adapter = f"{d.url}/invocations", {ADAPTER: "adapter"}
            evil = {"kv_transfer_params": {"remote_host": "evil"}}
            for body, headers, model, sent_to in (
                ({"messages": CHAT}, {}, None, "/v1/chat/completions"),
                ({"prompt": "x", "model": "adapter"}, {}, "adapter", "/v1/completions"),
                ({"prompt": "x"}, adapter, "adapter", "/v1/completions"),
                ({"messages": CHAT, "model": "x"}, adapter, "adapter", "/v1/chat/completions"),
                ({"input": "x"}, adapter, "adapter", "/invocations"),
                ({"messages": CHAT, "prompt": "x"}, {}, None, "/invocations"),
            ):
                for engine in (d.prefills[0], d.decodes[0]):
                    engine.received.clear()
                async with d.http.post(url, json=body | evil, headers=headers) as response:
                    assert response.status == (400 if sent_to == "/invocations" else 200)
                received = [*d.prefills[0].received, *d.decodes[0].received]
                num_legs = 1 if sent_to == "/invocations" else 2
                assert [one.path for one in received] == [sent_to] * num_legs
                assert {one.json.get("model") for one in received} == {model}
                assert not any(b"evil" in one.body for one in received)

    run(test)


def test_what_only_an_engine_knows_is_passed_on() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            async with d.http.get(f"{d.url}/tokenizer_info") as response:
                told = await response.json()
            assert told == {"path": "/tokenizer_info", "served_by": "d0"}
            async with d.http.post(f"{d.url}/generative_scoring", json={"items": []}) as response:
                assert (await response.json())["path"] == "/generative_scoring"
            async with d.http.get(f"{d.url}/load") as response:
                assert await response.json() == {"server_load": 0}
            assert not d.prefills[0].received

    run(test)


def test_stream_of_another_api_is_passed_on() -> None:
    async def test() -> None:
        async with (
            deployed() as d,
            d.http.post(f"{d.url}/v1/audio/transcriptions", json={"model": "tiny"}) as response,
        ):
            assert response.status == 200
            assert await response.read() == b'data: {"text": "a"}\n\n'
            assert d.count("requests_total", outcome="ok") == 1

    run(test)


def test_stored_response_is_found_where_it_is() -> None:
    async def test() -> None:
        async with deployed(2, 3) as d:
            url = f"{d.url}/v1/responses"
            holders = set()
            for _ in range(6):
                async with d.http.post(url, json={"input": "Hello"}) as response:
                    first = await response.json()
                (holder,) = (e.name for e in d.decodes if first["id"] in e.stored)
                holders.add(holder)
                async with d.http.get(f"{url}/{first['id']}") as response:
                    assert (await response.json())["id"] == first["id"]
                body = {"input": "And then?", "previous_response_id": first["id"]}
                async with d.http.post(url, json=body) as response:
                    assert response.status == 200
                    second = await response.json()
                (again,) = (e.name for e in d.decodes if second["id"] in e.stored)
                assert again == holder
                async with d.http.post(f"{url}/{second['id']}/cancel") as response:
                    assert (await response.json())["served_by"] == holder
            assert len(holders) == 3
            assert not any(engine.stored for engine in d.prefills)
            assert d.count("prefill_skips_total", reason="previous_response") == 6

    run(test)


def test_stored_response_of_an_engine_that_is_gone_is_an_error() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            url = f"{d.url}/v1/responses"
            async with d.http.post(url, json={"input": "Hello"}) as response:
                first = (await response.json())["id"]
            holder = next(e for e in d.decodes if first in e.stored)
            await holder.stop()
            body = {"input": "And then?", "previous_response_id": first}
            statuses = set()
            for _ in range(3):
                async with d.http.post(url, json=body) as response:
                    statuses.add(response.status)
                    assert "error" in await response.json()
            assert statuses <= {502, 503}
            await holder.start()
            body["previous_response_id"] = "resp_nobody-has-this"
            async with d.http.post(url, json=body) as response:
                assert response.status == 404

    run(test)


def test_background_response_is_never_sent_to_both_at_once() -> None:
    """D answers it before P has computed anything, and P's leg ends with the answer."""

    async def test() -> None:
        async with deployed(supports_concurrent=True) as d:
            for _ in range(3):
                body = {"input": "Hello", "background": True}
                async with d.http.post(f"{d.url}/v1/responses", json=body) as response:
                    assert response.status == 200
            assert d.count("orders_total", order="prefill-first") == 3
            assert all("background" not in one.json for one in d.prefills[0].received)
            assert all(one.json["background"] for one in d.decodes[0].received)

    run(test)


def batch(*questions: str, **more: Any) -> dict[str, Any]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    return {"model": "tiny", "messages": chats, "max_tokens": 4, **more}


def test_each_chat_of_a_batch_has_a_prefill_leg() -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            questions = [f"Question {index}" for index in range(70)]
            url = f"{d.url}/v1/chat/completions/batch"
            async with d.http.post(url, json=batch(*questions)) as response:
                assert response.status == 200
                answer = await response.json()
                assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
            assert [choice["index"] for choice in answer["choices"]] == list(range(70))
            alone = []
            for question in questions[:3]:
                chat = [{"role": "user", "content": question}]
                _, _, body = await d.post("/v1/chat/completions", messages=chat)
                alone.append(json.loads(body)["choices"][0]["message"])
            assert [choice["message"] for choice in answer["choices"][:3]] == alone
            assert answer["usage"]["completion_tokens"] == 4 * 70
            decoded = [one for engine in d.decodes for one in engine.received][:70]
            assert all(one.params["do_remote_prefill"] for one in decoded)
            assert len({one.headers["x-request-id"] for one in decoded}) == 70
            assert min(len(engine.received) for engine in d.decodes) >= 35

    run(test)


def test_batch_has_the_name_that_its_body_tells() -> None:
    async def test() -> None:
        async with deployed() as d:
            url = f"{d.url}/v1/chat/completions/batch"
            for told, headers, name in (
                ("mine", {}, "mine"),
                ("mine", {"x-request-id": "yours"}, "yours"),
                ("no name", {}, None),
            ):
                body = batch("One", "Two", request_id=told)
                async with d.http.post(url, json=body, headers=headers) as response:
                    assert response.status == 200
                    answer, given = await response.json(), response.headers["x-request-id"]
                assert answer["id"] == f"chatcmpl-{given}"
                assert name in (None, given)
                sent = {one.headers["x-request-id"] for one in d.decodes[0].received[-2:]}
                assert sent == {f"{given}-0", f"{given}-1"}

    run(test)


def test_batch_tells_nothing_that_is_one_chats() -> None:
    """As vLLM's own answer to a batch has it."""
    chat = FORMS["/v1/chat/completions"]

    def whole(answer: Answer, has_stopped: bool) -> dict[str, Any]:
        more = {"metrics": {"generation_time_ms": 1.0}, "prompt_token_ids": [1]}
        return {**chat.whole(answer, has_stopped), **more}

    async def test() -> None:
        async with deployed() as d:
            url = f"{d.url}/v1/chat/completions/batch"
            async with d.http.post(url, json=batch("One", "Two")) as response:
                answer = await response.json()
        assert (answer["metrics"], answer["prompt_token_ids"]) == (None, None)

    with patch.dict(FORMS, {"/v1/chat/completions": replace(chat, whole=whole)}):
        run(test)


def test_chat_that_fails_fails_its_batch() -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, order="prefill-first")) as d:
            d.decodes[0].script("ok, status(422)")
            url = f"{d.url}/v1/chat/completions/batch"
            async with d.http.post(url, json=batch("One", "Two", "Three")) as response:
                assert response.status == 422
                assert (await response.json())["error"]["message"] == "scripted"
            d.decodes[0].script("ok, bad_json")
            async with d.http.post(url, json=batch("One", "Two")) as response:
                assert response.status == 502
            assert d.count("requests_total", outcome="client_error") == 1
            assert d.count("requests_total", outcome="failed") == 1

    run(test)


@pytest.mark.parametrize(
    ("num_chats", "num_common_bytes", "status"),
    [(10, 30_000, 200), (10, 110_000, 413), (100, 10_000, 200), (100, 17_000, 413), (4097, 0, 413)],
)
def test_batch_takes_no_more_memory_than_a_body(
    num_chats: int, num_common_bytes: int, status: int
) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, max_body_bytes=1 << 20)) as d:
            body = batch(*["One"] * num_chats, user="x" * num_common_bytes)
            async with d.http.post(f"{d.url}/v1/chat/completions/batch", json=body) as response:
                assert response.status == status, await response.text()
            assert len(d.decodes[0].received) == (num_chats if status == 200 else 0)

    run(test)


def test_what_is_wrong_with_all_chats_is_told_before_one_is_sent() -> None:
    async def test() -> None:
        async with deployed() as d:
            body = batch("One", "Two") | {"model": 7}
            async with d.http.post(f"{d.url}/v1/chat/completions/batch", json=body) as response:
                assert response.status == 400
            assert not d.prefills[0].received

    run(test)


@pytest.mark.parametrize("odd", [{"n": 2}, {"stream": True}, {"messages": []}, {"messages": 0}])
def test_batch_that_only_an_engine_can_judge_goes_to_one(odd: dict[str, Any]) -> None:
    async def test() -> None:
        async with deployed() as d:
            body = batch("One", "Two") | odd | {"kv_transfer_params": {"remote_host": "evil"}}
            async with d.http.post(f"{d.url}/v1/chat/completions/batch", json=body) as response:
                assert response.status == (400 if "messages" in odd else 200)
            assert b"evil" not in d.decodes[0].received[0].body

    run(test)
