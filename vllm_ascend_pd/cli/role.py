# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd role``: what a kv_both engine is used for."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ascend_pd.cli.move import CA, ROUTER_URL, Router, TokenFile, operator_of

app = typer.Typer(add_completion=False)


@app.command(
    help="""Use a kv_both engine for prompts, for answers, or for both.

Without a restart, while it works:

    vllm-pd role engine-2 prefill

    vllm-pd role engine-2 decode

What it answers moves to others first (see `vllm-pd drain`), then it computes prompts. The last
engine of a kind stays what it is. The router remembers it when the engine starts anew, not when the
router does."""
)
def role(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="An engine.")],
    used_for: Annotated[
        str, typer.Argument(metavar="ROLE", help="prefill, decode, or both as it was started.")
    ],
    router: Router = ROUTER_URL,
    token_file: TokenFile = None,
    ca: CA = None,
) -> None:
    import asyncio

    import msgspec

    from vllm_ascend_pd.cluster.emptying import switch
    from vllm_ascend_pd.registration import Role

    try:
        wanted = msgspec.convert(used_for, Role)
    except msgspec.ValidationError as e:
        raise typer.BadParameter("prefill, decode or both", param_hint="ROLE") from e

    async def ask() -> None:
        async with operator_of(router, token_file, ca) as operator:
            async for line in switch(operator, instance, wanted):
                typer.echo(line)

    asyncio.run(ask())
