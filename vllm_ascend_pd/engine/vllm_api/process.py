# SPDX-License-Identifier: Apache-2.0
"""The process of an engine core or worker."""

from __future__ import annotations

from vllm.distributed import utils


def sleep_while_waiting() -> bool:
    """Have this process sleep for zero seconds (70 us) where it waits for another one, as it does
    on Pythons whose ``sched_yield`` holds the GIL; ``False`` if it does so already.

    Touches:
        vllm/distributed/utils.py:USE_SCHED_YIELD
    """
    was_yielding = bool(utils.USE_SCHED_YIELD)
    utils.USE_SCHED_YIELD = False
    return was_yielding
