# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd plan``: how many P and D engines a trace needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command(
    help="""Tell how to divide devices between P and D engines, by simulation over a trace.

`vllm-pd profile` measures how fast one P and one D are. Each split of the devices is then simulated
with the requests of the trace:

    vllm-pd plan --trace trace.jsonl --profile profile.json --slo-ttft 2 --slo-itl 0.1 --gpus 8

A request is in time if its first token comes within --slo-ttft seconds, and its others --slo-itl
seconds apart in the mean. Goodput is how many requests in a second are.

The trace is a JSONL file as Mooncake publishes them (timestamp in ms, input_length, output_length,
hash_ids if prefixes are known), or a .csv as Azure does (TIMESTAMP, ContextTokens,
GeneratedTokens)."""
)
def plan(
    trace: Annotated[
        Path, typer.Option(help="What clients ask, and when.", dir_okay=False, show_default=False)
    ],
    profile: Annotated[
        Path,
        typer.Option(help="What `vllm-pd profile` wrote.", dir_okay=False, show_default=False),
    ],
    gpus: Annotated[int, typer.Option(min=2, help="Devices that there are.", show_default=False)],
    slo_ttft: Annotated[float, typer.Option(help="Seconds to the first token.")] = 2.0,
    slo_itl: Annotated[float, typer.Option(help="Seconds between tokens.")] = 0.1,
    attained: Annotated[
        float, typer.Option(help="Share of the requests that must be in time, for `least`.")
    ] = 0.99,
    gpus_per_instance: Annotated[
        int, typer.Option(min=1, help="Devices of one engine: its tensor parallel size.")
    ] = 1,
    speed: Annotated[
        float, typer.Option(help="2: requests come twice as fast as in the trace.")
    ] = 1.0,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Only the first ones.", show_default="all")
    ] = None,
    tokens_per_id: Annotated[
        int, typer.Option(min=1, help="Tokens that one of hash_ids stands for.")
    ] = 512,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the table: a .svg, .png or .pdf.", dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    from vllm_ascend_pd.planner import report
    from vllm_ascend_pd.planner.limits import router_needs
    from vllm_ascend_pd.planner.profile import load
    from vllm_ascend_pd.planner.search import Objective, Search
    from vllm_ascend_pd.planner.simulate import simulate
    from vllm_ascend_pd.planner.speeds import Speeds
    from vllm_ascend_pd.planner.trace_file import RequestTrace, read_trace

    for name, value in (("--slo-ttft", slo_ttft), ("--slo-itl", slo_itl), ("--speed", speed)):
        if not value > 0:
            raise typer.BadParameter(f"{value:g} is not positive", param_hint=name)
    if not 0 < attained <= 1:
        raise typer.BadParameter(f"{attained:g} is not within 0 and 1", param_hint="--attained")
    num_instances = gpus // gpus_per_instance
    if num_instances < 2:
        raise typer.BadParameter(
            f"{gpus} devices are {num_instances} instances of {gpus_per_instance}: a P and a D are"
            " needed",
            param_hint="--gpus",
        )
    objective = Objective(slo_ttft, slo_itl, attained)
    speeds = Speeds.of(load(profile))
    asked = RequestTrace(
        read_trace(trace, max_requests, tokens_per_id=tokens_per_id),
        speed=speed,
        tokens_per_id=tokens_per_id,
    )
    search = Search(lambda split: simulate(asked, speeds, split), objective)
    found = search.find(num_instances)
    if as_json:
        typer.echo(report.to_json(found))
    else:
        typer.echo(report.table(found, objective, gpus_per_instance))
        if beyond := report.beyond(asked, speeds, found.best):
            typer.echo(beyond)
        typer.echo(report.needs(router_needs(asked, found.best)))
    if picture is not None:
        report.draw(found, objective, picture)
