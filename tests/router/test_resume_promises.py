# SPDX-License-Identifier: Apache-2.0
"""Which streams go on when their engine dies, and what clients and engines are told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.router.broken_streams import ANY, GREEDY, PATIENT, broken, resumes
from tests.router.harness import deployed, events, run
from vllm_ascend_pd.net.trust import Secret
from vllm_ascend_pd.resume import Resume, ResumeKey
from vllm_ascend_pd.router.config import Retries

CHAT = "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "batch"),
        ({"temperature": 0.7}, "sampled"),
        ({"temperature": None}, "sampled"),
        ({"temperature": 0.7, "seed": -1}, "sampled"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"path": "/v1/chat/completions", "include_reasoning": False}, "include_reasoning"),
        ({"path": CHAT, **CHAT_BODY, "tools": [TOOL]}, "tool_parser"),
        ({"path": CHAT, **CHAT_BODY, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"path": "/v1/messages", "messages": [{"role": "user", "content": "a"}]}, "api"),
        ({"path": "/v1/responses", "input": "a"}, "api"),
    ],
)
def test_what_cannot_go_on_ends_as_its_cause_says(fields: dict[str, Any], cause: str) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            d.decodes[0].script("break(4)")
            _, headers, body = await d.post(**{**GREEDY, **fields})
            assert b"broken_stream" in body
            assert headers["x-resumes"] == f"none; {cause}"
            assert not resumes(d)
            assert "return_token_ids" not in d.decodes[0].received[0].json
            assert d.count("not_resumed_total", cause=cause) == 1

    run(test)


@pytest.mark.parametrize(
    ("parser", "tool_choice", "expected"),
    [
        ("hermes", "auto", "exact"),
        ("hermes", "required", "none; tool_choice"),
        ("jamba", "auto", "none; tool_parser"),
        ("jamba", "none", "exact"),
    ],
)
def test_streams_with_tools_go_on_with_parsers_that_any_number_of_tokens_leaves_right(
    parser: str, tool_choice: str, expected: str
) -> None:
    async def test() -> None:
        config = replace(PATIENT, retries=Retries(tool_call_parser=parser))
        async with deployed(1, 2, config) as d:
            fields = {"path": CHAT, **CHAT_BODY, "tools": [TOOL], "tool_choice": tool_choice}
            _, headers, _ = await d.post(**{**GREEDY, **fields})
            assert headers["x-resumes"] == expected

    run(test)


def test_sampled_stream_goes_on_by_option() -> None:
    async def test() -> None:
        async with deployed(1, 2, ANY) as d:
            got = await broken(d, "break(2)", temperature=0.7)
            assert got[-1] == "[DONE]"
            assert resumes(d)[0].params["resume"]["only_exact"] is False
            assert d.count("resumes_total", kind="sampled", outcome="ok") == 1

    run(test)


def test_seeded_stream_goes_on() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "break(2)", temperature=0.7, seed=3)
            assert got[-1] == "[DONE]"
            assert resumes(d)[0].params["resume"]["only_exact"] is True

    run(test)


@pytest.mark.parametrize(
    "fields", [{"thinking_token_budget": -1}, {"stream_interval": 3}, {"prompt_embeds": None}]
)
def test_what_asks_for_nothing_that_is_lost_goes_on(fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "break(2)", **fields)
            assert got[-1] == "[DONE]"

    run(test)


def test_stream_of_a_prompt_that_is_cut_goes_on() -> None:
    """Its engine has computed the prompt alone."""

    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "break(2)", truncate_prompt_tokens=-1)
            assert got[-1] == "[DONE]"
            assert d.count("prefill_skips_total", reason="truncation") == 1
            assert not d.prefills[0].received

    run(test)


def test_nothing_goes_on_if_switched_off() -> None:
    async def test() -> None:
        async with deployed(1, 2, replace(PATIENT, retries=Retries(resume="off"))) as d:
            d.decodes[0].script("break(2)")
            _, headers, body = await d.post(**GREEDY)
            assert events(body)[-1]["error"]["type"] == "broken_stream"
            assert "x-resumes" not in headers
            assert "return_token_ids" not in d.decodes[0].received[0].json

    run(test)


def test_what_goes_on_is_signed_with_the_secret_of_the_engines(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "secret"
        path.write_text("s" * 40)
        path.chmod(0o600)
        async with deployed(1, 2, replace(PATIENT, secret_file=path)) as d:
            await broken(d, "break(2)")
            resume = Resume.from_params(resumes(d)[0].params["resume"])
            assert ResumeKey(Secret.load(str(path))).accepts(resume)
            assert not ResumeKey(Secret(b"o" * 40)).accepts(resume)

    run(test)


def test_client_cannot_say_what_an_engine_has_said() -> None:
    async def test() -> None:
        async with deployed() as d:
            resume = ResumeKey(None).sign("x", [1], [2]).to_params()
            for smuggled in (
                {"kv_transfer_params": {"resume": resume}},
                {"vllm_xargs": {"kv_transfer_params": {"resume": resume}}},
            ):
                status, _, _ = await d.post(**GREEDY, **smuggled)
                assert status == 200
            everyone = (*d.prefills, *d.decodes)
            assert all(b"resume" not in r.body for e in everyone for r in e.received)

    run(test)
