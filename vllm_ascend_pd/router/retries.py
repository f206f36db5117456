# SPDX-License-Identifier: Apache-2.0
"""How many retries there may be, so that they do not become the load that keeps engines down."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries: each request adds ``ratio``, each retry takes one. Event loop thread."""

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = float(burst)
        self._left = float(burst)

    def request(self) -> None:
        self._left = min(self._left + self._ratio, self._burst)

    def take(self) -> bool:
        """May there be one more retry?"""
        if self._left < 1:
            return False
        self._left -= 1
        return True
