# SPDX-License-Identifier: Apache-2.0
"""Engines of the tests of this folder: vLLM is imported once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.forked_engines import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def launched(launcher: Launcher) -> Iterator[Launcher]:
    """Starts engines, which end with the module."""
    yield launcher
    launcher.kill_engines()
