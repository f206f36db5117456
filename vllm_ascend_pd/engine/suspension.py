# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: workers let go of the KV caches before these are unmapped, and take them again."""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd import hooks


def suspend(worker: object) -> None:
    """Runs in the worker processes."""
    side: Any = hooks.worker
    side.suspend()


def resume(worker: object) -> None:
    """Runs in the worker processes."""
    side: Any = hooks.worker
    side.resume()
