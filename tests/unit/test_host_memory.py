# SPDX-License-Identifier: Apache-2.0
"""What a process can still take, of the host and within the limits of its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_pd import host_memory
from vllm_ascend_pd.cluster import machine
from vllm_ascend_pd.config import PoolConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.host_memory import available_memory_bytes, resident_memory_bytes
from vllm_ascend_pd.pool import tier

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 64 GiB, of which 40 GiB are available."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(folder: Path, limit: int | str, usage: int, inactive: int = 0, active: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(
        folder / "memory.stat", f"anon 1\nfile 2\ninactive_file {inactive}\nactive_file {active}\n"
    )


def v1(folder: Path, limit: int, usage: int, inactive: int = 0, active: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{usage}\n")
    total = f"total_inactive_file {inactive}\ntotal_active_file {active}\n"
    write(folder / "memory.stat", f"inactive_file 7\n{total}")


def test_container_whose_group_is_the_uppermost_that_it_sees(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    v2(root / "sys/fs/cgroup", 8 * GIB, 3 * GIB, inactive=1 * GIB, active=GIB // 2)
    assert available_memory_bytes(root) == 6 * GIB + GIB // 2


def test_least_of_a_group_and_those_above_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/system.slice/pd.service\n")
    v2(root / "sys/fs/cgroup/system.slice/pd.service", "max", 1 * GIB)
    v2(root / "sys/fs/cgroup/system.slice", 4 * GIB, 3 * GIB)
    assert available_memory_bytes(root) == 1 * GIB


@pytest.mark.parametrize("group", ["docker/4711", ""])
def test_container_with_the_first_version_of_cgroups(root: Path, group: str) -> None:
    """Also where its own group is mounted as the uppermost one."""
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/docker/4711\n4:memory:/docker/4711\n0::/\n")
    memory = root / "sys/fs/cgroup/memory"
    v1(memory, V1_UNLIMITED, 20 * GIB)
    v1(memory / group, 2 * GIB, 1 * GIB, inactive=GIB // 4, active=GIB // 4)
    assert available_memory_bytes(root) == 2 * GIB - GIB // 2


def test_host_counts_where_nothing_is_limited_and_where_the_limit_is_above(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user.slice\n")
    assert available_memory_bytes(root) == 40 * GIB
    v2(root / "sys/fs/cgroup/user.slice", 60 * GIB, 1 * GIB)
    assert available_memory_bytes(root) == 40 * GIB


def test_nothing_is_left_above_the_limit(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    v2(root / "sys/fs/cgroup", 1 * GIB, 2 * GIB)
    assert available_memory_bytes(root) == 0


def test_pool_and_cluster_go_by_it(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    v2(root / "sys/fs/cgroup", 8 * GIB, 0)
    for module in (tier, machine):
        monkeypatch.setattr(
            module, "available_memory_bytes", lambda: host_memory.available_memory_bytes(root)
        )
    assert tier.Opening(PoolConfig()).memory_bytes() == 2 * GIB
    assert machine.Machine.this().free_memory_bytes == 8 * GIB


def test_system_without_cgroups_has_what_is_available(root: Path) -> None:
    assert available_memory_bytes(root) == 40 * GIB
    write(root / "proc/self/cgroup", "0::/\n")
    v2(root / "sys/fs/cgroup", 8 * GIB, 3 * GIB)
    write(root / "sys/fs/cgroup/memory.stat", "anon 1\n")
    assert available_memory_bytes(root) == 40 * GIB


def test_pool_that_is_more_than_there_is_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "available_memory_bytes", lambda: 64 << 20)
    half = PoolConfig(dram_size=32 << 20)
    assert tier.Opening(half, num_workers=2).memory_bytes() == 32 << 20
    more = PoolConfig(dram_size=(32 << 20) + 1)
    with pytest.raises(ConfigError, match=r"pool.dram_size, 67108866 bytes, .* 67108864 bytes"):
        tier.Opening(more, num_workers=2).memory_bytes()
    assert tier.Opening(more, rank=1, num_workers=2).memory_bytes() == (32 << 20) + 1


def test_pool_that_holds_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "available_memory_bytes", lambda: 400)
    assert tier.Opening(PoolConfig(), value_bytes=100).memory_bytes() == 100
    assert not caplog.messages
    assert tier.Opening(PoolConfig(), value_bytes=101).memory_bytes() == 100
    assert "100 bytes for each worker, holds no block" in caplog.text


SIZED = "pool.dram_size, 16777216 bytes for each worker, holds no block (16777217 bytes)"


@pytest.mark.parametrize(
    ("tiers", "dram_size", "says"),
    [
        (("mooncake",), 16 << 20, SIZED),
        (("dram",), 16 << 20, SIZED),
        (("dram",), 0, "pool.dram_size, 0 bytes for each worker, holds no block"),
        (("mooncake",), 0, ""),
    ],
)
def test_pool_that_was_told_a_size_for_no_block_says_so(
    caplog: pytest.LogCaptureFixture, tiers: tuple[str, ...], dram_size: int, says: str
) -> None:
    config = PoolConfig(tiers=tiers, dram_size=dram_size)
    opening = tier.Opening(config, num_workers=2, value_bytes=16 << 20)
    assert opening.memory_bytes() == dram_size
    assert bool(caplog.messages) == (not dram_size and bool(says))
    caplog.clear()
    tier.Opening(config, num_workers=2, value_bytes=(16 << 20) + 1).memory_bytes()
    assert says in caplog.text
    assert bool(caplog.messages) == bool(says)
    assert not says or "raise it to 33554434 bytes or more" in caplog.text


def test_resident_memory_grows_with_what_is_written() -> None:
    before = resident_memory_bytes()
    kept = b"x" * (64 << 20)
    assert resident_memory_bytes() - before > len(kept) // 2
