# SPDX-License-Identifier: Apache-2.0
"""What is said of a secret's, a token's or a key's file, and who looks at the mode of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vllm_ascend_pd as package
from vllm_ascend_pd.cli.main import app
from vllm_ascend_pd.config import RouterLink
from vllm_ascend_pd.engine.registrar import Registrar
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.trust import Secret
from vllm_ascend_pd.private_file import read_private, read_token
from vllm_ascend_pd.registration import Registration
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.config import RouterConfig
from vllm_ascend_pd.router.tls import ServerCertificate

OPEN_MODES = [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o777]
CONTENT = "s3cret-" * 5
URL = "http://127.0.0.1:1"


def write(path: Path, mode: int, content: str = CONTENT + "\n") -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("refuses_open", [True, False])
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_what_only_its_owner_reads_is_taken_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, refuses_open: bool
) -> None:
    path = write(tmp_path / "f", mode)
    assert read_private("--x", str(path), refuses_open=refuses_open) == CONTENT.encode()
    assert not caplog.records


@pytest.mark.parametrize("mode", OPEN_MODES)
def test_what_others_may_reach_is_refused_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    path = str(write(tmp_path / "f", mode))
    said = f"--x '{path}' is open to its group or to others (mode {mode:04o}); run: chmod 600"
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_private("--x", path, refuses_open=True)
    assert not caplog.records
    assert read_private("--x", path) == CONTENT.encode()
    assert said in caplog.text
    assert CONTENT not in caplog.text


@pytest.mark.parametrize("refuses_open", [True, False])
def test_of_a_link_the_mode_of_its_file_counts_and_is_never_a_reason_to_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refuses_open: bool
) -> None:
    file, link = write(tmp_path / "f", 0o600), tmp_path / "link"
    link.symlink_to("f")
    assert read_private("--x", str(link), refuses_open=refuses_open) == CONTENT.encode()
    assert not caplog.records
    file.chmod(0o644)
    assert read_private("--x", str(link), refuses_open=refuses_open) == CONTENT.encode()
    assert "(mode 0644); in a Kubernetes volume set defaultMode: 0400" in caplog.text


def test_what_is_no_file_to_be_read_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "around").symlink_to("around")
    for name, said in {
        "missing": "No such file",
        "dangling": "No such file",
        "around": "Too many levels of symbolic links",
        ".": "Is a directory",
    }.items():
        with pytest.raises(ConfigError, match=rf"^--x '{tmp_path / name}': {said}"):
            read_private("--x", str(tmp_path / name))


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(ConfigError, match="longer than 4096 bytes; is it the right file"):
        read_private("--x", "/dev/zero")


@pytest.mark.parametrize(
    ("content", "accepted"),
    [
        ("t" * 4096, True),
        ("t" * 4097, False),
        (" token \r\n", True),
        ("", False),
        ("\n", False),
        ("two\nlines", False),
        ("\u00fcmlaut", False),
        ("esc\x1b[2J", False),
    ],
)
def test_a_token_is_one_line_of_printable_ascii(
    tmp_path: Path, content: str, accepted: bool
) -> None:
    path = str(write(tmp_path / "f", 0o600, content))
    if accepted:
        assert read_token("--x", path) == content.strip()
        return
    with pytest.raises(ConfigError, match=r"^--x") as raised:
        read_token("--x", path)
    assert not content or content not in str(raised.value)


# Whoever reads such a file looks at its mode.


def command(*words: str) -> Callable[[Path], None]:
    """It ends when it has read the file ``{}``, for there is no router or no configuration."""

    def run(path: Path) -> None:
        ended = CliRunner().invoke(app, [word.format(path) for word in words])
        assert ended.exit_code
        assert CONTENT not in ended.output

    return run


def tenants(path: Path) -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        Router(RouterConfig(tenants_file=path))


def serve_tls(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tls-certificate, --tls-key: \[SSL\]"):
        ServerCertificate(path, path)


def register(path: Path) -> None:
    link = RouterLink(url=URL, http_url=URL, token_file=str(path))
    Registrar(link, Registration(url=URL, role="both", epoch="e"), bool, lambda: None)


WARNS: dict[str, Callable[[Path], object]] = {
    "--api-keys-file": lambda path: Router(RouterConfig(api_keys_file=path)),
    "--engine-api-key-file": lambda path: Router(RouterConfig(engine_api_key_file=path)),
    "--registration-token-file": lambda path: Router(RouterConfig(registration_token_file=path)),
    "--tls-key": serve_tls,
    "--tenants-file": tenants,
    "--api-key-file": command("doctor", "--api-key-file={}", "--config={}"),
    "--api-key-file of profile": command("profile", URL, "--api-key-file={}"),
    "--token-file": command("drain", "p0", "--router", URL, "--token-file={}"),
    "--token-file of move": command("move", "r", "--router", URL, "--token-file={}"),
    "--token-file of role": command("role", "p0", "both", "--router", URL, "--token-file={}"),
    "router.token_file": register,
}
REFUSES: dict[str, Callable[[Path], object]] = {
    "security.secret_file": lambda path: Secret.load(str(path)),
    "--secret-file": lambda path: Router(RouterConfig(secret_file=path)),
}


@pytest.mark.parametrize("name", WARNS)
def test_tokens_and_keys_that_others_may_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path, option = tmp_path / "f", name.split()[0]
    for mode in (0o600, 0o640):
        WARNS[name](write(path, mode))
        assert (f"{option} '{path}' is open to its group" in caplog.text) == (mode == 0o640)
    assert CONTENT not in caplog.text


@pytest.mark.parametrize("option", REFUSES)
def test_secrets_that_others_may_read_are_refused(tmp_path: Path, option: str) -> None:
    path = tmp_path / "f"
    REFUSES[option](write(path, 0o600))
    with pytest.raises(ConfigError, match=f"^{option} '{path}' is open to its group"):
        REFUSES[option](write(path, 0o640))


def test_nobody_reads_such_a_file_without_that() -> None:
    reads = re.compile(r"\b\w*(secret|token|key)s?_file\w*\)?\.(read_|open\()")
    sources = {path: path.read_text() for path in Path(package.__file__).parent.rglob("*.py")}
    assert [
        (path.name, found[0]) for path, text in sources.items() if (found := reads.search(text))
    ] == []
