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


def is_server(argv: Sequence[str]) -> bool:
    """Whether this engine has an OpenAI server."""
    return "serve" in argv or any("api_server" in word for word in argv[:1])


def parsing(argv: Sequence[str]) -> str:
    """Of the options with which a server makes text, reasoning and tool calls of tokens: a digest,
    or ``none``. Empty where it is not known: without a server, or if a file may have others.
    """
    names = [word.partition("=")[0].replace("_", "-") for word in argv]
    if not is_server(argv) or "--config" in names or "--headless" in names:
        return ""
    found = {name: "" for name in names if name in _FLAGS}
    for word, name, following in zip(argv, names, [*argv[1:], ""], strict=True):
        if name in _WITH_VALUES:
            found[name] = word.partition("=")[2] if "=" in word else following
    return digest(found) if found else "none"
