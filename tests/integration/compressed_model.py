# SPDX-License-Identifier: Apache-2.0
"""A small random DeepSeek V4: a layer with windows only, one that attends to what stands for 4
tokens and has an indexer, and one for 128 tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

RATIOS = (0, 4, 128)
HIDDEN, HEAD, NUM_HEADS, LORA, EXPERT, NUM_EXPERTS = 256, 512, 8, 128, 64, 256
STREAMS, NUM_GROUPS, INDEX_HEADS, INDEX_HEAD = 4, 2, 64, 128
VOCAB_SIZE = 2048
_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "num_hidden_layers": len(RATIOS),
    "compress_ratios": RATIOS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": 64,
    "q_lora_rank": LORA,
    "o_lora_rank": LORA,
    "o_groups": NUM_GROUPS,
    "sliding_window": 128,
    "index_topk": 512,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_HEAD,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 0,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "expert_dtype": "fp8",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _weights() -> dict[str, torch.Tensor]:
    """Attention is sharp and adds much, so that the next token depends on the whole prompt."""
    draw = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        values = torch.randn(*shape, generator=draw) * gain / shape[-1] ** 0.5
        weights[name] = values.to(dtype)

    def fill(name: str, *shape: int, value: float, dtype: torch.dtype = torch.bfloat16) -> None:
        weights[name] = torch.full(shape, value, dtype=dtype)

    def add_streams(name: str, num_mixed: int, num_scales: int) -> None:
        add(f"{name}_fn", num_mixed, STREAMS * HIDDEN, dtype=torch.float32)
        fill(f"{name}_base", num_mixed, value=0.0, dtype=torch.float32)
        fill(f"{name}_scale", num_scales, value=1.0, dtype=torch.float32)

    def add_compressor(name: str, head: int, ratio: int) -> None:
        width = head * (2 if ratio == 4 else 1)
        add(f"{name}.wkv.weight", width, HIDDEN, gain=2.0)
        add(f"{name}.wgate.weight", width, HIDDEN, gain=2.0)
        fill(f"{name}.norm.weight", head, value=3.0)
        add(f"{name}.ape", ratio, width, gain=0.5 * width**0.5, dtype=torch.float32)

    add("embed.weight", VOCAB_SIZE, HIDDEN, gain=HIDDEN**0.5)
    add("head.weight", VOCAB_SIZE, HIDDEN, gain=4.0)
    fill("norm.weight", HIDDEN, value=1.0)
    add_streams("hc_head", STREAMS, 1)
    for index, ratio in enumerate(RATIOS):
        layer = f"layers.{index}"
        attn, ffn = f"{layer}.attn", f"{layer}.ffn"
        for part in ("attn", "ffn"):
            add_streams(f"{layer}.hc_{part}", (2 + STREAMS) * STREAMS, 3)
            fill(f"{layer}.{part}_norm.weight", HIDDEN, value=1.0)
        fill(f"{attn}.attn_sink", NUM_HEADS, value=0.0, dtype=torch.float32)
        add(f"{attn}.wq_a.weight", LORA, HIDDEN)
        add(f"{attn}.wkv.weight", HEAD, HIDDEN)
        fill(f"{attn}.q_norm.weight", LORA, value=1.0)
        fill(f"{attn}.kv_norm.weight", HEAD, value=3.0)
        add(f"{attn}.wq_b.weight", NUM_HEADS * HEAD, LORA, gain=3.0)
        add(f"{attn}.wo_a.weight", NUM_GROUPS * LORA, NUM_HEADS * HEAD // NUM_GROUPS, gain=2.0)
        add(f"{attn}.wo_b.weight", HIDDEN, NUM_GROUPS * LORA, gain=6.0)
        if ratio:
            add_compressor(f"{attn}.compressor", HEAD, ratio)
        if ratio == 4:
            add(f"{attn}.indexer.wq_b.weight", INDEX_HEADS * INDEX_HEAD, LORA)
            add(f"{attn}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
            add_compressor(f"{attn}.indexer.compressor", INDEX_HEAD, ratio)
        add(f"{ffn}.gate.weight", NUM_EXPERTS, HIDDEN)
        fill(f"{ffn}.gate.bias", NUM_EXPERTS, value=0.0, dtype=torch.float32)
        experts = (f"{ffn}.experts.{number}" for number in range(NUM_EXPERTS))
        for expert in (*experts, f"{ffn}.shared_experts"):
            add(f"{expert}.w1.weight", EXPERT, HIDDEN)
            add(f"{expert}.w2.weight", HIDDEN, EXPERT)
            add(f"{expert}.w3.weight", EXPERT, HIDDEN)
    return weights


def make_compressed_model(folder: Path, tokenizer: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
