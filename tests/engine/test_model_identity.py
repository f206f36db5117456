# SPDX-License-Identifier: Apache-2.0
"""Which options and files make a model another one, with vLLM's own configuration."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.checkpoints import copy_with_other_tensors
from vllm_ascend_pd import envs
from vllm_ascend_pd.engine.model_identity import model_identity
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny").path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def identity(tiny: Path) -> Callable[..., dict[str, str]]:
    def make(model: Path | str = tiny, **options: Any) -> dict[str, str]:
        args = EngineArgs(model=str(model), **{"dtype": "float32", "max_model_len": 256, **options})
        return model_identity(args.create_engine_config())

    return make


@pytest.fixture
def config(tiny: Path) -> VllmConfig:
    return EngineArgs(model=str(tiny), dtype="float32", max_model_len=256).create_engine_config()


def differences(a: dict[str, str], b: dict[str, str]) -> set[str]:
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


def test_a_copy_elsewhere_is_the_same_model(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny, tmp_path / "other")
    (other / "training_args.bin").write_bytes(b"of the training")
    assert identity() == identity(other)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 128},
        {"seed": 7},
        {"load_format": "safetensors"},
        {"served_model_name": "x"},
        {"tensor_parallel_size": 2},
        {"gpu_memory_utilization": 0.3},
    ],
    ids=str,
)
def test_what_does_not_change_kv_does_not_count(
    identity: Callable[..., dict[str, str]], options: dict[str, Any]
) -> None:
    assert identity() == identity(**options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"hf_overrides": {"rope_theta": 5000.0}}, ["config"]),
        ({"load_format": "dummy"}, ["load", "weights"]),
        ({"dtype": "bfloat16", "quantization": "fp8_per_tensor"}, ["quant"]),
        ({"dtype": "bfloat16", "quantization": "fp8"}, ["quant"]),
    ],
    ids=str,
)
def test_the_parts_that_differ_say_why(
    identity: Callable[..., dict[str, str]], options: dict[str, Any], parts: list[str]
) -> None:
    assert differences(identity(), identity(**options)) == set(parts)


def test_every_layers_k_and_v_count(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path
) -> None:
    other = copy_with_other_tensors(tiny, tmp_path / "other", r"\.(k|v)_proj\.")
    assert differences(identity(), identity(other)) == {"weights"}


@pytest.fixture
def loading(tiny: Path, tmp_path: Path) -> Callable[[], VllmConfig]:
    """The configuration of an engine that begins to load ``tmp_path / "model"``."""
    model = shutil.copytree(tiny, tmp_path / "model")
    transfer = KVTransferConfig(kv_connector="InEngine", kv_role="kv_both")
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=256, kv_transfer_config=transfer
    )
    return lambda: pickle.loads(pickle.dumps(args.create_engine_config()))


def test_weights_that_are_replaced_while_they_are_loaded_have_no_identity(
    loading: Callable[[], VllmConfig], tiny: Path, tmp_path: Path
) -> None:
    other = copy_with_other_tensors(tiny, tmp_path / "other", r"layers\.2\.mlp\.up_proj")
    config = loading()
    model_identity(config)
    shutil.copyfile(other / "model.safetensors", tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors was replaced while this engine"):
        model_identity(config)
    model_identity(loading())


def test_nor_have_those_that_have_other_names_then(
    loading: Callable[[], VllmConfig], tmp_path: Path
) -> None:
    config, weights = loading(), tmp_path / "model" / "model.safetensors"
    weights.rename(weights.with_stem("model-00001-of-00001"))
    with pytest.raises(ConfigError, match=r"model\.safetensors was replaced while this engine"):
        model_identity(config)


def test_a_file_that_a_download_adds_is_one_of_them(
    loading: Callable[[], VllmConfig], identity: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.rename(tmp_path / "later")
    config = loading()
    (tmp_path / "later").rename(weights)
    assert model_identity(config) == identity()


def test_one_tensor_counts(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path
) -> None:
    other = copy_with_other_tensors(tiny, tmp_path / "other", r"layers\.2\.mlp\.up_proj")
    assert differences(identity(), identity(other)) == {"weights"}


def drafting_with(drafter: Path, num_drafts: int = 2) -> dict[str, Any]:
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": num_drafts}
    return {"speculative_config": drafts}


def test_a_drafter_counts_and_not_where_it_lies_or_how_much_it_drafts(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path
) -> None:
    same = shutil.copytree(tiny, tmp_path / "same")
    assert identity(**drafting_with(same)) == identity(**drafting_with(tiny, 3))
    other = copy_with_other_tensors(tiny, tmp_path / "other", r"\.2\.mlp\.up_proj")
    made = [identity(), *(identity(**drafting_with(model)) for model in (tiny, other))]
    for one, two in itertools.combinations(made, 2):
        assert differences(one, two) == {"draft"}


def test_drafts_without_kv_do_not_count(identity: Callable[..., dict[str, str]]) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    assert identity(speculative_config=ngram) == identity()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.gguf", "model.pt"])
def test_weights_in_other_files_count(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path, file: str
) -> None:
    found = []
    for name, content in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        folder = tmp_path / name
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / file).write_bytes(content * 1000)
        found.append(identity(folder))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"weights"}


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """The model with its tensors in files of these names, or what else is to be in them."""
    numbers = itertools.count()

    def make(*same: str, **others: bytes | str) -> Path:
        folder = tmp_path / f"copy {next(numbers)}"
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        for name in same:
            shutil.copy(tiny / "model.safetensors", folder / name)
        for name, content in others.items():
            data = content if isinstance(content, bytes) else content.encode()
            (folder / name).write_bytes(data)
        return folder

    return make


def index_of(*files: str) -> str:
    return json.dumps({"weight_map": {f"tensor {i}": file for i, file in enumerate(files)}})


def test_copy_of_the_weights_that_nobody_reads_does_not_count(
    identity: Callable[..., dict[str, str]], copy: Callable[..., Path]
) -> None:
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin"):
        assert identity(copy("model.safetensors", **{name: b"same"})) == identity()
    for name in ("mask_embedding.pt", "model.bin", "other.safetensors"):
        found = identity(copy("model.safetensors", **{name: b"read by some"}))
        assert differences(found, identity()) == {"weights"}


def test_of_safetensors_those_that_the_index_names_count(
    identity: Callable[..., dict[str, str]], copy: Callable[..., Path]
) -> None:
    index = {"model.safetensors.index.json": index_of("model.safetensors")}
    beside = copy("model.safetensors", **index, **{"other.safetensors": b"other"})
    assert identity(beside) == identity()
    assert identity(beside, load_format="safetensors") == identity()
    both = {"model.safetensors.index.json": index_of("model.safetensors", "other.safetensors")}
    found = identity(copy("model.safetensors", **both, **{"other.safetensors": b"other"}))
    assert differences(found, identity()) == {"weights"}
    # It reads all that are there.
    streamed = identity(beside, load_format="runai_streamer")
    assert differences(streamed, identity()) == {"weights"}


@pytest.mark.parametrize("folder", ["whisper-large-v3", "audio_tokenizer"])
def test_tensors_in_a_folder_of_the_models_count(
    identity: Callable[..., dict[str, str]], copy: Callable[..., Path], folder: str
) -> None:
    found = []
    for content in (b"one", b"one", b"other"):
        model = copy("a.safetensors", **{"model.safetensors.index.json": index_of("a.safetensors")})
        (model / folder).mkdir()
        (model / folder / "model.safetensors").write_bytes(content)
        found.append(identity(model))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"weights"}


@pytest.mark.parametrize("field", ["text_model_id", "audio_model_id"])
def test_models_that_a_configuration_names_count(
    identity: Callable[..., dict[str, str]], tmp_path: Path, field: str
) -> None:
    other = tmp_path / "named"
    other.mkdir()
    found = []
    for content in (b"one", b"one", b"other"):
        (other / "model.safetensors").write_bytes(content)
        found.append(identity(hf_overrides={field: str(other)}))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"weights"}


def test_of_mistrals_format_its_own_files_count(
    identity: Callable[..., dict[str, str]], copy: Callable[..., Path]
) -> None:
    alone = identity(copy("consolidated.safetensors"))
    assert differences(alone, identity()) == {"load", "weights"}
    assert identity(copy("consolidated.safetensors", "model.safetensors")) == alone
    other = copy("model.safetensors", **{"consolidated.safetensors": b"other"})
    assert differences(identity(other), alone) == {"weights"}
    by_hand = identity(copy("consolidated.safetensors", "model.safetensors"), load_format="hf")
    assert differences(by_hand, identity()) == {"weights"}  # vLLM reads both without an index


def test_long_rope_counts_on_which_side_of_its_length_an_engine_is(
    identity: Callable[..., dict[str, str]],
) -> None:
    def length(max_model_len: int) -> str:
        options = {"hf_overrides": {"rope_parameters": LONG_ROPE}, "max_model_len": max_model_len}
        return identity(**options)["length"]

    assert [length(n) for n in (128, 512, 513, 1024)] == ["short", "short", "long", "long"]


def test_dynamic_rope_counts_with_the_length_that_it_may_stretch_to(
    identity: Callable[..., dict[str, str]],
) -> None:
    """By a factor; by ``alpha`` it does not look at lengths."""

    def made(**rope: float) -> list[dict[str, str]]:
        parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, **rope}
        overrides = {"rope_parameters": parameters}
        return [identity(hf_overrides=overrides, max_model_len=n) for n in (128, 256)]

    assert differences(*made(factor=2.0)) == {"length"}
    short, long = made(factor=1.0, alpha=1000.0)
    assert short == long


def test_length_is_the_one_that_the_model_was_built_with(tiny: Path) -> None:
    """`auto` is made what memory has room for once the model is built, in each process."""
    config = EngineArgs(
        model=str(tiny),
        dtype="float32",
        max_model_len=-1,
        hf_overrides={"rope_parameters": LONG_ROPE},
        kv_transfer_config=KVTransferConfig(kv_connector="InEngine", kv_role="kv_both"),
    ).create_engine_config()
    assert config.model_config.max_model_len > 512
    config.model_config.max_model_len = 512
    told = pickle.loads(pickle.dumps(config))
    assert model_identity(config)["length"] == model_identity(told)["length"] == "long"


def test_of_llama_4_it_counts_whether_it_scales_by_temperature(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its length, or as the generation configuration says."""
    model = config.model_config
    monkeypatch.setattr(model, "pd_content", {"model_type": "llama4"}, raising=False)
    found = []
    for length, said in ((32768, {}), (32769, {}), (256, {"attn_temperature_tuning": True})):
        model.max_model_len, model.override_generation_config = length, said
        found.append(model_identity(config))
    assert [identity.get("length") for identity in found] == [None, "tuned", "tuned"]
    assert found[1] == found[2]


def test_dummy_weights_depend_on_how_they_are_divided(
    identity: Callable[..., dict[str, str]],
) -> None:
    one, two = (identity(load_format="dummy", tensor_parallel_size=n) for n in (1, 2))
    assert differences(one, two) == {"weights"}


def test_remote_code_counts_where_it_is_trusted_and_computes(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny, tmp_path / "other")
    (other / "modeling.py").write_text("factor = 2")
    by_transformers = {"model_impl": "transformers", "trust_remote_code": True}
    found = [identity(model, model_impl="transformers") for model in (tiny, other)]
    assert found[0] == found[1] == identity(**by_transformers)
    assert differences(found[0], identity(other, **by_transformers)) == {"code"}


def test_remote_code_does_not_count_where_vllms_own_computes(
    identity: Callable[..., dict[str, str]], tiny: Path, tmp_path: Path
) -> None:
    """What a download of vLLM's lacks and a whole copy of the repository has."""
    other = shutil.copytree(tiny, tmp_path / "other")
    (other / "modeling.py").write_text("factor = 2")
    assert identity(other, trust_remote_code=True) == identity()


def test_code_that_prepares_media_counts(config: VllmConfig, tiny: Path, tmp_path: Path) -> None:
    config.model_config.multimodal_config = MultiModalConfig()
    config.model_config.trust_remote_code = True
    before = model_identity(config)
    config.model_config.model = str(shutil.copytree(tiny, tmp_path / "other"))
    (tmp_path / "other" / "processing.py").write_text("factor = 2")
    assert differences(before, model_identity(config)) == {"code"}


def test_a_hub_name_counts_by_the_commit_it_resolves_to(
    identity: Callable[..., dict[str, str]],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: VllmConfig,
) -> None:
    """A cache as the hub's library keeps it, with two commits of one name."""
    hub = tmp_path / "hub"
    repo = hub / "models--some--model"
    commits = {"main": "a" * 40, "next": "b" * 40}
    shutil.copytree(tiny, repo / "snapshots" / commits["main"])
    copy_with_other_tensors(tiny, repo / "snapshots" / commits["next"], r"\.k_proj\.")
    (repo / "refs").mkdir()
    for branch, commit in commits.items():
        (repo / "refs" / branch).write_text(commit)
    config.load_config.download_dir = str(hub)
    config.model_config.model = "some/model"
    local = identity()

    def named(revision: str | None) -> dict[str, str]:
        config.model_config.revision = revision
        return model_identity(config)

    assert named(None) == named("main") == local
    assert differences(named("next"), local) == {"weights"}
    (repo / "refs" / "main").write_text(commits["next"])
    assert named(None) == named("next")


@pytest.mark.parametrize("load_format", ["tensorizer", "sharded_state", "of_a_plugin"])
def test_loaders_that_are_told_what_to_read_count_with_that(
    config: VllmConfig, load_format: str
) -> None:
    config.load_config.load_format = load_format
    found = []
    for source in ("one", "one", "other"):
        config.load_config.model_loader_extra_config = {"tensorizer_uri": source}
        found.append(model_identity(config))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"load"}


def test_how_a_checkpoint_is_read_does_not_count(config: VllmConfig) -> None:
    before = model_identity(config)
    config.load_config.model_loader_extra_config = {"enable_multithread_load": True}
    assert model_identity(config) == before


def test_what_models_write_over_their_configurations_does_not_count(tiny: Path) -> None:
    """Where they are built, which is here or in a worker's process."""
    args = EngineArgs(
        model=str(tiny),
        dtype="float32",
        max_model_len=256,
        speculative_config={
            "method": "draft_model",
            "model": str(tiny),
            "num_speculative_tokens": 2,
        },
        kv_transfer_config=KVTransferConfig(kv_connector="InEngine", kv_role="kv_both"),
    )
    config = args.create_engine_config()
    before = model_identity(config)
    assert config.speculative_config is not None
    for model in (config.model_config, config.speculative_config.draft_model_config):
        model.hf_config.rope_parameters = {"rope_type": "deepseek_yarn", "factor": 2.0}
        model.hf_config.target_layer_count = 4
    told = pickle.loads(pickle.dumps(config))  # to a process of its own
    again = replace(config, model_config=config.speculative_config.draft_model_config)
    assert model_identity(config) == model_identity(told) == model_identity(again) == before
    another = replace(args, hf_overrides={"rope_parameters": LONG_ROPE}).create_engine_config()
    assert differences(model_identity(another), before) == {"config", "length"}


AWQ = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("method", "file", "one", "other"),
    [
        ("awq", "quant_config.json", AWQ, {**AWQ, "zero_point": False}),
        ("gptq", "quantize_config.json", GPTQ, {**GPTQ, "group_size": 64}),
    ],
)
def test_how_weights_are_quantized_counts_where_a_file_says_it(
    identity: Callable[..., dict[str, str]],
    copy: Callable[..., Path],
    method: str,
    file: str,
    one: dict[str, Any],
    other: dict[str, Any],
) -> None:
    options = {"dtype": "bfloat16", "quantization": method, "allow_deprecated_quantization": True}
    found = [
        identity(copy("model.safetensors", **{file: json.dumps(said)}), **options)
        for said in (one, one, other)
    ]
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"quant"}


def test_so_does_the_file_of_modelslim(config: VllmConfig, copy: Callable[..., Path]) -> None:
    """Which vllm-ascend reads, layer by layer."""
    config.model_config.quantization, found = "ascend", []
    for kind in ("W8A8", "W8A8", "W8A8_DYNAMIC"):
        said = {"quant_model_description.json": json.dumps({"model.layers.0.up_proj.weight": kind})}
        config.model_config.model = str(copy("model.safetensors", **said))
        found.append(model_identity(config))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"quant"}


def test_such_a_file_does_not_count_where_the_configuration_says_it(
    identity: Callable[..., dict[str, str]], copy: Callable[..., Path], tiny: Path
) -> None:
    """What a download of vLLM's lacks and a whole copy of the repository has."""
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = {**GPTQ, "quant_method": "gptq"}
    files = {"config.json": json.dumps(config)}
    downloaded = identity(copy("model.safetensors", **files), dtype="bfloat16")
    files["quantize_config.json"] = json.dumps(GPTQ)
    assert identity(copy("model.safetensors", **files), dtype="bfloat16") == downloaded


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "int8"}'),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"),
    ],
)
def test_variables_that_quantize_otherwise_count_for_a_quantized_model(
    identity: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    plain, quantized = identity(), identity(dtype="bfloat16", quantization="fp8")
    monkeypatch.setenv(name, value)
    assert identity() == plain
    other = identity(dtype="bfloat16", quantization="fp8")
    assert differences(other, quantized) == {"quant"}


def test_a_benchmark_that_chooses_experts_counts(
    identity: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves in a pool is not of the model."""
    plain = identity()
    forced = identity(additional_config={"enable_force_eplb": True})
    assert differences(plain, forced) == {"arch"}
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    assert differences(plain, identity()) == {"arch"}


def test_scales_of_a_media_encoder_count(config: VllmConfig, tmp_path: Path) -> None:
    found = []
    for name, scale in (("one", 200.0), ("same", 200.0), ("other", 210.0)):
        file = tmp_path / name
        file.write_text(json.dumps({"visual.blocks.0.attn.attn": dict.fromkeys("qkv", scale)}))
        config.model_config.multimodal_config = MultiModalConfig(
            mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file)
        )
        found.append(model_identity(config))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"media"}


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"min_pixels": 784}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"video_pruning_rate": 0.5},
    ],
    ids=str,
)
def test_how_media_are_processed_counts(config: VllmConfig, options: dict[str, Any]) -> None:
    config.model_config.multimodal_config = MultiModalConfig()
    before = model_identity(config)
    config.model_config.multimodal_config = MultiModalConfig(**options, limit_per_prompt={})
    assert differences(before, model_identity(config)) == {"media"}


def test_a_processor_counts_by_its_files(config: VllmConfig, tiny: Path, tmp_path: Path) -> None:
    config.model_config.multimodal_config = MultiModalConfig()
    found = []
    for name, mean in (("one", 0.5), ("same", 0.5), ("other", 0.6)):
        folder = shutil.copytree(tiny, tmp_path / name)
        (folder / "preprocessor_config.json").write_text(f'{{"image_mean": [{mean}]}}')
        config.model_config.model = str(folder)
        found.append(model_identity(config))
    assert found[0] == found[1]
    assert differences(*found[1:]) == {"media"}


def test_weights_that_nobody_here_can_read_count_by_name(
    config: VllmConfig,
) -> None:
    config.model_config.model_weights = "s3://bucket/model"
    weights = model_identity(config)["weights"]
    assert weights.startswith("named-")
    config.model_config.model_weights = "s3://bucket/other"
    assert model_identity(config)["weights"] != weights
