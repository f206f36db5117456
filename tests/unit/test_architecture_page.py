# SPDX-License-Identifier: Apache-2.0
"""What the page on the architecture says of the tree is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_ascend_pd"


def test_each_folder_of_the_package_is_in_the_list_of_rooms_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = page.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z_/]+)/` \| \S", rooms, re.MULTILINE)
    folders = [str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*/__init__.py")]
    assert sorted(listed) == sorted(folders)


def test_the_picture_of_the_schedulers_side_has_each_module_of_it_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = page.partition("\n## Rooms of the scheduler's side\n")[2].partition("\n```\n")[0]
    texts = " ".join(re.findall(r'\["(.*?)"\]', picture))
    modules = {path.stem for path in (PACKAGE / "engine" / "scheduler").glob("[!_]*.py")}
    assert modules <= set(re.findall(r"[a-z_]+", texts)), "a module that the picture lacks"
    assert set(re.findall(r"[a-z]+(?:_[a-z]+)+", texts)) <= modules, "one that is gone"
