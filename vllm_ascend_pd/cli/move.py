# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd move``: running requests go on at another engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.operator import RouterOperator
    from vllm_ascend_pd.operating import MoveReport, RequestStatus, RunningRequests

app = typer.Typer(add_completion=False)

Router = Annotated[str, typer.Option("--router", help="URL of the router.")]
TokenFile = Annotated[
    str | None,
    typer.Option(
        help="The router's --registration-token-file. Not needed for a router of this host that has"
        " none or, where its URL is a loopback one, that a `vllm-pd up` of yours has started."
    ),
]
CA = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        "--engine-ca",
        help="CA bundle for https, of the router and its engines; the system's by default.",
        dir_okay=False,
    ),
]
ROUTER_URL = "http://127.0.0.1:8000"
_COMPLETE = "its answer was complete before"


@app.command(
    help="""Have running requests go on at another engine.

Their clients notice nothing: each gets the rest of its stream, no token twice and none lost.

What runs where, and what cannot move and why:

    vllm-pd move --list

One request, several, or all of an engine:

    vllm-pd move cmpl-1 --to decode-1

    vllm-pd move cmpl-1 cmpl-2

    vllm-pd move --from decode-0 --to decode-1

An id is the x-request-id that the client sent, or got with its answer. A request stays where it is
when no other engine has room for it or can give the same tokens; the cause is told."""
)
def move(
    requests: Annotated[
        list[str] | None, typer.Argument(metavar="[REQUEST]...", help="Ids of requests.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="INSTANCE", help="Where to. Without: to the least loaded engine."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="INSTANCE", help="All requests of this engine."),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Only tell which requests run, and where.")
    ] = False,
    router: Router = ROUTER_URL,
    token_file: TokenFile = None,
    ca: CA = None,
) -> None:
    import asyncio

    if [bool(requests), source is not None, listing].count(True) != 1:
        raise typer.BadParameter("name requests, or give --from or --list", param_hint="REQUEST")

    async def ask() -> int:
        async with operator_of(router, token_file, ca) as operator:
            if listing:
                found = await operator.requests()
                typer.echo(_table(found.requests))
                return _say_missing(found)
            if to is not None:
                await operator.refuse_unknown([to])
            if source is None:
                return await _move_all(operator, requests or [], to, were_listed=False)
            found = await operator.requests()
            ids = [one.request_id for one in found.requests if one.instance == source]
            if not ids:
                await operator.refuse_unknown([source])
                typer.echo(f"nothing runs on {source}")
            code = await _move_all(operator, ids, to, were_listed=True)
            return max(code, _say_missing(found))

    raise typer.Exit(asyncio.run(ask()))


def _say_missing(found: RunningRequests) -> int:
    """Whether anything is missing, as an exit code."""
    if found.missing:
        typer.echo(f"vllm-pd move: {found.missing}; ask again", err=True)
    return int(bool(found.missing))


def operator_of(router: str, token_file: str | None, ca: Path | None) -> RouterOperator:
    """Of the options of an operator's command; ``ConfigError`` names the one that is wrong."""
    from vllm_ascend_pd.cluster.operator import RouterOperator
    from vllm_ascend_pd.cluster.up_socket import operator_token
    from vllm_ascend_pd.router.tls import client_context

    return RouterOperator(router, operator_token(router, token_file), client_context("--ca", ca))


async def _move_all(
    operator: RouterOperator, ids: list[str], to: str | None, *, were_listed: bool
) -> int:
    """All at once, told as they end; the exit code. Those that ``were_listed`` may have ended."""
    import asyncio

    from vllm_ascend_pd.cluster.operator import NotFound
    from vllm_ascend_pd.errors import ConfigError
    from vllm_ascend_pd.operating import MoveOrder

    async def move_one(request_id: str) -> int:
        try:
            reports = await operator.move(request_id, MoveOrder(to=to))
        except ConfigError as e:
            if were_listed and isinstance(e, NotFound):
                typer.echo(f"{request_id}  {_COMPLETE}")
                return 0
            typer.echo(f"{request_id}  {e}", err=True)
            return 1
        for report in reports:
            typer.echo(_line(report))
        return int(any(one.outcome not in ("moved", "not_needed") for one in reports))

    return max(await asyncio.gather(*map(move_one, dict.fromkeys(ids))), default=0)


def _line(report: MoveReport) -> str:
    name, seconds = report.request_id, report.seconds
    told = {
        "moved": f"{report.source} -> {report.target}, {seconds:.2f} s",
        "stayed": f"stays on {report.source}: {report.cause}",
        "not_needed": _COMPLETE,
        "broken": f"{report.source} has failed; it goes on as a broken stream does",
    }
    return f"{name}  {told.get(report.outcome) or f'{report.outcome}: {report.cause}'}"


def _table(running: list[RequestStatus]) -> str:
    rows = [("REQUEST", "ENGINE", "AGE", "BYTES", "CAN MOVE")]
    for one in running:
        can = (
            f"moves to {one.moves_to}"
            if one.moves_to
            else f"no: {one.stays}"
            if one.stays
            else "yes"
        )
        rows.append((one.request_id, one.instance, f"{one.age_s:.1f} s", str(one.num_bytes), can))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
