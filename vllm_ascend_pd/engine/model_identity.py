# SPDX-License-Identifier: Apache-2.0
"""The parts of the fingerprint that say which model this is: all that decides KV, and no names."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.config import PDConfig, WeightReading
from vllm_ascend_pd.engine.digest import digest
from vllm_ascend_pd.engine.vllm_api.config import (
    built_with,
    has_drafter,
    keep_stamps,
    kept_content,
    kept_stamps,
    media_options,
    quantizing_variables,
    simulated_routing,
    tunes_attention,
    uses_modelscope,
)
from vllm_ascend_pd.engine.weight_files import content_digest
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.config_types import LoadConfig, ModelConfig, VllmConfig


logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".ckpt", ".npz", ".npy")
)
_NO_WEIGHTS = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
)
"""What a training leaves beside the weights; vLLM does not load it either."""
_ONE_LOADER = ("hf", "safetensors", "fastsafetensors", "instanttensor")
_CHECKPOINT_FORMATS = frozenset((*_ONE_LOADER, "runai_streamer"))
"""Load formats that read the same tensors."""
_SAFETENSORS = {
    **dict.fromkeys(_ONE_LOADER, ("*.safetensors", "model.safetensors.index.json")),
    "mistral": ("consolidated*.safetensors", "consolidated.safetensors.index.json"),
}
"""By load format: the files that vLLM reads if there are any, and the index beside them, which may
name only some of these."""
_SAME_IN_BIN = "pytorch_model*.bin"
"""Not read where there are safetensors."""
_SUBFOLDERS = ("whisper-large-v3", "audio_tokenizer")
"""Of a model's folder, with tensors of it: those that Kimi-Audio and MiMo make of sounds."""
_OTHER_MODELS = ("text_model_id", "audio_model_id")
"""Fields of a configuration that name the models of which this one is made: Ultravox."""
_PROCESSOR_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
_QUANTIZATION_FILES = (
    *("*quant_config.json", "*quantize_config.json", "quant_model_description.json"),
)
_NOT_CONTENT = frozenset(("_name_or_path", "_commit_hash", "transformers_version", "max_model_len"))
"""Of a configuration: where it lies, and who read it."""
_LLAMA4_TUNING_LENGTH = 32768


def model_identity(vllm_config: VllmConfig) -> dict[str, str]:
    """``config``, ``arch``, ``weights``, and where they are given ``load``, ``quant``, ``length``,
    ``window``, ``media``, ``code``, ``draft``.
    """
    model = vllm_config.model_config
    config = _content(kept_content(model))
    parts = {
        "config": digest(config),
        "arch": model.architecture,
        "weights": "",
        "load": _load_format(vllm_config.load_config, model),
        "quant": "",
        "length": _length(model, config, built_with(vllm_config)[0]),
        "window": "off" if model.disable_sliding_window else "",
        "media": "",
        "code": "",
        "draft": _drafter(vllm_config),
    }
    if model.model_class_overrides:
        parts["arch"] += f"-{digest(model.model_class_overrides)}"
    if routing := simulated_routing(vllm_config):
        parts["arch"] += f"-{digest(routing)}"
    folder = model_folder(vllm_config.load_config, model)
    parts["quant"] = _quantization(model, config, folder)
    parts["weights"] = _weights(vllm_config, vllm_config.load_config, model)
    if model.multimodal_config is not None:
        parts["media"] = digest((media_options(model.multimodal_config), _processor(folder)))
    if code := _code(model, folder):
        parts["code"] = digest(_texts(code))
    return {name: value for name, value in parts.items() if value}


def note_weights(vllm_config: VllmConfig) -> None:
    """Before they are read: which files of them there are. A drafter's decide no token."""
    model = vllm_config.model_config

    def look() -> dict[str, tuple[int, ...]]:
        folder = model_folder(vllm_config.load_config, model)
        files = weight_files(folder) if folder is not None else []
        return {str(file): _stamp(file) for file in files}

    keep_stamps(model, look)


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes with what is in it. Some file systems number files anew all the time."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _refuse_changed(files: Iterable[Path], model: ModelConfig) -> None:
    """``ConfigError`` where files were written or removed meanwhile: nobody knows which were read.
    A download may have added some.
    """
    stamps = kept_stamps(model)
    changed = [name for name in stamps if not Path(name).is_file()]
    changed += [str(file) for file in files if stamps.get(str(file)) not in (None, _stamp(file))]
    if changed:
        raise ConfigError(
            f"{changed[0]} was replaced while this engine loaded its weights, so nobody knows what"
            " it computes with; start it again once all files are in place"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold tensors; or the one file that a model is."""
    if not folder.is_dir():
        return [folder]
    folders = (folder, *(folder / name for name in _SUBFOLDERS if (folder / name).is_dir()))
    return sorted(
        file
        for one in folders
        for file in one.iterdir()
        if file.suffix in _WEIGHT_SUFFIXES and file.name not in _NO_WEIGHTS and file.is_file()
    )


def _drafter(vllm_config: VllmConfig) -> str:
    """All that decides the KV of its layers, and the method; empty without one. How many tokens it
    drafts does not count.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not has_drafter(vllm_config):
        return ""
    model = speculative.draft_model_config
    load = speculative.draft_load_config or vllm_config.load_config
    config = _content(kept_content(model))
    quantization = _quantization(model, config, model_folder(load, model))
    parts = (
        *(model.architecture, str(model.dtype), quantization or "None"),
        *(speculative.kv_cache_dtype, config),
        _weights(vllm_config, load, model),
    )
    return f"{speculative.method}-{digest(parts)}"


def _content(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _content(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _NOT_CONTENT
    }


def _weights(vllm_config: VllmConfig, load: LoadConfig, model: ModelConfig) -> str:
    if load.load_format == "dummy":
        return _dummy_weights(vllm_config, model)
    folder = model_folder(load, model)
    files = _read_files(folder, load) if folder is not None else []
    for name in filter(None, map(kept_content(model).get, _OTHER_MODELS)):
        other = _folder_of(name, None, load) if files else None
        files += _read_files(other, load) if other is not None else []
    _refuse_changed(files, model)
    if files:
        kv_transfer_config = vllm_config.kv_transfer_config
        full = (
            kv_transfer_config is not None
            and PDConfig.from_kv_transfer_config(kv_transfer_config).identity is WeightReading.FULL
        )
        return content_digest(files, full)[:16]
    name = f"{model.model_weights or model.model}@{model.revision or ''}"
    logger.warning(
        "the weights of %s are not on a disk of this host: engines take them for equal by name",
        name,
    )
    return f"named-{digest(name)}"


def _dummy_weights(vllm_config: VllmConfig, model: ModelConfig) -> str:
    """vLLM fills each parameter from one seed by its size, so they depend on how it is divided.
    What is not floating point it leaves as memory was.
    """
    if model.quantization:
        return f"dummy-{secrets.token_hex(8)}"
    size = vllm_config.parallel_config.tensor_parallel_size
    return f"dummy-{vllm_config.device_config.device_type}-tp{size}"


def _load_format(load: LoadConfig, model: ModelConfig) -> str:
    """Empty where the tensors of the checkpoint are read as they are. Other loaders are told what
    they read by their own options.
    """
    load_format = _resolved(load, model_folder(load, model))
    if load_format in _CHECKPOINT_FORMATS:
        return ""
    options = load.model_loader_extra_config
    return f"{load_format}-{digest(options)}" if options else load_format


def _resolved(load: LoadConfig, folder: Path | None) -> str:
    """The load format that vLLM makes of ``auto``."""
    if load.load_format != "auto":
        return str(load.load_format)
    pattern, _ = _SAFETENSORS["mistral"]
    return "mistral" if folder is not None and any(folder.glob(pattern)) else "hf"


def _read_files(folder: Path, load: LoadConfig) -> list[Path]:
    """Of ``weight_files`` all that vLLM may read: engines with and without other copies of the same
    tensors are equal.
    """
    files = weight_files(folder)
    pattern, index = _SAFETENSORS.get(_resolved(load, folder), ("", ""))
    read = {file for file in files if fnmatch(file.name, pattern)}
    if not read:
        return files
    if (folder / index).is_file():
        named = set(json.loads((folder / index).read_text())["weight_map"].values())
        read = {file for file in read if file.name in named or file.parent != folder}
    return [file for file in files if file in read or not _is_copy(file)]


def _is_copy(file: Path) -> bool:
    return file.suffix == ".safetensors" or fnmatch(file.name, _SAME_IN_BIN)


def _quantization(model: ModelConfig, config: Mapping[str, Any], folder: Path | None) -> str:
    """The method, and what says how it is applied: options, files beside the weights, variables."""
    said: list[object] = [model.quantization_config]
    if model.quantization:
        said += [_quantization_files(model, config, folder), quantizing_variables()]
    return "-".join([str(model.quantization or ""), *(digest(it) for it in said if it)])


def _quantization_files(
    model: ModelConfig, config: Mapping[str, Any], folder: Path | None
) -> list[tuple[str, str]]:
    """None where the configuration says it all: then vLLM reads no other, and they may differ."""
    known = ("quantization_config", "compression_config")
    told = [part[name] for part in _mappings(config) for name in known if part.get(name)]
    if told and (model.quantization != "modelopt_mixed" or "quantized_layers" in told[0]):
        return []
    if named := config.get("quantization_config_file"):
        files = [Path(named)]
    elif folder is not None:
        files = sorted(file for name in _QUANTIZATION_FILES for file in folder.glob(name))
    else:
        files = []
    return _texts(files)


def _code(model: ModelConfig, folder: Path | None) -> list[Path]:
    """What beside the weights may compute, or prepare media. Of other models vLLM's own classes
    need none, and a download of vLLM's lacks most of what a copy of the repository has.
    """
    runs = model.multimodal_config is not None or model.architecture.startswith("Transformers")
    if folder is None or not (runs and model.trust_remote_code):
        return []
    return sorted(folder.glob("*.py"))


def _processor(folder: Path | None) -> list[tuple[str, str]]:
    """How the model's own files say that images, sounds and videos become what it computes with."""
    return _texts(folder / name for name in _PROCESSOR_FILES) if folder is not None else []


def _texts(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Of those that are there."""
    return [(file.name, file.read_text(errors="replace")) for file in files if file.is_file()]


def model_folder(load: LoadConfig, model: ModelConfig) -> Path | None:
    """Where the weights lie; of a hub name, the snapshot of the commit that was loaded."""
    if model.model_weights and model.model_weights != model.model:
        return None  # object storage; the folder holds the configuration only
    return _folder_of(model.model, model.revision, load)


def _folder_of(name: str, revision: str | None, load: LoadConfig) -> Path | None:
    path = Path(name)
    if path.exists():
        return path
    try:
        return _find_snapshot(name, revision, load.download_dir)
    except Exception as e:  # noqa: BLE001 - the hub's library: many kinds; it is said by the caller
        logger.debug("no snapshot of %s: %s", name, e)
        return None


def _find_snapshot(name: str, revision: str | None, cache_dir: str | None) -> Path:
    hub = import_module(
        "modelscope.hub.snapshot_download" if uses_modelscope() else "huggingface_hub"
    )
    return Path(
        hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
    )


def _length(model: ModelConfig, config: Mapping[str, Any], max_model_len: int) -> str:
    """What of ``max_model_len`` a model computes with: LongRoPE has two sets of factors, dynamic
    RoPE with a factor may stretch to it, and Llama 4 scales by temperature beyond a length.
    """
    if "llama4" in str(config.get("model_type")):
        return "tuned" if tunes_attention(model, max_model_len > _LLAMA4_TUNING_LENGTH) else ""
    for part in _mappings(config):
        kind = part.get("rope_type", part.get("type"))
        if kind == "dynamic" and "alpha" not in part:
            return str(max_model_len)
        if kind not in ("longrope", "su"):
            continue
        original = part.get("original_max_position_embeddings") or getattr(
            model.hf_text_config, "original_max_position_embeddings", None
        )
        if not isinstance(original, int):
            return str(max_model_len)
        return "long" if max_model_len > original else "short"
    return ""


def _mappings(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """It, and every mapping inside."""
    inner = [part for v in value.values() if isinstance(v, Mapping) for part in _mappings(v)]
    return [value, *inner]
