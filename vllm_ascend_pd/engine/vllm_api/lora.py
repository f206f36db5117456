# SPDX-License-Identifier: Apache-2.0
"""Adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import LoRARequest, Request, Scheduler


def adapter_folder(lora: LoRARequest) -> str:
    """Where its files lie; what is not on this host is fetched."""
    from vllm.lora.utils import get_adapter_absolute_path

    return str(get_adapter_absolute_path(lora.lora_path))


def with_reload(lora: LoRARequest, load_inplace: bool) -> LoRARequest:
    """The same, with or without the wish that workers load it although they have it."""
    struct: Any = lora
    changed: LoRARequest = msgspec.structs.replace(struct, load_inplace=load_inplace)
    return changed


def ask_no_reload(request: Request, lora: LoRARequest) -> None:
    """Of its adapter, which the workers have: else they read its files in every step."""
    request.lora_request = with_reload(lora, False)


def adapters_fit(scheduler: Scheduler) -> bool:
    """Whether workers have room for all adapters of running requests. vLLM asks that where it
    admits one, and ends the engine where it finds that they do not.
    """
    if (options := scheduler.vllm_config.lora_config) is None:
        return True
    loras = (request.lora_request for request in scheduler.running)
    return len({lora.lora_int_id for lora in loras if lora is not None}) <= options.max_loras
