# SPDX-License-Identifier: Apache-2.0
"""Options that are numbers."""

from __future__ import annotations

import math

import typer


def finite(value: float) -> float:
    """Callback of a float option, whose type lets ``inf`` and ``nan`` through."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
