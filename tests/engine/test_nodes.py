# SPDX-License-Identifier: Apache-2.0
"""What the workers of an engine on several hosts must have in common."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.engine.nodes import check_workers, options_of_worker
from vllm_ascend_pd.errors import ConfigError


def transfer(**changes: Any) -> Any:
    fields = {
        "kv_connector": "InEngine",
        "kv_role": "kv_both",
        "engine_id": "e",
        "kv_ip": "127.0.0.1",
        "kv_port": 0,
        "kv_connector_extra_config": {},
    }
    return SimpleNamespace(**{**fields, **changes})


def check(ours: Any, theirs: Any) -> None:
    workers = (SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=it)) for it in theirs)
    check_workers(PDConfig.from_kv_transfer_config(ours), [options_of_worker(it) for it in workers])


def secret_file(folder: Path, name: str, value: str) -> dict[str, Any]:
    path = folder / name
    path.write_text(value * 32)
    path.chmod(0o600)
    return {"kv_connector_extra_config": {"security": {"secret_file": str(path)}}}


def test_each_node_has_an_address_of_its_own_and_its_own_path_of_the_secret(tmp_path: Path) -> None:
    here, there = (secret_file(tmp_path, name, "ab") for name in ("here", "there"))
    other = transfer(kv_ip="127.0.0.2", kv_port=7, engine_id="other", **there)
    check(transfer(**here), [transfer(**here), other])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_connector": "NixlConnector"}, "without kv_connector InEngine"),
        ({"kv_role": "kv_producer"}, "with another kv_role:"),
        ({"kv_connector_extra_config": {"transfer": {"staging_slots": 3}}}, "another transfer:"),
    ],
)
def test_other_options_are_refused_by_worker_and_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^worker 1 was started .*{message}"):
        check(transfer(), [transfer(), transfer(**changes)])


def test_node_without_any_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker 0 was started without kv_connector InEngine"):
        check(transfer(), [None, transfer()])


def test_another_secret_is_refused(tmp_path: Path) -> None:
    here, there = (secret_file(tmp_path, value, value) for value in ("ab", "cd"))
    with pytest.raises(ConfigError, match=r"another security\.secret_file"):
        check(transfer(**here), [transfer(**there)])
    with pytest.raises(ConfigError, match=r"another security\.secret_file"):
        check(transfer(**here), [transfer()])
