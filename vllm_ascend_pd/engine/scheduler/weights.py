# SPDX-License-Identifier: Apache-2.0
"""Which generation of the weights an engine computes with, once they have been changed in place.

Touches:
    vllm/v1/worker/gpu_worker.py:Worker.start_weight_update
    vllm/v1/worker/gpu_worker.py:Worker.start_draft_weight_update
    vllm/v1/worker/gpu_worker.py:Worker.update_weights
    vllm/v1/worker/gpu_worker.py:Worker.reload_weights
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - tensors of the engine

from vllm_ascend_pd.engine.model_identity import weight_files
from vllm_ascend_pd.engine.vllm_api.process import loaded_models
from vllm_ascend_pd.engine.weight_files import content_digest, stat_key, tensor_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.engine.vllm_api.types import Executor

logger = logging.getLogger(__name__)

_KEEP_WEIGHTS = frozenset(
    (
        *("check_health", "execute_dummy_batch", "profile", "synchronize_device"),
        *("reset_mm_cache", "reset_encoder_cache", "update_max_model_len", "update_config"),
        *("get_model", "get_kv_cache_spec", "get_supported_tasks", "get_model_inspection"),
        *("add_lora", "remove_lora", "pin_lora", "list_loras", "save_sharded_state"),
        *("init_weight_transfer_engine", "report_device_id", "determine_available_memory"),
        *("shutdown_weight_transfer_engine", "compute_weight_checksums"),
        "release_late_interaction_query_cache",
    )
)
"""Methods of vLLM's workers after which the weights are those that they were."""
_UNFINISHED = frozenset(("start_weight_update", "start_draft_weight_update", "update_weights"))
"""Methods after which more is to come."""
_CHUNK = 1 << 22
_PRIME = (1 << 61) - 1


def keeps_weights(method: object) -> bool:
    """Whether a call of the workers leaves the weights alone: a method of vLLM's that does, or a
    function that says so by an attribute of this name.
    """
    return method in _KEEP_WEIGHTS or getattr(method, "keeps_weights", False) is True


def random_generation() -> str:
    """One that no other engine has."""
    return f"random-{secrets.token_hex(8)}"


def settled_generation(
    method: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    executor: Executor,
    source: ReloadSource,
    full: bool = False,
) -> str | None:
    """What the weights are after such a call, so that engines with the same ones agree: the files
    that they were read from, or what lies in memory. ``None`` when that cannot be told.
    """
    if method in _UNFINISHED:
        return None
    if method == "reload_weights" and (files := source.files_of(args, kwargs)):
        return f"files-{content_digest(files, full)[:16]}"
    if "weights" in executor.sleeping_tags:
        return None
    try:
        digests = executor.collective_rpc(digest_weights)
    except Exception as e:  # noqa: BLE001 - a digest is a gain; the caller's own call has succeeded
        logger.warning("the weights in memory cannot be told: %s", e)
        return None
    if None in digests:
        return None
    return f"memory-{hashlib.sha256(repr(digests).encode()).hexdigest()[:16]}"


class ReloadSource:
    """Which files a ``reload_weights`` reads, and whether they tell all weights."""

    def __init__(self, model: Path | None) -> None:
        """``model``: where the weights lie that the engine was started with, if on this host."""
        self._model = model
        self._read = model
        """What a call reads that names nothing; ``None`` where that cannot be told."""
        self._stamp = ""
        """Of the files of the last reload, before it."""

    def note_call(self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before each call of the workers: a path that one names stays the next ones' default."""
        if method == "reload_weights":
            options = _reload_options(args, kwargs)
            if options.get("weights_iterator") is None and options.get("weights_path"):
                self._read = Path(options["weights_path"])
            self._stamp = stat_key(_files(self._read))
        elif method == "update_config" or not isinstance(method, str):
            self._read = None

    def files_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Path]:
        """What this call has read, if it holds every tensor that the engine was started with: those
        that another one lacks stay as they were. Nobody knows it of files that were written since.
        """
        options = _reload_options(args, kwargs)
        if options.get("weights_iterator") is not None:
            return []
        if not options.get("is_checkpoint_format", True):
            return []
        files, all_files = _files(self._read), _files(self._model)
        if stat_key(files) != self._stamp:
            return []
        if files == all_files:
            return files
        names, all_names = tensor_names(files), tensor_names(all_files)
        return files if names and all_names and names >= all_names else []


def _reload_options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("weights_iterator", "weights_path", "is_checkpoint_format")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _files(path: Path | None) -> list[Path]:
    return weight_files(path) if path is not None and path.exists() else []


@torch.inference_mode()
def digest_weights(worker: Any) -> str | None:
    """Of every parameter and buffer of this worker's model and drafter, every byte; ``None`` where
    a kernel keeps a parameter to itself, as on CPUs. Runs in the worker process.
    """
    digest = hashlib.sha256()
    for model in loaded_models(worker):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.numel():
                return None
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(str(_sum(tensor)).encode())
    return digest.hexdigest()


def _sum(tensor: torch.Tensor) -> int:
    """Of all bytes, each times a number that depends on its place; on the tensor's own device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, data.numel(), _CHUNK):
        chunk = data[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=chunk.device)
        # Odd multipliers that are spread over 31 bits: the sums fit 64 bits.
        factor = (place * 0x9E3779B1 & 0x7FFFFFFF) | 1
        total = (total * 31 + int((chunk * factor).sum())) % _PRIME
    return total
