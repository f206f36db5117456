# SPDX-License-Identifier: Apache-2.0
"""The secret and the token that ``vllm-pd up`` makes by itself."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.full_disk import room_for
from tests.unit.cluster.test_commands import HOSTS, deployment
from vllm_ascend_pd.cluster import topology
from vllm_ascend_pd.cluster.commands import Deployment
from vllm_ascend_pd.cluster.launch import KEPT_SECRET, with_secrets, write_secrets
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.trust import Secret, Trust
from vllm_ascend_pd.pool.keys import KeySpace


def parse(**values: Any) -> topology.Topology:
    return topology.parse({"model": "m", **values})


def sections(made: Deployment, name: str) -> list[Any]:
    """What every engine of a deployment gets."""
    engines = [c.argv for c in made.commands if c.role in ("prefill", "decode")]
    configs = [json.loads(argv[argv.index("--kv-transfer-config") + 1]) for argv in engines]
    return [config["kv_connector_extra_config"][name] for config in configs]


def test_engines_and_router_of_one_machine_share_what_is_made_at_each_start(tmp_path: Path) -> None:
    made, paths = with_secrets(parse(), tmp_path / "logs")
    secret, token = paths
    keys = set()
    for _ in range(2):
        write_secrets(paths)
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        keys |= {Trust.load(str(secret)).key, token.read_text()}
    assert len(keys) == 4
    again = deployment(extra_config=made.extra_config)
    assert sections(again, "security") == [{"secret_file": str(secret)}] * 2
    assert [section["token_file"] for section in sections(again, "router")] == [str(token)] * 2
    router = again.commands[-1].argv
    assert router[router.index("--registration-token-file") + 1] == str(token)
    assert router[router.index("--secret-file") + 1] == str(secret)


def test_a_pools_files_are_found_at_the_next_start_and_so_their_secret_is_kept(
    tmp_path: Path,
) -> None:
    pool = {"tiers": ["dram", "fs"], "ssd": {"path": str(tmp_path / "kv"), "size": "1GiB"}}
    keys, tokens = set(), set()
    for start in ("first", "second"):
        made, paths = with_secrets(parse(extra_config={"pool": pool}), tmp_path / start)
        write_secrets(paths)
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        secret = Secret.load(made.extra_config["security"]["secret_file"])
        keys.add(KeySpace.of("the same model", secret=secret.derive(b"pool")).prefix)
        tokens.add(Path(made.extra_config["router"]["token_file"]).read_text())
    assert (len(keys), len(tokens)) == (1, 2)
    made, paths = with_secrets(parse(extra_config={"pool": pool}), tmp_path / "logs", keep=False)
    assert [path.parent for path in paths] == [tmp_path / "logs"] * 2


def test_a_secret_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    pool = {"ssd": {"path": str(tmp_path / "kv"), "size": "1GiB"}}
    _, paths = with_secrets(parse(extra_config={"pool": pool}), tmp_path)
    with pytest.raises(ConfigError, match=r"kv/\.secret-of-pool cannot be written"):
        write_secrets(paths)


def test_files_of_the_user_are_kept(tmp_path: Path) -> None:
    extra = {"security": {"secret_file": "/etc/s"}, "router": {"token_file": "/etc/t"}}
    made = parse(extra_config=extra)
    assert with_secrets(made, tmp_path) == (made, [])


def test_several_hosts_need_files_of_the_user(tmp_path: Path) -> None:
    made = parse(hosts=HOSTS, router={"host": "a"}, prefill=[{"host": "a"}], decode=[{"host": "b"}])
    assert with_secrets(made, tmp_path) == (made, [])


def test_a_secret_is_whole_or_is_not_there(tmp_path: Path) -> None:
    """A part of one that is kept would be there at every later start."""
    kept = tmp_path / KEPT_SECRET
    with room_for(10), pytest.raises(ConfigError, match="cannot be written"):
        write_secrets([kept])
    assert list(tmp_path.iterdir()) == []
    write_secrets([kept])
    assert Secret.load(str(kept))
    assert list(tmp_path.iterdir()) == [kept]
