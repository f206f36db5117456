# SPDX-License-Identifier: Apache-2.0
"""One line per request: what it was, who served it, how it ended. No body and no secret."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

    from vllm_ascend_pd.router.trace import Trace

logger = logging.getLogger("vllm_ascend_pd.router.access")


class AccessLog:
    """Off by configuration, or while the logger's level is above INFO."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def write(self, request: web.Request, trace: Trace) -> None:
        if not self._enabled or not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            '%s %s "%s %s" %d %dB %.1fms outcome=%s order=%s prefill=%s decode=%s attempts=%d'
            " ttft=%s%s",
            request.remote or "-",
            trace.request_id,
            request.method,
            request.path,
            trace.status,
            trace.num_bytes,
            (time.monotonic() - trace.started) * 1e3,
            trace.outcome,
            trace.order or "-",
            trace.prefill or "-",
            trace.decode or "-",
            trace.num_attempts,
            "-" if trace.ttft_s is None else f"{trace.ttft_s * 1e3:.1f}ms",
            f" error={trace.error!r}" if trace.error else "",
        )
