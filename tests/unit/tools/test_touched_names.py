# SPDX-License-Identifier: Apache-2.0
"""Names that our code takes of a package, looked for in its source without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from touched_names import missing_names, wanted_names

if TYPE_CHECKING:
    from pathlib import Path

TOY = {
    "toy/__init__.py": b"raise RuntimeError('imported')\n",
    "toy/base.py": b"class Base:\n    old: int = 0\n",
    "toy/core.py": b"""
from toy.base import Base
try:
    import fast as codec
except ImportError:
    codec = None
class Engine(Base):
    kind = "toy"
    def __init__(self):
        self.queue, self.running = [], []
    def run(self):
        left = 1
""",
}


def missing(tmp_path: Path, text: str) -> list[str]:
    code = tmp_path / "ours"
    code.mkdir()
    (code / "mine.py").write_text(text)
    return missing_names(wanted_names(code, "toy"), TOY)


def touching(*lines: str) -> str:
    listed = "".join(f"        {line}\n" for line in lines)
    return f'def f():\n    """Do it.\n\n    Touches:\n{listed}    """\n'


def declaring(name: str, *lines: str) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f'class Like:\n    """Touches: {name}"""\n\n{body}    def __len__(self): ...\n'


@pytest.mark.parametrize(
    "text",
    [
        "import toy.core",
        "from toy import core",
        "from toy.core import Engine, codec",
        "if True:\n    from toy.core import Base",
        "import other\nfrom other.core import Gone",
        touching("toy/core.py:Engine", "toy/core.py:Engine.run", "toy/core.py:Engine.running"),
        touching("toy/core.py:Engine.kind", "toy/core.py:Engine.old"),
        touching("toy/core.py:Engine.gone", "    | toy/core.py:Engine.queue"),
        touching("toy/gone.py:gone | toy/core.py:Engine.queue"),
        declaring("toy/core.py:Engine", "kind: str", "old: int", "def run(self) -> None: ..."),
        declaring("toy/gone.py:Gone | toy/core.py:Engine", "queue: list"),
    ],
)
def test_what_is_there_is_found(tmp_path: Path, text: str) -> None:
    assert missing(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import toy.gone", "toy/gone.py: (ours/mine.py:1)"),
        ("\nfrom toy.core import Engine, gone", "toy/core.py:gone (ours/mine.py:2)"),
        ("def f():\n    from toy import gone", "toy.py:gone (ours/mine.py:2)"),
        (touching("toy/core.py:left"), "toy/core.py:left (ours/mine.py:1)"),
        (touching("toy/core.py:Engine.left"), "toy/core.py:Engine.left (ours/mine.py:1)"),
        (
            touching("toy/core.py:Engine.run", "toy/core.py:Engine.a", "  | toy/core.py:Engine.b"),
            "toy/core.py:Engine.a | toy/core.py:Engine.b (ours/mine.py:1)",
        ),
        (
            declaring("toy/core.py:Engine", "kind: str", "gone: int"),
            "toy/core.py:Engine.gone (ours/mine.py:5)",
        ),
        (
            declaring("toy/core.py:Engine", "@property", "def gone(self) -> int: ..."),
            "toy/core.py:Engine.gone (ours/mine.py:5)",
        ),
    ],
)
def test_what_is_not_there_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    assert missing(tmp_path, text) == [said]
