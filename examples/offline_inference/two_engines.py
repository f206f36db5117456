# SPDX-License-Identifier: Apache-2.0
"""What ``resume.py`` and ``move.py`` share: two engines, and what is asked of them."""

from __future__ import annotations

import argparse
import os
from typing import Any

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "with a seed": {"temperature": 0.8, "seed": 7},
    "with penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
}

PATIENT = {"lease_s": 300, "peer_timeout_s": 60, "step_load_timeout_s": 60}
"""What a machine that is slow or busy needs; the defaults are for a service, where others wait."""
STOP_S = 120.0
"""What an engine has to end in; on a slow or busy machine vLLM's own 5 s are not enough."""


def parse_options(description: str, max_tokens: int, least: int) -> argparse.Namespace:
    """``least``: tokens of an answer of which each engine gives a part."""
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="model folder or name")
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--kv-cache-mb", type=int, default=256, help="KV cache of each engine")
    options = parser.parse_args()
    if options.max_tokens < least:
        parser.error(f"--max-tokens: give {least} or more, for each engine gives a part of them")
    return options


def make_engines(options: argparse.Namespace) -> tuple[Any, Any]:
    """Without ``security.secret_file`` engines on loopback take what nobody has signed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(int(STOP_S)))
    return _make_engine(options), _make_engine(options)


def _make_engine(options: argparse.Namespace) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=options.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=options.kv_cache_mb << 20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="InEngine",
            kv_role="kv_both",
            kv_port=0,
            kv_connector_extra_config={"transfer": PATIENT},
        ),
    )
