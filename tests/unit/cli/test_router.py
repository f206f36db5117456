# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-pd router`` prints beside its logs."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from vllm_ascend_pd.cli import router
from vllm_ascend_pd.router import config, server
from vllm_ascend_pd.router.config import RouterConfig

SAID = "vllm-pd router listens on http://r\n"


@pytest.mark.parametrize(("form", "told"), [("text", (SAID, "")), ("json", ("", SAID))])
def test_where_it_listens_is_not_among_json_lines(
    form: str, told: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(config: RouterConfig, listens: Callable[[str], None]) -> None:
        listens("http://r")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(config, "set_up_logging", lambda config: None)
    result = CliRunner().invoke(router.app, ["--access-log", form])
    assert (result.stdout, result.stderr) == told


@pytest.mark.parametrize("form", ["text", "json"])
def test_it_serves_although_the_disk_of_its_log_is_full(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    def serve(config: RouterConfig, listens: Callable[[str], None]) -> None:
        listens("http://r")
        served.append(config)

    def fill_disk(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(config, "set_up_logging", lambda config: None)
    monkeypatch.setattr(typer, "echo", fill_disk)
    CliRunner().invoke(router.app, ["--access-log", form], catch_exceptions=False)
    assert served
