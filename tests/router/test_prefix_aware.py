# SPDX-License-Identifier: Apache-2.0
"""Routing by what engines say they hold, over real ZMQ sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.router.harness import FAST, Deployment, deployed, run, until
from tests.router.scripted_engine import ScriptedEngine
from tests.router.test_discovery import described, register
from tests.unit.router.test_policies import instance
from tests.unit.router.test_prefix_index import BLOCK, CLEARED, batch, hits, stored
from vllm_ascend_pd.registration import KVEvents
from vllm_ascend_pd.router.discovery.registered import MAX_INSTANCES
from vllm_ascend_pd.router.instances import Instance
from vllm_ascend_pd.router.prefix import subscriber as subscribing
from vllm_ascend_pd.router.prefix.index import IndexState, PrefixIndex
from vllm_ascend_pd.router.prefix.subscriber import Subscriber

Cluster = tuple[Deployment, dict[str, ScriptedEngine], dict[str, "Publisher"]]


class Publisher:
    """Publishes and replays like vLLM's."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._pub = context.socket(zmq.XPUB)  # which tells who subscribes
        self._replay = context.socket(zmq.ROUTER)
        host = "tcp://127.0.0.1"
        self.endpoint = f"{host}:{self._pub.bind_to_random_port(host)}"
        self.replay_endpoint = f"{host}:{self._replay.bind_to_random_port(host)}"
        self.sent: list[bytes] = []
        self.room = 1000
        """For so many messages of a replay, and the last one."""
        self.has_replayed = asyncio.Event()
        self._task = asyncio.ensure_future(self._answer())

    @property
    def events(self) -> KVEvents:
        return KVEvents(endpoint=self.endpoint, replay_endpoint=self.replay_endpoint)

    async def publish(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        payload = batch(*events, ts=time.time())
        seq = len(self.sent).to_bytes(8, "big")
        self.sent.append(payload)
        if not is_lost:
            await self._pub.send_multipart([b"", seq, payload])

    async def publish_frames(self, num_frames: int) -> None:
        await self._pub.send_multipart([b""] * num_frames)

    async def wait_subscriber(self) -> None:
        assert await self.next_subscription() == b"\x01"

    async def next_subscription(self) -> bytes:
        """Or its end."""
        told: bytes = await asyncio.wait_for(self._pub.recv(), 20)
        return told

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for seq, payload in enumerate(self.sent):
                if first <= seq < first + self.room or seq == len(self.sent) - 1:
                    frames = [client, b"", b"topic", seq.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart([client, b"", b"", end, b""])
            self.has_replayed.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._replay.close(linger=0)


@asynccontextmanager
async def cluster() -> AsyncIterator[
    tuple[Deployment, dict[str, ScriptedEngine], dict[str, Publisher]]
]:
    """Two of each role, all of them publishing."""
    context = zmq.asyncio.Context()
    engines = {name: ScriptedEngine(name) for name in ("p0", "p1", "d0", "d1")}
    publishers = {name: Publisher(context) for name in engines}
    async with deployed(0, 0, replace(FAST, policy="prefix-aware")) as d:
        for name, engine in engines.items():
            await engine.start()
            events = {
                "endpoint": publishers[name].endpoint,
                "replay_endpoint": publishers[name].replay_endpoint,
            }
            role = "prefill" if name[0] == "p" else "decode"
            body = described(engine, role=role, kv_events=events)
            assert (await register(d, name, body))[0] == 200
        for publisher in publishers.values():
            await publisher.wait_subscriber()
        yield d, engines, publishers
        for engine in engines.values():
            async with d.http.delete(f"{d.url}/registry/instances/{engine.name}") as response:
                assert response.status == 204
            await engine.stop()
    for publisher in publishers.values():
        await publisher.close()
    context.destroy(linger=0)


@asynccontextmanager
async def listening(
    subscriber: Subscriber | None = None,
) -> AsyncIterator[tuple[Publisher, Subscriber, Instance]]:
    """A publisher, who is to listen to it, and the instance that it is of."""
    subscriber = subscriber or Subscriber()
    context = zmq.asyncio.Context()
    publisher = Publisher(context)
    one = instance("one")
    one.spec = msgspec.structs.replace(one.spec, kv_events=publisher.events)
    try:
        yield publisher, subscriber, one
    finally:
        await subscriber.close()
        await publisher.close()
        context.destroy(linger=0)


def index(d: Deployment, name: str) -> PrefixIndex:
    found: PrefixIndex = d.router.registry.get(name).prefix_index
    return found


TOKENS = list(range(100, 100 + 10 * BLOCK))


async def publish_prompt(d: Deployment, name: str, publisher: Publisher, num_blocks: int) -> None:
    """``publisher`` (of ``name``) holds the first blocks of ``TOKENS``; wait until it is known."""
    hashes = [f"{name} {i}".encode() for i in range(num_blocks)]
    await publisher.publish(stored(hashes, None, TOKENS[: num_blocks * BLOCK]))
    await until(lambda: len(index(d, name)) == num_blocks, "index")


def test_request_goes_where_its_prefix_is() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 8)
            await publish_prompt(d, "d0", publishers["d0"], 5)
            assert index(d, "p1").state is IndexState.EXACT
            for _ in range(4):
                assert (await d.post(prompt=TOKENS))[0] == 200
            assert [len(e.received) for e in engines.values()] == [0, 4, 4, 0]
            await publishers["p1"].publish(CLEARED)
            await until(lambda: not len(index(d, "p1")))
            for _ in range(4):
                await d.post(prompt=TOKENS)
            assert len(engines["p0"].received) == 2

    run(test)


def test_prefill_is_skipped_when_decode_holds_the_prompt() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "d1", publishers["d1"], 9)
            assert (await d.post(prompt=TOKENS))[0] == 200
            assert [len(e.received) for e in engines.values()] == [0, 0, 0, 1]
            assert engines["d1"].received[0].params == {}
            assert d.count("prefill_skips_total", reason="decode_holds_prefix") == 1
            await d.post(prompt=TOKENS, cache_salt="other tenant")
            assert d.count("prefill_skips_total", reason="decode_holds_prefix") == 1

    run(test)


def test_what_is_cached_of_a_model_is_of_no_use_to_its_adapters() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            for engine in engines.values():
                engine.models = ("tiny", "adapter")
                engine.adapters = {"adapter": "tiny"}
            await until(
                lambda: all(i.adapter_names for i in d.router.registry), "models read again"
            )
            await publish_prompt(d, "d1", publishers["d1"], 9)
            for _ in range(4):
                assert (await d.post(model="adapter", prompt=TOKENS))[0] == 200
            assert [len(e.received) for e in engines.values()] == [2, 2, 2, 2]
            assert (await d.post(prompt=TOKENS))[0] == 200
            assert d.count("prefill_skips_total", reason="decode_holds_prefix") == 1

    run(test)


def test_what_was_expected_is_compared_with_what_engines_say() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 8)
            await d.post(prompt=TOKENS)
            told = {"role": "prefill", "told": "true"}
            untold = {**told, "told": "false"}
            assert d.count("prefix_expected_tokens_total", **untold) == 8 * BLOCK
            assert d.count("prefix_prompt_tokens_total", role="prefill") == 0

            engines["p1"].num_cached_tokens = 7 * BLOCK
            await d.post(prompt=TOKENS)
            assert d.count("prefix_expected_tokens_total", **told) == 8 * BLOCK
            assert d.count("prefix_expected_tokens_total", **untold) == 8 * BLOCK
            assert d.count("prefix_cached_tokens_total", role="prefill") == 7 * BLOCK
            assert d.count("prefix_prompt_tokens_total", role="prefill") == 10 * BLOCK

            await publish_prompt(d, "d1", publishers["d1"], 9)
            engines["d1"].num_cached_tokens = 9 * BLOCK
            options = {"stream": True, "stream_options": {"include_usage": True}}
            for more in ({}, options, {"stream": True}):
                assert (await d.post(prompt=TOKENS, **more))[0] == 200
            # The last client asked for no usage, so the engine was not asked either.
            assert engines["d1"].received[-1].json.get("stream_options") is None
            assert d.count("prefix_cached_tokens_total", role="decode") == 2 * 9 * BLOCK
            told["role"] = untold["role"] = "decode"
            assert d.count("prefix_expected_tokens_total", **told) == 2 * 9 * BLOCK
            assert d.count("prefix_expected_tokens_total", **untold) == 9 * BLOCK

    run(test)


def test_salt_that_is_none_is_no_salt() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 8)
            for _ in range(3):
                assert (await d.post(prompt=TOKENS, cache_salt=None))[0] == 200
            assert len(engines["p1"].received) == 3

    run(test)


@pytest.mark.parametrize("prompt", [TOKENS, "some text"], ids=["token_ids", "text"])
def test_prompt_that_is_cut_is_not_looked_for(prompt: str | list[int]) -> None:
    """``/tokenize`` cuts nothing."""

    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 8)
            for _ in range(4):
                assert (await d.post(prompt=prompt, truncate_prompt_tokens=20))[0] == 200
            assert len(engines["p1"].received) == 2
            assert not any(engine.num_tokenized for engine in engines.values())

    run(test)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "image_embeds"])
def test_images_and_the_like_are_not_prepared_to_be_tokenized(kind: str) -> None:
    async def test() -> None:
        async with deployed(1, 1, replace(FAST, policy="prefix-aware")) as d:
            told = {"type": "text", "text": f'"{kind}"'}
            url = f"{d.url}/v1/chat/completions"
            for num_tokenized, parts in enumerate(([told, {"type": kind, kind: {}}], [told])):
                chat = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
                async with d.http.post(url, json=chat) as response:
                    assert response.status == 200
                assert sum(e.num_tokenized for e in (*d.prefills, *d.decodes)) == num_tokenized

    run(test)


def test_text_is_tokenized_by_an_engine_once() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            text = "x" * 10 * BLOCK
            tokens = list(text.encode())
            await publishers["d1"].publish(stored([b"a"], None, tokens[:BLOCK]))
            await until(lambda: len(index(d, "d1")) == 1)
            for _ in range(3):
                assert (await d.post(prompt=text))[0] == 200
            assert sum(e.num_tokenized for e in engines.values()) == 1
            assert len(engines["d1"].received) == 3

    run(test)


def test_text_is_tokenized_again_where_another_model_has_the_name() -> None:
    async def test() -> None:
        async with deployed(0, 1, replace(FAST, policy="prefix-aware")) as d:
            (engine,), (instance,) = d.decodes, d.router.registry.decodes
            for num_models, own in enumerate("aabb", 2):
                spec = msgspec.structs.replace(instance.spec, fingerprint=f"weights={own}")
                d.router.registry.put(spec)
                assert (await d.post(prompt="Hello"))[0] == 200
                assert engine.num_tokenized == num_models // 2

    run(test)


@pytest.mark.parametrize("number", [-1, 1 << 63, 1 << 64, 10**30])
def test_number_that_is_no_token_is_for_an_engine_to_refuse(number: int) -> None:
    async def test() -> None:
        async with deployed(0, 1, replace(FAST, policy="prefix-aware")) as d:
            (instance,) = d.router.registry.decodes
            instance.prefix_index.receive(0, batch(stored([b"a"], None, TOKENS[:BLOCK])))
            d.decodes[0].script("status(400)")
            assert (await d.post(prompt=[number]))[0] == 400
            assert d.decodes[0].received[0].json["prompt"] == [number]

    run(test)


@pytest.mark.parametrize("room", [1000, 12], ids=["", "in parts"])
def test_events_before_the_router_came_are_replayed(room: int) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        publisher.room = room
        for seq in range(50):
            await publisher.publish(stored([seq], None, [seq] * BLOCK))
        async with deployed(1, 0, replace(FAST, policy="prefix-aware")) as d:
            engine = ScriptedEngine("late")
            await engine.start()
            events = {
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
            }
            await register(d, "late", described(engine, kv_events=events))
            await until(lambda: len(index(d, "late")) == 50)
            assert index(d, "late").state is IndexState.EXACT
            await engine.stop()
        await publisher.close()
        context.destroy(linger=0)

    run(test)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_index_is_not_believed_when_something_fails_on_the_way(
    is_replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with listening() as (publisher, subscriber, one):
            with monkeypatch.context() as patch:
                patch.setattr(PrefixIndex, "_apply", lambda self, event: 1 / 0)
                if is_replayed:
                    await publisher.publish(CLEARED)
                subscriber.watch(one)
                await publisher.wait_subscriber()
                # What is published while it replays may come twice, once after the patch is gone.
                await asyncio.wait_for(publisher.has_replayed.wait(), 20)
                if not is_replayed:
                    await publisher.publish(CLEARED)
                index = one.prefix_index
                assert index is not None
                await until(lambda: index.state is IndexState.DEGRADED, "state")
            await publisher.publish(stored([b"a"], None, TOKENS[:BLOCK]))
            await until(lambda: len(index) == 1, "index")
            assert index.state is IndexState.DEGRADED

    run(test)


@pytest.mark.parametrize("starts_again", [False, True])
def test_messages_that_were_lost_are_replayed(starts_again: bool) -> None:
    async def test() -> None:
        async with listening() as (publisher, subscriber, one):
            subscriber.watch(one)
            await publisher.wait_subscriber()
            index = one.prefix_index
            assert index is not None
            for seq in range(9):
                await publisher.publish(stored([seq], None, [seq] * BLOCK))
            await until(lambda: len(index) == 9, "index")
            if starts_again:
                publisher.sent.clear()
            await publisher.publish(stored([b"a"], None, TOKENS[:BLOCK]), is_lost=True)
            await publisher.publish(stored([b"b"], b"a", TOKENS[BLOCK : 2 * BLOCK]))
            await until(lambda: hits(index, TOKENS) == 2 * BLOCK, "index")
            assert index.state is IndexState.EXACT
            assert len(index) == (2 if starts_again else 11)

    run(test)


class ForgetsAtTheLastMoment(Subscriber):
    """An engine is gone in the turn of the loop in which its replay ends."""

    async def _replay(self, instance: Instance, *rest: Any) -> None:
        await super()._replay(instance, *rest)
        self.forget(instance)


def test_nobody_listens_to_an_engine_that_went_while_its_events_were_replayed() -> None:
    async def test() -> None:
        async with listening(ForgetsAtTheLastMoment()) as (publisher, subscriber, one):
            await publisher.publish(stored([b"a"], None, TOKENS[:BLOCK]))
            subscriber.watch(one)
            task = subscriber._tasks[one]
            await asyncio.wait({task}, timeout=20)
            assert task.done()
            assert not subscriber.holders.num_hit_tokens(TOKENS).any()

    run(test)


def test_backlog_of_events_leaves_the_event_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    num_messages = 64
    context = zmq.asyncio.Context()
    monkeypatch.setattr("zmq.asyncio.Context", lambda: context)  # so they are there at once
    waits = 0
    recv = zmq.asyncio.Socket.recv

    def waiting(socket: zmq.asyncio.Socket, *args: Any, **named: Any) -> Any:
        nonlocal waits
        waits += 1
        return recv(socket, *args, **named)

    async def test() -> None:
        nonlocal waits
        publisher = context.socket(zmq.XPUB)
        publisher.bind("inproc://events")
        subscriber, one = Subscriber(), instance("one")
        events = KVEvents(endpoint="inproc://events")
        one.spec = msgspec.structs.replace(one.spec, kv_events=events)
        subscriber.watch(one)
        assert await asyncio.wait_for(publisher.recv(), 20) == b"\x01"
        monkeypatch.setattr("zmq.asyncio.Socket.recv", waiting)
        for seq in range(num_messages):
            payload = batch(stored([seq], None, [seq] * BLOCK))
            zmq.Socket.shadow(publisher).send_multipart([b"", seq.to_bytes(8, "big"), payload])
        index, longest = one.prefix_index, 0
        assert index is not None
        while len(index) < num_messages:
            before = len(index)
            await asyncio.sleep(0)
            longest = max(longest, len(index) - before)
        assert longest == subscribing._AT_ONCE
        assert waits <= num_messages / subscribing._AT_ONCE + 2
        publisher.close(linger=0)
        await subscriber.close()

    run(test)


def test_not_all_engines_are_asked_for_a_replay_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    most, num_engines = 3, 12
    monkeypatch.setattr(subscribing, "_REPLAYS_AT_ONCE", most)
    under_way: list[int] = []
    replayed: Counter[str] = Counter()

    class Counting(Subscriber):
        async def _receive_again(self, instance: Instance, *rest: Any) -> None:
            replayed[instance.instance_id] += 1
            under_way.append(replayed.total() - len(over))
            await super()._receive_again(instance, *rest)
            over.append(instance)

    over: list[Instance] = []

    async def test() -> None:
        async with listening(Counting()) as (publisher, subscriber, one):
            await publisher.publish(stored([b"a"], None, TOKENS[:BLOCK]))
            engines = [instance(f"e{i}") for i in range(num_engines)]
            for engine in engines:
                engine.spec = msgspec.structs.replace(engine.spec, kv_events=one.spec.kv_events)
                subscriber.watch(engine)
            for engine in engines:
                await until(lambda one=engine: len(one.prefix_index) == 1, "index")

    run(test)
    assert max(under_way) == most
    assert set(replayed.values()) == {1}


def test_more_engines_are_listened_to_than_zmq_has_sockets_for_by_itself() -> None:
    async def test() -> None:
        async with listening() as (_, subscriber, one):
            subscriber.watch(one)
            await asyncio.sleep(0)
            assert subscriber._context is not None
            assert subscriber._context.get(zmq.MAX_SOCKETS) >= MAX_INSTANCES + 1

    run(test)


class Network:
    """Between a publisher and who listens to it; its connections can go silent, and stay open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._silent: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def fall_silent(self) -> None:
        """As far as it is connected by now."""
        self._silent.update(self._writers)

    async def _connect(self, here: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [there, writer]
        for pair in ((here, writer), (reader, there)):
            self._tasks.add(asyncio.ensure_future(self._pass_on(*pair)))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if writer not in self._silent:
                writer.write(data)

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_connection_that_has_gone_silent_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host has lost power, say, and nobody has closed it."""

    async def test() -> None:
        monkeypatch.setattr(subscribing, "_HEARTBEAT_MS", 200)
        async with listening() as (publisher, subscriber, one):
            network = Network(int(publisher.endpoint.rpartition(":")[2]))
            events = KVEvents(endpoint=await network.start())
            one.spec = msgspec.structs.replace(one.spec, kv_events=events)
            subscriber.watch(one)
            index = one.prefix_index
            assert index is not None

            async def is_heard(tokens: list[int]) -> None:
                """A slow machine may look silent, too, so it is said again and again."""
                while not hits(index, tokens):
                    await publisher.publish(stored([bytes(tokens)], None, tokens))
                    await asyncio.sleep(0.01)

            await asyncio.wait_for(is_heard(TOKENS[:BLOCK]), 20)
            network.fall_silent()
            await asyncio.wait_for(is_heard(TOKENS[BLOCK : 2 * BLOCK]), 20)
            await network.close()

    run(test)


def test_messages_without_end_are_not_listened_to() -> None:
    async def test() -> None:
        async with listening() as (publisher, subscriber, one):
            subscriber.watch(one)
            await publisher.wait_subscriber()
            await publisher.publish_frames(4)
            await publisher.publish(stored([b"a"], None, TOKENS[:BLOCK]))
            index = one.prefix_index
            assert index is not None
            await until(lambda: index.state is IndexState.EXACT, "state")
            await publisher.publish_frames(1000)
            await until(lambda: index.state is IndexState.FALLBACK, "state")
            assert not subscriber.holders.num_hit_tokens(TOKENS).any()

    run(test)


def test_event_that_makes_no_sense_ends_nothing() -> None:
    async def test() -> None:
        async with cluster() as (d, _, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 2)
            await publishers["p1"].publish({**stored([b"x"], None, TOKENS), "block_size": 0})
            await until(lambda: index(d, "p1").state is IndexState.DEGRADED, "state")
            await publish_prompt(d, "p1", publishers["p1"], 3)

    run(test)


def test_busy_holder_loses_to_an_idle_instance() -> None:
    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 8)
            d.router.registry.get("p1").num_active_tokens += 1000
            await d.post(prompt=TOKENS)
            assert len(engines["p0"].received) == 1
            d.router.registry.get("p1").num_active_tokens -= 1000

    run(test)


def test_what_is_cached_of_prompts_under_way_keeps_nobody_busy() -> None:
    """Or all engines would compute, and keep, what one of them has as soon as two ask for it."""

    async def test() -> None:
        async with cluster() as (d, engines, publishers):
            await publish_prompt(d, "p1", publishers["p1"], 8)
            engines["p1"].script("delay(1), delay(1), delay(1)")
            posts = []
            for num in range(1, 4):
                posts.append(asyncio.ensure_future(d.post(prompt=TOKENS)))
                await until(lambda num=num: engines["p1"].num_in_progress == num, "it came")
                assert d.router.registry.get("p1").num_active_tokens == num * 2 * BLOCK
            assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}
            assert d.router.registry.get("p1").num_active_tokens == 0

    run(test)


def test_without_events_it_is_least_loaded() -> None:
    async def test() -> None:
        async with deployed(2, 2, replace(FAST, policy="prefix-aware")) as d:
            for _ in range(4):
                assert (await d.post())[0] == 200
            assert [len(e.received) for e in (*d.prefills, *d.decodes)] == [2, 2, 2, 2]

    run(test)


@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        pytest.param("a text", {}, id="tokenizer_asked"),
        pytest.param(TOKENS, {}, id="token_ids"),
        pytest.param(TOKENS, {"cache_salt": "mine"}, id="salted"),
    ],
)
def test_of_equal_costs_each_engine_gets_its_turn(
    prompt: str | list[int], more: dict[str, Any]
) -> None:
    async def test() -> None:
        async with deployed(2, 3, replace(FAST, policy="prefix-aware")) as d:
            for _ in range(6):
                assert (await d.post(prompt=prompt, **more))[0] == 200
            assert [len(e.received) for e in (*d.prefills, *d.decodes)] == [3, 3, 2, 2, 2]

    run(test)


def test_instance_whose_events_come_from_elsewhere_is_listened_to_there() -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        publishers = [Publisher(context) for _ in range(2)]
        async with deployed(1, 1, replace(FAST, policy="prefix-aware")) as d:
            (one,) = d.router.registry.decodes
            name = one.instance_id
            assert index(d, name).state is IndexState.FALLBACK
            for number, publisher in enumerate(publishers):
                told = msgspec.structs.replace(one.spec, kv_events=publisher.events)
                d.router.registry.put(told)
                await publisher.wait_subscriber()
                await publish_prompt(d, name, publisher, number + 1)
                assert index(d, name).state is IndexState.EXACT
            assert await publishers[0].next_subscription() == b"\x00"
            d.router.registry.put(msgspec.structs.replace(one.spec, kv_events=None))
            assert await publishers[1].next_subscription() == b"\x00"
            assert index(d, name).state is IndexState.FALLBACK
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)

    run(test)
