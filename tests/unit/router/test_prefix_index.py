# SPDX-License-Identifier: Apache-2.0
"""What the router knows of an engine's prefix cache, from the events of vLLM's own publisher."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.router.prefix.index import Holders, IndexState, PrefixIndex
from vllm_ascend_pd.types import GENERATION_SALT

BLOCK = 4


def stored(hashes: list[Any], parent: Any, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any], ts: float = 1.5) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), 0])


def hits(index: PrefixIndex, tokens: list[int]) -> int:
    return int(index.holders.num_hit_tokens(tokens)[index.slot])


TOKENS = list(range(12))


def test_blocks_that_follow_each_other_are_a_prefix() -> None:
    index = PrefixIndex(Holders())
    assert index.state is IndexState.FALLBACK
    assert hits(index, TOKENS) == 0
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8])))
    index.receive(1, batch(stored([b"c"], b"b", TOKENS[8:])))
    assert index.state is IndexState.EXACT
    assert hits(index, TOKENS) == 12
    assert hits(index, [*TOKENS, 99]) == 12
    assert hits(index, [*TOKENS[:7], 99, *TOKENS[8:]]) == 4
    assert hits(index, TOKENS[4:]) == 0
    index.receive(2, batch(removed(b"b")))
    assert hits(index, TOKENS) == 4


def test_prefix_held_twice_is_gone_when_both_are() -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(stored([1], None, TOKENS[:4]), stored([2], None, TOKENS[:4])))
    index.receive(1, batch(removed(1)))
    assert hits(index, TOKENS) == 4
    index.receive(2, batch(removed(2), removed(2), removed(77)))
    assert hits(index, TOKENS) == 0
    assert len(index) == 0


def test_block_held_twice_is_gone_when_both_are() -> None:
    """Requests that came together have computed it each; vLLM tells of each block."""
    index = PrefixIndex(Holders())
    twice = stored([b"a"], None, TOKENS[:4])
    index.receive(0, batch(twice, stored([b"b"], b"a", TOKENS[4:8]), twice, twice))
    for seq in (1, 2):
        index.receive(seq, batch(removed(b"a")))
        assert hits(index, TOKENS) == 8
    index.receive(3, batch(removed(b"a")))
    assert hits(index, TOKENS) == 0
    index.receive(4, batch(twice, twice))
    index.receive(5, batch(CLEARED, twice))
    index.receive(6, batch(removed(b"a")))
    assert hits(index, TOKENS) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"lora_name": "adapter"},
        {"extra_keys": [["salt"]]},
        {"medium": "CPU"},
        {"medium": "STORAGE"},
        {"group_idx": 1},
    ],
    ids=str,
)
def test_blocks_that_a_plain_prompt_cannot_hit_are_left_out(more: dict[str, Any]) -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(stored([b"a"], None, TOKENS[:4], **more)))
    index.receive(1, batch(stored([b"b"], b"a", TOKENS[4:8])))
    assert hits(index, TOKENS) == 0


def in_groups(hashes: list[Any], parent: Any, tokens: list[int]) -> list[dict[str, Any]]:
    """As of a model whose first layers have a window, and others none."""
    kinds = ("sliding_window", "full_attention", "full_attention")
    return [
        stored(hashes, parent, tokens, group_idx=group, kv_cache_spec_kind=kind)
        for group, kind in enumerate(kinds)
    ]


def test_prefix_is_known_by_layers_that_keep_all_of_it() -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(*in_groups([b"a"], None, TOKENS[:4])))
    index.receive(1, batch(*in_groups([b"b"], b"a", TOKENS[4:8]), removed(b"a", group_idx=0)))
    assert hits(index, TOKENS) == 8
    index.receive(2, batch(removed(b"b", group_idx=2)))
    assert hits(index, TOKENS) == 8
    index.receive(3, batch(removed(b"b", group_idx=1)))
    assert hits(index, TOKENS) == 4
    assert len(index) == 1


def test_an_engine_that_starts_anew_may_have_other_groups() -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(*in_groups([b"a"], None, TOKENS[:4])))
    index.receive(0, batch(stored([b"b"], None, TOKENS[:4])))
    assert hits(index, TOKENS) == 4


def test_model_of_windows_only_is_known_by_its_first_layers() -> None:
    index = PrefixIndex(Holders())
    kind = {"kv_cache_spec_kind": "sliding_window"}
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8], group_idx=0, **kind)))
    assert hits(index, TOKENS) == 8


def test_blocks_that_say_only_which_weights_they_are_of_are_hit() -> None:
    index = PrefixIndex(Holders())
    keys = [[GENERATION_SALT + "files-1"], None]
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8], extra_keys=keys)))
    assert hits(index, TOKENS) == 8


def test_blocks_of_the_weights_before_are_not_hit() -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8])))
    index.receive(1, batch(stored([b"salted"], None, [0] * 4, extra_keys=[["salt"]])))
    assert hits(index, TOKENS) == 8
    for seq in (2, 3):
        keys = [[GENERATION_SALT + str(seq)], None]
        index.receive(seq, batch(stored([seq, -seq], None, [seq] * 8, extra_keys=keys)))
        assert hits(index, [seq] * 8) == 8
        assert len(index) == 2
    index.receive(4, batch(stored([b"c"], -3, TOKENS[:4])))
    assert len(index) == 3


@pytest.mark.parametrize("first", [True, False])
def test_parts_of_blocks_are_left_out(first: bool) -> None:
    index = PrefixIndex(Holders())
    part = {**stored([b"part"], None, TOKENS[:2]), "block_size": 2}
    whole = stored([b"a", b"b"], None, TOKENS[:8])
    index.receive(0, batch(*((part, whole) if first else (whole, part))))
    assert index.block_size == BLOCK
    assert hits(index, TOKENS) == 8
    assert len(index) == 2


def test_an_engine_that_starts_anew_may_have_smaller_blocks() -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8])))
    small = {**stored([1, 2, 3], None, TOKENS[:6]), "block_size": 2}
    index.receive(0, batch(small, ts=2.0))
    assert (index.state, index.block_size, hits(index, TOKENS)) == (IndexState.EXACT, 2, 6)


def test_who_comes_late_knows_less_until_the_cache_is_cleared() -> None:
    index = PrefixIndex(Holders())
    index.receive(7, batch(stored([b"b"], b"before us", TOKENS[4:8])))
    assert index.state is IndexState.DEGRADED
    assert len(index) == 0
    index.receive(8, batch(stored([b"a"], None, TOKENS[:4])))
    assert hits(index, TOKENS) == 4
    index.receive(9, batch(CLEARED))
    assert index.state is IndexState.EXACT
    assert hits(index, TOKENS) == 0


def test_gap_forgets_what_may_have_been_removed() -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(stored([b"a"], None, TOKENS[:4])))
    index.receive(2, batch())
    assert index.state is IndexState.DEGRADED
    assert hits(index, TOKENS) == 0


def test_repeated_message_changes_nothing_and_a_restart_begins_anew() -> None:
    index = PrefixIndex(Holders())
    for seq in range(3):
        index.receive(seq, batch(stored([seq], None, [seq] * 4)))
    index.receive(1, batch(removed(0, 1, 2)))
    assert len(index) == 3
    index.receive(0, batch(stored([b"new"], None, TOKENS[:4])))
    assert len(index) == 1
    assert index.state is IndexState.EXACT


def test_restart_is_recognised_though_its_first_messages_were_missed() -> None:
    index = PrefixIndex(Holders())
    for seq in range(9):
        index.receive(seq, batch(stored([seq], None, [seq] * 4), ts=100 + seq))
    index.receive(7, batch(CLEARED, ts=107))
    index.receive(7, b"not understood")
    assert len(index) == 9
    index.receive(2, batch(stored([b"a"], None, TOKENS[:4]), ts=200))
    assert index.state is IndexState.DEGRADED
    assert len(index) == hits(index, TOKENS) / BLOCK == 1
    index.receive(3, batch(stored([b"b"], b"a", TOKENS[4:8]), ts=201))
    assert hits(index, TOKENS) == 8


def test_memory_is_bounded() -> None:
    index = PrefixIndex(Holders(), max_blocks=10)
    for seq in range(100):
        index.receive(seq, batch(stored([seq], None, [seq] * 4)))
    assert len(index) == 10
    assert index.state is IndexState.DEGRADED


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 0}, {"block_size": -4}, {"token_ids": [1 << 63] * 4}, {"token_ids": [-1] * 4}],
    ids=str,
)
def test_event_that_makes_no_sense_is_not_believed(wrong: dict[str, Any]) -> None:
    index = PrefixIndex(Holders())
    index.receive(0, batch(stored([b"a"], None, TOKENS[:4])))
    index.receive(1, batch({**stored([b"b"], b"a", TOKENS[4:8]), **wrong}))
    assert index.state is IndexState.DEGRADED
    index.receive(2, batch(stored([b"c"], None, TOKENS[:4])))
    assert hits(index, TOKENS) == 4


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_any_bytes_are_survived(payloads: list[bytes]) -> None:
    index = PrefixIndex(Holders())
    for seq, payload in enumerate(payloads):
        index.receive(seq, payload)
    assert hits(index, TOKENS) == 0


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
WHAT = st.sampled_from(("store", "store", "store", "remove", "clear", "replace"))


@given(st.lists(st.tuples(st.integers(0, 2), WHAT, PATHS)))
def test_each_engines_index_agrees_with_a_set_of_prefixes(
    steps: list[tuple[int, str, list[int]]],
) -> None:
    """Against a model that keeps whole prefixes: store a path of blocks, or remove its last."""
    holders = Holders()
    indexes = [PrefixIndex(holders) for _ in range(3)]
    models: list[set[tuple[int, ...]]] = [set() for _ in indexes]
    for seq, (who, what, path) in enumerate(steps):
        model = models[who]
        prefixes = [tuple(path[: i + 1]) for i in range(len(path))]
        events = []
        if what == "store":
            for prefix in prefixes:
                parent = str(prefix[:-1]) if len(prefix) > 1 else None
                if prefix not in model:
                    events.append(stored([str(prefix).encode()], parent and parent.encode(),
                                         [prefix[-1]] * BLOCK))  # fmt: skip
                    model.add(prefix)
        elif what == "remove":  # an engine removes no block before those that follow it
            gone = {p for p in model if p[: len(path)] == tuple(path)}
            model -= gone
            events.append(removed(*(str(p).encode() for p in gone)))
        else:
            model.clear()
            events.append(CLEARED)
            if what == "replace":
                indexes[who].close()
                indexes[who] = PrefixIndex(holders)
        # Each engine counts its own messages; what matters here is that none is missed.
        indexes[who]._next_seq = seq or None
        indexes[who].receive(seq, batch(*events))
    for index, model in zip(indexes, models, strict=True):
        for _, _, path in steps:
            tokens = [token for token in path for _ in range(BLOCK)]
            known = 0
            while known < len(path) and tuple(path[: known + 1]) in model:
                known += 1
            assert hits(index, tokens) == known * BLOCK
        index.close()
    assert not holders._slots
    assert not holders.num_hit_tokens(TOKENS).any()


def test_engines_with_other_block_sizes_hold_the_same_prompt() -> None:
    holders = Holders()
    small, large, empty = (PrefixIndex(holders) for _ in range(3))
    small.receive(0, batch({**stored([1, 2, 3], None, TOKENS[:6]), "block_size": 2}))
    large.receive(0, batch(stored([1, 2], None, TOKENS[:8])))
    assert [hits(index, TOKENS) for index in (small, large, empty)] == [6, 8, 0]
    small.close()
    taken = PrefixIndex(holders)
    assert [hits(index, TOKENS) for index in (taken, large)] == [0, 8]


def test_what_comes_for_an_engine_that_is_gone_is_not_the_next_ones() -> None:
    holders = Holders()
    gone = PrefixIndex(holders)
    gone.close()
    gone.close()
    engines = [PrefixIndex(holders) for _ in range(2)]
    gone.receive(0, batch(stored([b"a"], None, TOKENS[:4])))
    assert [hits(one, TOKENS) for one in engines] == [0, 0]
    assert len({one.slot for one in engines}) == 2
    for one in engines:
        one.close()
    assert not holders._slots


def test_very_many_engines_are_told_apart() -> None:
    holders = Holders()
    indexes = [PrefixIndex(holders) for _ in range(600)]
    for number, index in enumerate(indexes):
        index.receive(0, batch(stored([1, 2, 3][: number % 4], None, TOKENS)))
    assert [hits(index, TOKENS) for index in indexes] == [0, 4, 8, 12] * 150


def test_blocks_of_one_engine_alone_share_the_object_that_says_so() -> None:
    holders = Holders()
    for _ in range(40):  # so that the number is no small one, which Python keeps once by itself
        last = PrefixIndex(holders)
    for seq in range(20):
        last.receive(seq, batch(stored([seq], None, [seq] * BLOCK)))
    assert len({id(slots) for slots in holders._slots.values()}) == 1
    assert len(holders._slots) == 20
