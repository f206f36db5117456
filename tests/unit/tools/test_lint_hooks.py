# SPDX-License-Identifier: Apache-2.0
"""The small lint hooks of this repository."""

from __future__ import annotations

from pathlib import Path

import lint_signoff
import lint_spdx
import pytest

LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [(LICENCE, 0), (f"#!/bin/sh\n{LICENCE}", 0), ("", 1), ("\n\n\n" + LICENCE, 1)],
)
def test_a_file_states_its_licence_near_its_top(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int
) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert lint_spdx.main([str(path)]) == status
    assert (str(path) in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("pool: add a tier\n\nSigned-off-by: A B <a@b.example>\n", 0),
        ("pool: add a tier\n", 1),
        ("pool: add a tier\n\nSigned-off-by: A B\n", 1),
    ],
)
def test_a_commit_message_is_signed_off(tmp_path: Path, message: str, status: int) -> None:
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(message)
    assert lint_signoff.main(str(path)) == status
