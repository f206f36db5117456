# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd doctor``: what is wrong with this host, or with engines that run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_ascend_pd.cli.move import CA, TokenFile

app = typer.Typer(add_completion=False)

EngineKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="The router's --engine-api-key-file. Without: the key of --api-key-file.",
        dir_okay=False,
    ),
]


@app.command(
    help="""Examine this host, and a running deployment, and say what to do about what is wrong.

Without options it looks at this host: patches, versions, libraries, ports, bandwidth. With
`--router`, or with `--prefill` and `--decode`, also at the engines: whether they fit together, and
whether a real request moves KV. With `--config`, at all that the topology file says should run.
Exit code 1 when something failed.

    vllm-pd doctor --router http://127.0.0.1:8000"""
)
def doctor(
    router: Annotated[
        str | None, typer.Option(metavar="URL", help="A router; its engines are examined.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Topology file: its router, its pool's master and each of its engines.",
            dir_okay=False,
        ),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="The topology runs with `vllm-pd up --ray`: the cluster says which engines there"
            " are. Needs --config and --router.",
        ),
    ] = False,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A prefill engine; repeat for more.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A decode engine; repeat for more.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with an API key of the router's clients.", dir_okay=False),
    ] = None,
    engine_api_key_file: EngineKeyFile = None,
    token_file: TokenFile = None,
    ca: CA = None,
    measure: Annotated[
        bool, typer.Option(help="Measure the bandwidth of this host's transports.")
    ] = True,
    ascend: Annotated[
        bool, typer.Option("--ascend", help="Walk through the bring-up list of a host with NPUs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    import asyncio
    import sys

    from rich.console import Console

    from vllm_ascend_pd.cluster import topology
    from vllm_ascend_pd.cluster.doctor.deployment import router_url
    from vllm_ascend_pd.cluster.doctor.examine import Subject, examine, show, to_json
    from vllm_ascend_pd.cluster.doctor.findings import Finding, Verdict, exit_code
    from vllm_ascend_pd.cluster.scaling.orders import refuse_what_a_cluster_decides
    from vllm_ascend_pd.cluster.up_socket import operator_token
    from vllm_ascend_pd.router.tls import client_context

    for name, urls in (
        ("--router", [router] if router else []),
        ("--prefill", prefill or []),
        ("--decode", decode or []),
    ):
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise typer.BadParameter(f"{url!r} is not http://HOST:PORT", param_hint=name)
    if ray and (config is None or router is None):
        raise typer.BadParameter(
            "give --config FILE, and --router with this host's address in the cluster",
            param_hint="--ray",
        )
    key = read_key("--api-key-file", api_key_file)
    engine_key = read_key("--engine-api-key-file", engine_api_key_file) or key
    plan_of = None
    if config is not None:
        plan_of = topology.load(config)
        if ray:
            refuse_what_a_cluster_decides(plan_of)
        router = router or router_url(plan_of)
    console = Console()

    def report(finding: Finding) -> None:
        if not as_json:
            show(console, finding)

    subject = Subject(
        router=router.rstrip("/") if router else None,
        prefill=tuple(prefill or ()),
        decode=tuple(decode or ()),
        topology=plan_of,
        on_ray=ray,
        api_key=key,
        engine_api_key=engine_key,
        token=operator_token(router, token_file) if router else None,
        tls=client_context("--ca", ca),
        measure=measure,
        ascend=ascend,
    )
    findings = asyncio.run(examine(subject, report))
    if as_json:
        typer.echo(to_json(findings))
    else:
        count = {v: sum(f.verdict is v for f in findings) for v in reversed(Verdict)}
        console.print(", ".join(f"{number} {v.value}" for v, number in count.items() if number))
    sys.exit(exit_code(findings))


def read_key(name: str, path: Path | None) -> str | None:
    """The one line of an option's file; ``ConfigError`` names the option."""
    from vllm_ascend_pd.private_file import read_token

    return read_token(name, str(path)) if path else None
