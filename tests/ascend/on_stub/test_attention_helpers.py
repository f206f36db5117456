# SPDX-License-Identifier: Apache-2.0
"""The three functions through which vllm-ascend's own operators reach a transfer."""

from __future__ import annotations

from vllm.config.kv_transfer import pd_hooks
from vllm_ascend.attention.utils import (
    maybe_save_kv_layer_to_connector,
    notify_kv_cache_written,
    wait_for_kv_layer_from_connector,
)

from vllm_ascend_pd import hooks


def call_all(name: str) -> None:
    wait_for_kv_layer_from_connector(name)
    notify_kv_cache_written(name)
    maybe_save_kv_layer_to_connector(name, [])


def test_patched_vllm_ascend_uses_the_packages_hooks() -> None:
    assert pd_hooks is hooks


def test_layer_waits_and_saves(step: object, events: list[str]) -> None:
    call_all("model.layers.0.attn")
    assert events == [f"{word} model.layers.0.attn" for word in ("wait", "save", "save")]


def test_empty_name_is_no_layer_that_could_be_saved(step: object, events: list[str]) -> None:
    """Mamba layers save under an empty name; GQA notifies without one."""
    notify_kv_cache_written()
    maybe_save_kv_layer_to_connector("", [])
    assert events == []


def test_outside_of_an_armed_step_nothing_happens(events: list[str]) -> None:
    assert hooks.current_step is None
    call_all("model.layers.0.attn")
    assert events == []
