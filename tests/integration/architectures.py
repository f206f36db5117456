# SPDX-License-Identifier: Apache-2.0
"""Small random models of other architectures than the tiny model's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    # So large that the next token depends on the whole prompt.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _config(name: str) -> Any:
    import transformers

    heads = {"num_attention_heads": 4, "head_dim": 32}
    if name == "mqa":
        return transformers.LlamaConfig(**_COMMON, **heads, num_key_value_heads=1)
    if name == "sliding":
        return transformers.Gemma2Config(
            **{**_COMMON, "tie_word_embeddings": True},
            **heads,
            num_key_value_heads=2,
            sliding_window=64,
            query_pre_attn_scalar=32,
        )
    if name == "windows":
        # A group of its own for each layer, three of them with windows.
        return transformers.Gemma3TextConfig(
            **{**_COMMON, "tie_word_embeddings": True, "num_hidden_layers": 4},
            **heads,
            num_key_value_heads=2,
            sliding_window=64,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            query_pre_attn_scalar=32,
        )
    if name == "mla":
        return transformers.DeepseekV2Config(
            **_COMMON,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            head_dim=64,
            first_k_dense_replace=3,
            n_routed_experts=2,
            n_shared_experts=1,
            moe_intermediate_size=32,
            num_experts_per_tok=1,
            # DeepSeek's own scaling. vLLM's CPU kernel turns the wrong rows of MLA without one.
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        )
    if name == "tied":
        # The last two of four layers read the KV of the second.
        return transformers.Gemma3nTextConfig(
            **{**_COMMON, "tie_word_embeddings": True, "num_hidden_layers": 4},
            **heads,
            num_key_value_heads=2,
            num_kv_shared_layers=2,
            layer_types=["full_attention"] * 4,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=32,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 4,
        )
    raise ValueError(name)


def make_model(name: str, folder: Path, tokenizer: Path) -> Path:
    """Its folder: random weights, the same for the same name, and the tiny model's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
