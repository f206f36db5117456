# SPDX-License-Identifier: Apache-2.0
"""What was found, as text, as JSON and as a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.planner.search import SLOWER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_ascend_pd.planner.limits import Need
    from vllm_ascend_pd.planner.search import Objective, Row, Splits
    from vllm_ascend_pd.planner.speeds import Speeds
    from vllm_ascend_pd.planner.trace_file import RequestTrace

_HEAD = (
    *("split", "goodput", "in time", f"{100 * (SLOWER - 1):.0f} % slower"),
    *("TTFT p50", "p99", "ITL p50", "p99", "P busy", "D busy"),
)
_OVERLOADED = "overloaded"


def table(found: Splits, objective: Objective, num_per_instance: int) -> str:
    """One line a split, then the best and the least."""
    rows = [_HEAD, *(_cells(row) for row in found.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    best = found.best
    shown = f"{best.goodput:.2f} requests/s in time, {100 * best.attained:.1f} % of all"
    lines += ["", f"best:  {best.split}: {_OVERLOADED if best.is_overloaded else shown}"]
    if any(row.is_overloaded for row in found.rows):
        lines.append(f"{_OVERLOADED}: its queue grows as long as requests come")
    goal = f"{100 * objective.attained:g} % of the requests in time"
    if found.least is None:
        lines.append(f"least: so many instances do not get {goal}")
    else:
        num_devices = sum(found.least.split) * num_per_instance
        lines.append(f"least: {found.least.split} ({num_devices} devices) get {goal}")
    return "\n".join(lines)


def beyond(trace: RequestTrace, speeds: Speeds, row: Row) -> str:
    """What the prediction rests on that the profile has not measured; empty if all was."""
    num_tokens = int(np.percentile(trace.num_prompt_tokens, 99))
    measured_tokens = int(speeds.prefill_s.x[-1])
    found, fixes = [], []
    if num_tokens > measured_tokens:
        found.append(f"prompts of {num_tokens:,} tokens (measured up to {measured_tokens:,})")
        fixes.append(f"--tokens …,{num_tokens}")
    if row.decode_batch > speeds.measured_batch:
        found.append(f"{row.decode_batch} requests at once in a D (up to {speeds.measured_batch})")
        fixes.append(f"--batches …,{row.decode_batch}")
    if not found:
        return ""
    return (
        f"\nworked out, not measured: {' and '.join(found)};"
        f" take a profile with {' '.join(fixes)} before you rely on it"
    )


def needs(found: Sequence[Need]) -> str:
    """How busy one process of the router would be, and with what."""
    if not found:
        return "\none router process: all requests come at the same moment, which tells no rate"
    lines = ["", "one router process, by what it would do (share of one core):"]
    lines += [
        f"  {need.what:<28} {need.per_second:12,.0f} /s  {100 * need.busy:7.1f} %" for need in found
    ]
    total = sum(need.busy for need in found)
    most = max(found, key=lambda need: need.busy)
    lines.append(f"  together {100 * total:.1f} %; the first to be too much: {most.what}")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    busy = (f"{100 * row.prefill_use:.0f} %", f"{100 * row.decode_use:.0f} %")
    if row.is_overloaded:
        return (str(row.split), _OVERLOADED, *"------", *busy)
    return (
        str(row.split),
        f"{row.goodput:.2f}/s",
        f"{100 * row.attained:.1f} %",
        f"{100 * row.attained_if_slower:.1f} %",
        f"{row.ttft_p50_s:.3f} s",
        f"{row.ttft_p99_s:.3f} s",
        f"{1000 * row.itl_p50_s:.1f} ms",
        f"{1000 * row.itl_p99_s:.1f} ms",
        *busy,
    )


def _shown(row: Row, figure: float) -> float:
    return math.nan if row.is_overloaded else figure


def to_json(found: Splits) -> str:
    """``Splits``, with splits as ``[P, D]``."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def draw(found: Splits, objective: Objective, path: Path) -> None:
    """Goodput, both times and how busy the engines are, by split. The suffix names the format."""
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise ConfigError("--picture needs matplotlib: install vllm-ascend-pd[planner]") from e
    mpl.use("Agg")
    from matplotlib import pyplot

    rows = found.rows
    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.2))
    goodput, ttft, itl, busy = axes
    places = range(len(rows))
    colors = ["#6a9f58" if row is found.best else "#4878a8" for row in rows]
    goodput.bar(places, [_shown(row, row.goodput) for row in rows], color=colors)
    goodput.set(title="requests in time, per second")
    for place, row in zip(places, rows, strict=True):
        if row.is_overloaded:
            at = (place, 0.02)  # of the height
            where = goodput.get_xaxis_transform()
            goodput.text(*at, _OVERLOADED, rotation=90, ha="center", transform=where)
    for one, name, limit_s in ((ttft, "ttft", objective.ttft_s), (itl, "itl", objective.itl_s)):
        for percent, mark in (("p50", "o"), ("p99", "^")):
            seconds = [1000 * _shown(row, getattr(row, f"{name}_{percent}_s")) for row in rows]
            one.plot(places, seconds, mark + "-", label=percent)
        one.axhline(1000 * limit_s, color="black", linestyle=":", label="objective")
        one.set(title=f"{name.upper()}, ms", yscale="log")
        one.legend()
    busy.plot(places, [100 * row.prefill_use for row in rows], "o-", label="P")
    busy.plot(places, [100 * row.decode_use for row in rows], "^-", label="D")
    busy.set(title="busy, %", ylim=(0, 105))
    busy.legend()
    for one in axes:
        one.set_xticks(list(places), [f"{p}:{d}" for p, d in (row.split for row in rows)])
        one.set(xlabel="P:D", xlim=(-0.6, len(rows) - 0.4))
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--picture {path}: {e}") from e
