# SPDX-License-Identifier: Apache-2.0
"""A Prometheus beside a deployment's processes: what it scrapes, and how it is started."""

from __future__ import annotations

import shutil
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from vllm_ascend_pd.cluster.commands import Command, Deployment
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_ascend_pd.cluster.commands import PortChooser

SCRAPE_EVERY = "5s"


def find_prometheus() -> str:
    """The program; ``ConfigError`` that says how to get it."""
    if program := shutil.which("prometheus"):
        return program
    raise ConfigError(
        "--observe: there is no program prometheus on PATH; install it (Debian: apt-get install"
        " --no-install-recommends prometheus), or leave --observe out"
    )


def scrape_config(deployment: Deployment, rules: Path) -> dict[str, Any]:
    """Prometheus' configuration: the router and every engine, by their names there.

    The router tells of engines in a label ``instance`` of its own, which stays.
    """
    targets = [
        {"targets": [urlsplit(command.url).netloc], "labels": {"instance": command.name}}
        for command in deployment.commands
        if command.is_engine or command.role == "router"
    ]
    job = {"job_name": "vllm-pd", "honor_labels": True, "static_configs": targets}
    return {
        "global": {"scrape_interval": SCRAPE_EVERY, "evaluation_interval": SCRAPE_EVERY},
        "rule_files": [str(rules)],
        "scrape_configs": [job],
    }


def with_prometheus(
    deployment: Deployment, here: str, folder: Path, choose_port: PortChooser
) -> Deployment:
    """The same with a Prometheus beside the router, if that runs ``here``: on loopback, because
    Prometheus asks nobody for a password. Writes what it reads into ``folder``.
    """
    router = next(command for command in deployment.commands if command.role == "router")
    if router.host != here:
        return deployment
    program, listen = find_prometheus(), f"127.0.0.1:{choose_port('127.0.0.1')}"
    folder.mkdir(parents=True, exist_ok=True)
    config, rules = folder / "prometheus.yml", folder / "alerts.yaml"
    rules.write_text(files("vllm_ascend_pd.cluster").joinpath("alerts.yaml").read_text())
    config.write_text(yaml.safe_dump(scrape_config(deployment, rules)))
    argv = (
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={listen}",
    )
    url, health = f"http://{listen}", "/-/ready"
    command = Command("prometheus", "prometheus", here, argv, {}, url, health)
    return Deployment((*deployment.commands, command), deployment.router_url)
