# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd pool``: look into the master of a KV pool."""

from __future__ import annotations

import re
import urllib.request
from typing import Annotated

import typer

from vllm_ascend_pd.net.direct_http import direct_opener

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Look into a KV pool through its master's HTTP port. An engine with a master of its own"
    " says it at start: 'KV pool: own master at HOST:PORT (http PORT)'.",
)

Master = Annotated[
    str,
    typer.Option("--http", help="HOST:PORT of the master's HTTP port (--metrics_port)."),
]

_TIMEOUT_S = 5.0
_STATS = {
    "master_key_count": "keys",
    "master_allocated_bytes": "memory used, bytes",
    "master_total_capacity_bytes": "memory, bytes",
    "master_allocated_file_size_bytes": "disk used, bytes",
    "master_active_clients": "clients",
    "master_evicted_key_count": "keys evicted",
    "master_put_start_alloc_failures_total": "puts refused, memory full",
}


@app.command()
def stats(http: Master) -> None:
    """What the pool holds now, and how much of it each segment has."""
    lines = _get(http, "/metrics").splitlines()
    samples = {}
    for line in lines:
        if match := re.fullmatch(r"(\w+)(\{[^}]*\})? (\S+)", line):
            samples[match[1] + (match[2] or "")] = float(match[3])
    for name, text in _STATS.items():
        if name in samples:
            typer.echo(f"{text:<28}{samples[name]:>18,.0f}")
    for name, used in sorted(samples.items()):
        if match := re.fullmatch(r'segment_allocated_bytes\{segment="([^"]*)"\}', name):
            size = samples.get(name.replace("allocated", "total_capacity"), 0.0)
            typer.echo(f"segment {match[1]:<20}{used:>18,.0f} of {size:,.0f}")


@app.command()
def keys(
    http: Master,
    limit: Annotated[int, typer.Option(help="Print so many at most.")] = 20,
) -> None:
    """Keys by those who share them (format/fingerprint), and some of them.

    With tensor parallelism each worker of an engine has keys of its own.
    """
    found = [key for key in _get(http, "/get_all_keys").splitlines() if key]
    spaces: dict[str, int] = {}
    for key in found:
        space = key.rpartition("/")[0]
        spaces[space] = spaces.get(space, 0) + 1
    for space, count in sorted(spaces.items()):
        typer.echo(f"{space}/*  {count:,} keys")
    for key in sorted(found)[:limit]:
        typer.echo(f"  {key}")
    if len(found) > limit:
        typer.echo(f"  … {len(found) - limit:,} more")


@app.command()
def clear(
    http: Master,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget every value, of all engines and models. Requests go on; they are computed."""
    if not yes:
        typer.confirm(f"Remove everything from the pool at {http}?", abort=True)
    typer.echo(_get(http, "/api/v1/remove_all?force=true", method="POST").strip())


def _get(http: str, path: str, method: str = "GET") -> str:
    request = urllib.request.Request(f"http://{http}{path}", method=method)
    try:
        with direct_opener().open(request, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read()
    except (OSError, ValueError) as e:
        typer.echo(f"vllm-pd pool: no master answers at http://{http}: {e}", err=True)
        raise typer.Exit(1) from e
    return body.decode(errors="replace")
