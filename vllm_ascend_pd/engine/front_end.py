# SPDX-License-Identifier: Apache-2.0
"""What the command line says of an engine's front end. It is also that of its EngineCore process,
which does not get the options of its server otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.digest import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLAGS = ("--enable-auto-tool-choice", "--no-enable-auto-tool-choice")
_WITH_VALUES = (
    *("--tool-call-parser", "--tool-parser-plugin"),
    *("--reasoning-parser", "--reasoning-parser-plugin"),
)
_ASKED_FOR = (
    *_FLAGS,
    *_WITH_VALUES,
    *("--config", "--headless", "--host", "--port", "--ssl-certfile", "--uds"),
    "--data-parallel-multi-port-external-lb",
)
"""Of all options, those that somebody here wants to know."""


def is_server(argv: Sequence[str]) -> bool:
    """Whether this engine has an OpenAI server."""
    return "serve" in argv or any("api_server" in word for word in argv[:1])


def options(argv: Sequence[str]) -> dict[str, str]:
    """Values by name, as if every word were an option with one, the last of each. As vLLM does, it
    takes underscores in names for dashes, and the beginning of a name for the whole.
    """
    names = [_whole(word.partition("=")[0].replace("_", "-")) for word in argv]
    return {
        name: word.partition("=")[2] if "=" in word else following
        for word, name, following in zip(argv, names, [*argv[1:], ""], strict=True)
    }


def _whole(name: str) -> str:
    """An option that begins so. vLLM refuses what several begin with."""
    found = [known for known in _ASKED_FOR if known.startswith(name) and name.startswith("--")]
    return found[0] if len(found) == 1 else name


def parsing(argv: Sequence[str]) -> str:
    """Of the options with which a server makes text, reasoning and tool calls of tokens: a digest,
    or ``none``. Empty where it is not known: without a server, or if a file may have others.
    """
    given = options(argv)
    if not is_server(argv) or "--config" in given or "--headless" in given:
        return ""
    found = {name: "" for name in given if name in _FLAGS}
    found |= {name: value for name, value in given.items() if name in _WITH_VALUES}
    return digest(found) if found else "none"
