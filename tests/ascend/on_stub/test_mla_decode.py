# SPDX-License-Identifier: Apache-2.0
"""MLA's forward of a batch without a prefill: it waits for its layer before it uses the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm_ascend.attention import mla_v1
from vllm_ascend.attention.mla_v1 import AscendMLAImpl

LAYER = "model.layers.3.attn"
NUM_TOKENS, HIDDEN = 2, 8


@pytest.fixture
def impl(events: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``forward`` reads of an implementation, with the computation left out."""
    monkeypatch.setattr(mla_v1, "_EXTRA_CTX", SimpleNamespace(num_tokens=NUM_TOKENS))
    impl = MagicMock()
    impl.num_heads, impl.v_head_dim, impl.use_output_gate = 1, HIDDEN, False
    impl.fa_quant_layer, impl.is_pcp_decode_sharded = False, False
    impl.layerwise_kv_cache_hook = None
    impl.get_num_actual_tokens.return_value = NUM_TOKENS
    impl._decode_requires_current_kv.return_value = False
    impl.fused_qkv_a_proj = None
    impl.o_proj.return_value = (torch.ones(NUM_TOKENS, HIDDEN),)
    impl.kv_a_proj_with_mqa.return_value = (torch.zeros(NUM_TOKENS, HIDDEN),)
    impl._forward_decode = lambda *args: torch.zeros(args[-1].num_decode_tokens, HIDDEN)
    impl._mla_preprocess = lambda *args: AscendMLAImpl._mla_preprocess(impl, *args)

    def write(what: str) -> Any:
        def preprocess(*args: Any) -> Any:
            events.append(what)
            return (object(), None) if what == "only decode" else object()

        return preprocess

    impl.mla_preprocess_only_decode = write("only decode")
    impl.mla_preprocess_decode = write("decode")
    impl.mla_preprocess_prefill = write("prefill")
    return impl


def forward(impl: Any, num_prefills: int = 0) -> None:
    metadata = SimpleNamespace(
        num_actual_tokens=NUM_TOKENS,
        num_decodes=NUM_TOKENS - num_prefills,
        num_prefills=num_prefills,
        num_decode_tokens=NUM_TOKENS - num_prefills,
    )
    output = torch.zeros(NUM_TOKENS, HIDDEN)
    cache = (torch.zeros(4, 1), torch.zeros(4, 1))
    AscendMLAImpl.forward(impl, LAYER, torch.zeros(NUM_TOKENS, HIDDEN), cache, metadata, output)
    assert output.eq(1).all()


def test_decode_waits_before_the_fused_preprocessing(
    impl: Any, step: object, events: list[str]
) -> None:
    impl.enable_mlapo = True
    forward(impl)
    assert events == [f"wait {LAYER}", "only decode", f"save {LAYER}"]


def test_decode_waits_before_the_unfused_preprocessing(
    impl: Any, step: object, events: list[str]
) -> None:
    impl.enable_mlapo = False
    forward(impl)
    assert events == [f"wait {LAYER}", "decode", f"save {LAYER}", f"save {LAYER}"]


@pytest.mark.parametrize("enable_mlapo", [True, False])
def test_decode_without_an_armed_step_is_as_released(
    impl: Any, events: list[str], enable_mlapo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connector's wait must not be called where upstream does not call it."""
    monkeypatch.setattr(
        mla_v1, "wait_for_kv_layer_from_connector", lambda name: events.append("upstream's wait")
    )
    impl.enable_mlapo = enable_mlapo
    forward(impl)
    assert events == ["only decode" if enable_mlapo else "decode"]


def test_batch_with_a_prefill_waits_once(impl: Any, step: object, events: list[str]) -> None:
    impl.enable_mlapo = True
    impl._forward_prefill.return_value = torch.zeros(1, HIDDEN)
    impl.mla_preprocess_prefill = lambda *args: events.append("prefill")
    forward(impl, num_prefills=1)
    assert events == [f"wait {LAYER}", "decode", "prefill", f"save {LAYER}", f"save {LAYER}"]
