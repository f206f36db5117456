# SPDX-License-Identifier: Apache-2.0
"""Two KV cache groups between two workers: layers that take turns, blocks of different size.

layer of the engine   0  1  2  3
group 0               0     1       blocks of 1 token
group 1                  0     1    blocks of 2 tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.transfer.raw_peers import wait_until
from tests.unit.transfer.test_send_receive import PAGE, Pair
from vllm_ascend_pd.backends.block_copy import GroupPages, PageLayout
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause

THEIRS = ((3, 4, 5, 6), (8, 9))
OURS = ((10, 11, 12, 13), (20, 21))
LAYERS = ([0, 2], [1, 3])
NUM_TOKENS = 4


def two_groups(layout: PageLayout) -> tuple[GroupPages, ...]:
    return (GroupPages.of(layout, 1, LAYERS[0]), GroupPages.of(layout, 2, LAYERS[1]))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(FaultScript(), make_groups=two_groups, push_mode=PushMode.LAYER)
    yield pair
    pair.stop()
    assert (pair.server.num_errors, pair.loader.num_errors) == (0, 0)


def begin_step(pair: Pair, num_ready: int, num_coming: int) -> None:
    pair.grants.begin_step([Grant(pair.lease(), "e", THEIRS, num_ready, num_coming)])
    pair.server.notify()


def spec_of(pair: Pair, end: int = NUM_TOKENS, **changes: object) -> LoadSpec:
    blocks = (LoadBlocks(0, (0, 1, 2, 3), OURS[0]), LoadBlocks(1, (0, 1), OURS[1]))
    spec = pair.spec((), (), admitted=pair.admit(end=end))
    return replace(spec, **{"blocks": blocks, **changes})


def has(pair: Pair, group: int) -> list[bool]:
    """Of each of the group's layers, whether all its blocks have come."""
    ours, theirs = pair.ours.bytes, pair.theirs.bytes
    return [
        bool((ours[layer, OURS[group]] == theirs[layer, THEIRS[group]]).all())
        for layer in LAYERS[group]
    ]


def test_blocks_come_into_the_layers_of_their_group_and_into_no_other(pair: Pair) -> None:
    before = pair.ours.bytes.copy()
    begin_step(pair, NUM_TOKENS, NUM_TOKENS)
    result = pair.run(spec_of(pair))
    assert (result.cause, result.num_bytes) == ("", (2 * 4 + 2 * 2) * PAGE)
    assert has(pair, 0) + has(pair, 1) == [True] * 4
    for group, layers in enumerate(LAYERS):
        others = [block for block in range(before.shape[1]) if block not in OURS[group]]
        pages = np.ix_(layers, others)
        np.testing.assert_array_equal(pair.ours.bytes[pages], before[pages])


def test_layer_is_waited_for_in_its_own_group(pair: Pair) -> None:
    begin_step(pair, NUM_TOKENS, NUM_TOKENS)
    pair.loader.start_load(spec_of(pair))
    for layer in range(4):
        pair.loader.wait_layer(layer)
        group, index = layer % 2, layer // 2
        assert has(pair, group)[index]
    pair.loader.wait_all()
    (result,) = pair.loader.take_results()
    assert result.cause == ""


def test_layers_of_both_groups_come_as_the_engine_computes_them(pair: Pair) -> None:
    pair.loader.start_load(spec_of(pair, in_step=False, num_awaited=NUM_TOKENS))
    begin_step(pair, 0, NUM_TOKENS)
    for layer in range(4):
        pair.grants.layer_done(layer)
        pair.server.notify()
        wait_until(lambda layer=layer: has(pair, layer % 2)[layer // 2])
        assert not any(has(pair, 1 - layer % 2)[(layer + 1) // 2 :])
    pair.grants.end_step()
    pair.server.notify()
    results: list[object] = []
    wait_until(lambda: bool(results.extend(pair.loader.take_results()) or results))


@pytest.mark.parametrize(
    ("end", "blocks", "cause"),
    [
        (3, (LoadBlocks(0, (0, 1, 2), OURS[0][:3]), LoadBlocks(1, (0, 1), OURS[1])), ""),
        (3, (LoadBlocks(0, (0, 1, 2, 3), OURS[0]),), Cause.NO_TICKET.value),
        (2, (LoadBlocks(1, (0, 1), OURS[1]),), Cause.NO_TICKET.value),
        (4, (LoadBlocks(1, (0, 1), OURS[1]),), Cause.NOT_COMPUTED.value),
    ],
    ids=["tail of a larger block", "beyond in group 0", "beyond in group 1", "not computed"],
)
def test_tokens_say_which_blocks_of_each_group_may_be_read(
    pair: Pair, end: int, blocks: tuple[LoadBlocks, ...], cause: str
) -> None:
    begin_step(pair, 3, 3)
    assert pair.run(spec_of(pair, end, blocks=blocks)).cause == cause


@pytest.mark.parametrize(
    ("num_computed", "end", "index", "cause"),
    [
        (3, 3, 1, ""),
        (4, 4, 1, ""),
        (4, 2, 0, ""),
        (4, 3, 1, Cause.NOT_COMPUTED.value),
        (2, 1, 0, Cause.NOT_COMPUTED.value),
    ],
    ids=["tail", "full tail", "boundary before", "tail behind one more", "block behind one more"],
)
def test_a_state_is_that_behind_the_tokens_that_are_asked_for(
    num_computed: int, end: int, index: int, cause: str
) -> None:
    pair = Pair(
        FaultScript(), make_groups=lambda layout: (GroupPages.of(layout, 2, LAYERS[1], True),)
    )
    try:
        pair.grants.begin_step([Grant(pair.lease(), "e", THEIRS[1:], num_computed, num_computed)])
        blocks = (LoadBlocks(0, (index,), OURS[1][:1]),)
        assert pair.run(spec_of(pair, end, blocks=blocks)).cause == cause
    finally:
        pair.stop()
