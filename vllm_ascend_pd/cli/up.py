# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd up``: engines and a router, started and kept up by one command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_ascend_pd.cli.finite import finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.cluster.commands import Deployment
    from vllm_ascend_pd.cluster.launch import Manner
    from vllm_ascend_pd.cluster.topology import Topology

app = typer.Typer(add_completion=False)


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": True},
    help="""Start P and D engines and a router on this machine, and keep them up until Ctrl-C.

Free ports are found, and cores or accelerators are divided among the engines. What stands after
`--` goes to every `vllm serve`:

    vllm-pd up Qwen/Qwen3-8B --prefill 1 --decode 1 -- --dtype bfloat16 --max-model-len 32768

For several hosts write a topology file. On each host run `vllm-pd up --config topology.yaml`, or
run what `--dry-run` prints for it.

On a Ray cluster that runs, from one of its nodes or as a job of it, engines are put where there is
room, and replaced when they or their nodes are gone; `vllm-pd scale` changes how many:

    vllm-pd up Qwen/Qwen3-8B --ray auto --pd-ratio 1:2 --max-instances 6""",
)
def up(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model name or folder.", show_default=False),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option("--prefill", "-p", min=0, help="Number of P engines.", show_default="1"),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option("--decode", "-d", min=0, help="Number of D engines.", show_default="1"),
    ] = None,
    both: Annotated[
        int | None,
        typer.Option(
            "--both",
            "-b",
            min=1,
            help="Number of engines that the router makes P or D, as load asks; then there are no"
            " others, unless --prefill or --decode says so.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the router.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients send.", show_default="MODEL")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Share a KV pool; each engine gives it SIZE (8GiB)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Topology file, instead of MODEL, the options above, and --access-log.",
            dir_okay=False,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Which host of the topology this is.", show_default="by its address"),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the logs.", show_default="vllm-pd-logs/TIME"),
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(min=1, callback=finite, help="Seconds until a process must be up.")
    ] = 1800,
    log_max_size: Annotated[
        str, typer.Option(metavar="SIZE", help="A log that is larger is rotated.")
    ] = "100MiB",
    log_files: Annotated[
        int, typer.Option(min=0, help="Rotated logs of each process that are kept.")
    ] = 4,
    access_log: Annotated[
        str, typer.Option(help="The router's line per request: text, json or off.")
    ] = "text",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ADDRESS",
            help="Engines on the nodes of this Ray cluster, the router here.",
            rich_help_panel="On Ray",
        ),
    ] = None,
    pd_ratio: Annotated[
        str, typer.Option(metavar="P:D", help="Of P to D engines.", rich_help_panel="On Ray")
    ] = "1:1",
    max_instances: Annotated[
        int,
        typer.Option(min=2, help="Engines, where there is room.", rich_help_panel="On Ray"),
    ] = 2,
    engine_cpus: Annotated[
        int, typer.Option(min=1, help="CPUs of each engine.", rich_help_panel="On Ray")
    ] = 1,
    observe: Annotated[
        bool, typer.Option("--observe", help="Start a Prometheus, too, that scrapes all of them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands for each host, start nothing.")
    ] = False,
) -> None:
    import asyncio
    import time

    from rich.console import Console

    from vllm_ascend_pd.cluster import launch
    from vllm_ascend_pd.cluster.commands import Programs, make_deployment
    from vllm_ascend_pd.cluster.machine import FreePorts, Machine
    from vllm_ascend_pd.cluster.observe import with_prometheus
    from vllm_ascend_pd.cluster.scaling.on_ray import OnRay, at_router, deployment_on_ray
    from vllm_ascend_pd.cluster.topology import with_more_args

    more = list(context.args)
    if config is not None and model is not None and model.startswith("-"):
        more.insert(0, model)  # the first word after `--`
        model = None
    counts = {
        name: [{"count": count}]
        for name, count in (("prefill", prefill), ("decode", decode), ("both", both))
        if count is not None
    }
    given = {
        "model": model,
        "served_model_name": served_model_name,
        **counts,
        "router": {"port": port, "args": {"access-log": access_log}},
        "extra_config": {"pool": {"dram_size": pool}} if pool else {},
    }
    topology = _topology(context, config, given)
    topology = with_more_args(topology, more)
    _refuse(
        observe=observe,
        dry_run=dry_run,
        on_ray=ray is not None,
        counts=bool(counts),
        of_ray=(pd_ratio, max_instances, engine_cpus) != ("1:1", 2, 1),
    )
    if ray is not None:
        asked = OnRay.parse(ray, pd_ratio, max_instances, engine_cpus)
        topology = at_router(topology, asked)
    here = launch.find_local_host(topology, host)
    now = time.strftime("%Y%m%d-%H%M%S")
    logs = log_dir or Path("vllm-pd-logs", now)
    if log_dir is None and not dry_run:
        logs = launch.new_log_dir(now)
        context.call_on_close(lambda: launch.remove_if_empty(logs))
    topology, secrets = launch.with_secrets(topology, logs.absolute(), keep=ray is None)
    if secrets and not dry_run:
        context.call_on_close(launch.lock_folder(logs).close)
    programs, choose_port = Programs() if dry_run else launch.find_programs(), FreePorts()
    manner = _manner(topology, logs, startup_timeout, log_max_size, log_files)
    if ray is None:
        deployment = make_deployment(topology, Machine.this(), here, choose_port, programs)
    else:
        deployment, manner = deployment_on_ray(topology, asked, manner, programs, choose_port)
    if dry_run:
        _print_commands(topology, deployment, secrets)
        return
    if observe:
        deployment = with_prometheus(deployment, here, logs.absolute() / "prometheus", choose_port)
    commands = deployment.on(here)
    launch.refuse_busy_ports(commands, from_file=config is not None)
    launch.refuse_second_launch(deployment)
    if any(command.is_engine for command in commands):
        asyncio.run(launch.refuse_unpatched_engine())
    launch.write_secrets(secrets)
    code = asyncio.run(launch.launch(deployment, commands, topology.name, Console(), manner))
    raise typer.Exit(code)


def _refuse(*, observe: bool, dry_run: bool, on_ray: bool, counts: bool, of_ray: bool) -> None:
    """Options that say nothing together."""
    if observe and dry_run:
        raise typer.BadParameter("--observe starts a Prometheus, --dry-run nothing")
    if on_ray and (observe or dry_run):
        raise typer.BadParameter("--observe and --dry-run need to know where engines run")
    if on_ray and counts:
        raise typer.BadParameter("--pd-ratio and --max-instances say how many engines --ray has")
    if of_ray and not on_ray:
        raise typer.BadParameter("--pd-ratio, --max-instances and --engine-cpus need --ray")


def _manner(
    topology: Topology, logs: Path, startup_s: float, log_max_size: str, log_files: int
) -> Manner:
    from vllm_ascend_pd.cluster.launch import Manner
    from vllm_ascend_pd.cluster.log_rotation import Rotation
    from vllm_ascend_pd.parsing import parse_size
    from vllm_ascend_pd.processes.child import Patience

    token_file = topology.extra_config.get("router", {}).get("token_file")
    return Manner(
        logs,
        Patience(startup_s=startup_s),
        Rotation(parse_size("--log-max-size", log_max_size), log_files),
        Path(token_file) if token_file else None,
    )


def _topology(context: typer.Context, config: Path | None, given: dict[str, Any]) -> Topology:
    """Of the file, or of what the options say."""
    from vllm_ascend_pd.cluster import topology

    if config is None and given["model"] is None:
        raise typer.BadParameter("give a model, or --config", param_hint="MODEL")
    if config is None:
        return topology.parse(given)
    if given["model"] is not None:
        raise typer.BadParameter("the topology file names the model", param_hint="MODEL")
    for name in ("prefill", "decode", "both", "port", "served_model_name", "pool", "access_log"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter("the topology file says it", param_hint=option)
    return topology.load(config)


def _print_commands(topology: Topology, deployment: Deployment, secrets: Sequence[Path]) -> None:
    from vllm_ascend_pd.cluster.launch import KEPT_SECRET

    for name, machine in topology.hosts.items():
        typer.echo(f"# host {name} ({machine.address})")
        for path in secrets:
            folder, file = shlex.quote(str(path.parent)), shlex.quote(str(path))
            make = f"mkdir -p {folder} && (umask 077 && openssl rand -hex 32 > {file})"
            is_kept = path.name == KEPT_SECRET
            typer.echo(f"[ -e {file} ] || {{ {make}; }}" if is_kept else make)
        for command in deployment.on(name):
            typer.echo(command.shell_line)
