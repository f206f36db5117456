# SPDX-License-Identifier: Apache-2.0
"""Engines with secrets: the same one transfers, another one or none recomputes and says why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, EngineError, PromptOf

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

NUM_TOKENS = 3 * BLOCK_SIZE + 7
SHORT_LEASE = {"lease_s": 2.0}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Path of a secret file by name."""
    folder = tmp_path_factory.mktemp("secrets")
    paths: dict[str, str | None] = {"none": None}
    for name in ("ours", "other"):
        path = folder / name
        path.write_text(f"the secret is {name} " * 3 + "\n")
        path.chmod(0o600)
        paths[name] = str(path)
    return paths


def test_engines_with_one_secret_transfer(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, secrets: dict[str, str | None]
) -> None:
    producer = engines.shared("kv_producer", transfer=SHORT_LEASE, secret_file=secrets["ours"])
    consumer = engines.shared("kv_consumer", secret_file=secrets["ours"])
    for part in ("first", "second"):
        prompt = prompt_of(NUM_TOKENS, part)
        answer = consumer.ask(prompt, 16, producer.prefill(prompt))
        assert answer.token_ids == single(prompt, 16).token_ids
        assert (answer.outcome, answer.sources) == ("loaded", (0, NUM_TOKENS, 0))
    for engine in (producer, consumer):
        assert "the secret is" not in engine._log_path.read_text()
        assert not [name for name in engine.metrics() if name.startswith("frames_refused")]


@pytest.mark.parametrize(
    ("theirs", "ours", "advice"),
    [
        ("ours", "none", "has a security.secret_file, and this engine has none"),
        ("none", "ours", "security.secret_file must be the same there and here"),
        ("ours", "other", "security.secret_file must be the same there and here"),
    ],
)
def test_request_is_recomputed_when_secrets_differ(
    engines: Engines,
    single: SingleEngine,
    prompt_of: PromptOf,
    secrets: dict[str, str | None],
    theirs: str,
    ours: str,
    advice: str,
) -> None:
    producer = engines.shared("kv_producer", transfer=SHORT_LEASE, secret_file=secrets[theirs])
    consumer = engines.shared("kv_consumer", secret_file=secrets[ours])
    before = consumer.metrics().get("requests/unauthenticated", 0)
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert (answer.outcome, answer.sources) == ("unauthenticated", (0, 0, NUM_TOKENS))
    assert consumer.metrics()["requests/unauthenticated"] == before + 1
    consumer.wait_log(advice)
    producer.wait_log("wrong_secret (it has another secret than this engine, or none")
    producer.wait_count("leases", 0)
    producer.run()
    assert producer.metrics()["frames_refused/wrong_secret"] >= 1


def test_engine_with_an_open_secret_file_does_not_start(engines: Engines, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("s" * 40)
    path.chmod(0o644)
    with pytest.raises(EngineError, match=r"secret' is open to its group or to others.*chmod 600"):
        engines.own("kv_producer", secret_file=str(path))


@pytest.mark.parametrize(
    "changes", [{"mac": b"x" * 16}, {"mac": b""}, {"end": 9999}, {"generation": 99}], ids=str
)
@pytest.mark.parametrize("mode", ["step", "park"])
def test_worker_serves_nothing_without_the_ticket_of_its_scheduler(
    producer: Engine,
    engines: Engines,
    single: SingleEngine,
    prompt_of: PromptOf,
    changes: dict[str, object],
    mode: str,
) -> None:
    consumer = engines.shared("kv_consumer", transfer={"load_mode": mode})
    prompt = prompt_of(NUM_TOKENS)
    before = producer.metrics().get("frames_refused/no_ticket", 0)
    consumer.add("r", prompt, 16, producer.prefill(prompt))
    consumer.wait_for("r", "session", "READY")
    consumer.change_tickets("r", **changes)
    answer = consumer.run()["r"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert (answer.outcome, answer.sources) == ("no_ticket", (0, 0, NUM_TOKENS))
    producer.wait_count("leases", 0)
    producer.run()
    assert producer.metrics()["frames_refused/no_ticket"] > before
    producer.wait_log("no_ticket (it asked for blocks for which no open was accepted)")
