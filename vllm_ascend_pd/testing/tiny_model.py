# SPDX-License-Identifier: Apache-2.0
"""Make a small local model that a real vLLM loads, so that nothing is fetched from a model hub.

    python -m vllm_ascend_pd.testing.tiny_model --out .cache/models/tiny

The folder holds a Qwen3 with random weights and a byte-level BPE tokenizer. The same parameters
give the same bytes. Its text is nonsense, yet it is a good witness for tests that compare tokens:

* the next token depends on the whole context (attention is sharp, and adds as much as the
  embedding gives), so a single wrong block of KV changes the output;
* the best logit stands clear of the second in float32, so equal inputs give equal tokens;
* only tokens of ASCII text are favoured, and the end token never is: output is readable and
  reaches ``max_tokens``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

FORMAT: Final = 1  # raise it when the same parameters give other bytes
STAMP: Final = "tiny_model.json"  # written last: a folder without it is unfinished
VOCAB_SIZE: Final = 2048
END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
LOGIT_STD: Final = 4.0
ATTENTION_SHARPNESS: Final = (1.5, 3.0)  # std of the attention scores, layer by layer in turn
# What a block adds, against an embedding of 1: below these, greedy decoding soon repeats itself.
ATTENTION_GAIN: Final = 2.0
MLP_GAIN: Final = 3.0

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of one size of the model, in the words of the Hugging Face config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int = 32768


SHAPES: Final = {
    "tiny": ModelShape(128, 4, 4, 2, 32, 256),
    "60m": ModelShape(768, 8, 12, 6, 64, 2304),
}
DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class MadeModel:
    """What ``make_tiny_model`` found or made."""

    path: Path
    num_parameters: int
    reused: bool


def make_tiny_model(
    out: Path, size: str = "tiny", seed: int = 0, dtype: str = "float32", force: bool = False
) -> MadeModel:
    """Write the model folder, or keep one that was made there with the same parameters."""
    if size not in SHAPES:
        raise ValueError(f"unknown size {size!r}; valid: {sorted(SHAPES)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {sorted(DTYPES)}")
    shape = SHAPES[size]
    wanted = {"format": FORMAT, "size": size, "seed": seed, "dtype": dtype, **asdict(shape)}
    stamp = _read_stamp(out)
    if stamp is None and out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} holds other files, which are left alone: name another folder")
    if stamp is not None and not force:
        as_asked = stamp["parameters"] == wanted
        if as_asked and stamp["files"] == _sizes(out):
            return MadeModel(out, stamp["num_parameters"], reused=True)

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    token_ids = _write_tokenizer(partial)
    _write_config(partial, shape, dtype, token_ids)
    num_parameters = _write_weights(partial, shape, seed, dtype, _favoured_tokens(token_ids))
    stamp = {"parameters": wanted, "num_parameters": num_parameters, "files": _sizes(partial)}
    _write_json(partial / STAMP, stamp)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return MadeModel(out, num_parameters, reused=False)


def _read_stamp(out: Path) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads((out / STAMP).read_text())
    except FileNotFoundError:
        return None
    return stamp


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.iterdir() if path.name != STAMP)
    return {path.name: path.stat().st_size for path in files}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(out: Path) -> dict[str, int]:
    """Train the tokenizer, write it, and return its vocabulary (byte-level token to id)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[END, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    prose, words = (
        files(__package__).joinpath(name).read_text() for name in ("prose.txt", "words.txt")
    )
    tokenizer.train_from_iterator([prose, words, words.title()], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": [IM_START, IM_END],
            "model_max_length": SHAPES["tiny"].max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    vocab: dict[str, int] = tokenizer.get_vocab()
    return vocab


def _favoured_tokens(token_ids: dict[str, int]) -> Array:
    """A mask of shape [vocab]: ASCII text ("Ġ" is how byte-level BPE writes a space)."""
    favoured = np.zeros(VOCAB_SIZE, dtype=bool)
    for token, token_id in token_ids.items():
        text = token.replace("Ġ", " ")
        favoured[token_id] = text.isascii() and token not in (END, IM_START, IM_END)
    return favoured


def _write_config(out: Path, shape: ModelShape, dtype: str, token_ids: dict[str, int]) -> None:
    _write_json(
        out / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": dtype,
            "vocab_size": VOCAB_SIZE,
            **asdict(shape),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "attention_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": token_ids[END],
            "pad_token_id": token_ids[END],
        },
    )
    _write_json(
        out / "generation_config.json",
        {"eos_token_id": token_ids[END], "pad_token_id": token_ids[END]},
    )


def _weights(shape: ModelShape, seed: int, favoured: Array) -> Iterator[tuple[str, Array]]:
    """Yield (name, float32 array) of every weight, in a fixed order that the seed's stream follows.

    Uniform draws, because they are exact on every machine. A matrix of gain 1 keeps the scale of
    its input; the residual stream starts at 1 a component, and each block adds about as much.
    """
    rng = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, gain: float = 1.0, fan_in: int | None = None) -> Array:
        bound = gain * (3.0 / (columns if fan_in is None else fan_in)) ** 0.5
        draws = rng.random((rows, columns), dtype=np.float32)
        return (draws - np.float32(0.5)) * np.float32(2 * bound)

    hidden, head_dim = shape.hidden_size, shape.head_dim
    q_size = shape.num_attention_heads * head_dim
    kv_size = shape.num_key_value_heads * head_dim
    yield "model.embed_tokens.weight", matrix(VOCAB_SIZE, hidden, fan_in=1)
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        sharpness = ATTENTION_SHARPNESS[layer % len(ATTENTION_SHARPNESS)]
        qk_norm = np.full(head_dim, sharpness**0.5, dtype=np.float32)
        yield prefix + "input_layernorm.weight", np.ones(hidden, dtype=np.float32)
        yield prefix + "self_attn.q_proj.weight", matrix(q_size, hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(kv_size, hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(kv_size, hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(hidden, q_size, gain=ATTENTION_GAIN)
        yield prefix + "self_attn.q_norm.weight", qk_norm
        yield prefix + "self_attn.k_norm.weight", qk_norm.copy()
        yield prefix + "post_attention_layernorm.weight", np.ones(hidden, dtype=np.float32)
        yield prefix + "mlp.gate_proj.weight", matrix(shape.intermediate_size, hidden)
        yield prefix + "mlp.up_proj.weight", matrix(shape.intermediate_size, hidden)
        yield (
            prefix + "mlp.down_proj.weight",
            matrix(hidden, shape.intermediate_size, gain=MLP_GAIN),
        )
    yield "model.norm.weight", np.ones(hidden, dtype=np.float32)
    lm_head = matrix(VOCAB_SIZE, hidden, gain=LOGIT_STD)
    lm_head[~favoured] = 0.0
    yield "lm_head.weight", lm_head


def _write_weights(out: Path, shape: ModelShape, seed: int, dtype: str, favoured: Array) -> int:
    """Write model.safetensors: length of the header, JSON header, tensors back to back."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    num_parameters = offset = 0
    for name, weight in _weights(shape, seed, favoured):
        data = _as_bytes(weight, dtype)
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(weight.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
        num_parameters += weight.size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts at a multiple of 8
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        file.writelines(chunks)
    return num_parameters


def _as_bytes(weight: Array, dtype: str) -> bytes:
    """Little-endian bytes; bfloat16, which numpy lacks, is rounded to nearest even."""
    if dtype == "float32":
        return weight.astype("<f4").tobytes()
    if dtype == "float16":
        return weight.astype("<f2").tobytes()
    bits = weight.astype("<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_ascend_pd.testing.tiny_model",
        description="Make a small local Qwen3 with random weights, for tests and benchmarks.",
        epilog="Serve it: HF_HUB_OFFLINE=1 vllm serve DIR --dtype float32 --max-model-len 8192",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--size", choices=sorted(SHAPES), default="tiny", help="tiny: 1 M parameters; 60m: 60 M"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32", help="of the weights (default float32)"
    )
    parser.add_argument("--force", action="store_true", help="make it again")
    args = parser.parse_args(argv)
    started = time.monotonic()
    try:
        made = make_tiny_model(args.out, args.size, args.seed, args.dtype, args.force)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    what = f"{args.size} Qwen3, {made.num_parameters / 1e6:.1f} M parameters, {args.dtype}"
    if made.reused:
        print(f"{made.path}: already there ({what}, seed {args.seed})")
    else:
        print(f"{made.path}: made in {time.monotonic() - started:.1f} s ({what}, seed {args.seed})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
