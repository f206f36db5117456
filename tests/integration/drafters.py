# SPDX-License-Identifier: Apache-2.0
"""Small random models with drafters that mostly agree with them, so that an acceptance rate tells
whether a drafter has read the right KV.

A drafter of these is the model once more. Behind EAGLE's and MTP's input comes the token that
follows, whose embedding is all that they use, so they are language models that see every token but
the first. Their prompts begin with ``START``, which no layer sees: where its embedding is not zero,
no matrix reads it. Each next token depends on the whole context, as in ``tiny_model``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.integration.architectures import architecture
from tests.integration.engines import BLOCK_SIZE

START = [0, 0]
"""How prompts begin: MTP's embedding of what is at position 0 is cleared."""

WINDOW = 64
WINDOW_GAIN = STATE_GAIN = 0.05
_VOCAB, _HIDDEN, _HEADS, _HEAD_DIM = 2048, 128, 4, 32
PAGE_BYTES = 2 * BLOCK_SIZE * _HEADS * _HEAD_DIM * 4
"""Of a block in one layer, but for MLA and ``gdn``."""
_LATENT_RANK, _ROPE_DIM = 512, 64
"""Of MLA: what vLLM's kernel for CPUs takes."""
_BIASED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_COMMON = {
    "vocab_size": _VOCAB,
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_LLAMA = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": _HEAD_DIM,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_MIMO = {
    **_LLAMA,
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
}
_DEEPSEEK = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "q_lora_rank": None,
    "kv_lora_rank": _LATENT_RANK,
    "qk_rope_head_dim": _ROPE_DIM,
    "qk_nope_head_dim": _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
    "first_k_dense_replace": 9,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 1,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Drafted:
    """A model, and how an engine that speculates is told of its drafter."""

    model: str
    speculative: dict[str, Any]


class _Maker:
    """Random weights; a matrix of gain 1 keeps the scale of its input."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        bound = gain * (3.0 / columns) ** 0.5
        return (torch.rand(rows, columns, generator=self._generator) - 0.5) * 2 * bound

    def blind(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """One that does not see ``START``."""
        matrix = self.matrix(rows, columns, gain)
        matrix[:, 0] = 0.0
        return matrix

    def ends(self) -> Weights:
        """Embedding, of length 1 a component, and head."""
        embedding = self.matrix(_VOCAB, _HIDDEN)
        embedding[:, 0] = 0.0
        embedding[START[0]] = 0.0
        embedding[START[0], 0] = 1.0
        embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt()
        head = self.blind(_VOCAB, _HIDDEN, gain=4.0)
        head[:3] = 0.0
        return {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": torch.ones(_HIDDEN),
            "lm_head.weight": head,
        }

    def block(self, attention: Weights) -> Weights:
        """A layer."""
        size = _COMMON["intermediate_size"]
        return {
            "input_layernorm.weight": torch.ones(_HIDDEN),
            **{f"self_attn.{name}.weight": weight for name, weight in attention.items()},
            "post_attention_layernorm.weight": torch.ones(_HIDDEN),
            "mlp.gate_proj.weight": self.blind(size, _HIDDEN),
            "mlp.up_proj.weight": self.blind(size, _HIDDEN),
            "mlp.down_proj.weight": self.matrix(_HIDDEN, size, gain=3.0),
        }

    def attention(self, sharpness: float = 1.0) -> Weights:
        """``sharpness`` is the standard deviation of the scores."""
        return {
            "q_proj": self.blind(_HIDDEN, _HIDDEN, gain=sharpness**0.5),
            "k_proj": self.blind(_HIDDEN, _HIDDEN, gain=sharpness**0.5),
            "v_proj": self.blind(_HIDDEN, _HIDDEN),
            "o_proj": self.matrix(_HIDDEN, _HIDDEN, gain=2.0),
        }

    def latent_attention(self) -> Weights:
        return {
            "q_proj": self.blind(_HEADS * (_HEAD_DIM + _ROPE_DIM), _HIDDEN, gain=1.7),
            "kv_a_proj_with_mqa": self.blind(_LATENT_RANK + _ROPE_DIM, _HIDDEN),
            "kv_a_layernorm": torch.ones(_LATENT_RANK),
            "kv_b_proj": self.matrix(_HEADS * 2 * _HEAD_DIM, _LATENT_RANK),
            "o_proj": self.matrix(_HIDDEN, _HEADS * _HEAD_DIM, gain=2.0),
        }


def make_drafted(kind: str, folder: Path, tokenizer: Path, seed: int = 0) -> Drafted:
    """``kind``: ``eagle``, ``eagle3``, ``mimo`` or ``deepseek``, an MTP each, or ``windows``, an
    EAGLE of one layer behind a model of which other layers have sliding windows, or ``gdn``, an MTP
    behind one of which they keep a state. ``seed`` is the drafter's, which agrees with the model if
    it is 0; but with that of ``even_windows``, which has as many layers of the one kind as of the
    other.
    """
    model, drafter = folder / "model", folder / f"drafter-{seed}"
    if kind == "gdn":
        return _make_gdn(model, tokenizer)
    if kind in ("windows", "even_windows"):
        return _make_windows(model, drafter, tokenizer, seed, is_even=kind == "even_windows")
    if kind in ("eagle", "eagle3"):
        layers = _make_llama_layers(0)
        weights = _Maker(1).ends()
        _write(model, tokenizer, {**_LLAMA, "num_hidden_layers": len(layers)}, weights, layers)
        make = _make_eagle if kind == "eagle" else _make_eagle3
        make(drafter, tokenizer, weights, _make_llama_layers(seed))
        return Drafted(str(model), {"method": kind, "model": str(drafter)})
    config, make_attention = _MIMO, lambda maker: maker.attention(2.0)
    if kind == "deepseek":
        config, make_attention = _DEEPSEEK, _Maker.latent_attention
    own, drafted = (maker.block(make_attention(maker)) for maker in (_Maker(2), _Maker(2 + seed)))
    # The module is one layer, so the model has one that counts. The other's KV is moved like any.
    maker = _Maker(3)
    idle = maker.block(make_attention(maker))
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        idle[name] = torch.zeros_like(idle[name])
    weights = _Maker(1).ends()
    module = _mimo_module(drafted) if kind == "mimo" else _deepseek_module(drafted, weights)
    model = folder / f"model-{seed}"
    _write(model, tokenizer, {**config, "num_hidden_layers": 2}, weights | module, [idle, own])
    return Drafted(str(model), {"method": "mtp"})


def _make_windows(model: Path, drafter: Path, tokenizer: Path, seed: int, is_even: bool) -> Drafted:
    """The windows add so much to what the drafter computes that some tokens are others."""
    weights = _Maker(1).ends()
    windows = [maker.block(maker.attention(2.0)) for maker in (_Maker(20), _Maker(21))]
    for layer in windows:
        layer["self_attn.o_proj.weight"] *= WINDOW_GAIN
        layer["mlp.down_proj.weight"] *= 0.0
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = [windows[0], _make_llama_layers(0)[1], windows[1]]
    if is_even:
        kinds += ["full_attention", "full_attention", "sliding_attention"]
        layers += [maker.block(maker.attention(2.0)) for maker in map(_Maker, (22, 23, 24))]
    sizes = {"num_hidden_layers": len(layers), "sliding_window": WINDOW}
    config = {**_LLAMA, **sizes, "layer_types": kinds}
    _write(model, tokenizer, config, weights, layers)
    _make_eagle(drafter, tokenizer, weights, [_make_llama_layers(seed)[1]])
    return Drafted(str(model), {"method": "eagle", "model": str(drafter)})


def _make_gdn(folder: Path, tokenizer: Path) -> Drafted:
    """The states add so much to what the module computes that some tokens are others."""
    if folder.exists():
        return Drafted(str(folder), {"method": "mtp"})
    config = architecture("gdn")
    config.mlp_only_layers = [1, 2]  # the module has experts, so what it is like has some
    config.num_nextn_predict_layers = 1
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    maker = _Maker(30)
    weights = model.state_dict()
    for name, weight in weights.items():
        if "down_proj" in name:
            weight.zero_()
        elif name.endswith("out_proj.weight"):
            weight.copy_(maker.matrix(_HIDDEN, _HIDDEN, gain=STATE_GAIN))
    full, width = "model.layers.3.", config.num_attention_heads * config.head_dim
    new = maker.ends() | {
        f"{full}self_attn.q_proj.weight": maker.blind(2 * width, _HIDDEN),
        f"{full}self_attn.k_proj.weight": maker.blind(width, _HIDDEN),
        f"{full}self_attn.v_proj.weight": maker.blind(width, _HIDDEN),
        f"{full}self_attn.o_proj.weight": maker.matrix(_HIDDEN, width, gain=4.0),
    }
    del new["model.norm.weight"]  # zeros, here
    for name in ("q_norm", "k_norm"):
        new[f"{full}self_attn.{name}.weight"] = torch.full((config.head_dim,), 0.7)
    for name, weight in new.items():
        weights[name].copy_(weight)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    module = {n.replace(full, "mtp.layers.0."): w for n, w in saved.items() if full in n}
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        module[f"mtp.{name}.weight"] = torch.zeros(_HIDDEN)
    module["mtp.fc.weight"] = _select(1, 0)
    save_file(module, folder / "module.safetensors")
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return Drafted(str(folder), {"method": "mtp"})


def _make_llama_layers(seed: int) -> list[Weights]:
    maker = _Maker(10 + seed)
    return [maker.block(maker.attention(sharpness)) for sharpness in (1.5, 3.0, 1.5)]


def _select(first: int, second: int) -> torch.Tensor:
    """``[hidden, 2 * hidden]``: so much of either half of what is concatenated."""
    return torch.cat([first * torch.eye(_HIDDEN), second * torch.eye(_HIDDEN)], dim=1)


def _make_eagle(folder: Path, tokenizer: Path, weights: Weights, layers: list[Weights]) -> None:
    """The first layer has no norm, and behind the last there is none."""
    head = {"embed_tokens.weight": weights["model.embed_tokens.weight"], "fc.weight": _select(1, 0)}
    del layers[0]["input_layernorm.weight"]
    config = {**_LLAMA, "num_hidden_layers": len(layers)}
    _write(folder, tokenizer, config, head, layers, "layers")


def _make_eagle3(folder: Path, tokenizer: Path, weights: Weights, layers: list[Weights]) -> None:
    """Its first layer sees an embedding by attention only: each token looks at itself."""
    maker = _Maker(4)
    look = _select(1, 0)
    look[:, 0] = 0.0
    first = maker.block({"q_proj": 2.8 * look, "k_proj": 2.8 * look, "v_proj": look})
    first["self_attn.o_proj.weight"] = torch.eye(_HIDDEN)
    first["mlp.down_proj.weight"] = torch.zeros_like(first["mlp.down_proj.weight"])
    first["hidden_norm.weight"] = torch.zeros(_HIDDEN)
    head = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "fc.weight": maker.matrix(_HIDDEN, 3 * _HIDDEN),
        "norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": weights["lm_head.weight"],
    }
    for layer in layers:
        layer["hidden_norm.weight"] = torch.ones(_HIDDEN)
    config = {
        **_LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": len(layers) + 1,
        "norm_before_residual": True,
    }
    _write(folder, tokenizer, config, head, [first, *layers], "layers")


def _mimo_module(block: Weights) -> Weights:
    prefix = "model.mtp_layers.0."
    return {
        **{prefix + name: weight for name, weight in block.items()},
        prefix + "input_proj.weight": _select(0, 1),
        prefix + "token_layernorm.weight": torch.ones(_HIDDEN),
        prefix + "hidden_layernorm.weight": torch.ones(_HIDDEN),
        prefix + "final_layernorm.weight": torch.ones(_HIDDEN),
    }


def _deepseek_module(block: Weights, weights: Weights) -> Weights:
    prefix = "model.layers.2."
    return {
        **{prefix + name: weight for name, weight in block.items()},
        prefix + "embed_tokens.weight": weights["model.embed_tokens.weight"],
        prefix + "eh_proj.weight": _select(1, 0),
        prefix + "enorm.weight": torch.ones(_HIDDEN),
        prefix + "hnorm.weight": torch.ones(_HIDDEN),
        prefix + "shared_head.norm.weight": torch.ones(_HIDDEN),
        prefix + "shared_head.head.weight": weights["lm_head.weight"],
    }


def _write(
    folder: Path,
    tokenizer: Path,
    config: dict[str, Any],
    weights: Weights,
    layers: list[Weights],
    prefix: str = "model.layers",
) -> None:
    if folder.exists():
        return
    folder.mkdir(parents=True)
    every = dict(weights)
    for index, layer in enumerate(layers):
        every |= {f"{prefix}.{index}.{name}": weight for name, weight in layer.items()}
    if config["model_type"] == "qwen2":  # whose attention has biases
        for name in [name for name in every if name.endswith(_BIASED)]:
            every[name.replace(".weight", ".bias")] = torch.zeros(len(every[name]))
    tensors = {name: tensor.clone() for name, tensor in every.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
