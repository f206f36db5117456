# SPDX-License-Identifier: Apache-2.0
"""Environment variables of this package, read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

FAULTS = "ASCEND_PD_FAULTS"
POOL_FAULTS = "ASCEND_PD_POOL_FAULTS"
STATE_ERRORS = "ASCEND_PD_STATE_ERRORS"
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def fault_script() -> str | None:
    """A fault script for the transfer engine (tests only), see ``backends.fault_script``."""
    return os.environ.get(FAULTS) or None


def hash_seed() -> str | None:
    """Python's own variable; vLLM starts the hashes of the prefix cache from it."""
    return os.environ.get("PYTHONHASHSEED")


def pool_fault_script() -> str | None:
    """A fault script for the pool (tests only), see ``pool.fake_tier``."""
    return os.environ.get(POOL_FAULTS) or None


def raises_state_errors() -> bool:
    """Whether an impossible event raises (tests only), see ``states``."""
    return bool(os.environ.get(STATE_ERRORS))


def visible_devices(device: str) -> tuple[str, str | None]:
    """The driver's own variable for accelerators of that kind (``cuda``, ``npu``), and what it is
    set to."""
    name = VISIBLE_DEVICES[device]
    return name, os.environ.get(name)


def cache_folder() -> Path:
    """Where this package keeps what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vllm_ascend_pd"
