# SPDX-License-Identifier: Apache-2.0
"""The worker side's steps, over the fake transfer engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)

from tests.pages import one_group
from tests.unit.transfer.raw_peers import silent_server
from vllm_ascend_pd import hooks
from vllm_ascend_pd.backends.block_copy import BlockCopier, WorkerPages
from vllm_ascend_pd.backends.fake_engine import FakeTransferEngine
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import Transports
from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.vllm_api.groups import kv_groups
from vllm_ascend_pd.engine.worker.kv_caches import KVCaches, locate, run_order
from vllm_ascend_pd.engine.worker.saved_layers import SavedLayers
from vllm_ascend_pd.engine.worker.step import ArmedStep, WorkerLayers, WorkerMemory, WorkerSide
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.pool.io import PoolIO, PoolSlots
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.messages import AheadSpec, DropAhead, Save
from vllm_ascend_pd.pool.packed_slot import PackedSlot
from vllm_ascend_pd.pool.values import BlockValues
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, LeaseRef, LoadId

NUM_BLOCKS = 8
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
# Not in the order of the layers, as the engine may have it.
NAMES = ["model.layers.10.attn", "model.layers.2.attn", "model.layers.0.attn"]


def make_caches(layout: str = "LBHNC") -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """One allocation of all layers, one view per layer, and an alias of the first."""
    page = SPEC.page_size_bytes
    size = page * NUM_BLOCKS * len(NAMES)
    buffer = torch.randint(0, 127, (size,), dtype=torch.int8)
    stride = page * NUM_BLOCKS
    caches = {name: buffer[i * stride : (i + 1) * stride] for i, name in enumerate(NAMES)}
    caches["shares.layer.0"] = caches[NAMES[2]]
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[KVCacheTensor(size, NAMES, stride, page)],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, SPEC)],
        kv_cache_layout=layout,
    )
    return config, caches


class Side:
    """A worker side of both roles, and its pages as ``uint8 [layer, block, byte]``."""

    def __init__(
        self,
        pooled: bool = False,
        drafts: bool = False,
        num_under_way: int = 1,
        whole_blocks: bool = False,
    ) -> None:
        config, self.caches = make_caches()
        self.located: KVCaches = locate(config, self.caches)
        self.engine = FakeTransferEngine()
        self.transports = Transports({"fake": self.engine})
        self.grants = grants = Grants()
        copier, trust = PythonBlockCopier(), Trust()
        pages = WorkerPages(copier, one_group(self.located.layout))
        pools = [StagingPool(self.engine, 2, 4 * SPEC.page_size_bytes) for _ in range(2)]
        self.live_regions: list[tuple[int, int]] = []
        self.server = DataServer(
            host="127.0.0.1",
            transports=self.transports,
            pages=pages,
            pool=pools[0],
            grants=grants,
            allows_host=lambda host: True,
            write_timeout_s=5.0,
            trust=trust,
        )
        self.loader = PeerLoader(self.transports.sessions, pages, pools[1], trust)
        self.server.start()
        self.loader.start()
        self.pool = self.open_pool(copier, pools) if pooled else None
        self.worker = WorkerSide(
            WorkerLayers(self.located.layers, drafts=drafts, whole_blocks=whole_blocks),
            WorkerMemory(self.transports, pools, self.live_regions),
            grants,
            trust,
            self.server,
            self.loader,
            self.pool,
            num_under_way=num_under_way,
        )

    def open_pool(self, copier: BlockCopier, pools: list[StagingPool]) -> PoolIO:
        space = KeySpace.of("steps")
        values = BlockValues(copier, one_group(self.located.layout)[0], space)
        slots = [StagingPool(self.engine, 1, 2 * values.num_bytes) for _ in range(3)]
        pools += slots
        read, write, ahead = slots
        self.memory = MemoryTier(1 << 20)
        pool = PoolIO(self.memory, [values], PoolSlots(read, write, ahead), 1)
        pool.start()
        return pool

    def pages(self, name: str) -> Any:
        return self.caches[name].numpy().reshape(NUM_BLOCKS, SPEC.page_size_bytes)

    def load(self) -> LoadResult:
        """What a consumer gets of the grant now."""
        self.loader.start_load(load_spec(self, 99))
        self.loader.wait_all()
        (result,) = self.loader.take_results()
        return result

    def step(self, meta: StepMeta | None = None) -> StepReport | None:
        """A whole step as the runner drives it; its report."""
        self.worker.begin_step(output_of(meta))
        armed = self.worker.take_armed_step(wait_all=False)
        if armed is not None:
            with armed:
                for name in NAMES:
                    armed.wait_layer(name)
                    armed.save_layer(name)
        with self.worker.step_output() as output:
            pass
        report = output.kv_connector_worker_meta
        assert report is None or isinstance(report, StepReport)
        return report


def output_of(meta: StepMeta | None) -> Any:
    return SimpleNamespace(pd_metadata=meta)


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    side.worker.shutdown()
    assert not side.server.is_alive()
    assert not side.loader.is_alive()
    assert side.server.num_errors == side.loader.num_errors == 0
    assert side.engine.num_regions() == 0


@pytest.fixture
def pooled() -> Iterator[Side]:
    side = Side(pooled=True)
    yield side
    side.worker.shutdown()
    assert side.engine.num_regions() == 0


@pytest.fixture
def drafting() -> Iterator[Side]:
    """The last layer is a drafter's."""
    side = Side(drafts=True)
    yield side
    side.worker.shutdown()
    assert side.engine.num_regions() == 0


LEASE = LeaseRef("t", 1)


def load_spec(
    side: Side,
    load_id: int = 1,
    *,
    in_step: bool = True,
    block_ids: tuple[int, int] = (6, 7),
    has_tail: bool = False,
    **changes: Any,
) -> LoadSpec:
    fields: dict[str, Any] = {
        "load_id": LoadId(load_id),
        "peers": (side.server.page_server.admit(LEASE, 2),),
        "transfer_id": "t",
        "epoch": "e",
        "blocks": (LoadBlocks(0, (0, 1), block_ids, has_tail),),
        "in_step": in_step,
        "timeout_s": 5.0,
    }
    return LoadSpec(**{**fields, **changes})


GRANT = StepMeta(grants=(Grant(LEASE, "e", ((1, 2),), 0, 2),))


def test_layers_are_in_the_models_order_whatever_the_allocations(side: Side) -> None:
    layers = side.located.layers
    assert [layers[name] for name in NAMES] == [range(2, 3), range(1, 2), range(1)]
    base = side.located.layout.region.base
    for name in NAMES:
        offset = int(side.located.layout.layer_offsets[layers[name].start])
        assert base + offset == side.caches[name].data_ptr()


@pytest.mark.parametrize(
    "drafts",
    [
        ["model.layers.11.attn"],
        ["draft_model.model.layers.0.attn", "draft_model.model.layers.1.attn"],
        ["mtp.layers.0.attn"],
    ],
    ids=["numbers that go on", "another model", "a module"],
)
def test_layers_of_a_drafter_are_behind_those_of_the_model(drafts: list[str]) -> None:
    config = make_caches()[0]
    config.kv_cache_groups = [KVCacheGroupSpec([*NAMES, *drafts], SPEC)]
    names = [*reversed(drafts), *NAMES]
    assert run_order(config, names) == [*reversed(NAMES), *drafts]


def test_pages_of_groups_are_those_of_their_layers() -> None:
    """The scheduler refuses several groups by name, so no worker may fail on them before."""
    config, caches = make_caches()
    config.kv_cache_groups = [
        KVCacheGroupSpec([NAMES[0], "shares.layer.0"], SPEC),
        KVCacheGroupSpec(NAMES[1:], SPEC),
    ]
    groups = locate(config, caches).by_group(kv_groups(config))
    assert [group.layers for group in groups] == [(2,), (0, 1)]
    assert [group.block_size for group in groups] == [SPEC.block_size] * 2
    for group, names in zip(groups, ([NAMES[0]], [NAMES[2], NAMES[1]]), strict=True):
        base, offsets = group.layout.region.base, group.layout.layer_offsets
        assert [base + int(it) for it in offsets] == [caches[name].data_ptr() for name in names]


def test_layer_that_shares_a_cache_waits_for_the_same_pages(side: Side) -> None:
    layers = side.located.layers
    assert layers["shares.layer.0"] == layers[NAMES[2]]


def test_layout_without_whole_pages_is_refused_by_name() -> None:
    config, caches = make_caches("LHBNC")
    with pytest.raises(ConfigError, match=r"VLLM_KV_CACHE_LAYOUT=LHBNC.*LBHNC"):
        locate(config, caches)


def of_sizes(*num_heads: int) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Layers with so many KV heads."""
    page = SPEC.page_size_bytes
    buffer = torch.randint(0, 127, (page * sum(num_heads) * NUM_BLOCKS,), dtype=torch.int8)
    tensors: list[KVCacheTensor] = []
    caches: dict[str, torch.Tensor] = {}
    offset = 0
    for name, size in zip(NAMES, num_heads, strict=True):
        layer = size * page * NUM_BLOCKS
        tensors.append(KVCacheTensor(len(buffer), [name], layer, size * page, offset))
        caches[name] = buffer[offset:]
        offset += layer
    specs: dict[str, Any] = {
        name: replace(SPEC, num_kv_heads=size) for name, size in zip(NAMES, num_heads, strict=True)
    }
    group = KVCacheGroupSpec(NAMES, UniformTypeKVCacheSpecs(SPEC.block_size, specs))
    return KVCacheConfig(NUM_BLOCKS, tensors, [group], kv_cache_layout="LBHNC"), caches


def test_large_page_counts_as_several() -> None:
    config, caches = of_sizes(3, 1, 2)
    page = SPEC.page_size_bytes
    (group,) = kv_groups(config)
    assert (group.page_bytes, len(group.layers), group.bytes_per_block) == (page, 6, 6 * page)
    found = locate(config, caches)
    assert found.layers == {NAMES[2]: range(2), NAMES[1]: range(2, 3), NAMES[0]: range(3, 6)}
    assert found.layout.page_bytes == page
    assert found.layout.block_strides.tolist() == [2 * page] * 2 + [page] + [3 * page] * 3
    base = found.layout.region.base
    for name, size in zip(NAMES, (3, 1, 2), strict=True):
        starts = [base + int(found.layout.layer_offsets[index]) for index in found.layers[name]]
        assert starts == [caches[name].data_ptr() + part * page for part in range(size)]
    (pages,) = found.by_group((group,))
    assert pages.layers == tuple(range(6))


def test_forward_waits_for_all_of_a_large_page() -> None:
    waited: list[int] = []
    loaders = SimpleNamespace(wait_layer=waited.append)
    grants = Grants()
    layers = {"small": range(1), "large": range(1, 4)}
    step = ArmedStep(cast(Any, loaders), grants, None, layers, wait_all=False)
    step.wait_layer("large")
    assert waited == [1, 2, 3]


def test_scheduler_that_knows_one_specification_counts_alike() -> None:
    """vLLM gives it that of one layer."""
    config, _ = of_sizes(3, 1, 2)
    ours = generate_scheduler_kv_cache_config([config])
    assert kv_groups(ours) == kv_groups(config)


def test_layers_with_pages_of_sizes_without_a_common_part_are_refused_by_name() -> None:
    config, caches = of_sizes(3, 1, 2)
    config.kv_cache_tensors[1] = replace(config.kv_cache_tensors[1], block_stride=1032)
    with pytest.raises(ConfigError, match=r"pages of one size.*not of \[1032, 2048, 3072\] bytes"):
        locate(config, caches)


def test_caches_of_one_layer_that_make_one_page_are_refused_by_name_on_a_cpu() -> None:
    config, caches = of_sizes(33, 2, 2)
    names = ["model.layers.0.attn", "model.layers.0.indexer", "model.layers.0.other"]
    for tensor, name in zip(config.kv_cache_tensors, names, strict=True):
        tensor.layers = [name]
    config.kv_cache_groups[0].layer_names = names
    caches = dict(zip(names, caches.values(), strict=True))
    with pytest.raises(ConfigError, match=r"on a CPU.*not of \[2048, 33792\] bytes"):
        locate(config, caches)


def test_cache_that_is_not_in_host_memory_is_refused_by_name() -> None:
    config, caches = make_caches()
    with pytest.raises(ConfigError, match="on 'meta'"):
        locate(config, {name: cache.to("meta") for name, cache in caches.items()})


def test_first_step_tells_where_pages_are_served_and_later_ones_do_not(side: Side) -> None:
    assert side.step() == StepReport((), {0: side.server.page_server})
    assert side.step() is None


def test_step_without_tokens_tells_it_too(side: Side) -> None:
    side.worker.begin_step(output_of(None))
    output = side.worker.no_forward().kv_connector_output
    assert output is not None
    assert output.kv_connector_worker_meta == StepReport((), {0: side.server.page_server})


def test_granted_blocks_are_loaded_in_a_step(side: Side) -> None:
    side.step(GRANT)
    report = side.step(StepMeta(loads=(load_spec(side),)))
    assert report is not None
    (result,) = report.results
    assert result.cause == ""
    assert result.num_bytes == len(NAMES) * 2 * SPEC.page_size_bytes
    for name in NAMES:
        np.testing.assert_array_equal(side.pages(name)[6:8], side.pages(name)[1:3])
    assert side.worker.counts() == {
        "regions": 2,
        "busy_slots": 0,
        "loads": 0,
        "loaded_bytes": 0,
        "grants": 1,
    }


def test_grant_is_served_only_after_its_step_has_computed_it(side: Side) -> None:
    side.worker.begin_step(output_of(GRANT))
    with side.worker.step_output():
        assert side.load().cause == Cause.NOT_COMPUTED.value
    assert side.load().cause == ""


def test_grant_is_served_while_the_step_that_has_computed_it_samples(side: Side) -> None:
    """Model Runner V2 reports only after sampling, and after drafting."""
    side.worker.begin_step(output_of(GRANT))
    side.worker.end_forward()
    assert side.load().cause == ""
    with side.worker.step_output():
        pass
    assert side.load().cause == ""


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_grant_is_served_when_the_drafter_has_run(drafting: Side, runner: str) -> None:
    """Model Runner V1 reports before it drafts, V2 behind it."""
    drafting.worker.begin_step(output_of(GRANT))
    armed = drafting.worker.take_armed_step(wait_all=False)
    assert armed is not None
    if runner == "v1":
        with drafting.worker.step_output(), armed:
            armed.save_layer(NAMES[1])
    else:
        with armed:
            armed.save_layer(NAMES[1])
        drafting.worker.end_forward()
    assert drafting.grants.look(LEASE)[1] == 2
    assert drafting.load().cause == Cause.NOT_COMPUTED.value
    drafting.worker.end_drafts()
    assert drafting.load().cause == ""


def test_what_the_drafter_reads_has_landed_when_the_model_has_run(drafting: Side) -> None:
    drafting.step(GRANT)
    drafting.worker.end_drafts()
    drafting.worker.begin_step(output_of(StepMeta(loads=(load_spec(drafting),))))
    armed = drafting.worker.take_armed_step(wait_all=False)
    assert armed is not None
    with drafting.worker.step_output(), armed:
        pass
    for name in NAMES:
        np.testing.assert_array_equal(drafting.pages(name)[6:8], drafting.pages(name)[1:3])


def test_layer_is_served_when_it_is_computed(side: Side) -> None:
    side.worker.begin_step(output_of(GRANT))
    armed = side.worker.take_armed_step(wait_all=False)
    assert armed is not None
    with side.worker.step_output(), armed:
        assert hooks.current_step is armed
        hooks.current_step.wait_layer(NAMES[2])
        hooks.current_step.save_layer(NAMES[2])
        grant, num_layers_done, _ = side.grants.look(LEASE)
        assert (grant.num_ready, grant.num_coming, num_layers_done) == (0, 2, 1)
        hooks.current_step.save_layer(NAMES[0])
        assert side.grants.look(LEASE)[1] == 3
    grant, num_layers_done, _ = side.grants.look(LEASE)
    assert (grant.num_ready, num_layers_done) == (2, 0)


def test_nothing_is_served_before_all_is_computed_where_layers_make_one_page() -> None:
    side = Side(whole_blocks=True)
    side.worker.begin_step(output_of(GRANT))
    armed = side.worker.take_armed_step(wait_all=False)
    assert armed is not None
    with side.worker.step_output(), armed:
        for name in NAMES:
            armed.save_layer(name)
        grant, num_layers_done, _ = side.grants.look(LEASE)
        assert (grant.num_ready, num_layers_done) == (0, 0)
    assert side.grants.look(LEASE)[0].num_ready == 2
    side.worker.shutdown()


SHARED_BLOCKS = {f"model.attn.{i}": range(i, i + 1) for i in range(6)}


def test_only_what_is_saved_is_told_whatever_the_order() -> None:
    """As Zamba2's layers run, which are numbered by the block that they share."""
    saved = SavedLayers(SHARED_BLOCKS, [*SHARED_BLOCKS])
    packed: list[int] = []
    ahead = SimpleNamespace(layer_done=packed.append)
    server = SimpleNamespace(notify_layer=lambda: None)
    for _ in range(2):
        packed.clear()
        saved.begin_step()
        (grants := Grants()).begin_step(GRANT.grants)
        step = ArmedStep(
            None, grants, cast(Any, server), SHARED_BLOCKS, False, cast(Any, ahead), saved
        )
        granted = []
        for number in (0, 3, 1, 4, 2, 5):
            step.save_layer(f"model.attn.{number}")
            granted.append(grants.look(LEASE)[1])
        assert granted == [last + 1 for last in packed] == [1, 1, 2, 2, 5, 6]


LAYERS_OF_ALL_KINDS = {
    "model.layers.0.mixer": range(1),
    "model.layers.1.attn": range(1, 4),  # a large page
    "model.layers.1.indexer": range(4, 5),
    "model.layers.2.attn": range(5, 6),
    "model.layers.3.mixer": range(6, 7),
    "draft.layers.0.attn": range(7, 8),
    "model.layers.4.attn": range(1, 4),  # reads what the first one has written
}


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        ([1, 2, 4], [4, 6, 6]),
        ([1, 1, 2, 2], [4, 4, 6, 6]),
        ([2, 1], [1, 6]),
        ([4, 2], [4, 6]),
    ],
    ids=["in order", "twice", "the other way round", "an alias first"],
)
def test_layer_without_a_hook_counts_with_a_later_one(
    numbers: list[int], counts: list[int]
) -> None:
    hooked = [f"model.layers.{number}.attn" for number in (1, 2)]
    saved = SavedLayers(LAYERS_OF_ALL_KINDS, [*hooked, "draft.layers.0.attn"])
    assert [saved.save(f"model.layers.{number}.attn") for number in numbers] == counts


def test_state_that_nothing_of_its_beginning_follows_counts_at_the_end() -> None:
    saved = SavedLayers({"0.mixer": range(1), "model.attn.0": range(1, 2)}, ["model.attn.0"])
    assert saved.save("model.attn.0") == 0


def test_forward_that_fails_grants_nothing(side: Side) -> None:
    side.worker.begin_step(output_of(GRANT))
    with pytest.raises(ZeroDivisionError), side.worker.step_output():
        raise ZeroDivisionError
    assert side.load().cause == Cause.NOT_COMPUTED.value


def test_revoked_grant_is_given_up_before_the_forward(side: Side) -> None:
    side.step(GRANT)
    side.worker.begin_step(output_of(StepMeta(revokes=(LEASE,))))
    assert side.worker.counts()["grants"] == 0


def test_step_is_begun_once(side: Side) -> None:
    side.step(GRANT)
    output = output_of(StepMeta(loads=(load_spec(side),)))
    side.worker.begin_step(output)
    side.worker.begin_step(output)
    assert side.worker.take_armed_step(wait_all=True) is not None
    side.worker.begin_step(output)
    assert side.worker.take_armed_step(wait_all=True) is None
    with side.worker.step_output() as kv_output:
        pass
    report = kv_output.kv_connector_worker_meta
    assert isinstance(report, StepReport)
    assert len(report.results) == 1


def test_only_steps_with_loads_or_grants_are_armed(side: Side) -> None:
    side.worker.begin_step(output_of(None))
    assert side.worker.take_armed_step(wait_all=False) is None
    side.worker.begin_step(output_of(GRANT))
    assert side.worker.take_armed_step(wait_all=False) is not None
    side.worker.begin_step(output_of(StepMeta(revokes=(LeaseRef("u", 2),))))
    assert side.worker.take_armed_step(wait_all=False) is None
    side.worker.begin_step(output_of(StepMeta(loads=(load_spec(side, in_step=False),))))
    assert side.worker.take_armed_step(wait_all=False) is None


@pytest.fixture
def ahead() -> Iterator[Side]:
    """Two steps are under way at a time."""
    side = Side(num_under_way=2)
    yield side
    side.worker.shutdown()
    assert side.engine.num_regions() == 0


@pytest.mark.parametrize(("name", "expected"), [("side", 1), ("ahead", 2)])
def test_steps_under_way_with_one_that_loads_are_at_risk(
    request: pytest.FixtureRequest, name: str, expected: int
) -> None:
    side: Side = request.getfixturevalue(name)
    side.step(GRANT)
    assert not side.worker.is_at_risk()
    side.step(StepMeta(loads=(load_spec(side),)))
    assert [side.worker.is_at_risk() for _ in range(3)].count(True) == expected
    side.step(StepMeta(loads=(load_spec(side, 2, in_step=False),)))
    assert not side.worker.is_at_risk()


def test_step_without_a_forward_leaves_nothing_to_the_next_forward(side: Side) -> None:
    side.worker.begin_step(output_of(GRANT))
    side.worker.no_forward()
    assert side.worker.take_armed_step(wait_all=False) is None


def test_armed_step_is_current_only_inside(side: Side) -> None:
    side.step(GRANT)
    side.worker.begin_step(output_of(StepMeta(loads=(load_spec(side),))))
    armed = side.worker.take_armed_step(wait_all=False)
    assert isinstance(armed, ArmedStep)
    assert hooks.current_step is None
    with armed:
        assert hooks.current_step is armed
    assert hooks.current_step is None


def test_full_graph_step_has_all_pages_before_it_runs(side: Side) -> None:
    side.step(GRANT)
    side.worker.begin_step(output_of(StepMeta(loads=(load_spec(side),))))
    armed = side.worker.take_armed_step(wait_all=True)
    assert armed is not None
    with armed:
        assert hooks.current_step is None
        for name in NAMES:
            np.testing.assert_array_equal(side.pages(name)[6:8], side.pages(name)[1:3])


def test_tail_is_in_place_when_the_forward_begins(side: Side) -> None:
    side.step(GRANT)
    spec = load_spec(side, has_tail=True)
    side.worker.begin_step(output_of(StepMeta(loads=(spec,))))
    armed = side.worker.take_armed_step(wait_all=False)
    assert armed is not None
    with armed:
        for name in NAMES:
            np.testing.assert_array_equal(side.pages(name)[7], side.pages(name)[2])


def pack_in_step(side: Side, full_graph: bool) -> PackedSlot:
    meta = StepMeta(ahead=(AheadSpec(7, (1, 2)),))
    side.worker.begin_step(output_of(meta))
    armed = side.worker.take_armed_step(wait_all=full_graph)
    assert armed is not None
    with side.worker.step_output(), armed:
        for name in NAMES[::-1]:
            if hooks.current_step is not None:
                hooks.current_step.wait_layer(name)
                hooks.current_step.save_layer(name)
    assert side.pool is not None
    packing = side.pool.ahead.take(7)
    assert packing is not None
    return packing


def test_announced_blocks_are_packed_by_the_layer_hook(pooled: Side) -> None:
    with pack_in_step(pooled, full_graph=False) as packing:
        deadline = time.monotonic() + 10
        while not packing.is_whole:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert pooled.worker.counts()["busy_slots"] == 0


def test_a_step_brings_the_saves_of_those_before(pooled: Side) -> None:
    """Before it packs: what has been dropped makes room for what it announces."""
    with pack_in_step(pooled, full_graph=False):
        pass
    first = StepMeta(ahead=(AheadSpec(8, (1, 2)),))
    pooled.worker.begin_step(output_of(first))
    second = StepMeta(saves=(Save(1, (1, 2), (b"1" * 32, b"2" * 32), 8), DropAhead(8)))
    pooled.worker.begin_step(output_of(second))
    deadline = time.monotonic() + 10
    while len(pooled.memory.room) < 2 or pooled.worker.counts()["busy_slots"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_full_graph_packs_nothing_ahead(pooled: Side) -> None:
    with pack_in_step(pooled, full_graph=True) as packing:
        assert not packing.is_whole
        assert pooled.worker.counts()["busy_slots"] == 1


def test_step_that_announces_nothing_packs_nothing(pooled: Side) -> None:
    with pack_in_step(pooled, full_graph=False):
        pass
    pooled.worker.begin_step(output_of(StepMeta(grants=GRANT.grants)))
    armed = pooled.worker.take_armed_step(wait_all=False)
    assert armed is not None
    with armed:
        for name in NAMES:
            armed.save_layer(name)
    assert pooled.worker.counts()["busy_slots"] == 0


def test_cancelled_parked_load_is_reported_once(side: Side) -> None:
    side.step()
    with silent_server() as endpoint:
        peer = PageServer(endpoint, TicketKey()).admit(LEASE, 2)
        assert side.step(StepMeta(loads=(load_spec(side, in_step=False, peers=(peer,)),))) is None
        report = side.step(StepMeta(cancels=(LoadId(1), LoadId(99))))
    assert report is not None
    assert [result.cause for result in report.results] == [Cause.CANCELLED.value]
    assert side.step() is None


def test_what_a_thread_that_does_not_end_writes_to_stays(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(side.server, "join", lambda timeout: None)
        patch.setattr(side.server, "submit", lambda command: None)
        side.worker.shutdown()
    side.engine.register(1 << 20, 1)  # it is open
    side.engine.unregister(1 << 20)
