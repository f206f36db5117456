# SPDX-License-Identifier: Apache-2.0
"""Settings of vllm-ascend that cannot work with a role are refused at start, each by its name."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_pd.config import Role
from vllm_ascend_pd.engine.ascend import AscendFacts, check_roles
from vllm_ascend_pd.errors import ConfigError

P, D, BOTH = Role.PRODUCER, Role.CONSUMER, Role.BOTH
SMALL_BATCH = {"uses_mla": True, "max_num_batched_tokens": 1024}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"uses_mla": True},
        {**SMALL_BATCH, "keeps_prefill_weights": True},
        {**SMALL_BATCH, "enable_mlapo": False},
        {"max_num_batched_tokens": 64},  # no MLA, no MLAPO
    ],
    ids=str,
)
def test_setting_that_works_is_let_through(role: Role, facts: dict[str, Any]) -> None:
    check_roles(AscendFacts(**facts), role)


@pytest.mark.parametrize(
    ("facts", "roles", "named"),
    [
        ({"is_310p": True}, {P, D, BOTH}, "310P"),
        (SMALL_BATCH, {D}, "mlapo_keep_prefill_weights"),
        ({"uses_sparse_attention": True}, {P, D, BOTH}, "sparse attention"),
        ({"enable_kv_nz": True}, {P, D, BOTH}, "enable_kv_nz"),
        ({"enable_c8_quant": True}, {P, D, BOTH}, "C8 quantisation"),
        ({"quantizes_mla": True}, {P, D, BOTH}, "enable_fa_quant"),
        ({"uses_c8_mxfp": True}, {P, D, BOTH}, "--kv-cache-dtype"),
        ({"recompute_scheduler": True}, {D, BOTH}, "recompute_scheduler_enable"),
        ({"balances_alone": True}, {P, D, BOTH}, "enable_balance_scheduling"),
        ({"dyntra_lb": True}, {P, D, BOTH}, "dyntra_lb_config"),
        ({"xlite_graph": True}, {P, D, BOTH}, "xlite_graph_config"),
        ({"sparse_kv_offload": True}, {P, D, BOTH}, "sparse_kv_offload_config"),
        ({"pipeline_runs_ahead": True}, {P}, "--no-async-scheduling"),
    ],
)
def test_setting_that_cannot_work_is_refused_by_name(
    facts: dict[str, Any], roles: set[Role], named: str
) -> None:
    for role in Role:
        if role in roles:
            with pytest.raises(ConfigError, match=named):
                check_roles(AscendFacts(**facts), role)
        else:
            check_roles(AscendFacts(**facts), role)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"xlite_graph_config.*sparse_kv_offload_config"):
        check_roles(AscendFacts(xlite_graph=True, sparse_kv_offload=True), P)
