# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd profile``: measures how fast running engines are, for ``vllm-pd plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.cli.doctor import EngineKeyFile, read_key
from vllm_ascend_pd.cli.move import CA

app = typer.Typer(add_completion=False)


@app.command(
    help="""Measure a P and a D behind a router, and write what `vllm-pd plan` needs.

Seconds of prefill by tokens and batch, of a decode step by batch and context, and of the hand-over
by tokens. The engines should have nothing else to do:

    vllm-pd up MODEL -- --max-model-len 8192

    vllm-pd profile http://127.0.0.1:8000 --out profile.json

Larger prompts than --tokens, batches and contexts are worked out from those that were measured, so
let these reach as far as your requests do."""
)
def profile(
    router: Annotated[str, typer.Argument(metavar="URL", help="The router.")],
    out: Annotated[Path, typer.Option(help="The file to write.", dir_okay=False)] = Path(
        "profile.json"
    ),
    tokens: Annotated[
        str, typer.Option(help="Lengths of prompts, for P and the hand-over.")
    ] = "64,256,1024,4096",
    batches: Annotated[
        str, typer.Option(help="Requests at once in a D; up to 4 of them, in a P.")
    ] = "1,2,4,8,16",
    contexts: Annotated[str, typer.Option(help="Contexts of the decode steps.")] = "64,1024",
    most_tokens: Annotated[
        int, typer.Option(min=1, help="Points with more tokens at once are left out.")
    ] = 16384,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measurements of each point; the median counts.")
    ] = 3,
    both_busy: Annotated[
        bool,
        typer.Option(
            "--both-busy",
            help="Keep each engine busy while the other one is measured, where they share a host"
            " that this slows down.",
        ),
    ] = False,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="The option of `vllm serve`, as the P engines have it.")
    ] = 2048,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="The option of `vllm serve`, as the D engines have it.")
    ] = 256,
    token_ids: Annotated[
        str, typer.Option(help="Prompts are random tokens from FIRST:LAST.")
    ] = "300:2000",
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with an API key of the router's clients.", dir_okay=False),
    ] = None,
    engine_api_key_file: EngineKeyFile = None,
    ca: CA = None,
) -> None:
    import asyncio
    import os

    from vllm_ascend_pd.errors import ConfigError
    from vllm_ascend_pd.planner.measure import Access, EngineLimits, Grid, take_profile
    from vllm_ascend_pd.planner.profile import save
    from vllm_ascend_pd.router.tls import client_context

    if not router.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{router!r} is not http://HOST:PORT", param_hint="URL")
    if not os.access(out.parent, os.W_OK | os.X_OK):  # before minutes of measuring
        raise typer.BadParameter(f"{out.parent} takes no files", param_hint="--out")
    first, last = (_numbers("--token-ids", token_ids, ":") * 2)[:2]
    if first >= last:
        raise typer.BadParameter(f"{token_ids!r} is not FIRST:LAST", param_hint="--token-ids")
    grid = Grid(
        num_tokens=_numbers("--tokens", tokens),
        batches=_numbers("--batches", batches),
        contexts=_numbers("--contexts", contexts),
        most_tokens=most_tokens,
        rounds=rounds,
        token_ids=(first, last),
        both_busy=both_busy,
    )
    limits = EngineLimits(max_num_batched_tokens, max_num_seqs)
    try:
        key = read_key("--api-key-file", api_key_file)
        engine_key = read_key("--engine-api-key-file", engine_api_key_file) or key
        access = Access(router.rstrip("/"), key, engine_key, client_context("--ca", ca))
        taken = asyncio.run(take_profile(access, grid, limits, typer.echo))
        save(taken, out)
    except OSError as e:
        raise ConfigError(str(e)) from e
    typer.echo(f"wrote {out}")


def _numbers(name: str, text: str, separator: str = ",") -> list[int]:
    parts = [part.strip() for part in text.split(separator)]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=name)
    return sorted(map(int, parts))
