# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from vllm_ascend_pd.testing.tiny_lora import RANK, main, make_tiny_lora
from vllm_ascend_pd.testing.tiny_model import SHAPES, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny").path


def test_adapter_changes_every_projection_of_every_layer(model: Path, tmp_path: Path) -> None:
    weights = load_file(make_tiny_lora(tmp_path / "a", model) / "adapter_model.safetensors")
    shape = SHAPES["tiny"]
    assert len(weights) == shape.num_hidden_layers * 4 * 2
    k_proj = "base_model.model.model.layers.3.self_attn.k_proj"
    added = weights[f"{k_proj}.lora_B.weight"] @ weights[f"{k_proj}.lora_A.weight"]
    assert added.shape == (shape.num_key_value_heads * shape.head_dim, shape.hidden_size)
    assert np.linalg.matrix_rank(added) == RANK


def test_same_seed_gives_the_same_bytes_and_another_does_not(model: Path, tmp_path: Path) -> None:
    a, b, c = (
        (make_tiny_lora(tmp_path / name, model, seed) / "adapter_model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a == b
    assert a != c


def test_command_says_what_it_made(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(model), "--out", str(tmp_path / "a"), "--seed", "3"]) == 0
    assert "LoRA of rank 4" in capsys.readouterr().out
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["r"] == RANK


@pytest.mark.parametrize("missing", [True, False])
def test_command_leaves_what_is_there_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: bool
) -> None:
    """No model there, or something in the way."""
    folder = tmp_path / "none" if missing else model
    assert main(["--model", str(folder), "--out", str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
