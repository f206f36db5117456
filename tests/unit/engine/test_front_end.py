# SPDX-License-Identifier: Apache-2.0
"""What the command line says of an engine's server."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.engine.front_end import parsing

SERVE = ["/venv/bin/vllm", "serve", "--port", "8001"]


@pytest.mark.parametrize(
    "options",
    [
        ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"],
        ["--enable-auto-tool-choice", "--tool-call-parser=hermes", "--host", "127.0.0.1"],
        ["--tool_call_parser", "hermes", "--enable-auto-tool-choice"],
        ["--tool-call", "hermes", "--enable-auto"],
        ["--tool-call-parser", "hermes", "--enable-auto-tool-choice", "model"],
    ],
)
def test_the_same_options_are_the_same_however_they_are_written(options: list[str]) -> None:
    expected = parsing([*SERVE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"])
    assert parsing([*SERVE, *options]) == expected


def test_other_options_are_others() -> None:
    of_servers = [
        [],
        ["--tool-call-parser", "hermes"],
        ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"],
        ["--tool-call-parser", "pythonic", "--enable-auto-tool-choice"],
        ["--reasoning-parser", "qwen3"],
        ["--reasoning-parser", "hermes"],
    ]
    told = [parsing([*SERVE, *options]) for options in of_servers]
    assert told[0] == "none"
    assert len(set(told)) == len(of_servers)


@pytest.mark.parametrize(
    "argv",
    [
        ["pytest", "tests"],
        [*SERVE, "--config", "engine.yaml"],
        [*SERVE, "--config=engine.yaml", "--tool-call-parser", "hermes"],
        [*SERVE, "--headless"],
        [*SERVE, "--headl"],
    ],
)
def test_what_the_command_line_does_not_tell_is_not_known(argv: list[str]) -> None:
    assert parsing(argv) == ""
