# SPDX-License-Identifier: Apache-2.0
"""The official client, against a router in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import openai
import pytest

from tests.router.harness import Deployment, deployed

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def router() -> Iterator[tuple[Deployment, openai.OpenAI]]:
    """The router runs on its own event loop: this client blocks."""
    started: Future[Deployment] = Future()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with deployed() as deployment:
            started.set_result(deployment)
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    deployment = started.result(10)
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="k", max_retries=0) as client:
        yield deployment, client
    loop.call_soon_threadsafe(end.set)
    thread.join(20)
    assert not thread.is_alive()
    loop.close()


def test_completion_and_chat(router: tuple[Deployment, openai.OpenAI]) -> None:
    _, client = router
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=4, n=2)
    assert len(whole.choices) == 2
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    pieces = client.completions.create(model="tiny", prompt="Hello", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text

    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    streamed = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_errors_are_the_clients_own(router: tuple[Deployment, openai.OpenAI]) -> None:
    deployment, client = router
    deployment.decodes[0].script("status(422)")
    with pytest.raises(openai.UnprocessableEntityError, match="scripted"):
        client.completions.create(model="tiny", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.post("/completions", body={"model": "tiny"}, cast_to=object)


def test_broken_stream_is_an_error(router: tuple[Deployment, openai.OpenAI]) -> None:
    deployment, client = router
    deployment.decodes[0].script("break(2)")
    pieces = client.completions.create(model="tiny", prompt="Hello", stream=True)
    with pytest.raises(openai.APIError, match="after part of the answer"):
        list(pieces)


def test_client_that_stops_reading_ends_the_request(
    router: tuple[Deployment, openai.OpenAI],
) -> None:
    deployment, client = router
    deployment.decodes[0].token_s = 0.02
    pieces = client.completions.create(model="tiny", prompt="Hello", stream=True, max_tokens=1000)
    next(iter(pieces))
    pieces.close()
