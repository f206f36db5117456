# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd scale``: another number of engines, or another ratio, while they serve."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ascend_pd.cli.finite import finite

app = typer.Typer(add_completion=False)


@app.command(
    help="""Change how many engines a `vllm-pd up --ray` keeps, and how many of them are P and D.

    vllm-pd scale --pd-ratio 2:1 --max-instances 6

No request fails: engines change roles rather than end, and one that ends is drained first (see
`vllm-pd drain`). What has no room waits, and the command says for what. Without options it tells
what there is. Run it on the host, and as the user, of `vllm-pd up --ray`."""
)
def scale(
    pd_ratio: Annotated[
        str | None, typer.Option(metavar="P:D", help="Of P to D engines.", show_default="as it is")
    ] = None,
    max_instances: Annotated[
        int | None,
        typer.Option(min=2, help="Engines, where there is room.", show_default="as it is"),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the router, which says which `up`.")
    ] = 8000,
    wait: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, help="Seconds until all must be done; 0: do not wait."
        ),
    ] = 1800,
) -> None:
    import asyncio

    from vllm_ascend_pd.cluster.scaling.fleet_status import follow
    from vllm_ascend_pd.cluster.scaling.target import Ratio
    from vllm_ascend_pd.cluster.up_socket import ScaleOrder, ask_to_scale, find_socket

    async def run() -> None:
        ratio = Ratio.parse(pd_ratio) if pd_ratio is not None else None
        url = await ask_to_scale(find_socket(port), ScaleOrder(ratio, max_instances))
        async for line in follow(url, until_settled=bool(wait and (ratio or max_instances))):
            typer.echo(line)

    try:
        asyncio.run(asyncio.wait_for(run(), wait or None))
    except asyncio.TimeoutError as e:
        typer.echo(f"vllm-pd scale: not done after {wait:g} s; it goes on", err=True)
        raise typer.Exit(1) from e
