# SPDX-License-Identifier: Apache-2.0
"""Files that are read again when they change: keys, tenants, instances."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.auth import Secrets
from vllm_ascend_pd.router.config import RouterConfig
from vllm_ascend_pd.router.discovery.static import StaticDiscovery
from vllm_ascend_pd.router.instances import Registry
from vllm_ascend_pd.router.tenants import Tenants
from vllm_ascend_pd.router.watched_file import WatchedFile


class Watching:
    """What was taken of a file; content that says ``wrong`` is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fails: OSError | None = None
        self.num_read = 0
        self.taken: list[bytes] = []
        self.file = WatchedFile("--x", path, self.read, self.take)
        self.file.read()

    def read(self) -> bytes:
        self.num_read += 1
        if self.fails is not None:
            raise self.fails
        return self.path.read_bytes()

    def take(self, content: bytes) -> None:
        if content.startswith(b"wrong"):
            raise ConfigError(f"--x: {content.decode()}")
        self.taken.append(content)


@pytest.fixture
def watching(tmp_path: Path) -> Watching:
    path = tmp_path / "file"
    path.write_text("one")
    return Watching(path)


def test_it_is_read_again_when_it_changes_and_only_then(watching: Watching) -> None:
    assert not watching.file.refresh()
    watching.path.write_text("two words")
    assert watching.file.refresh()
    assert not watching.file.refresh()
    assert (watching.taken, watching.num_read) == ([b"one", b"two words"], 2)


def test_one_that_could_not_be_read_is_read_when_it_can_be(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    watching.path.write_text("two words")
    watching.fails = PermissionError("not yours")
    for _ in range(3):
        assert not watching.file.refresh()
    watching.fails = None
    assert watching.file.refresh()
    assert watching.taken == [b"one", b"two words"]
    assert [record.message for record in caplog.records] == [
        "kept what was read before: --x: not yours"
    ]


def test_who_may_read_it_is_a_change(watching: Watching) -> None:
    watching.path.chmod(0o640)
    assert watching.file.refresh()


def test_one_that_is_wrong_is_read_once_and_told_once(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    for content in ("wrong", "wrong again"):
        watching.path.write_text(content)
        for _ in range(3):
            assert not watching.file.refresh()
    assert (watching.taken, watching.num_read) == ([b"one"], 3)
    assert len(caplog.records) == 2


def test_one_that_is_away_is_missed_once(
    watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    watching.path.unlink()
    for _ in range(3):
        assert not watching.file.refresh()
    watching.path.write_text("back")
    assert watching.file.refresh()
    assert watching.taken == [b"one", b"back"]
    assert len(caplog.records) == 1
    watching.path.unlink()
    with pytest.raises(ConfigError, match="--x"):
        watching.file.read()


def secrets(path: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    found = Secrets(path, "--x")
    return found.refresh, lambda: found.accepts("new")


def tenants(path: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    found = Tenants(path, None)  # type: ignore[arg-type]
    return found.refresh, lambda: found.get("new") is not None


def instances(path: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    registry = Registry(lambda spec: instance(spec.instance_id))
    found = StaticDiscovery(RouterConfig(instances_file=path), registry)
    found.read()
    return found.refresh, lambda: registry.get("new") is not None


@pytest.mark.parametrize(
    ("open_file", "content"),
    [
        (secrets, "NAME"),
        (tenants, '{"tenants": {"NAME": {}}}'),
        (instances, '{"instances": [{"id": "NAME", "url": "http://a:1", "role": "both"}]}'),
    ],
)
def test_every_file_is_read_when_it_can_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    open_file: Callable[[Path], tuple[Callable[[], None], Callable[[], bool]]],
    content: str,
) -> None:
    path = tmp_path / "file"
    path.write_text(content.replace("NAME", "a"))
    refresh, has_new = open_file(path)
    path.write_text(content.replace("NAME", "new"))

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "not yours")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "open", refuse)
        refresh()
    assert not has_new()
    refresh()
    assert has_new()
