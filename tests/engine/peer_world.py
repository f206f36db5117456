# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers without threads: real remote prompts, a scripted network, one clock.

Everything from the remote prompt and the lease down to the frame is the real code; only sockets
are scripted. Nothing happens by itself: the test hands over frames, runs turns, moves the clock.

    ConsumerProcess                                   ProducerProcess
      Consumer ─ ControlClient ─ Peers ═══ Link ═══ Listener ─ ControlServer ─ LeaseBook ─ Producer
"""

from __future__ import annotations

import itertools
import queue
import zlib
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from tests.clock import Clock
from vllm_ascend_pd.config import PDConfig, Role
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.known_peers import KnownPeers
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.scheduler.parking import Parking
from vllm_ascend_pd.engine.scheduler.parts import Common, Ending
from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import KVGroup
from vllm_ascend_pd.metrics import Provenance, Stats
from vllm_ascend_pd.net.peers import Peers
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.control import ControlClient, ControlServer, OpenOutcome
from vllm_ascend_pd.transfer.grants import Grants
from vllm_ascend_pd.transfer.leases import LeaseBook
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint, Epoch, LoadId
from vllm_ascend_pd.wire import FirstToken

BLOCK_SIZE = 16
NUM_BLOCKS = 64
VOCAB_SIZE = 1000
GROUP = KVGroup(0, BLOCK_SIZE, page_bytes=1, layers=("layer",))
LEASE_S = 30.0
PEER_TIMEOUT_S = 2.0
HEARTBEAT_S = 10.0
ARRIVAL_TIMEOUT_S = 5.0
TRUST = Trust()

init_none_hash(sha256)
_numbers = itertools.count()


def make_request(tokens: list[int], params: dict[str, Any]) -> Request:
    return Request(
        request_id=f"r{next(_numbers)}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def first_token_of(prompt: Sequence[int]) -> int:
    """What every engine samples after ``prompt``."""
    return zlib.crc32(repr(list(prompt)).encode()) % VOCAB_SIZE


# The network.


class Link:
    """One connection, and the frames that are under way on it."""

    def __init__(self, consumer: ConsumerProcess, peer: Endpoint) -> None:
        self.consumer = consumer
        self.peer = peer
        self.producer = consumer.network.producers.get(peer)
        self.identity = b"\0%d" % next(_numbers)
        self.up: list[bytes] = []
        self.down: list[bytes] = []
        self.broken = self.producer is None

    def deliver(self, upwards: bool, frame: bytes) -> None:
        if upwards:
            assert self.producer is not None
            self.producer.take(self.identity, frame)
        else:
            self.consumer.peers.take(self, frame)


class Network:
    """Which processes there are, and the links between them."""

    def __init__(self) -> None:
        self.producers: dict[Endpoint, ProducerProcess] = {}
        self.links: list[Link] = []

    def under_way(self) -> list[tuple[Link, bool, int]]:
        """Each frame, as its link, whether it goes up to the producer, and its place."""
        return [
            (link, upwards, place)
            for link in self.links
            for upwards, frames in ((True, link.up), (False, link.down))
            for place in range(len(frames))
        ]

    def cut(self, link: Link) -> None:
        """What is under way is lost; the consumer has not noticed yet."""
        link.broken = True
        link.up.clear()
        link.down.clear()

    def notice(self, link: Link) -> None:
        self.links.remove(link)
        link.consumer.peers.lose(link)


class ScriptedPeers(Peers):
    """Links instead of connections."""

    def __init__(self, consumer: ConsumerProcess, client: ControlClient) -> None:
        super().__init__(client, TRUST, client._on_frame, client._on_lost)
        self._consumer = consumer
        self._links: dict[Endpoint, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def send(self, peer: Endpoint, payload: bytes) -> bool:
        if (link := self._links.get(peer)) is None:
            link = self._links[peer] = Link(self._consumer, peer)
            self._consumer.network.links.append(link)
        if not link.broken:
            link.up.append(payload)
        return not link.broken

    def receive(self) -> None:
        """What is on a link has not arrived: `take` is how it does."""

    def take(self, link: Link, frame: bytes) -> None:
        if self._links.get(link.peer) is link:
            self._on_frame(link.peer, frame)

    def lose(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._on_lost(link.peer, Cause.PEER_UNREACHABLE, "is gone")


class ScriptedListener:
    """The other ends of a producer's links."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def send(self, identity: bytes, payload: bytes) -> None:
        for link in self._network.links:
            if link.identity == identity and not link.broken:
                link.down.append(payload)


# The processes.


def make_manager() -> KVCacheManager:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=256,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def make_common(manager: KVCacheManager, role: Role) -> Common:
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager)
    phantoms, loads = PhantomBlocks(manager.block_pool, (GROUP,)), Loads()
    return Common(
        scheduler=scheduler,
        config=PDConfig(role=role, engine_id="p", host="127.0.0.1", port=0),
        stats=Stats(),
        groups=(GROUP,),
        sharding=Sharding(),
        phantoms=phantoms,
        loads=loads,
        parking=Parking(manager, (GROUP,), phantoms, loads),
    )


class ProducerProcess:
    """One start of a producer: both of its processes, and the prompts that it computes."""

    def __init__(self, network: Network, clock: Clock, port: int) -> None:
        self.network = network
        self.endpoint = Endpoint("127.0.0.1", port, TRUST.key)
        self.manager = make_manager()
        self.pool = self.manager.block_pool
        self.num_free = self.pool.get_num_free_blocks()
        epoch = Epoch(f"epoch-{next(_numbers)}")
        self.book = LeaseBook(epoch, "same", LEASE_S, clock)
        self.book.page_servers = (PageServer(Endpoint("127.0.0.1", 1), TicketKey()),)
        self.server = ControlServer(self.book, lambda: None, TRUST, ARRIVAL_TIMEOUT_S, clock)
        scripted: Any = ScriptedListener(network)
        self.server.listener = scripted
        common = make_common(self.manager, Role.PRODUCER)
        self.stats = common.stats
        self.producer = Producer(
            common,
            self.book,
            self.server,
            epoch,
            self.endpoint,
            sampling_key=lambda request: b"alike",
        )
        self.grants = Grants()
        self.arrived: list[Request] = []
        self.running: list[Request] = []
        network.producers[self.endpoint] = self

    def take(self, identity: bytes, frame: bytes) -> None:
        self.server._on_frame(identity, frame)

    def arrive(self, tokens: list[int], transfer_id: str | None = None) -> Request | None:
        """A request, with the transfer id that a router chose or without; maybe not accepted."""
        params: dict[str, Any] = {"do_remote_decode": True}
        if transfer_id is not None:
            params["transfer_id"] = transfer_id
        request = make_request(tokens, params)
        if self.producer.expect(request) is not None:
            return None
        self.arrived.append(request)
        return request

    def compute(self, request: Request) -> bool:
        """The whole prompt, in one or two steps; not when memory is short."""
        while (left := request.num_tokens - request.num_computed_tokens) > 0:
            num_tokens = min(left, 2 * BLOCK_SIZE)
            if self.manager.allocate_slots(request, num_tokens) is None:
                return False
            self._step({request.request_id: num_tokens})
            request.num_computed_tokens += num_tokens
        self.arrived.remove(request)
        self.running.append(request)
        return True

    def end_prefill(self, request: Request, status: RequestStatus) -> dict[str, Any] | None:
        (self.running if request in self.running else self.arrived).remove(request)
        request.status = status
        if status is not RequestStatus.FINISHED_ABORTED:
            request.append_output_token_ids(first_token_of(request.prompt_token_ids or ()))
        ending = Ending()
        self.producer.finish(request, ending)
        self.manager.free(request)
        return ending.params

    def preempt(self, request: Request) -> None:
        """Its blocks are gone; nobody computes it again here."""
        self._step({}, {request.request_id})
        self.end_prefill(request, RequestStatus.FINISHED_ABORTED)

    def tick(self) -> None:
        """The control thread's clock, then what the scheduler and its worker make of it."""
        self.server.run_commands()
        self.server.on_tick()
        if self.producer.settle():
            self._step({})

    def _step(self, num_scheduled: dict[str, int], preempted: set[str] | None = None) -> None:
        self.producer.collect_closed()  # the engine does so before each step
        output: Any = SimpleNamespace(
            num_scheduled_tokens=num_scheduled, preempted_req_ids=preempted
        )
        grants = self.producer.build_grants(output)
        self.grants.discard(self.producer.take_revokes())
        self.grants.begin_step(grants)
        self.grants.end_step()

    def stop(self) -> None:
        self.network.producers.pop(self.endpoint, None)
        for link in self.network.links:
            if link.producer is self:
                self.network.cut(link)
        self.server.stop()


class _Outcomes(queue.SimpleQueue[OpenOutcome]):
    """Every open is answered once, and told one first token at most."""

    def __init__(self) -> None:
        self._seen: set[tuple[Hashable, bool]] = set()

    def put(self, item: OpenOutcome, block: bool = True, timeout: float | None = None) -> None:
        seen = item.key, isinstance(item.answer, FirstToken | None)
        assert seen not in self._seen, "an open was answered twice"
        self._seen.add(seen)
        super().put(item)


class ConsumerProcess:
    """One start of a consumer's scheduler process. Its worker's loads end as the test says."""

    def __init__(self, network: Network, clock: Clock) -> None:
        self.network = network
        self.client = ControlClient(PEER_TIMEOUT_S, HEARTBEAT_S, TRUST, ARRIVAL_TIMEOUT_S, clock)
        self.peers = ScriptedPeers(self, self.client)
        self.client.peers = self.peers
        self.client.outcomes = _Outcomes()
        self.consumer = Consumer(
            common=make_common(make_manager(), Role.CONSUMER),
            client=self.client,
            fingerprint="same",
            sampling_key=lambda request: b"alike",
            divides_pages=True,
            vocab_size=VOCAB_SIZE,
        )
        self.consumer.known = KnownPeers(max_failures=3, clock=clock)
        self.requests: list[Request] = []
        self.ended: list[tuple[Request, RemotePrompt, Provenance]] = []
        self.loading: list[RemotePrompt] = []

    def add(self, tokens: list[int], params: dict[str, Any]) -> tuple[Cause, str] | None:
        request = make_request(tokens, params)
        refused = self.consumer.add(request, params)
        if refused is None:
            self.requests.append(request)
        return refused

    def remote(self, request: Request) -> RemotePrompt:
        remote = self.consumer.find(request)
        assert remote is not None
        return remote

    def turn(self) -> None:
        """The control thread's queue, then what the scheduler makes of the answers."""
        self.client.run_commands()
        self.consumer.collect()
        for remote in self.consumer.take_first_tokens():
            assert remote.first_token_id is not None
            remote.request.append_output_token_ids(remote.first_token_id)

    def tick(self) -> None:
        self.turn()
        self.client.on_tick()
        self.consumer.collect()

    def load(self, request: Request) -> None:
        remote = self.remote(request)
        remote.load_started()
        self.loading.append(remote)

    def admit(self, request: Request) -> None:
        remote = self.remote(request)
        num_peer = request.num_tokens - 1 if remote.num_loads else 0
        remote.admit(0, num_peer, [])

    def end_load(self, remote: RemotePrompt, cause: str) -> None:
        self.loading.remove(remote)
        result = LoadResult(LoadId(0), cause, 100, 1.0)
        remote.load_ended(result, {}, was_parked=remote.parked)

    def finish(self, request: Request) -> None:
        remote = self.remote(request)
        self.requests.remove(request)
        ending = Ending()
        self.consumer.finish(request, ending)
        assert ending.provenance is not None
        self.ended.append((request, remote, ending.provenance))

    def stop(self) -> None:
        self.network.links = [link for link in self.network.links if link.consumer is not self]
        self.client.stop()
