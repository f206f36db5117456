# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's thread does for long prompts and many requests: counted in calls, as time
depends on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from tests.engine.peer_world import make_request
from tests.engine.scripted_source import ScriptedSource
from tests.engine.test_phantom import BLOCK_SIZE, cached, publish
from tests.engine.test_phantom import make_request as request_of
from tests.engine.test_pool_scheduler import World
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.scheduler.phantom import Phantom, PhantomBlocks
from vllm_ascend_pd.engine.vllm_api.blocks import block_key, block_keys
from vllm_ascend_pd.kv.span import GroupBlocks, KVGroup, Span, Wanted
from vllm_ascend_pd.pool.messages import Lookup
from vllm_ascend_pd.transfer.leases import Lease, LeaseBook, Tail
from vllm_ascend_pd.types import Epoch, Place, TransferId


def num_calls(action: Callable[[], object]) -> int:
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def blocks_of(ids: range) -> list[Any]:
    return [SimpleNamespace(block_id=i, block_hash=str(i), is_null=False) for i in ids]


def test_what_a_request_shares_is_not_compared_with_each_load() -> None:
    """Each of many requests of a pass has a load in the step of its own, and all share a prefix."""
    loads = Loads()
    for i in range(50):
        request: Any = make_request([0], {})
        (own,) = blocks_of(range(i, i + 1))
        source = ScriptedSource(request, 1)
        loads.claim(request, source, [Phantom(own, own.block_hash, source, Wanted(0))])
    shared = blocks_of(range(1000, 2000))
    newcomer: Any = make_request([0], {})
    assert num_calls(lambda: loads.note_user(newcomer, shared)) < 1000
    assert not loads.is_under(newcomer)
    loads.note_user(newcomer, [*shared, *blocks_of(range(30, 31))])
    assert loads.is_under(newcomer)


def test_blocks_that_are_computed_on_a_long_load_share_what_they_are_computed_on() -> None:
    """Else there are as many entries as their product."""
    loads = Loads()
    request: Any = make_request([0], {})
    table = blocks_of(range(200))
    source = ScriptedSource(request, 100)
    phantoms = [Phantom(b, b.block_hash, source, Wanted(b.block_id)) for b in table[:100]]
    loads.claim(request, source, phantoms)
    loads.note_begin(request, 100)
    loads.note_computed(lambda request: [table])
    [record] = loads.new
    assert record.computed_on.keys() == set(range(100, 200))
    assert len({id(on) for _, on in record.computed_on.values()}) == 1
    assert record.bad_block_ids([7]) == {7, *range(100, 200)}


def test_blocks_of_those_that_load_are_gone_through_once_a_pass() -> None:
    """Where there are windows it is noted for each request of a pass what others compute."""
    loads = Loads()
    tables: dict[Any, Any] = {}
    for i in range(30):
        request: Any = make_request([0], {})
        tables[request] = [_Table(blocks_of(range(100 * i, 100 * i + 100)))]
        own = next(iter(tables[request][0]))
        source = ScriptedSource(request, 1)
        loads.claim(request, source, [Phantom(own, own.block_hash, source, Wanted(0))])
        loads.note_begin(request, 1)
        loads.note_computed(tables.__getitem__)
    assert max(table.num_looks for (table,) in tables.values()) < 5
    assert all(len(record.computed_on) == 99 for record in loads.new)
    last = list(tables)[-1]
    tables[last] = [[*tables[last][0], *blocks_of(range(5000, 5001))]]
    loads.note_computed(tables.__getitem__)
    assert len(loads.new[-1].computed_on) == 100


class _Table(list[Any]):
    """A table of blocks that counts how often all of them are looked at."""

    num_looks = 0

    def __iter__(self) -> Any:
        self.num_looks += 1
        return super().__iter__()


def test_running_requests_that_store_nothing_cost_a_step_little() -> None:
    """They are behind prompts that are stored."""
    world = World(put_decoded=False)
    requests = {str(i): world.request(BLOCK_SIZE, name=str(i)) for i in range(100)}
    for request in requests.values():
        world.saves.skip(request, BLOCK_SIZE)
        request.num_computed_tokens = 3 * BLOCK_SIZE
    output: Any = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(requests, 1))
    world.saves.note_step(output, requests)
    assert num_calls(world.saves.confirm) < 20


def test_keys_of_many_blocks_are_those_of_each() -> None:
    hashes: Any = request_of(4 * BLOCK_SIZE).block_hashes
    for group in 0, 3:
        assert [*block_keys(hashes, group)] == [block_key(one, group) for one in hashes]


def test_request_without_memory_is_not_looked_through_in_each_pass() -> None:
    """Its source has more blocks than memory has room for."""
    pool = BlockPool(num_gpu_blocks=201, enable_caching=True, hash_block_size=BLOCK_SIZE)
    phantoms = PhantomBlocks(pool, (KVGroup(0, BLOCK_SIZE, 1, ("layer",)),))
    request = request_of(300 * BLOCK_SIZE + 1)
    source = ScriptedSource(request, 300)
    used = pool.get_new_blocks(100)
    publish(pool, phantoms, request, source)
    ids = cached(pool, request)
    assert None not in ids[:100]
    assert set(ids[100:]) == {None}
    hits = [pool.blocks[i] for i in ids[:100] if i is not None]
    again = num_calls(lambda: phantoms.publish(request, [hits], source, 0))
    assert again < 50
    pool.free_blocks(used)
    publish(pool, phantoms, request, source)
    assert None not in cached(pool, request)[:200]


def test_prompt_that_ends_is_not_compared_with_all_that_wait_for_a_consumer() -> None:
    """They are many when consumers are gone."""
    book = LeaseBook(Epoch("e"), "same", lease_s=30.0, clock=lambda: 0.0)

    def finish(number: int) -> int:
        blocks = GroupBlocks(BLOCK_SIZE, tuple(range(50)))
        span = Span(0, 50 * BLOCK_SIZE, (blocks,))
        lease = Lease(TransferId(str(number)), span, (Tail((1,), b""),))
        book.grant(lease)
        book.finish(lease)
        return book.make_way(50 * 100)

    assert sum(map(finish, range(100))) == 0
    assert num_calls(lambda: finish(100)) < 1000
    assert len(book) == 100, "the oldest has made way"
    assert "0" not in book
    assert book.release("1", "e")
    assert finish(101) == 0
    assert finish(102) == 1
    assert "2" not in book


def test_long_prompt_that_waits_is_looked_up_again_more_seldom() -> None:
    """What a second of looking costs does not grow with the prompts that wait."""
    world = World()
    request = world.request(num_tokens=4000 * BLOCK_SIZE)
    world.source.add(request)
    world.find([Place.NOWHERE] * 4000)
    world.now += 7.9
    world.source.look_again(request)
    assert world.take(Lookup) == []
    world.now += 0.1
    world.source.look_again(request)
    assert len(world.take(Lookup)) == 1
