# SPDX-License-Identifier: Apache-2.0
"""``timeout``, a deadline over awaits: ``asyncio.wait_for`` loses cancellations before 3.12."""

from __future__ import annotations

import asyncio
import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout  # aiohttp needs it there, too

TIMED_OUT = (asyncio.TimeoutError, TimeoutError)

__all__ = ["TIMED_OUT", "timeout"]
