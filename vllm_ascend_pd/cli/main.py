# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd``: finds the subcommand and imports nothing else.

A subcommand ``some-name`` is the module ``vllm_ascend_pd.cli.some_name`` with one Typer app of one
command, called ``app``. Its top imports only what ``--help`` needs; the rest is imported when
the command runs, so that ``vllm-pd router`` loads neither vLLM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from vllm_ascend_pd.errors import PDError

SUBCOMMANDS = (
    *("patch", "up", "restart", "scale", "move", "drain", "role", "router", "doctor", "pool"),
    *("manifests", "profile", "plan"),
)
"""In the order of ``vllm-pd --help``."""


class LazyGroup(TyperGroup):
    """Imports a subcommand's module when the subcommand is asked for, and says what is wrong with
    what the user gave it.
    """

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except PDError as e:
            typer.echo(f"vllm-pd {ctx.invoked_subcommand}: {e}", err=True)
            raise typer.Exit(2) from e

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(SUBCOMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in SUBCOMMANDS:
            return None
        if cmd_name not in self.commands:
            module = import_module(f"vllm_ascend_pd.cli.{cmd_name.replace('-', '_')}")
            command = typer.main.get_command(module.app)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands[cmd_name]


app = typer.Typer(
    name="vllm-pd",
    cls=LazyGroup,
    help="Prefill/decode disaggregation for vLLM: its router and its tools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Prefill/decode disaggregation for vLLM: its router and its tools."""
    if version:
        from vllm_ascend_pd import __version__

        typer.echo(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)
