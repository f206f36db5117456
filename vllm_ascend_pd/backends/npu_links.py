# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's transport for NPUs makes of the environment: how late it writes, and whether it
reaches host memory.

Read from the sources of Mooncake 0.3.13 (``ascend_direct_transport``) and of ADXL below it; none of
it has been seen on an NPU yet.
"""

from __future__ import annotations

import os

from vllm_ascend_pd.backends.mooncake_library import ENV_DEFAULTS
from vllm_ascend_pd.backends.transfer_engine import TransferEngine

_TRIES = 2
_WAITS_A_TRY = 4
"""For an old link to go, for the new one, for the write, and on an error for that link to go."""
_DEFAULT_TIMEOUT_MS = 10_000
_OUR_CALL_TIMEOUT_S = int(ENV_DEFAULTS["MC_TRANSFER_TIMEOUT"])
_BEFORE_S = 2 * TransferEngine.LATE_WRITE_S + 5.0
"""A producer begins with what it was asked for within this time, or not at all."""
_ROUNDTRIP_US = 4.096


def late_write_s() -> float:
    """How long after it was asked for the last byte of a batch may be written, at most.

    Mooncake's call hands a batch that has failed on once more, as long as its own time-out lasts;
    at its end it leaves the last one to ADXL. What that gives up, the network card may still send
    again, so its term is added.
    """
    longest_ms = max(
        _number("ASCEND_CONNECT_TIMEOUT", _DEFAULT_TIMEOUT_MS),
        _number("ASCEND_TRANSFER_TIMEOUT", _DEFAULT_TIMEOUT_MS),
    )
    resend_us = _ROUNDTRIP_US * float(1 << _number("HCCL_RDMA_TIMEOUT", 20))
    resend_s = resend_us * _number("HCCL_RDMA_RETRY_CNT", 7) / 1e6
    call_s = _number("MC_TRANSFER_TIMEOUT", _OUR_CALL_TIMEOUT_S)
    return _BEFORE_S + call_s + _TRIES * _WAITS_A_TRY * longest_ms / 1000 + resend_s


def host_memory_route() -> str | None:
    """By which setting memory of a host is reached also over HCCS, which knows none: inside one
    A2 host, or an A3 super node. ``None``: there is no such setting.
    """
    if _number("HCCL_INTRA_ROCE_ENABLE", 0) == 1:
        return "HCCL_INTRA_ROCE_ENABLE"
    if os.environ.get("ASCEND_BUFFER_POOL", "0:0") != "0:0":
        return "ASCEND_BUFFER_POOL"
    if "roce" in os.environ.get("ASCEND_GLOBAL_RESOURCE_CONFIG", ""):
        return "ASCEND_GLOBAL_RESOURCE_CONFIG"
    return None


HOST_MEMORY_HELP = (
    "HCCS, the link of NPUs inside one A2 host or A3 super node, reaches no host memory: set"
    " HCCL_INTRA_ROCE_ENABLE=1 and HCCL_INTRA_PCIE_ENABLE=0, or ASCEND_BUFFER_POOL=4:8, for all"
    " engines"
)


def _number(name: str, default: int) -> int:
    """As Mooncake reads it: what is no number is not there."""
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return default
