# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-pd router`` prints beside its logs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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
