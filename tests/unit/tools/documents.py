# SPDX-License-Identifier: Apache-2.0
"""Commands of the documents, as a shell reads them, and the files that they take and make."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / "README.md", ROOT / "patches" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
EXISTING = {*TRACKED, *(str(folder) for path in TRACKED for folder in Path(path).parents)}

CHECKED = ("vllm-pd", "python", "python3", "make", "vllm", "pip")
"""Programs whose arguments are looked at. Of the others, only files are."""
OTHERS = ("cat", "cp", "curl", "docker", "helm", "jq", "kubectl", "openssl", "ray", "umask")
PATCH_COMMANDS = ("status", "apply", "revert", "check", "export", "port")
"""In the prose of the patches' page these are commands of their tool."""
MAKES = ("--out", "--png", "--picture", "--folder", "--scratch", "--target", ">", "tee")
"""What stands behind one of these is made by its command."""
SUFFIXES = ("csv", "gz", "json", "jsonl", "md", "png", "py", "sh", "toml", "txt", "yaml")


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    """With ``>`` and what stands behind it, if at all, as the last ones."""
    in_prose: bool
    """It may stand for a longer one: ``vllm-pd role`` names no engine."""

    @property
    def program(self) -> str:
        return Path(self.words[0]).name

    @property
    def arguments(self) -> list[str]:
        return list(self.words[1 : [*self.words, ">"].index(">")])

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(page: Path) -> Iterator[Command]:
    """Of the blocks of code, and of code within prose, in the order of the page."""
    code = re.compile(r"^ *```(\w*)\n(.*?)^ *```$|`([^`]+)`", re.MULTILINE | re.DOTALL)
    for language, block, in_prose in code.findall(page.read_text()):
        if in_prose:
            if _is_command(in_prose.split(), page):
                words = _split(in_prose, iter(()))
                yield from _simple([w for w in words if w not in ("…", "...")], in_prose=True)
        elif language in ("", "bash", "sh"):
            lines = iter(block.replace("\\\n", " ").splitlines())
            for line in lines:
                words = re.sub(r"^( *[A-Z_]+=\S*)+ ", "", line).lstrip(" (").split()
                if words and Path(words[0]).name in (*CHECKED, *OTHERS):
                    yield from _simple(_split(line.strip(" ()"), lines), in_prose=False)


def _is_command(words: list[str], page: Path) -> bool:
    if len(words) > 1 and page.parent.name == "patches" and words[0] in PATCH_COMMANDS:
        return True
    return Path(words[0]).name in CHECKED or words[0] in (*EXISTING, "--part", "--parts")


def _split(line: str, more: Iterator[str]) -> list[str]:
    """The words of a line, of which a quoted one or a document may go on over the next lines."""
    while True:
        try:
            words = shlex.split(line, comments=True)
            break
        except ValueError:
            line += "\n" + next(more)
    if end := re.search(r"<<'(\w+)'", line):
        while next(more) != end[1]:
            pass
    return words


def _simple(words: list[str], *, in_prose: bool) -> Iterator[Command]:
    """The simple commands of a line, and the one that another runs."""
    simple: list[str] = []
    for word in [*words, "|"]:
        if word not in ("|", "&&", "||", ";"):
            if simple or not re.match("[A-Z_]+=", word):
                simple.append(word)
            continue
        if simple:
            yield Command(tuple(simple), in_prose)
        if simple[:1] == ["ray"] and "--" in simple:
            yield Command(tuple(simple[simple.index("--") + 1 :]), in_prose=True)
        simple = []


def made_by(command: Command) -> set[str]:
    words = command.words
    made = {made for word, made in pairwise(words) if word in MAKES}
    if command.program == "make":
        for target in words[1:]:
            made |= _made_by_make(target)
    elif command.program == "cp" or "tools/gpu_bundle.py" in words:
        made.add(words[-1])
    return made


def _made_by_make(target: str) -> set[str]:
    if target == "wheel":
        return {"dist", *(path.name for path in (ROOT / "tools" / "requirements").glob("*.txt"))}
    return {"demo": {".cache/models/tiny"}, "bench": {".cache/models/60m"}}.get(target, set())


def files_of(command: Command) -> set[str]:
    """Files and models that a command names, but what lies outside of the checkout."""
    files = set()
    before = ""
    for word in command.words:
        files |= set(re.findall(r"(?:^|[\"'= ])(\.cache/[\w./-]+)", word))
        if re.fullmatch(r"[\w.][\w./-]*", word) and before != "--file" and before:
            in_checkout = "/" in word and word.partition("/")[0] in EXISTING
            elsewhere = re.fullmatch(r"[A-Z]+|\w+/[A-Z].*", word)
            is_model = _is_model(command, before) and not elsewhere
            if in_checkout or is_model or word.rpartition(".")[2] in SUFFIXES:
                files.add(word)
        before = word
    return files


def _is_model(command: Command, before: str) -> bool:
    return before == "--model" or (before in ("up", "serve") and "bench" not in command.words)
