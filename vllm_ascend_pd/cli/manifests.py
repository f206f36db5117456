# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd manifests``: what ``vllm-pd up`` would run, as workloads for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command(
    help="""Print Kubernetes Deployments that run the commands of `vllm-pd up` in pods.

They belong to the other objects of deploy/base: service, rights, secret, network policy.

    vllm-pd manifests topology.yaml > workloads.yaml""",
)
def manifests(
    topology: Annotated[
        Path, typer.Argument(metavar="TOPOLOGY", help="Topology file, without hosts.")
    ],
    image: Annotated[str, typer.Option(help="Image of engines and router.")] = "vllm-pd",
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print the alert rules too, as a PrometheusRule.")
    ] = False,
) -> None:
    import yaml

    from vllm_ascend_pd.cluster import topology as topologies
    from vllm_ascend_pd.cluster.manifests import alert_rules
    from vllm_ascend_pd.cluster.manifests import manifests as make

    objects = make(topologies.load(topology), image)
    objects += [alert_rules()] if alerts else []
    typer.echo(yaml.safe_dump_all(objects, sort_keys=False, width=100), nl=False)
