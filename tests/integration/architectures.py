# SPDX-License-Identifier: Apache-2.0
"""Small random models of other architectures than the tiny model's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048
IMAGE_TOKEN = VOCAB_SIZE + 1
"""Stands for an image in a prompt of the model ``images``."""
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
_MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "first_k_dense_replace": 3,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    # DeepSeek's own scaling. vLLM's CPU kernel turns the wrong rows of MLA without one.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


def architecture(name: str) -> Any:
    import transformers

    heads = {"num_attention_heads": 4, "head_dim": 32}
    if name in ("mqa", "windows alone"):
        is_mqa = name == "mqa"
        kind = transformers.LlamaConfig if is_mqa else transformers.MistralConfig
        own = {"num_key_value_heads": 1} if is_mqa else {"sliding_window": 64}
        return kind(**{**_COMMON, "num_key_value_heads": 2, **own}, **heads)
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
    if name == "sizes":
        # As "windows", whose layers have heads half as large as the other one's, and so blocks of
        # twice as many tokens.
        return transformers.Gemma4TextConfig(
            **{**_COMMON, "tie_word_embeddings": True, "num_hidden_layers": 4},
            **heads,
            num_key_value_heads=2,
            global_head_dim=64,
            sliding_window=64,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB_SIZE,
        )
    if name == "sinks":
        # Every second layer has a window, and each head a sink.
        return transformers.GptOssConfig(
            **{**_COMMON, "num_hidden_layers": 4},
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=64,
        )
    if name == "gdn":
        # Three layers keep a state, each in a group of its own; vLLM wants experts in some layer. A
        # token has all of them: which ones it has a last bit of bfloat16 would decide.
        return transformers.Qwen3NextConfig(
            **{**_COMMON, "num_hidden_layers": 4},
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=256,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            mlp_only_layers=[0, 1, 2],
            num_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    if name == "mamba2":
        return transformers.GraniteMoeHybridConfig(
            **{**_COMMON, "num_hidden_layers": 4},
            num_attention_heads=4,
            num_key_value_heads=4,
            layer_types=["mamba"] * 3 + ["attention"],
            position_embedding_type="rope",
            num_local_experts=0,
            shared_intermediate_size=256,
            mamba_expand=1,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=16,
        )
    if name == "nemotron":
        # Mamba2 between plain layers, which keep nothing.
        common = {key: value for key, value in _COMMON.items() if key != "num_hidden_layers"}
        return transformers.NemotronHConfig(
            **common,
            **heads,
            num_key_value_heads=4,
            layers_block_type=["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=1,
        )
    if name == "zamba2":
        # Two blocks of attention take turns, so that layers are not numbered as they run.
        return transformers.Zamba2Config(
            **{**_COMMON, "num_hidden_layers": 6},
            num_attention_heads=4,
            num_key_value_heads=4,
            layers_block_type=["hybrid"] * 6,
            hybrid_layer_ids=list(range(6)),
            num_mem_blocks=2,
            use_mem_rope=True,
            use_shared_attention_adapter=False,
            mamba_expand=1,
            n_mamba_heads=4,
            mamba_d_state=16,
        )
    if name == "chunks":
        return transformers.Llama4TextConfig(
            **{**_COMMON, "num_hidden_layers": 4},
            **heads,
            num_key_value_heads=2,
            attention_chunk_size=64,
            intermediate_size_mlp=256,
            interleave_moe_layer_step=8,
            num_local_experts=2,
        )
    if name == "mla":
        return transformers.DeepseekV2Config(**_COMMON, **_MLA, q_lora_rank=None)
    if name == "sparse":
        # MLA whose tokens attend to so few others, which an indexer chooses for each of them. A
        # page of its KV is as large as four of what the indexer keeps.
        return transformers.DeepseekV32Config(
            **_COMMON,
            **{**_MLA, "kv_lora_rank": 68},
            q_lora_rank=64,
            n_group=1,
            topk_group=1,
            index_topk=8,
            index_n_heads=2,
            index_head_dim=128,
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


def make_image_model(folder: Path, tokenizer: Path) -> Path:
    """Idefics3, whose images vLLM prepares without torchvision: each is cut into 4 tiles, and these
    and the whole of it are 16 tokens each.
    """
    import torch
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    added = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    added += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokens = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    tokens.add_special_tokens({"additional_special_tokens": added})
    assert tokens.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    text = {**_COMMON, "vocab_size": len(tokens), "num_attention_heads": 4, "head_dim": 32}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 64, "patch_size": 8}
    config = transformers.Idefics3Config(
        vision_config={**vision, "initializer_range": 0.3},
        text_config=transformers.LlamaConfig(**text, num_key_value_heads=2),
        scale_factor=2,
        image_token_id=IMAGE_TOKEN,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(
        do_image_splitting=True, size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    )
    transformers.Idefics3Processor(images, tokens, image_seq_len=16).save_pretrained(folder)
    return folder


def make_model(name: str, folder: Path, tokenizer: Path) -> Path:
    """Its folder: random weights, the same for the same name, and the tiny model's tokenizer."""
    import torch
    import transformers

    if name == "images":
        return make_image_model(folder, tokenizer)
    if name == "compressed":
        from tests.integration.compressed_model import make_compressed_model

        return make_compressed_model(folder, tokenizer)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(architecture(name), dtype=torch.float32)
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
