# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd restart``: engines of a running ``vllm-pd up``, one after another."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ascend_pd.cli.finite import finite

app = typer.Typer(add_completion=False)


@app.command(
    help="""Restart engines of a `vllm-pd up` that runs on this machine, one after another.

The router sends an engine nothing new, its requests move to others or end, it is restarted, and
when the router uses it again the next one follows. No request fails, as long as another engine can
answer:

    vllm-pd restart decode-0

    vllm-pd restart --rolling"""
)
def restart(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Engines, as `vllm-pd up` names them."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--rolling", "--all", help="All engines of this machine, in turn.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the router, which says which `up`.")
    ] = 8000,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds for the requests of one engine to end. 0: end them.",
        ),
    ] = 600,
) -> None:
    import asyncio
    import time

    from vllm_ascend_pd.cluster.up_socket import RestartOrder, ask_to_restart, find_socket

    if bool(names) == every:
        raise typer.BadParameter("name engines, or give --rolling", param_hint="NAME")

    async def follow() -> int:
        code = 0
        async for progress in ask_to_restart(
            find_socket(port), RestartOrder(tuple(names or ()), drain_timeout)
        ):
            typer.echo(f"{time.strftime('%H:%M:%S')}  {progress.text}", err=progress.failed)
            code = 1 if progress.failed else code
        return code

    raise typer.Exit(asyncio.run(follow()))
