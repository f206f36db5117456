# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd drain``: an engine gets empty, and no client notices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_ascend_pd.cli.finite import finite
from vllm_ascend_pd.cli.move import CA, ROUTER_URL, Router, TokenFile, operator_of

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.operator import RouterOperator

app = typer.Typer(add_completion=False)


@app.command(
    help="""Empty an engine; no client notices.

It gets no new requests, and those that it has go on at others, with the same tokens. What cannot
move (n > 1, logprobs, ...) is waited for. Then the engine may be stopped:

    vllm-pd drain decode-0

To have it serve again, at any time:

    vllm-pd drain decode-0 --undo

It may be asked for again, and interrupted: the engine stays drained until that is undone. One
that registers with the router serves again once it starts anew, too. SIGTERM to an engine that
registers, a pod that is deleted, and "draining" in the file of instances do the same. To
restart engines, see `vllm-pd restart`."""
)
def drain(
    instances: Annotated[list[str], typer.Argument(metavar="INSTANCE...", help="Engines.")],
    undo: Annotated[bool, typer.Option("--undo", help="They get requests as before.")] = False,
    wait: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, help="Seconds until they must be empty; 0: do not wait."
        ),
    ] = 600,
    router: Router = ROUTER_URL,
    token_file: TokenFile = None,
    ca: CA = None,
) -> None:
    import asyncio

    from vllm_ascend_pd.cluster.emptying import drain as draining
    from vllm_ascend_pd.registration import DrainOrder

    async def one(operator: RouterOperator, name: str) -> None:
        if undo:
            await operator.undo_drain(name)
            typer.echo(f"{name} gets requests again")
        elif not wait:
            await operator.drain(name, DrainOrder(seconds=None))
            typer.echo(f"{name} gets no new requests")
        else:
            async for line in draining(operator, name):
                typer.echo(line)

    async def ask() -> None:
        async with operator_of(router, token_file, ca) as operator:
            await operator.refuse_unknown(instances)
            await asyncio.wait_for(
                asyncio.gather(*(one(operator, name) for name in instances)), wait or None
            )

    try:
        asyncio.run(ask())
    except asyncio.TimeoutError as e:
        typer.echo(f"vllm-pd drain: requests are left after {wait:g} s; it goes on", err=True)
        raise typer.Exit(1) from e
