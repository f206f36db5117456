# SPDX-License-Identifier: Apache-2.0
"""Our log lines in the engine's log."""

from __future__ import annotations

import logging


def adopt_engine_logging() -> None:
    """Write where and as vLLM writes, at the level the user chose for it."""
    engine, ours = logging.getLogger("vllm"), logging.getLogger("vllm_ascend_pd")
    if not ours.handlers:
        ours.handlers = engine.handlers
        ours.setLevel(engine.level)
        ours.propagate = not engine.handlers
