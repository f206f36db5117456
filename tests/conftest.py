# SPDX-License-Identifier: Apache-2.0
"""What every test needs."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def thawed_in_the_end() -> Iterator[None]:
    """Native modules say what is left when the process ends, and would say that of all."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap(thawed_in_the_end: None) -> None:
    """What vLLM and torch have brought along is not collected again and again.

    A full collection of it stops all threads for half a second and more, which is longer than some
    deadlines here. vLLM's own processes freeze their heap, too, when they have started.
    """
    gc.collect()
    gc.freeze()
