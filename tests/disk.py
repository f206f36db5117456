# SPDX-License-Identifier: Apache-2.0
"""What the pool has written to its SSD folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def wait_on_disk(folder: Path, num_values: int, timeout_s: float = 30.0) -> None:
    """Until so many values are; one that memory evicts before that is lost.

    Mooncake writes a value's ``.meta`` file last.
    """
    deadline = time.monotonic() + timeout_s
    while (num_written := len(list(folder.rglob("*.meta")))) < num_values:
        assert time.monotonic() < deadline, f"{num_written} of {num_values} values in {folder}"
        time.sleep(0.05)
