# SPDX-License-Identifier: Apache-2.0
"""The whole configuration that vllm-ascend's platform makes of an engine with InEngine, as its
scheduler sees it: what docs/ascend.md says to work is let through, and what it refuses is named.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from tests.integration.architectures import make_model
from vllm_ascend_pd.config import Role
from vllm_ascend_pd.engine.ascend import ascend_facts, check_roles, is_ascend
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

P, D, BOTH = Role.PRODUCER, Role.CONSUMER, Role.BOTH
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SMALL_BATCH = {"max_num_batched_tokens": 1024}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def ascend(**options: Any) -> dict[str, Any]:
    return {"additional_config": options}


def scheduler(**options: Any) -> dict[str, Any]:
    return ascend(scheduler_config=options)


@pytest.fixture(autouse=True)
def no_process_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at a model's class in a process of its own, which takes ten seconds to start."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny = make_tiny_model(folder / "tiny").path
    names = ("mla", "sparse", "mamba2", "sliding", "tied")
    return {"tiny": str(tiny)} | {
        name: str(make_model(name, folder / name, Path(tiny))) for name in names
    }


def configure(model: str, role: Role, options: dict[str, Any]) -> None:
    """As ``vllm serve`` and then the scheduler's process do."""
    transfer = KVTransferConfig(kv_connector="InEngine", kv_role=role.value)
    options = deepcopy(options)  # vllm-ascend writes some of them
    args = EngineArgs(model=model, max_model_len=512, kv_transfer_config=transfer, **options)
    config = args.create_engine_config()
    assert is_ascend(config)
    check_roles(ascend_facts(config), role)


@pytest.mark.parametrize(
    ("model", "options", "roles"),
    [
        ("tiny", {}, Role),
        ("mla", {}, Role),
        ("sliding", {}, Role),
        ("tied", {}, Role),
        ("mla", SMALL_BATCH, [P, BOTH]),
        ("mla", SMALL_BATCH | ascend(mlapo_keep_prefill_weights=True), Role),
        ("mla", SMALL_BATCH | ascend(enable_mlapo=False), Role),
        ("tiny", {"speculative_config": NGRAM}, Role),
        ("tiny", {"tensor_parallel_size": 2}, Role),
        ("tiny", STAGES, [D, BOTH]),
        ("tiny", STAGES | {"async_scheduling": False}, Role),
        ("tiny", {"data_parallel_size": 2}, Role),
        ("mla", {"data_parallel_size": 2} | scheduler(enable_balance_scheduling=True), [BOTH]),
        ("tiny", scheduler(recompute_scheduler_enable=True), [P]),
        *(("tiny", {"compilation_config": {"cudagraph_mode": mode}}, Role) for mode in MODES),
    ],
    ids=str,
)
def test_what_works_is_let_through(
    models: dict[str, str], model: str, options: dict[str, Any], roles: Any
) -> None:
    for role in roles:
        configure(models[model], role, options)


@pytest.mark.parametrize(
    ("model", "options", "roles", "named"),
    [
        ("sparse", {}, Role, "sparse attention"),
        ("mamba2", {}, Role, "layers that keep a state, on NPUs"),
        ("mla", SMALL_BATCH, [D], "set mlapo_keep_prefill_weights"),
        ("mla", ascend(enable_kv_nz=True), [D, BOTH], "decoding takes them for NZ pages"),
        ("tiny", STAGES, [P], "set --no-async-scheduling"),
        ("tiny", STAGES | {"speculative_config": NGRAM}, Role, "speculative decoding with pipe"),
        ("mamba2", {"speculative_config": NGRAM}, Role, "ngram beside layers that keep a state"),
        ("tiny", {"enable_prefix_caching": False}, Role, "prefix caching is off"),
        (
            "mla",
            {
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "cp_kv_cache_interleave_size": 128,
            },
            Role,
            "decode context parallel sizes above 1",
        ),
        ("tiny", scheduler(recompute_scheduler_enable=True), [D], "recompute_scheduler_enable end"),
        ("tiny", scheduler(enable_balance_scheduling=True), [BOTH], "it balances nothing here"),
        (
            "mla",
            {"data_parallel_size": 2} | scheduler(dyntra_lb_config={"enabled": True}),
            [D],
            "dyntra_lb_config marks",
        ),
        ("tiny", ascend(xlite_graph_config={"enabled": True}), Role, "xlite_graph_config runs no"),
        # By vllm-ascend, on which InEngine relies here: a worker has some layers of the cache only.
        (
            "mla",
            {"tensor_parallel_size": 2, "enforce_eager": True} | ascend(enable_kvpp=True),
            Role,
            "KVPP",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(
    models: dict[str, str], model: str, options: dict[str, Any], roles: Any, named: str
) -> None:
    for role in roles:
        with pytest.raises(ValueError, match=named):
            configure(models[model], role, options)
