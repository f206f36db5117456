# SPDX-License-Identifier: Apache-2.0
"""Whose request goes first of those that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_pd.router.policies.base import Routed

Turn = tuple[bool, int, float, int]
"""Smaller is sooner: whether it comes for the first time, its priority below 0, its virtual time,
and its number, in order of arrival."""


class Turns:
    """By priority, then so that tenants get tokens by their weights (start-time fair queueing).
    Event loop thread."""

    def __init__(self) -> None:
        self._now = 0.0
        """Virtual time: the turn of whoever was admitted last."""
        self._number = 0

    def next(self, request: Routed, again: bool) -> Turn:
        """``again``: it was admitted before, and goes first."""
        self._number += 1
        tenant = request.tenant
        if again or tenant is None:
            return not again, 0, 0.0, self._number
        begins = max(self._now, tenant.due)
        request.num_turn_tokens = max(1, request.num_prompt_tokens + request.num_max_tokens)
        tenant.due = begins + request.num_turn_tokens / tenant.quota.weight
        return True, -tenant.quota.priority, begins, self._number

    def admitted(self, turn: Turn) -> None:
        self._now = max(self._now, turn[2])

    def left(self, request: Routed, turn: Turn) -> None:
        """Without having been admitted: its tenant has been served nothing for it."""
        is_first, tenant = turn[0], request.tenant
        if is_first and tenant is not None:
            tenant.due -= request.num_turn_tokens / tenant.quota.weight
            request.num_turn_tokens = 0
