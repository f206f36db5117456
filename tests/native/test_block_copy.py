# SPDX-License-Identifier: Apache-2.0
"""Both block copiers against a naive reference."""

from __future__ import annotations

import logging
import sys
import threading
import types
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.backends.block_copy import (
    BlockCopier,
    NativeBlockCopier,
    PageLayout,
    Region,
    Values,
    finish_checksum,
    make_block_copier,
)
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.errors import BackendError

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
KNOWN_CHECKSUM = 0x9B79CB0FF2DF79B3
COPIERS: list[BlockCopier] = [PythonBlockCopier()]
try:
    COPIERS.append(NativeBlockCopier())
except BackendError:
    NATIVE = None
else:
    NATIVE = COPIERS[-1]

needs_native = pytest.mark.skipif(NATIVE is None, reason="the native extension is not built")


@pytest.fixture(params=["python", pytest.param("native", marks=needs_native)])
def copier(request) -> BlockCopier:
    return PythonBlockCopier() if request.param == "python" else NativeBlockCopier()


def naive_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def naive_checksum(data: bytes, seed: int = 0) -> int:
    """The definition, word by word."""
    acc = naive_mix(seed)
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little")
        mixed = word ^ ((i // 8 + 1) * GOLDEN & MASK)
        rotated = ((word << 32) | (word >> 32)) & MASK
        acc = (acc + rotated + (mixed & 0xFFFFFFFF) * (mixed >> 32)) & MASK
    return naive_mix(acc ^ (len(data) * GOLDEN & MASK))


def region_of(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins as KV caches do."""
    memory = np.empty(array.nbytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + array.nbytes] = array
    return memory[start : start + array.nbytes]


@dataclass
class Case:
    """Random pages, an empty staging buffer, and what a naive gather would give."""

    pages: np.ndarray
    staging: np.ndarray
    layout: PageLayout
    block_ids: np.ndarray
    staging_offset: int

    @property
    def packed(self) -> bytes:
        size = self.layout.page_bytes
        starts = [
            int(layer) + int(block) * int(stride)
            for layer, stride in zip(
                self.layout.layer_offsets, self.layout.block_strides, strict=True
            )
            for block in self.block_ids
        ]
        return b"".join(self.pages[start : start + size].tobytes() for start in starts)

    @property
    def staged(self) -> bytes:
        end = self.staging_offset + self.layout.num_bytes(len(self.block_ids))
        return self.staging[self.staging_offset : end].tobytes()


def make_case(
    page_bytes=64, gap=0, num_layers=2, num_blocks=8, block_ids=(5, 0, 3), offset=0, seed=0
) -> Case:
    rng = np.random.default_rng(seed)
    # With a gap every second layer has a larger one.
    strides = page_bytes + gap * (1 + np.arange(num_layers, dtype=np.int64) % 2)
    num_page_bytes = max(1, num_blocks * int(strides.sum()))
    pages = aligned(rng.integers(0, 256, num_page_bytes, dtype=np.uint8))
    staging = np.zeros(offset + num_layers * len(block_ids) * page_bytes + 13, dtype=np.uint8)
    layer_offsets = num_blocks * (strides.cumsum() - strides)
    layout = PageLayout(region_of(pages), layer_offsets, strides, page_bytes)
    return Case(pages, staging, layout, np.array(block_ids, dtype=np.int64), offset)


cases = st.builds(
    make_case,
    page_bytes=st.one_of(st.integers(1, 80), st.sampled_from([4096, 8191, 8192, 8193, 20_001])),
    gap=st.integers(0, 33),
    num_layers=st.integers(0, 4),
    num_blocks=st.just(8),
    block_ids=st.lists(st.integers(0, 7), max_size=8, unique=True),
    offset=st.integers(0, 17),
    seed=st.integers(0, 99),
)
seeds = st.integers(0, MASK)


@pytest.mark.parametrize("data", [b"", b"\0", b"a", b"1234567", b"12345678", b"123456789"])
@pytest.mark.parametrize("seed", [0, 1, MASK])
def test_checksum_is_the_defined_one(copier, data, seed):
    memory = np.frombuffer(data + b"x", dtype=np.uint8).copy()
    assert copier.checksum(region_of(memory), 0, len(data), seed) == naive_checksum(data, seed)


def test_checksum_of_known_bytes_never_changes(copier):
    """Peers of different builds compare these sums: a new value needs a new wire version."""
    memory = np.arange(1000, dtype=np.uint16).view(np.uint8)
    assert copier.checksum(region_of(memory), 0, 2000, seed=42) == KNOWN_CHECKSUM


@pytest.mark.parametrize("num_bytes", [8 * 4, 8 * 5, 8 * 1024 + 3, (1 << 20) + 24, 3 * (1 << 20)])
def test_long_checksums_are_the_defined_one(copier, num_bytes):
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 1, dtype=np.uint8)
    expected = naive_checksum(data[1:].tobytes(), 7)
    assert copier.checksum(region_of(data), 1, num_bytes, 7) == expected


def test_zeros_of_different_lengths_have_different_checksums(copier):
    zeros = np.zeros(200, dtype=np.uint8)
    sums = {copier.checksum(region_of(zeros), 0, length) for length in range(201)}
    assert len(sums) == 201


def test_the_seed_changes_the_checksum(copier):
    memory = np.arange(64, dtype=np.uint8)
    sums = {copier.checksum(region_of(memory), 0, 64, seed) for seed in range(100)}
    assert len(sums) == 100


@settings(max_examples=150)
@given(case=cases, seed=seeds)
def test_gather_equals_the_naive_one(case, seed):
    for copier in COPIERS:
        case.staging[:] = 0
        result = copier.gather(
            case.layout, case.block_ids, region_of(case.staging), case.staging_offset, seed
        )
        assert case.staged == case.packed
        assert result == naive_checksum(case.packed, seed)
        assert not case.staging[: case.staging_offset].any()
        assert not case.staging[case.staging_offset + len(case.packed) :].any()


value_cases = st.builds(
    make_case,
    page_bytes=st.sampled_from([8, 16, 72, 4096, 8200]),
    gap=st.integers(0, 33),
    num_layers=st.integers(0, 4),
    num_blocks=st.just(8),
    block_ids=st.lists(st.integers(0, 7), max_size=5, unique=True),
    offset=st.integers(0, 17),
    seed=st.integers(0, 99),
)


@settings(max_examples=150)
@given(
    case=value_cases, seed=seeds, stride_gap=st.integers(0, 70), stops=st.sets(st.integers(0, 4))
)
def test_values_packed_layer_by_layer_are_those_of_one_gather(case, seed, stride_gap, stops):
    num_layers, num_blocks = len(case.layout.layer_offsets), len(case.block_ids)
    value_bytes = case.layout.num_bytes(1)
    stride = value_bytes + stride_gap
    end = case.staging_offset + max(0, num_blocks * stride - stride_gap)
    staging, expected = (np.zeros(end + 13, dtype=np.uint8) for _ in range(2))
    checksums = []
    for i in range(num_blocks):
        block = case.block_ids[i : i + 1]
        at = case.staging_offset + i * stride
        checksums.append(
            PythonBlockCopier().gather(case.layout, block, region_of(expected), at, seed)
        )
    bounds = [0, *sorted(stop for stop in stops if stop < num_layers), num_layers]
    for copier in COPIERS:
        staging[:] = 0
        total = np.zeros(num_blocks, dtype=np.uint64)
        for start, stop in pairwise(bounds):
            total += copier.gather_layers(
                case.layout,
                start,
                stop,
                case.block_ids,
                Values(region_of(staging), case.staging_offset, stride),
            )
        assert np.array_equal(staging, expected)
        assert [finish_checksum(t, value_bytes, seed) for t in total.tolist()] == checksums


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": 60}, "multiple of 8, not 60"),
        ({"value_stride": 127}, "layers from 0 on do not fit in a value of 127 bytes"),
        ({"start": 1, "value_stride": 127}, "layers from 1 on do not fit"),
        ({"value_stride": -1}, "do not fit"),
        ({"value_stride": 2**62}, "staging|do not fit"),
        ({"staging_offset": 14}, "staging range of 384 bytes"),
        ({"staging_offset": -1}, "staging range of 384 bytes"),
        ({"block_ids": np.array([5, 8, 0])}, r"block_ids\[1\] = 8 lies outside"),
        ({"layout_offset": 2**40}, r"layer_offsets\[1\]"),
    ],
)
def test_values_that_leave_their_memory_are_refused(copier, change, message):
    case = make_case(page_bytes=change.get("page_bytes", 64))
    layout = case.layout
    if offset := change.get("layout_offset"):
        layout = PageLayout.packed(layout.region, np.array([0, offset]), 64)
    with pytest.raises(ValueError, match=message):
        copier.gather_layers(
            layout,
            change.get("start", 0),
            2,
            change.get("block_ids", case.block_ids),
            Values(
                region_of(case.staging),
                change.get("staging_offset", 0),
                change.get("value_stride", 128),
            ),
        )
    assert not case.staging.any()


@settings(max_examples=150)
@given(case=cases, seed=seeds)
def test_scatter_undoes_gather_and_touches_nothing_else(case, seed):
    packed = case.packed
    rest = case.pages.copy()
    case.staging[case.staging_offset : case.staging_offset + len(packed)] = np.frombuffer(
        packed, dtype=np.uint8
    )
    expected = rest.copy()
    for layer, stride in zip(case.layout.layer_offsets, case.layout.block_strides, strict=True):
        for block in case.block_ids:
            start = int(layer) + int(block) * int(stride)
            rest[start : start + case.layout.page_bytes] ^= 0xFF
    for copier in COPIERS:
        case.pages[:] = rest
        result = copier.scatter(
            case.layout, case.block_ids, region_of(case.staging), case.staging_offset, seed
        )
        assert np.array_equal(case.pages, expected)
        assert result == naive_checksum(packed, seed)


def test_layers_can_be_copied_one_after_the_other(copier):
    case = make_case(num_layers=3)
    staging = region_of(case.staging)
    num_layer_bytes = case.layout.for_layers(0, 1).num_bytes(len(case.block_ids))
    for layer in range(3):
        one = case.layout.for_layers(layer, layer + 1)
        copier.gather(one, case.block_ids, staging, layer * num_layer_bytes)
    assert case.staged == case.packed


@pytest.mark.parametrize("gap", [0, 8, 32])
@pytest.mark.parametrize("page_bytes", [128 << 10, (128 << 10) + 8, (128 << 10) + 5])
def test_large_copies_are_the_defined_ones(copier, page_bytes, gap):
    """These go around the caches, where the target's alignment allows it."""
    case = make_case(page_bytes=page_bytes, gap=gap, offset=64)
    arguments = case.layout, case.block_ids, region_of(case.staging), case.staging_offset, 9
    packed = case.packed
    expected = PythonBlockCopier().checksum(
        region_of(np.frombuffer(packed, np.uint8)), 0, len(packed), 9
    )
    assert copier.gather(*arguments) == expected
    assert case.staged == packed
    case.pages[:] = 0
    assert copier.scatter(*arguments) == expected
    assert case.packed == packed


@pytest.mark.parametrize("num_bytes", [64, 20_001])
def test_any_flipped_bit_changes_the_checksum(copier, num_bytes):
    case = make_case(page_bytes=num_bytes, num_layers=1, block_ids=(2,))
    staging = region_of(case.staging)
    good = copier.gather(case.layout, case.block_ids, staging)
    bits = range(num_bytes * 8) if num_bytes == 64 else range(0, num_bytes * 8, 997)
    for bit in bits:
        case.staging[bit // 8] ^= 1 << bit % 8
        assert copier.scatter(case.layout, case.block_ids, staging) != good
        case.staging[bit // 8] ^= 1 << bit % 8
    assert copier.scatter(case.layout, case.block_ids, staging) == good


def test_swapped_pages_change_the_checksum(copier):
    case = make_case(num_layers=1, block_ids=(1, 2, 3))
    staging = region_of(case.staging)
    good = copier.gather(case.layout, np.array([1, 2, 3]), staging)
    assert copier.gather(case.layout, np.array([1, 3, 2]), staging) != good


def test_swapped_words_change_the_checksum(copier):
    words = np.arange(1, 65, dtype=np.uint64)
    good = copier.checksum(region_of(words), 0, words.nbytes)
    for i in range(63):
        swapped = words.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        assert copier.checksum(region_of(swapped), 0, words.nbytes) != good


@pytest.mark.parametrize("block_ids", [[-1], [8], [0, 1, 8], [2**62], [-(2**62)]])
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_a_block_outside_the_region_is_named(copier, name, block_ids):
    case = make_case(num_layers=1)
    before = case.pages.copy()
    ids = np.array(block_ids, dtype=np.int64)
    staging = np.zeros(1000, dtype=np.uint8)
    with pytest.raises(ValueError, match=rf"block_ids\[{len(ids) - 1}\] = {ids[-1]} lies outside"):
        getattr(copier, name)(case.layout, ids, region_of(staging))
    assert np.array_equal(case.pages, before)
    assert not staging.any()


def test_a_block_is_outside_if_only_its_end_is(copier):
    pages = np.zeros(8 * 64 - 1, dtype=np.uint8)
    layout = PageLayout.packed(region_of(pages), np.array([0]), 64)
    staging = np.zeros(64, dtype=np.uint8)
    copier.gather(layout, np.array([6]), region_of(staging))
    with pytest.raises(ValueError, match=r"block_ids\[0\] = 7"):
        copier.gather(layout, np.array([7]), region_of(staging))


@pytest.mark.parametrize("offset", [-1, 1024 - 63, 2**62])
def test_a_layer_outside_the_region_is_named(copier, offset):
    case = make_case()
    layout = PageLayout.packed(case.layout.region, np.array([0, offset]), 64)
    with pytest.raises(ValueError, match=rf"layer_offsets\[1\] = {offset} puts a page"):
        copier.gather(layout, case.block_ids, region_of(case.staging))


@pytest.mark.parametrize("offset", [-1, 14, 2**62])
def test_a_staging_range_outside_its_region_is_refused(copier, offset):
    case = make_case()
    with pytest.raises(ValueError, match="staging range of 384 bytes"):
        copier.gather(case.layout, case.block_ids, region_of(case.staging), offset)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 8), (0, 65), (60, 5), (0, -1), (2**62, 1)])
def test_a_checksum_range_outside_its_region_is_refused(copier, offset, num_bytes):
    memory = np.zeros(64, dtype=np.uint8)
    with pytest.raises(ValueError, match="leaves the region of 64 bytes"):
        copier.checksum(region_of(memory), offset, num_bytes)


@pytest.mark.parametrize(("page_bytes", "block_stride"), [(0, 64), (-8, 64), (65, 64), (1, 0)])
def test_an_impossible_layout_is_refused(copier, page_bytes, block_stride):
    case = make_case()
    layout = PageLayout(case.layout.region, np.array([0]), np.array([block_stride]), page_bytes)
    with pytest.raises(ValueError, match="page_bytes <= block_stride"):
        copier.gather(layout, case.block_ids, region_of(case.staging))


def test_each_layer_has_a_stride(copier):
    case = make_case()
    layout = PageLayout(case.layout.region, np.array([0, 64]), np.array([64]), 64)
    with pytest.raises(ValueError, match="1 block_strides of 2 layers"):
        copier.gather(layout, case.block_ids, region_of(case.staging))


def test_block_beyond_the_layer_with_the_largest_stride_is_refused(copier):
    case = make_case()
    size = case.layout.region.size
    layout = PageLayout(case.layout.region, np.array([0, 0]), np.array([64, size // 2]), 64)
    copier.gather(layout, np.array([1]), region_of(case.staging))
    with pytest.raises(ValueError, match=r"block_ids\[0\] = 2 lies outside"):
        copier.gather(layout, np.array([2]), region_of(case.staging))


def test_a_page_larger_than_the_region_is_refused(copier):
    case = make_case()
    layout = PageLayout.packed(case.layout.region, np.array([0]), 2048)
    with pytest.raises(ValueError, match=r"layer_offsets\[0\] = 0 puts a page"):
        copier.gather(layout, case.block_ids, region_of(case.staging))


def test_staging_inside_the_pages_is_refused(copier):
    case = make_case()
    inside = Region(case.layout.region.base + 64, 512)
    with pytest.raises(ValueError, match="overlaps"):
        copier.gather(case.layout, case.block_ids, inside)


@pytest.mark.parametrize(
    "block_ids",
    [
        np.array([1, 2], dtype=np.int32),
        np.array([1, 2], dtype=np.uint64),
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.arange(8)[::2],
    ],
    ids=["int32", "uint64", "float", "matrix", "strided"],
)
def test_other_arrays_are_refused(copier, block_ids):
    case = make_case()
    with pytest.raises(TypeError):
        copier.gather(case.layout, block_ids, region_of(case.staging))


@pytest.mark.parametrize(("base", "size"), [(0, 64), (4096, 0), (-1, 64), (4096, -1)])
def test_null_and_empty_regions_are_refused(base, size):
    with pytest.raises(ValueError, match="not a memory region"):
        Region(base, size)


@needs_native
@pytest.mark.parametrize(("base", "size"), [(0, 64), (4096, 0), (MASK, 2), (4096, MASK)])
def test_the_extension_checks_regions_for_itself(base, size):
    from vllm_ascend_pd import _C

    with pytest.raises(ValueError, match="not a memory region"):
        _C.Region(base, size)


@needs_native
@pytest.mark.parametrize("name", ["gather", "gather_layers", "scatter", "checksum"])
def test_other_threads_run_during_a_native_call(name):
    """With a switch interval of an hour, only a released GIL lets the other thread in."""
    case = make_case(page_bytes=1 << 20, num_layers=4, block_ids=range(8))
    staging = region_of(case.staging)
    go, counted = threading.Event(), threading.Event()

    def count() -> None:
        go.wait()
        counted.set()

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(3600)
    try:
        go.set()  # the other thread can run from here on, but has no GIL
        for _ in range(200):
            if name == "checksum":
                NATIVE.checksum(staging, 0, staging.size)
            elif name == "gather_layers":
                NATIVE.gather_layers(case.layout, 0, 4, case.block_ids, Values(staging, 0, 4 << 20))
            else:
                getattr(NATIVE, name)(case.layout, case.block_ids, staging)
            if counted.is_set():
                break
        progressed = counted.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert progressed


@needs_native
def test_the_native_copier_is_picked(caplog):
    assert isinstance(make_block_copier(), NativeBlockCopier)
    assert not caplog.records


def test_an_extension_of_an_older_package_is_refused_by_name(monkeypatch):
    old = types.ModuleType("vllm_ascend_pd._C")
    monkeypatch.setitem(sys.modules, "vllm_ascend_pd._C", old)
    monkeypatch.setattr("vllm_ascend_pd._C", old, raising=False)
    with pytest.raises(BackendError, match="older than this package"):
        NativeBlockCopier()


def test_without_the_extension_one_warning_is_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm_ascend_pd._C", None)
    monkeypatch.delattr("vllm_ascend_pd._C", raising=False)
    with caplog.at_level(logging.INFO):
        copier = make_block_copier()
    assert isinstance(copier, PythonBlockCopier)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "native" in caplog.text
