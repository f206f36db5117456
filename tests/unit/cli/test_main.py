# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd`` finds its subcommands without importing the others."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from vllm_ascend_pd import __version__
from vllm_ascend_pd.cli import main


@pytest.fixture
def subcommand(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("vllm_ascend_pd.cli.say_hello")
    app = typer.Typer()

    @app.command(help="Greets.")
    def run(name: str) -> None:
        typer.echo(f"hello {name}")

    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(main, "SUBCOMMANDS", ("say-hello", "never-imported"))
    return "say-hello"


def test_subcommand_runs_and_others_are_not_imported(subcommand: str) -> None:
    result = CliRunner().invoke(main.app, [subcommand, "engine"])
    assert (result.exit_code, result.output) == (0, "hello engine\n")
    assert "vllm_ascend_pd.cli.never_imported" not in sys.modules


def test_unknown_subcommand_is_an_error() -> None:
    result = CliRunner().invoke(main.app, ["no-such-thing"])
    assert result.exit_code == 2
    assert "no-such-thing" in result.output


def test_version() -> None:
    result = CliRunner().invoke(main.app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, __version__)


def test_router_imports_no_engine_and_nothing_slow() -> None:
    code = (
        "import sys; import vllm_ascend_pd.cli.router, vllm_ascend_pd.router.server;"
        "slow = ('vllm', 'torch', 'numpy', 'kubernetes', 'opentelemetry', 'mooncake');"
        "print([name for name in slow if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr
