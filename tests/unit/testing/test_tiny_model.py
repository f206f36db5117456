# SPDX-License-Identifier: Apache-2.0
"""The test model: the same bytes each time, text that round-trips, and tokens worth comparing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from vllm_ascend_pd.testing.tiny_model import (
    END,
    IM_END,
    IM_START,
    SHAPES,
    STAMP,
    VOCAB_SIZE,
    main,
    make_tiny_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny").path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_same_parameters_give_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    assert digests(make_tiny_model(tmp_path / "again").path) == digests(model_dir)


def test_another_seed_changes_the_weights_and_only_them(model_dir: Path, tmp_path: Path) -> None:
    first, second = digests(model_dir), digests(make_tiny_model(tmp_path / "m", seed=1).path)
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors", STAMP}


def test_a_model_made_with_the_same_parameters_is_kept(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "m")
    written = (made.path / "model.safetensors").stat().st_mtime_ns
    kept = make_tiny_model(tmp_path / "m")
    assert (made.reused, kept.reused) == (False, True)
    assert kept.num_parameters == made.num_parameters
    assert (made.path / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_model_is_made_again(tmp_path: Path, damage: str) -> None:
    weights = make_tiny_model(tmp_path / "m").path / "model.safetensors"
    size = weights.stat().st_size
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.unlink()
    assert not make_tiny_model(tmp_path / "m").reused
    assert weights.stat().st_size == size


def test_other_parameters_or_force_make_it_again(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m")
    assert not make_tiny_model(tmp_path / "m", dtype="bfloat16").reused
    assert not make_tiny_model(tmp_path / "m", dtype="bfloat16", force=True).reused


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="name another folder"):
        make_tiny_model(tmp_path, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_unknown_size_and_dtype_are_refused_with_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'7b'.*60m.*tiny"):
        make_tiny_model(tmp_path / "m", size="7b")
    with pytest.raises(ValueError, match=r"'int8'.*bfloat16"):
        make_tiny_model(tmp_path / "m", dtype="int8")


def test_weights_have_the_shapes_that_the_config_promises(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    shape = SHAPES["tiny"]
    with safe_open(model_dir / "model.safetensors", framework="numpy") as weights:
        names = set(weights.keys())
        embedding = weights.get_tensor("model.embed_tokens.weight")
        k_proj = weights.get_tensor("model.layers.3.self_attn.k_proj.weight")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert len(names) == 3 + 11 * shape.num_hidden_layers
    assert embedding.shape == (VOCAB_SIZE, shape.hidden_size) == (2048, config["hidden_size"])
    assert k_proj.shape == (config["num_key_value_heads"] * config["head_dim"], 128)
    assert embedding.dtype == np.float32
    assert abs(float(embedding.std()) - 1.0) < 0.01


def test_bfloat16_weights_are_the_float32_ones_rounded(model_dir: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    half = make_tiny_model(tmp_path / "m", dtype="bfloat16").path
    with (
        safe_open(model_dir / "model.safetensors", framework="pt") as full,
        safe_open(half / "model.safetensors", framework="pt") as rounded,
    ):
        for name in full.keys():  # noqa: SIM118 - not a dict
            expected = full.get_tensor(name).to(torch.bfloat16)
            assert torch.equal(rounded.get_tensor(name), expected), name


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(token_id < VOCAB_SIZE for token_id in ids)


def test_tokenizer_has_a_full_vocabulary_and_whole_common_words(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert len(tokenizer.encode("the cache of the engine").ids) == 5
    assert [tokenizer.token_to_id(token) for token in (END, IM_START, IM_END)] == [0, 1, 2]


def test_the_end_token_and_bytes_of_other_scripts_are_never_favoured(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    with safe_open(model_dir / "model.safetensors", framework="numpy") as weights:
        strength = np.abs(weights.get_tensor("lm_head.weight")).max(axis=1)
    silent = [0, 1, 2, *tokenizer.encode("é").ids]
    assert not strength[silent].any()
    assert strength[tokenizer.encode("the cache").ids].all()


def test_the_command_says_what_it_made_and_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "m")]) == 0
    assert "made in" in capsys.readouterr().out
    assert main(["--out", str(tmp_path / "m")]) == 0
    assert (
        "already there (tiny Qwen3, 1.1 M parameters, float32, seed 0)" in capsys.readouterr().out
    )
    assert main(["--out", str(tmp_path)]) == 1
    assert "name another folder" in capsys.readouterr().err
