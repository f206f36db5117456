# SPDX-License-Identifier: Apache-2.0
"""Patch series as data: reads ``patches/<package>-<version>/`` and applies hunks without fuzz.

Used by ``apply_patches.py`` and ``check_patches.py``; standard library only. Nothing here writes.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REFUSED, USAGE, NO_PACKAGE, BAD_PATCH, GIT_FAILED = 1, 2, 3, 4, 5  # exit codes
PRISTINE, APPLIED = "pristine", "applied"  # states of a file, and the two goals of a move

Contents = dict[str, bytes]  # path as in the patches ("vllm/v1/...") -> file content
Files = Mapping[str, bytes]


class ToolError(Exception):
    """Ends the command: says what happened and how to mend it, and carries the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PatchError(ToolError):
    """A file under patches/ is malformed or does not do what its ids promise."""

    def __init__(self, message: str) -> None:
        super().__init__(message, BAD_PATCH)


# ---- patch files ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hunk:
    """One ``@@`` block; lines keep their first character (blank, ``-`` or ``+``)."""

    old_start: int
    new_start: int
    lines: tuple[bytes, ...]

    def side(self, drop: bytes) -> list[bytes]:
        """The lines without those marked `drop`: b"+" gives the old side, b"-" the new one."""
        return [line[1:] for line in self.lines if line[:1] != drop]


@dataclass(frozen=True, slots=True)
class FileDiff:
    path: str
    before: str  # git blob ids
    after: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    name: str
    text: bytes
    headers: dict[str, str]  # From, Subject
    body: str
    diffs: tuple[FileDiff, ...]


@dataclass(frozen=True, slots=True)
class Pin:
    package: str  # import name
    version: str
    sdist_sha256: str
    requires: str = ""  # the series of another package whose additions this one calls


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    pin: Pin
    patches: tuple[Patch, ...]
    chains: dict[str, list[FileDiff]]  # path -> the diffs that touch it, in series order


_DIFF = re.compile(rb"diff --git a/(\S+) b/(\S+)")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100(?:644|755)")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?")


def parse_patch(name: str, text: bytes) -> Patch:
    if not text.endswith(b"\n"):
        raise PatchError(f"{name}: the last line has no newline: add one")
    lines = text.split(b"\n")[:-1]
    first = next((n for n, line in enumerate(lines) if line.startswith(b"diff --git ")), None)
    if first is None:
        raise PatchError(f"{name}: no 'diff --git' line: make it with 'export'")
    head = b"\n".join(lines[:first]).decode("utf-8", "surrogateescape")
    header_text, _, body = head.partition("\n\n")
    headers: dict[str, str] = {}
    for line in re.sub(r"\n[ \t]+", " ", header_text).split("\n"):
        key, colon, value = line.partition(": ")
        if colon:
            headers[key] = value.strip()
    body = re.sub(r"(?:^|\n)---\s*$", "", body.rstrip()).strip()
    return Patch(name, text, headers, body, tuple(_parse_diffs(name, lines, first)))


def _parse_diffs(name: str, lines: list[bytes], at: int) -> Iterator[FileDiff]:
    while at < len(lines):
        where = f"{name}:{at + 1}"
        names = _DIFF.fullmatch(lines[at])
        index = _INDEX.fullmatch(lines[at + 1]) if at + 1 < len(lines) else None
        if not names or names[1] != names[2]:
            raise PatchError(f"{where}: expected 'diff --git a/PATH b/PATH' with one same path")
        if not index:
            raise PatchError(
                f"{where}: expected a full-index 'index <40 hex>..<40 hex> 100644' line (no new, "
                "deleted or renamed file, no mode change): make the patch with 'export'"
            )
        if lines[at + 2 : at + 4] != [b"--- a/" + names[1], b"+++ b/" + names[1]]:
            raise PatchError(f"{where}: expected '--- a/PATH' and '+++ b/PATH' after the index")
        at += 4
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _parse_hunk(name, lines, at)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"{where}: the file has no hunk: drop it from the patch")
        yield FileDiff(names[1].decode(), index[1].decode(), index[2].decode(), tuple(hunks))


def _parse_hunk(name: str, lines: list[bytes], at: int) -> tuple[Hunk, int]:
    where = f"{name}:{at + 1}"
    match = _HUNK.fullmatch(lines[at])
    if not match:
        raise PatchError(f"{where}: malformed hunk header: make the patch with 'export'")
    old_left, new_left = int(match[2] or 1), int(match[4] or 1)
    start = at = at + 1
    while (old_left or new_left) and at < len(lines) and lines[at][:1] in (b" ", b"-", b"+"):
        old_left -= lines[at][:1] != b"+"
        new_left -= lines[at][:1] != b"-"
        at += 1
    ended = at == len(lines) or lines[at].startswith((b"@@", b"diff --git "))
    if old_left or new_left or not ended:
        raise PatchError(
            f"{name}:{at + 1}: the hunk at {where} does not have as many lines as its header says "
            "(edited by hand, or an editor stripped trailing blanks?): make it with 'export'"
        )
    return Hunk(int(match[1]), int(match[3]), tuple(lines[start:at])), at


def read_pin(path: Path) -> Pin:
    """`key = "value"` lines; tomllib would need Python 3.11."""
    text = path.read_text() if path.is_file() else ""
    found = dict(re.findall(r'^(\w+)\s*=\s*"([^"]*)"\s*(?:#.*)?$', text, re.MULTILINE))
    if found.keys() - {"requires"} != {"package", "version", "sdist_sha256"}:
        raise PatchError(
            f'{path}: need package, version and sdist_sha256, each as key = "value", and may have'
            " requires"
        )
    return Pin(**found)


def pin_text(pin: Pin) -> str:
    lines = "# SPDX-License-Identifier: Apache-2.0\n"
    for name in ("package", "version", "sdist_sha256"):
        lines += f'{name} = "{getattr(pin, name)}"\n'
    return lines


def read_order(text: str) -> list[str]:
    """The patch names of a `series` file: one a line, `#` starts a comment."""
    return [name for line in text.split("\n") if (name := line.partition("#")[0].strip())]


def chain_diffs(patches: Iterable[Patch]) -> dict[str, list[FileDiff]]:
    chains: dict[str, list[FileDiff]] = {}
    for patch in patches:
        for diff in patch.diffs:
            chain = chains.setdefault(diff.path, [])
            if chain and chain[-1].after != diff.before:
                raise PatchError(
                    f"{patch.name}: {diff.path} starts from {diff.before[:12]}, but the patch "
                    f"before it in the series leaves {chain[-1].after[:12]}: fix the order, or "
                    "export the series anew"
                )
            chain.append(diff)
    return chains


def load_series(directory: Path) -> Series:
    order = directory / "series"
    if not order.is_file():
        raise PatchError(f"{order}: not found: list the patches in it, one a line")
    patches: list[Patch] = []
    for name in read_order(order.read_text()):
        if not (directory / name).is_file():
            raise PatchError(f"{order}: lists {name}, which does not exist: drop the line")
        patches.append(parse_patch(name, (directory / name).read_bytes()))
    pin = read_pin(directory / "pin.toml")
    return Series(directory.name, pin, tuple(patches), chain_diffs(patches))


def series_dirs(patches_dir: Path) -> list[Path]:
    return sorted(path.parent for path in patches_dir.glob("*/pin.toml"))


def slug(subject: str) -> str:
    """The file name that a subject asks for: lower case, hyphens, without articles."""
    words = re.findall(r"[a-z0-9]+", subject.lower())
    return "-".join(word for word in words if word not in ("a", "an", "the"))


# ---- content: blob ids, hunks without fuzz -------------------------------------------------------


def blob_id(content: bytes) -> str:
    data = b"blob %d\0" % len(content) + content
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def apply_hunks(content: bytes, diff: FileDiff, reverse: bool = False) -> bytes:
    """Every hunk must match exactly, at exactly the line that its header names."""
    lines, result, done = content.split(b"\n"), [], 0
    for hunk in diff.hunks:
        old, new = hunk.side(drop=b"+"), hunk.side(drop=b"-")
        start = hunk.old_start
        if reverse:
            old, new, start = new, old, hunk.new_start
        start -= bool(old)  # an empty side is numbered by the line above it
        if start < done or lines[start : start + len(old)] != old:
            raise PatchError(f"{diff.path}: the hunk at line {start + 1} does not match the file")
        result += lines[done:start] + new
        done = start + len(old)
    return b"\n".join(result + lines[done:])


def walk_chain(content: bytes, chain: list[FileDiff], goal: str) -> bytes:
    """From one end of the chain to the other, verifying the blob id after each patch."""
    for diff in chain if goal == APPLIED else reversed(chain):
        content = apply_hunks(content, diff, reverse=goal == PRISTINE)
        if blob_id(content) != (diff.after if goal == APPLIED else diff.before):
            raise PatchError(f"{diff.path}: a patch does not give the blob id that it promises")
    return content


def file_state(content: bytes | None, chain: list[FileDiff]) -> str:
    if content is None:
        return "missing"
    found = blob_id(content)
    if found == chain[0].before:
        return PRISTINE
    if found == chain[-1].after:
        return APPLIED
    return "partial" if any(found == diff.after for diff in chain) else "foreign"
