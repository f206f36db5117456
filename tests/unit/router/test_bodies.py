# SPDX-License-Identifier: Apache-2.0
"""What of a client's body goes to which leg."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from vllm_ascend_pd.registration import KVEndpoint, engine_on
from vllm_ascend_pd.router.apis import (
    APIS,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    has_token,
)
from vllm_ascend_pd.router.bodies import BadRequest, concurrent_params, parse, parse_other
from vllm_ascend_pd.router.config import Timeouts
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.health import parse_load
from vllm_ascend_pd.router.prefilled import Prefilled, find_prompt_usage, parse_prefill_answer
from vllm_ascend_pd.router.prefix.tokenizer import Tokenizer
from vllm_ascend_pd.router.salts import salt
from vllm_ascend_pd.router.tokens import MAX_MODELS, MEDIA_TOKENS, PromptLengths

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_decode_leg_gets_what_the_client_sent(fields: dict[str, Any]) -> None:
    sent = {"prompt": "x", **fields, "model": "m"}
    sent.pop("vllm_xargs", None)
    sent.pop("kv_transfer_params", None)
    body = parse(COMPLETIONS, json.dumps(sent).encode())
    assert json.loads(body.for_decode(None, "d0")) == sent
    params = concurrent_params("t", KVEndpoint(engine_id="e", host="h", port=1, key="k"))
    decode = json.loads(body.for_decode(params, "d0"))
    told = decode.pop("kv_transfer_params")
    assert (told["transfer_id"], told["remote_key"]) == ("t", "k")
    assert decode == sent


@given(st.dictionaries(st.text(), JSON))
def test_prefill_leg_keeps_the_prompt_and_generates_one_token(fields: dict[str, Any]) -> None:
    sent = {"messages": [{"role": "user", "content": "é"}], **fields, "model": "m", "n": 5}
    sent |= {"logprobs": True, "logprob_token_ids": [1]}
    prefill = json.loads(parse(CHAT, json.dumps(sent).encode()).for_prefill("t"))
    assert prefill["messages"] == sent["messages"]
    assert (prefill["max_tokens"], prefill["max_completion_tokens"], prefill["n"]) == (1, 1, 1)
    assert prefill["stream"] is False
    assert not {"logprobs", "logprob_token_ids"} & prefill.keys()
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "t",
    }


@pytest.mark.parametrize(("told", "sent"), [(7, 1), (1, 1), (0, None), (None, None), ("7", None)])
def test_prefill_leg_may_not_end_before_its_token_either(told: Any, sent: Any) -> None:
    """Its token is D's first one then, and engines refuse a minimum above their limit of tokens."""
    body = {"prompt": "x", "max_tokens": 20, "min_tokens": told}
    prefill = json.loads(parse(COMPLETIONS, json.dumps(body).encode()).for_prefill())
    assert prefill.get("min_tokens") == sent


@given(st.binary())
def test_any_bytes_are_a_body_or_a_bad_request(raw: bytes) -> None:
    for path in APIS:
        with contextlib.suppress(BadRequest):
            assert parse(path, raw).prompt or b"prompt_embeds" in raw
    with contextlib.suppress(BadRequest):
        assert json.loads(parse_other(raw)[0]) == json.loads(raw)


class _Flag(BaseModel):
    stream: bool | None = None


@given(st.none() | st.booleans() | st.sampled_from([0, 1, 0.0, 1.0, *"01fFnNtTyY", "OFF", "True"]))
@example("False")
@example("no")
def test_stream_is_told_as_engines_read_it(value: Any) -> None:
    body = parse(COMPLETIONS, json.dumps({"prompt": "x", "stream": value}).encode())
    assert body.is_stream is bool(_Flag(stream=value).stream)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("text", None),
        ([1, 2, 3], None),
        ([], None),
        (["one"], None),
        ([[1, 2]], None),
        (["one", "two"], "batch"),
        ([[1, 2], [3]], "batch"),
    ],
    ids=str,
)
def test_several_prompts_are_noticed(prompt: Any, reason: str | None) -> None:
    for indent in (None, 2, 100):
        raw = b" \n" * 99 + json.dumps({"prompt": prompt}, indent=indent).encode()
        assert parse(COMPLETIONS, raw).decode_only == reason


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"input": "x", "max_output_tokens": 7}', (7, None, False)),
        (b'{"input": "x", "background": true, "max_tokens": 7}', (16, None, True)),
        (b'{"input": "x", "previous_response_id": "r"}', (16, "previous_response", False)),
        (b'{"input": "x", "previous_response_id": null, "background": null}', (16, None, False)),
    ],
)
def test_responses(raw: bytes, expected: tuple[int, str | None, bool]) -> None:
    body = parse(RESPONSES, raw)
    assert (body.num_max_tokens, body.decode_only, body.is_background) == expected


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"max_tokens": 7, "n": 2}, None),
        ({"max_tokens": 7, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"max_tokens": 7, "prompt_logprob_token_ids": [1]}, "prompt_logprobs"),
        ({"max_tokens": 7, "skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ],
)
def test_how_to_sample_token_ids(sampling: dict[str, Any], reason: str | None) -> None:
    told = {"token_ids": [1, 2], "sampling_params": sampling, "stream": True}
    body = parse(GENERATE, json.dumps(told).encode())
    assert (body.decode_only, body.is_stream, body.prompt) == (reason, True, b"[1, 2]")
    assert body.num_max_tokens == 7 * sampling.get("n", 1)


def test_tokens_of_a_tenants_stream_come_one_by_one() -> None:
    told = {"token_ids": [1], "sampling_params": {"stream_interval": 5, "seed": 1}}
    body = parse(GENERATE, json.dumps(told).encode())
    body.drop("stream_interval")
    for sent in (body.for_decode(None, "d0"), body.for_prefill()):
        assert json.loads(sent)["sampling_params"].items() >= {"seed": 1}.items()
        assert b"stream_interval" not in sent


@pytest.mark.parametrize(("more", "found"), [({}, (1, 2)), ({"features": {"mm_hashes": {}}}, None)])
def test_token_ids_are_routed_by_themselves(more: dict[str, Any], found: Any) -> None:
    told = {"token_ids": [1, 2], "sampling_params": {}, **more}
    asked = Tokenizer().token_ids(parse(GENERATE, json.dumps(told).encode()), Mock(), ())
    assert asyncio.run(asked) == found


def test_names_of_images_are_a_tenants_own() -> None:
    features = {"mm_hashes": {"image": ["a", "b"]}, "mm_placeholders": {}}
    parts = [{"type": "image_url", "url": "u", "uuid": "mine"}]
    told = {"token_ids": [1], "sampling_params": {}, "features": features, "content_parts": parts}
    body = parse(GENERATE, json.dumps(told).encode())
    salt(body.fields, "search")
    sent = json.loads(msgspec.json.encode(body.fields))
    assert sent["features"] == {**features, "mm_hashes": {"image": ["search|a", "search|b"]}}
    assert sent["content_parts"][0]["uuid"] == "search|mine"
    assert sent["cache_salt"] == "search|"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (b"", False),
        (b"data: {", False),
        (b'data: {"a": 1}\n\n', True),
        (b": keep-alive\n\n", False),
        (b": keep-alive\n\ndata: 1\n\n", True),
        (b"event: response.created\ndata: {}\n\nevent: response.in_pro", False),
        (b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n", False),
        (b"event: response.created\ndata: {}\n\nevent: response.failed\ndata: {}\n\n", True),
    ],
)
def test_stream_has_begun_with_its_first_token(events: bytes, expected: bool) -> None:
    assert has_token(events) == expected


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (COMPLETIONS, {"use_beam_search": True, "n": 2}, "use_beam_search"),
        (CHAT, {"use_beam_search": "true"}, "use_beam_search"),
        (CHAT, {"use_beam_search": False, "prompt_logprobs": None}, None),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True}, None),
        (COMPLETIONS, {"logprobs": 1}, None),
        (CHAT, {"echo": True}, "prompt_logprobs"),
        (CHAT, {"echo": True, "top_logprobs": None}, None),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, None),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "look_up"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "auto"}}, None),
        (MESSAGES, {"tool_choice": ["tool"]}, None),
        (CHAT, {"tool_choice": "required"}, None),
        (COMPLETIONS, {"truncate_prompt_tokens": -1}, "truncation"),
        (CHAT, {"truncate_prompt_tokens": "-1"}, "truncation"),
        (COMPLETIONS, {"truncate_prompt_tokens": 100}, None),
        (CHAT, {"truncate_prompt_tokens": None}, None),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"truncation": None}, "truncation"),
        (RESPONSES, {"truncation": "disabled"}, None),
    ],
    ids=str,
)
def test_what_decode_engines_compute_the_prompt_for_needs_no_prefill(
    path: str, fields: dict[str, Any], reason: str | None
) -> None:
    sent = {"prompt": "x", "messages": [], "input": "x", **fields}
    assert parse(path, json.dumps(sent).encode()).decode_only == reason


def test_prompt_embeds_need_no_prompt() -> None:
    assert parse(COMPLETIONS, b'{"prompt_embeds": "AA=="}').decode_only == "prompt_embeds"


@pytest.mark.parametrize("none", [None, []])
def test_prompt_embeds_that_are_none_leave_a_prompt_to_be_computed(none: Any) -> None:
    """As who writes out every field of vLLM's request sends them."""
    body = {"prompt": "x", "prompt_embeds": none}
    assert parse(COMPLETIONS, json.dumps(body).encode()).decode_only is None
    with pytest.raises(BadRequest):
        parse(COMPLETIONS, json.dumps({"prompt_embeds": none}).encode())


def test_documents_make_a_prompt() -> None:
    documents = [{"title": "a", "text": "b" * 4000}]
    body = {"messages": [{"role": "user", "content": "x"}], "documents": documents}
    parsed = parse(CHAT, json.dumps(body).encode())
    assert PromptLengths().estimate(None, parsed.prompt) > 1000


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 10),
        ({"include_reasoning": True, "stream_interval": 1}, 10),
        ({"include_reasoning": False}, 100),
        ({"stream_interval": 4}, 40),
        ({"stream_interval": 400}, 100),
        ({"stream_interval": 0}, 10),
    ],
    ids=str,
)
def test_engine_may_be_silent_as_long_as_was_asked_for(
    fields: dict[str, Any], seconds: float
) -> None:
    body = parse(CHAT, json.dumps({"messages": [], **fields}).encode())
    assert body.silence_s(Timeouts(idle_s=10, answer_s=100)) == seconds
    assert body.silence_s(Timeouts(idle_s=1000, answer_s=100)) == 1000


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": 7, "n": None}, 7),
        ({"max_tokens": 7, "prompt": ["a", "b", "c"], "n": 2}, 42),
        ({"n": 2}, 32),
        ({"max_tokens": 7, "n": -1}, 7),
    ],
    ids=str,
)
def test_all_answers_of_a_request_count(fields: dict[str, Any], num: int) -> None:
    body = parse(COMPLETIONS, json.dumps({"prompt": "x", **fields}).encode())
    assert body.num_max_tokens == num


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (b'{"a": {"kv_transfer_params": 1}}', {"a": {"kv_transfer_params": 1}}),
        (b'{"kv_transfer_params": 1, "a": 2}', {"a": 2}),
        (b'[{"kv_transfer_params": 1}, {"kv_transfer_params": 2}]', [{}, {}]),
        (b'{"requests": [{"kv_transfer_params": 1}]}', {"requests": [{}]}),
        (
            b'{"sampling_params": {"extra_args": {"kv_transfer_params": 1}}}',
            {"sampling_params": {"extra_args": {}}},
        ),
        (b'{"kv_transfer_params": 1, "kv_transfer_params": {"x": 1}}', {}),
    ],
)
def test_parameters_are_dropped_where_engines_read_them(raw: bytes, kept: Any) -> None:
    assert json.loads(parse_other(raw)[0]) == kept


def test_prefill_answers() -> None:
    params = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 7, "x": [1, {"y": 2}]}
    answer: dict[str, Any] = {
        "kv_transfer_params": params,
        "usage": {"prompt_tokens": 12},
        "choices": [],
    }
    found = parse_prefill_answer(json.dumps(answer).encode())
    assert isinstance(found, Prefilled)
    assert found.params is not None
    assert json.loads(bytes(found.params)) == params
    assert (found.kv, found.num_prompt_tokens) == (None, 12)
    params |= {"supports_concurrent": True, "remote_key": "k"}
    found = parse_prefill_answer(json.dumps(answer).encode())
    assert isinstance(found, Prefilled)
    expected = KVEndpoint(engine_id="e", host="h", port=7, key="k", supports_concurrent=True)
    assert found.kv == expected


@pytest.mark.parametrize(("sent_to", "is_reachable"), [(None, False), (0, False), (1, True)])
def test_what_a_rank_keeps_is_reached_only_where_that_rank_was_asked(
    sent_to: int | None, is_reachable: bool
) -> None:
    params = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 7, "transfer_id": "t"}
    params |= {"supports_concurrent": True, "remote_data_parallel_rank": 1}
    found = parse_prefill_answer(json.dumps({"kv_transfer_params": params}).encode(), sent_to)
    assert isinstance(found, Prefilled)
    assert found.params is not None
    assert (found.kv is not None) == (found.transfer_id == "t") == is_reachable


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"{}", FailureKind.NO_PARAMS),
        (b'{"kv_transfer_params": null}', FailureKind.NO_PARAMS),
        (b'{"kv_transfer_params": {}}', FailureKind.NO_PARAMS),
        (b'{"kv_transfer_params": 7}', FailureKind.PROTOCOL),
        (b"[", FailureKind.PROTOCOL),
        (b"\xff", FailureKind.PROTOCOL),
    ],
)
def test_prefill_answers_that_are_of_no_use(raw: bytes, kind: FailureKind) -> None:
    found = parse_prefill_answer(raw)
    assert isinstance(found, Failure)
    assert found.kind is kind


def test_prompt_lengths_are_counted_or_learned() -> None:
    lengths = PromptLengths()
    assert lengths.estimate("m", b"[1, 2,3]") == 3
    text = b'"' + b"x" * 998 + b'"'
    assert lengths.estimate("m", text) == 251
    for _ in range(200):
        lengths.learn("m", text, 500)
    assert lengths.estimate("m", text) == 501
    assert lengths.estimate("other", text) == 251


def test_prompt_lengths_of_so_many_models_are_known() -> None:
    lengths, text = PromptLengths(), b'"' + b"x" * 998 + b'"'
    lengths.learn("first", text, 500)
    for number in range(MAX_MODELS):
        lengths.learn(f"m{number}", text, 500)
        lengths.learn("m0", text, 500)
    assert [lengths.estimate(name, text) for name in ("first", "m0", "m999")] == [251, 501, 501]


def test_image_counts_as_one_whatever_its_bytes_and_says_nothing_of_texts() -> None:
    lengths = PromptLengths()
    text = json.dumps("so it is " * 1000).encode()
    before = lengths.estimate("m", text)
    url = {"url": "data:image/png;base64," + "iVBORw0KGgo/" * 10000}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    chat = json.dumps([{"role": "user", "content": parts}]).encode()
    assert 0 < lengths.estimate("m", chat) - MEDIA_TOKENS < 50
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg/" * 10000, "format": "wav"}}
    chat_of_two = json.dumps([{"role": "user", "content": [*parts, sound]}]).encode()
    assert 0 < lengths.estimate("m", chat_of_two) - 2 * MEDIA_TOKENS < 80
    one_word = json.dumps("ACGT" * 10000).encode()
    assert lengths.estimate("m", one_word) > 10000
    by_url = chat.replace(url["url"].encode(), b"http://127.0.0.1/1.png")
    told = ((chat, 1000), (chat, 20000), (by_url, 4000), (text, 1), (b"[12345, 67890]", 2))
    for prompt, num_tokens in told:
        lengths.learn("m", prompt, num_tokens)
    assert lengths.estimate("m", text) == before


def test_load_of_several_engines_behind_one_server_adds_up() -> None:
    text = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
vllm:prefix_cache_queries_total{engine="0"} 1e+03
vllm:prefix_cache_hits_total{engine="0"} 250
vllm:num_requests_waiting_by_reason{reason="x"} 9.0
"""
    load = parse_load(text)
    assert (load.num_running, load.num_waiting) == (5, 1)
    assert load.kv_usage == pytest.approx(0.6)
    assert (load.prefix_queries, load.prefix_hits) == (1000, 250)
    assert parse_load(b"\x00garbage").num_running == 0
    second = parse_load(text, engine=1)
    assert (second.num_running, second.num_waiting, second.kv_usage) == (3, 0, 0.7)


def test_engines_of_a_server_are_its_ranks_in_their_order() -> None:
    """Labels go on from one server of a group to the next, requests count those of one."""
    numbers = (10, 8, 9)
    text = "".join(f'vllm:num_requests_running{{engine="{i}",x="1"}} {i}\n' for i in numbers)
    page = text.encode()
    assert [engine_on(page, rank) for rank in (None, 0, 1, 2, 3)] == [None, 8, 9, 10, -1]
    assert parse_load(page, engine_on(page, 2)).num_running == 10
    assert parse_load(page, engine_on(page, 3)).num_running == 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many", "", '1.0 # {a="b"}'])
def test_load_that_is_no_number_is_none(value: str) -> None:
    text = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2.0"
    load = parse_load(text.encode())
    assert (load.num_running, load.num_waiting) == (0, 2)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}', (9, 8)),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":8},"prompt_tokens":9}}', (9, 8)),
        (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": null}}', None),
        (b'{"text": "{\\"prompt_tokens\\": 1, \\"cached_tokens\\": 1}"}', None),
        (b"", None),
    ],
)
def test_prompt_usage_is_found_where_the_engine_tells_it(
    data: bytes, found: tuple[int, int] | None
) -> None:
    assert find_prompt_usage(data) == found
