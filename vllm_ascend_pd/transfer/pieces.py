# SPDX-License-Identifier: Apache-2.0
"""In which pieces a prompt's pages travel. Pure.

A piece is what fits one staging slot: some consecutive layers of some blocks, layer-major, so that
early layers land first. The tail block travels ahead of all others, because the attention of
every layer writes the last token into it.

    blocks   0  1  2 tail              pieces (slot = 3 pages)
    layer 0  b  b  b  a                a: layers 0-1 of the tail
    layer 1  c  c  c  a                b: layer 0 of blocks 0-2
                                       c: layer 1 of blocks 0-2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers ``[first_layer, first_layer + num_layers)`` of blocks ``[start, stop)`` of a load."""

    first_layer: int
    num_layers: int
    start: int
    stop: int
    tail: bool

    def num_bytes(self, page_bytes: int) -> int:
        return self.num_layers * (self.stop - self.start) * page_bytes


def plan_pieces(
    num_layers: int, num_blocks: int, has_tail: bool, page_bytes: int, slot_bytes: int
) -> list[Piece]:
    """All pieces of a load of ``num_blocks`` blocks, the last of which is the tail if there is one.

    Every page is in exactly one piece. ``page_bytes`` is that of one block in one layer and at
    most ``slot_bytes``.
    """
    pages_per_piece = slot_bytes // page_bytes
    num_full = num_blocks - has_tail
    pieces: list[Piece] = []
    if has_tail:
        for layer in range(0, num_layers, pages_per_piece):
            count = min(pages_per_piece, num_layers - layer)
            pieces.append(Piece(layer, count, num_full, num_blocks, True))
    if num_full:
        pieces += _split(0, num_layers, 0, num_full, pages_per_piece)
    return pieces


def plan_ready(planned: list[int], ready: list[int], pages_per_piece: int) -> list[Piece]:
    """Pieces of what has become ready: blocks ``[planned[l], ready[l])`` of every layer ``l``.

    Counts of leading blocks of a load; consecutive layers with the same two counts share pieces.
    """
    pieces: list[Piece] = []
    first = 0
    for (start, stop), same in groupby(zip(planned, ready, strict=True)):
        num_layers = len(list(same))
        if stop > start:
            pieces += _split(first, num_layers, start, stop, pages_per_piece)
        first += num_layers
    return pieces


def _split(
    first_layer: int, num_layers: int, start: int, stop: int, pages_per_piece: int
) -> list[Piece]:
    """A rectangle of pages as pieces: whole layers if a layer fits, else parts of one."""
    num_blocks = stop - start
    end = first_layer + num_layers
    if num_blocks <= pages_per_piece:
        step = pages_per_piece // num_blocks
        return [
            Piece(layer, min(step, end - layer), start, stop, False)
            for layer in range(first_layer, end, step)
        ]
    return [
        Piece(layer, 1, begin, min(begin + pages_per_piece, stop), False)
        for layer in range(first_layer, end)
        for begin in range(start, stop, pages_per_piece)
    ]
