# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_ascend_pd.backends.socket_folder import SocketFolder


@pytest.fixture(autouse=True)
def root(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_folder_is_private_and_goes_with_all_that_is_in_it(root):
    folder = SocketFolder()
    assert folder.path.parent == root
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "x.sock").touch()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_what_a_killed_process_left_is_removed_and_nothing_else(root):
    code = "from vllm_ascend_pd.backends.socket_folder import SocketFolder as S; f = S();"
    code += "print(f.path, flush=True); input()"
    environment = {"TMPDIR": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        left = Path(other.stdout.readline().strip())
        living = SocketFolder()
        assert left.exists()
        other.kill()
        other.wait()
        SocketFolder().remove()
        assert not left.exists()
        assert living.path.exists()
        living.remove()


def test_a_long_path_is_not_used(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 60)
    folder = SocketFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()
