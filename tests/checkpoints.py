# SPDX-License-Identifier: Apache-2.0
"""Copies of models and adapters whose tensors differ."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def copy_with_more_heads(source: Path, out: Path) -> Path:
    """The folder ``source`` at ``out``, with each KV head twice: what it computes is the same."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    head_dim = config["head_dim"]
    config["num_key_value_heads"] *= 2
    (out / "config.json").write_text(json.dumps(config))
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if re.search(r"\.(k|v)_proj\.", name):
                heads = tensors[name].reshape(-1, head_dim, *tensors[name].shape[1:])
                doubled = heads.repeat(2, axis=0)
                tensors[name] = doubled.reshape(-1, *tensors[name].shape[1:])
        save_file(tensors, file)
    return out


def copy_with_other_tensors(source: Path, out: Path, pattern: str) -> Path:
    """The folder ``source`` at ``out``, with the values of the float32 tensors whose names match
    in reverse order. Nothing else in its files changes.
    """
    shutil.copytree(source, out, dirs_exist_ok=True)
    num_turned = 0
    for file in out.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__" or not re.search(pattern, name):
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            data[begin:end] = np.frombuffer(bytes(data[begin:end]), np.float32)[::-1].tobytes()
            num_turned += 1
        file.write_bytes(data)
    assert num_turned
    return out


def copy_with_experts(source: Path, out: Path, num_experts: int = 4) -> Path:
    """The folder ``source``, of Qwen3, at ``out``, as one of Qwen3-MoE: each expert has a part of
    the rows of what was one for all tokens, of which a token takes two.
    """
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"num_experts": num_experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config |= {"moe_intermediate_size": config["intermediate_size"] // num_experts}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    (out / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if ".mlp." in name]:
            layer, _, projection = name.partition(".mlp.")
            parts = np.split(tensors.pop(name), num_experts, axis=int("down" in projection))
            for i, part in enumerate(parts):
                own = np.ascontiguousarray(part)
                tensors[f"{layer}.mlp.experts.{i}.{projection}"] = own
            gate = random.standard_normal((num_experts, config["hidden_size"]), np.float32)
            tensors[f"{layer}.mlp.gate.weight"] = gate
        save_file(tensors, file)
    return out
