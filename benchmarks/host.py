# SPDX-License-Identifier: Apache-2.0
"""What suits this host."""

from __future__ import annotations

from pathlib import Path


def usual_dtype() -> str:
    """``bfloat16``, or ``float32`` on a CPU without AVX-512, where bfloat16 takes long."""
    return "bfloat16" if "avx512f" in Path("/proc/cpuinfo").read_text() else "float32"
