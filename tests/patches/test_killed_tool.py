# SPDX-License-Identifier: Apache-2.0
"""apply_patches.py killed at any moment: `status` is right, `apply` finishes, `revert` undoes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patches.kill_points import snapshot
from tests.patches.test_apply_patches import CHANGED, Site, write_series

SCRIPT = Path(__file__).with_name("kill_points.py")
TEMPORARY = ".pd-tmp"
NUM_CALLS = {"apply": 24, "revert": 21, "update": 40}
"""Of each command on the package of these tests: one that is added is seen, and tried too."""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def outcomes(site: Site, command: str) -> list[dict[str, Any]]:
    arguments = [sys.executable, "-B", str(SCRIPT), str(site.patches), str(site.root), command]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("case", NUM_CALLS)
def test_every_write_may_be_the_last(site: Site, case: str) -> None:
    pristine = snapshot(site.root)
    site("apply")
    if case == "update":
        write_series(site.patches, CHANGED)
        before = snapshot(site.root)
        site("apply")
        applied = snapshot(site.root)
        site("revert")
        write_series(site.patches)
        site("apply")
        write_series(site.patches, CHANGED)
        assert snapshot(site.root) == before
    else:
        before = applied = snapshot(site.root)
        if case == "apply":
            site("revert")
            before = pristine
    found = outcomes(site, "revert" if case == "revert" else "apply")
    whole = {"pristine": pristine, "applied": applied}
    for outcome in found:
        call, verdict, left = outcome["call"], outcome["verdict"], outcome["left"]
        left = {path: file for path, file in left.items() if not path.endswith(TEMPORARY)}
        assert (outcome["apply"], outcome["revert"]) == (0, 0), call
        assert outcome["apply left"] == {k: list(v) for k, v in applied.items()}, call
        assert outcome["revert left"] == {k: list(v) for k, v in pristine.items()}, call
        if verdict in whole:
            assert left == whole[verdict], call
            assert outcome["status"] == 0
        else:
            assert verdict in ("interrupted", "outdated"), call
            assert outcome["status"] == 1
            assert left not in whole.values(), call
    assert found[0]["left"] == before, "killed before its first write"
    assert found[-1]["call"] == ""
    assert len(found) - 1 == NUM_CALLS[case]
