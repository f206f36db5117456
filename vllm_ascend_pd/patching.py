# SPDX-License-Identifier: Apache-2.0
"""Our patches: where the tool that applies them is, and whether an engine carries those of this
package."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_ascend_pd
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PATCHED = ("vllm", "vllm_ascend")
_RECEIPT = ".vllm_ascend_pd-"
"""Begins the name of the file that the tool leaves beside a package: which patches it has."""
_DIFF = re.compile(r"^diff --git a/(\S+) .*\nindex (\w+)\.\.(\w+)", re.MULTILINE)


def patch_tool() -> Path:
    """``apply_patches.py`` of the source tree, or the copy that an installed package carries."""
    package = Path(vllm_ascend_pd.__file__).parent
    source = package.parent / "tools" / "apply_patches.py"
    return source if source.is_file() else package / "_patching" / "tools" / "apply_patches.py"


def refuse_other_patches(roots: Iterable[Path] | None = None) -> None:
    """``ConfigError`` where the engine was patched by another version of this package, whose calls
    are other ones, or only in part. Of one that was patched without the tool nothing is known.

    ``roots``: of its packages, by default those that this process would import.
    """
    for root in _roots() if roots is None else roots:
        for receipt in root.glob(f"{_RECEIPT}*.json"):
            if _tells_of_others(receipt):
                apply = shlex.join([sys.executable, str(patch_tool()), "apply"])
                raise ConfigError(
                    f"the engine in {root} has the patches of another version of vllm-ascend-pd, or"
                    f" a part of these; stop all engines that run from there, then run: {apply}"
                )


def _roots() -> Iterator[Path]:
    for name in _PATCHED:
        spec = find_spec(name)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Path(place).parent


def _tells_of_others(receipt: Path) -> bool:
    """Whether the files have other patches than this package's, or not all of them. A receipt may
    be of files that are gone."""
    try:
        noted = json.loads(receipt.read_text())
        ends, is_complete = _ends(noted["patches"].values()), bool(noted["complete"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # the tool says what is wrong with it
    series = patch_tool().parents[1] / "patches" / receipt.stem.removeprefix(_RECEIPT)
    if is_complete and ends == _ends(_texts(series)):
        return False
    return all(_blob_id(receipt.parent / path) in both for path, both in ends.items())


def _texts(series: Path) -> Iterator[str]:
    order = series / "series"
    for line in order.read_text().splitlines() if order.is_file() else ():
        if name := line.partition("#")[0].strip():
            yield (series / name).read_text()


def _ends(patches: Iterable[str]) -> dict[str, tuple[str, str]]:
    """By path: git's names of the file before the first of them and after the last."""
    ends: dict[str, tuple[str, str]] = {}
    for path, before, after in (found for text in patches for found in _DIFF.findall(text)):
        first, _ = ends.get(path, (before, after))
        ends[path] = first, after
    return ends


def _blob_id(path: Path) -> str:
    content = path.read_bytes() if path.is_file() else b""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
