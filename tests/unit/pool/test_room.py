# SPDX-License-Identifier: Apache-2.0
"""What goes for a new value, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.config import PoolConfig
from vllm_ascend_pd.pool.composite_tier import CompositeTier
from vllm_ascend_pd.pool.fs_tier import FileTier
from vllm_ascend_pd.pool.keys import tenant_of
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.room import Room, Shares
from vllm_ascend_pd.pool.tier import Status, Tier, Value
from vllm_ascend_pd.types import Place

SIZE, ROOM, SHARE = 10, 100, 0.4
SHARES = Shares(SHARE)
MEMORY = np.arange(SIZE, dtype=np.uint8)

TENANTS = st.sampled_from(["", "a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), TENANTS, st.integers(1, 41)),
        st.tuples(st.just("touch"), TENANTS, st.integers(0, 30)),
        st.tuples(st.just("pop"), TENANTS, st.integers(0, 30)),
        st.tuples(st.just("fail"), TENANTS, st.integers(1, 40)),
    ),
    max_size=60,
)


@given(STEPS)
def test_room_is_that_of_a_list_in_order_of_use(steps: list[tuple[str, str, int]]) -> None:
    room = Room(ROOM, SHARES)
    model: list[tuple[str, int, str]] = []  # the least recently used first
    for number, (what, tenant, size) in enumerate(steps):
        key = model[size % len(model)][0] if model else "unknown"
        known = [one for one in model if one[0] == key]
        if what in ("put", "fail"):
            key = f"new {number}"
            if not room.fits(size, tenant):
                assert size > ROOM * SHARE
                continue
            gone = room.reserve(size, tenant)
            expected = []
            for own in (True, False):
                of = [one for one in model if one[2] == tenant] if own else list(model)
                used, most = sum(one[1] for one in of), ROOM * SHARE if own else ROOM
                while used + size > most:
                    expected.append(of[0])
                    used -= of[0][1]
                    model.remove(of.pop(0))
            assert gone == expected
            if what == "fail":
                room.release(size, tenant)
            else:
                room.keep(key, size, tenant)
                model.append((key, size, tenant))
        elif what == "touch":
            room.touch(key)
            model = [one for one in model if one not in known] + known
        else:
            assert room.pop(key) == (known[0][2] if known else None)
            model = [one for one in model if one not in known]
        assert room.all_keys() == [one[0] for one in model]
        assert room.used_bytes == sum(one[1] for one in model) <= ROOM
    for key in room.all_keys():
        room.pop(key)
    assert (room.used_bytes, room._used_by, room._keys_of) == (0, {}, {})


def test_what_a_tenant_has_just_used_is_not_what_goes() -> None:
    room = Room(ROOM, SHARES)
    for key in "wxyz":
        assert room.reserve(SIZE, "a") == []
        room.keep(key, SIZE, "a")
    room.touch("w")
    assert room.reserve(SIZE, "a") == [("x", SIZE, "a")]
    assert room.reserve(SIZE, "b") == []


def value(key: str, tenant: str = "") -> Value:
    return Value(key, MEMORY.ctypes.data, SIZE, tenant)


def there(tier: Tier, *keys: str) -> list[bool]:
    return [place is not Place.NOWHERE for place in tier.lookup(keys)]


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_tenant_over_its_share_loses_its_own_values(kind: str, tmp_path: Path) -> None:
    tier: Tier = MemoryTier(ROOM, shares=SHARES)
    if kind == "files":
        tier = FileTier(tmp_path, ROOM, SHARES)
    others = [value("pd2/f/aa", "b"), value("pd2/f/bb")]
    assert tier.put(others) == [Status.OK] * 2
    keys = [f"pd2/f/{i}" for i in range(7)]
    assert tier.put([value(key, "a") for key in keys]) == [Status.OK] * 7
    assert there(tier, *keys) == [False] * 3 + [True] * 4
    assert there(tier, "pd2/f/aa", "pd2/f/bb") == [True, True]
    assert tier.num_over_share == 3
    assert tier.room.used_bytes == 6 * SIZE
    tier.close()


def test_files_know_whose_they_are_after_a_restart(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, ROOM, SHARES)
    keys = [f"pd2/f/{i}" for i in range(4)]
    tier.put([value("pd2/f/aa"), *(value(key, "a") for key in keys)])
    tier.close()
    tier = FileTier(tmp_path, ROOM, SHARES)
    assert there(tier, *keys, "pd2/f/aa") == [True] * 5
    assert tier.tenants([keys[0], "pd2/f/aa"]) == ["a", ""]
    read = np.zeros(SIZE, np.uint8)
    assert tier.get([Value(keys[2], read.ctypes.data, SIZE)]) == [Status.OK]
    assert (read == MEMORY).all()
    tier.put([value("pd2/f/more", "a")])
    assert sum(there(tier, *keys)) == 3
    assert there(tier, "pd2/f/aa") == [True]
    tier.remove(["pd2/f/more", *keys])
    assert [path.name for path in tmp_path.glob("pd2/f/*/*")] == ["aa"]
    tier.close()
    smaller = FileTier(tmp_path, SIZE * 4, SHARES)  # whose share is one value
    smaller.put([value("pd2/f/x", "a"), value("pd2/f/y", "a")])
    assert there(smaller, "pd2/f/x", "pd2/f/y", "pd2/f/aa") == [False, True, True]
    smaller.close()


def test_copy_in_a_faster_tier_is_its_tenants(tmp_path: Path) -> None:
    memory, files = MemoryTier(ROOM, shares=SHARES), FileTier(tmp_path, ROOM, SHARES)
    tier = CompositeTier([memory, files])
    files.put([value("pd2/f/aa", "a")])
    memory.put([value(f"pd2/f/{i}", "a") for i in range(4)])
    assert tier.get([value("pd2/f/aa")]) == [Status.OK]
    assert memory.tenants(["pd2/f/aa"]) == ["a"]
    assert there(memory, *(f"pd2/f/{i}" for i in range(4))) == [False, True, True, True]
    assert tier.num_over_share == 1
    tier.close()


def test_tenants_with_a_share_of_their_own_have_that() -> None:
    shares = {"large": 0.7, "small": 0.1}
    config = PoolConfig(tiers=("dram",), dram_size=16 << 20, tenant_share=0.3, tenant_shares=shares)
    tier = MemoryTier(ROOM, shares=Shares.of(config))
    for salt, num_kept in ("large|a", 7), ("small|b", 1), ("other", 3), (None, 3):
        tenant = tenant_of(salt)
        keys = [f"pd2/f/{i}" for i in range(9)]
        assert tier.put([value(key, tenant) for key in keys]) == [Status.OK] * 9
        assert there(tier, *keys) == [False] * (9 - num_kept) + [True] * num_kept
        tier.remove(keys)
    without = Shares.of(PoolConfig(tiers=("dram",), dram_size=16 << 20, tenant_shares=shares))
    assert without.num_bytes(tenant_of("other"), ROOM) == ROOM


def test_salts_of_one_tenant_are_one_tenants() -> None:
    assert tenant_of("a|user") == tenant_of("a|") == tenant_of("a")
    assert len({tenant_of(salt) for salt in ("a|x", "b|x", "ab", "|", None)}) == 5
    assert tenant_of(None) == tenant_of("") == ""
    assert len(tenant_of("surrogate \udc80")) == 16
