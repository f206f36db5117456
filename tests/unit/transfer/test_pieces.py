# SPDX-License-Identifier: Apache-2.0
"""Cutting a load into pieces."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.transfer.pieces import Piece, plan_pieces

PAGE = 64


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, int, bool, int]:
    """Layers, blocks, whether the last block is a tail, pages in a slot."""
    has_tail = draw(st.booleans())
    return (
        draw(st.integers(1, 40)),
        draw(st.integers(1, 60)),
        has_tail,
        draw(st.integers(1, 50)),
    )


def pages_of(piece: Piece) -> list[tuple[int, int]]:
    layers = range(piece.first_layer, piece.first_layer + piece.num_layers)
    return [(layer, block) for layer in layers for block in range(piece.start, piece.stop)]


@given(loads(), st.integers(0, PAGE - 1))
def test_every_page_is_in_exactly_one_piece(load: tuple[int, int, bool, int], rest: int) -> None:
    num_layers, num_blocks, has_tail, pages = load
    pieces = plan_pieces(num_layers, num_blocks, has_tail, PAGE, pages * PAGE + rest)
    seen = Counter(page for piece in pieces for page in pages_of(piece))
    assert set(seen) == {(i, b) for i in range(num_layers) for b in range(num_blocks)}
    assert set(seen.values()) == {1}


@given(loads(), st.integers(0, PAGE - 1))
def test_pieces_fit_the_slot(load: tuple[int, int, bool, int], rest: int) -> None:
    num_layers, num_blocks, has_tail, pages = load
    slot_bytes = pages * PAGE + rest
    for piece in plan_pieces(num_layers, num_blocks, has_tail, PAGE, slot_bytes):
        assert 0 < piece.num_bytes(PAGE) <= slot_bytes
        assert piece.num_bytes(PAGE) == len(pages_of(piece)) * PAGE


@given(loads())
def test_tail_travels_first_and_alone(load: tuple[int, int, bool, int]) -> None:
    num_layers, num_blocks, has_tail, pages = load
    pieces = plan_pieces(num_layers, num_blocks, has_tail, PAGE, pages * PAGE)
    tails = [piece.tail for piece in pieces]
    assert tails == sorted(tails, reverse=True)
    assert any(tails) is has_tail
    for piece in pieces:
        is_last_block = (piece.start, piece.stop) == (num_blocks - 1, num_blocks)
        assert not piece.tail or is_last_block


@given(loads())
def test_early_layers_travel_before_late_ones(load: tuple[int, int, bool, int]) -> None:
    num_layers, num_blocks, has_tail, pages = load
    pieces = plan_pieces(num_layers, num_blocks, has_tail, PAGE, pages * PAGE)
    for tail in (True, False):
        first_layers = [piece.first_layer for piece in pieces if piece.tail is tail]
        assert first_layers == sorted(first_layers)


def test_small_load_is_one_piece() -> None:
    assert plan_pieces(4, 3, False, PAGE, 12 * PAGE) == [Piece(0, 4, 0, 3, False)]
