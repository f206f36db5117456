# SPDX-License-Identifier: Apache-2.0
"""What the router knows of an engine's prefix cache, from the events of vLLM's own publisher."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.router.prefix.index import IndexState, PrefixIndex, chain
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


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def hits(index: PrefixIndex, tokens: list[int]) -> int:
    return index.num_hit_tokens(chain(tokens, BLOCK))


TOKENS = list(range(12))


def test_blocks_that_follow_each_other_are_a_prefix() -> None:
    index = PrefixIndex()
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
    index = PrefixIndex()
    index.receive(0, batch(stored([1], None, TOKENS[:4]), stored([2], None, TOKENS[:4])))
    index.receive(1, batch(removed(1)))
    assert hits(index, TOKENS) == 4
    index.receive(2, batch(removed(2), removed(2), removed(77)))
    assert hits(index, TOKENS) == 0
    assert len(index) == 0


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
    index = PrefixIndex()
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
    index = PrefixIndex()
    index.receive(0, batch(*in_groups([b"a"], None, TOKENS[:4])))
    index.receive(1, batch(*in_groups([b"b"], b"a", TOKENS[4:8]), removed(b"a", group_idx=0)))
    assert hits(index, TOKENS) == 8
    index.receive(2, batch(removed(b"b", group_idx=2)))
    assert hits(index, TOKENS) == 8
    index.receive(3, batch(removed(b"b", group_idx=1)))
    assert hits(index, TOKENS) == 4
    assert len(index) == 1


def test_an_engine_that_starts_anew_may_have_other_groups() -> None:
    index = PrefixIndex()
    index.receive(0, batch(*in_groups([b"a"], None, TOKENS[:4])))
    index.receive(0, batch(stored([b"b"], None, TOKENS[:4])))
    assert hits(index, TOKENS) == 4


def test_model_of_windows_only_is_known_by_its_first_layers() -> None:
    index = PrefixIndex()
    kind = {"kv_cache_spec_kind": "sliding_window"}
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8], group_idx=0, **kind)))
    assert hits(index, TOKENS) == 8


def test_blocks_that_say_only_which_weights_they_are_of_are_hit() -> None:
    index = PrefixIndex()
    keys = [[GENERATION_SALT + "files-1"], None]
    index.receive(0, batch(stored([b"a", b"b"], None, TOKENS[:8], extra_keys=keys)))
    assert hits(index, TOKENS) == 8


@pytest.mark.parametrize("first", [True, False])
def test_parts_of_blocks_are_left_out(first: bool) -> None:
    index = PrefixIndex()
    part = {**stored([b"part"], None, TOKENS[:2]), "block_size": 2}
    whole = stored([b"a", b"b"], None, TOKENS[:8])
    index.receive(0, batch(*((part, whole) if first else (whole, part))))
    assert index.block_size == BLOCK
    assert hits(index, TOKENS) == 8
    assert index.num_hit_tokens(chain(TOKENS, 2)) == 0


def test_who_comes_late_knows_less_until_the_cache_is_cleared() -> None:
    index = PrefixIndex()
    index.receive(7, batch(stored([b"b"], b"before us", TOKENS[4:8])))
    assert index.state is IndexState.DEGRADED
    assert len(index) == 0
    index.receive(8, batch(stored([b"a"], None, TOKENS[:4])))
    assert hits(index, TOKENS) == 4
    index.receive(9, batch(CLEARED))
    assert index.state is IndexState.EXACT
    assert hits(index, TOKENS) == 0


def test_gap_forgets_what_may_have_been_removed() -> None:
    index = PrefixIndex()
    index.receive(0, batch(stored([b"a"], None, TOKENS[:4])))
    index.receive(2, batch())
    assert index.state is IndexState.DEGRADED
    assert hits(index, TOKENS) == 0


def test_repeated_message_changes_nothing_and_a_restart_begins_anew() -> None:
    index = PrefixIndex()
    for seq in range(3):
        index.receive(seq, batch(stored([seq], None, [seq] * 4)))
    index.receive(1, batch(removed(0, 1, 2)))
    assert len(index) == 3
    index.receive(0, batch(stored([b"new"], None, TOKENS[:4])))
    assert len(index) == 1
    assert index.state is IndexState.EXACT


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_blocks=10)
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
    index = PrefixIndex()
    index.receive(0, batch(stored([b"a"], None, TOKENS[:4])))
    index.receive(1, batch({**stored([b"b"], b"a", TOKENS[4:8]), **wrong}))
    assert index.state is IndexState.DEGRADED
    index.receive(2, batch(stored([b"c"], None, TOKENS[:4])))
    assert hits(index, TOKENS) == 4


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_any_bytes_are_survived(payloads: list[bytes]) -> None:
    index = PrefixIndex()
    for seq, payload in enumerate(payloads):
        index.receive(seq, payload)
    assert hits(index, TOKENS) == 0


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=4))))
def test_index_agrees_with_a_set_of_prefixes(steps: list[tuple[bool, list[int]]]) -> None:
    """Against a model that keeps whole prefixes: store a path of blocks, or remove its last."""
    index = PrefixIndex()
    model: set[tuple[int, ...]] = set()
    for seq, (store, path) in enumerate(steps):
        prefixes = [tuple(path[: i + 1]) for i in range(len(path))]
        events = []
        if store:
            for prefix in prefixes:
                parent = str(prefix[:-1]) if len(prefix) > 1 else None
                if prefix not in model:
                    events.append(stored([str(prefix).encode()], parent and parent.encode(),
                                         [prefix[-1]] * BLOCK))  # fmt: skip
                    model.add(prefix)
        else:  # an engine removes no block before those that follow it
            gone = {p for p in model if p[: len(path)] == tuple(path)}
            model -= gone
            events.append(removed(*(str(p).encode() for p in gone)))
        index.receive(seq, batch(*events))
    for _, path in steps:
        tokens = [token for token in path for _ in range(BLOCK)]
        known = 0
        while known < len(path) and tuple(path[: known + 1]) in model:
            known += 1
        assert hits(index, tokens) == known * BLOCK
    assert index.state in (IndexState.EXACT, IndexState.FALLBACK)
