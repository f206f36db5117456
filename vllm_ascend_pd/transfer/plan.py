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
    if not num_full:
        return pieces
    if num_full <= pages_per_piece:
        step = pages_per_piece // num_full
        for layer in range(0, num_layers, step):
            count = min(step, num_layers - layer)
            pieces.append(Piece(layer, count, 0, num_full, False))
        return pieces
    for layer in range(num_layers):
        for start in range(0, num_full, pages_per_piece):
            stop = min(start + pages_per_piece, num_full)
            pieces.append(Piece(layer, 1, start, stop, False))
    return pieces
