# SPDX-License-Identifier: Apache-2.0
"""Make a small LoRA adapter with random weights for a model folder, for tests and demos.

    python -m vllm_ascend_pd.testing.tiny_lora --model .cache/models/tiny --out .cache/models/lora-a

The same parameters give the same bytes. It changes the KV of every layer, and is strong enough that
greedy decoding with it says something else than without.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 4
_STRENGTH = 0.5
"""Size of what it adds to a projection, against the projection of a random vector."""


def make_tiny_lora(out: Path, model: Path, seed: int = 0) -> Path:
    """Write an adapter for the attention of the model in folder ``model``, in PEFT's format.

    Raises:
        FileNotFoundError: ``model`` has no ``config.json``.
        FileExistsError: ``out`` exists.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    num_q = config["num_attention_heads"] * head
    num_kv = config["num_key_value_heads"] * head
    shapes = {
        "q_proj": (num_q, hidden),
        "k_proj": (num_kv, hidden),
        "v_proj": (num_kv, hidden),
        "o_proj": (hidden, num_q),
    }
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_out, num_in) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = random.standard_normal((RANK, num_in)) / np.sqrt(num_in)
            up = random.standard_normal((num_out, RANK)) * _STRENGTH / np.sqrt(RANK)
            weights[f"{prefix}.lora_A.weight"] = down.astype(np.float32)
            weights[f"{prefix}.lora_B.weight"] = up.astype(np.float32)
    out.mkdir(parents=True)
    save_file(weights, out / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(shapes),
        "base_model_name_or_path": str(model),
    }
    (out / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_ascend_pd.testing.tiny_lora",
        description="Make a small LoRA adapter with random weights for a local model.",
        epilog="Serve it: vllm serve MODEL --enable-lora --lora-modules a=DIR",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="its folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    try:
        made = make_tiny_lora(args.out, args.model, args.seed)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{made}: a LoRA of rank {RANK} for {args.model}, seed {args.seed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
