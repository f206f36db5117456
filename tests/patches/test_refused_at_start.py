# SPDX-License-Identifier: Apache-2.0
"""What cannot work with InEngine is refused before a process of the engine starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from transformers import PretrainedConfig
from vllm.config import KVTransferConfig
from vllm.config.cache import MambaCacheMode
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.integration.architectures import make_model
from vllm_ascend_pd import hooks
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

IN_ENGINE = {"kv_connector": "InEngine", "kv_role": "kv_both"}
ON_SEVERAL_HOSTS = "InEngine does not support: data parallel ranks on several hosts"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny").path)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory, model: str) -> str:
    """It has experts, though no layer of it uses them."""
    return str(make_model("mla", tmp_path_factory.mktemp("models") / "mla", Path(model)))


@cache
def serve_parser() -> FlexibleArgumentParser:
    """Which takes a while."""
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def configure(model: str, *options: str) -> Any:
    """The configuration that ``vllm serve`` makes of these options."""
    arguments = ["--model", model, "--max-model-len", "512", *options]
    arguments += ["--kv-transfer-config", json.dumps(IN_ENGINE)]
    parsed = AsyncEngineArgs.from_cli_args(serve_parser().parse_args(arguments))
    return parsed.create_engine_config(headless="--data-parallel-start-rank=1" in options)


REFUSED = {
    "ranks of another node": (
        ["--data-parallel-size-local=1", "--data-parallel-start-rank=1"],
        "on several hosts behind one front end",
    ),
    "nodes": (["--nnodes=2", "--node-rank=1", "--data-parallel-external-lb"], "--nnodes above 1"),
    "another connector": (["--kv-offloading-size=1"], "--kv-offloading-size"),
    "micro-batches": (
        ["--ubatch-size=2", "--all2all-backend=deepep_low_latency"],
        "leave out --enable-dbo",
    ),
}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_data_parallel_ranks_behind_one_front_end_are_not_refused(
    request: pytest.FixtureRequest, kind: str
) -> None:
    model = request.getfixturevalue("model" if kind == "dense" else "moe")
    assert configure(model, "--data-parallel-size=2").parallel_config.data_parallel_size == 2


OF_ONE_RANK = ["--data-parallel-size-local=1", "--data-parallel-hybrid-lb"]


@pytest.mark.parametrize("options", [["--data-parallel-rank=1"], OF_ONE_RANK])
def test_data_parallel_ranks_with_a_front_end_each_are_not_refused(
    moe: str, options: list[str]
) -> None:
    """vLLM makes the same of the only rank of a node as of a rank that is named."""
    config = configure(moe, "--data-parallel-size=2", *options)
    assert config.parallel_config.data_parallel_external_lb


OF_SEVERAL_RANKS = ["--data-parallel-size=4", "--data-parallel-size-local=2"]
HYBRID = ["--data-parallel-hybrid-lb"]
LAST_RANKS = ["--data-parallel-start-rank=2"]


@pytest.mark.parametrize("options", [HYBRID, LAST_RANKS, [*HYBRID, *LAST_RANKS]])
def test_front_ends_with_several_data_parallel_ranks_are_not_refused(
    moe: str, options: list[str]
) -> None:
    """A first rank that is named means the same to vLLM."""
    config = configure(moe, *OF_SEVERAL_RANKS, *options)
    assert config.parallel_config.data_parallel_hybrid_lb


@pytest.mark.parametrize(
    "options", [["--data-parallel-size=2", *OF_ONE_RANK], [*OF_SEVERAL_RANKS, *HYBRID]]
)
def test_front_ends_of_dense_ranks_are_refused(model: str, options: list[str]) -> None:
    """vLLM's check, which comes first, misses ranks that are not named; these end later."""
    with pytest.raises(ValueError, match="start engines without --data-parallel options"):
        configure(model, *options)


@pytest.mark.parametrize("option", ["--data-parallel-multi-port-external-lb", "-dpm"])
def test_front_ends_that_one_command_starts_are_refused(
    moe: str, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """All have its words, so none could say at which port it is."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", moe, option])
    with pytest.raises(ValueError, match="front ends that one command starts"):
        configure(moe, "--data-parallel-size=2", "--data-parallel-rank=1")


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_other_forms_of_data_parallel_are_named(moe: str, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(moe, "--data-parallel-size=2", *options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data_parallel_backend", "ray", "the data parallel backend ray"),
        ("enable_elastic_ep", True, "leave out --enable-elastic-ep"),
    ],
)
def test_data_parallel_that_needs_other_packages_is_named(
    model: str, field: str, value: object, message: str
) -> None:
    """vLLM's own checks, which come first, ask for Ray and NIXL."""
    config = configure(model, "--data-parallel-size=2")
    setattr(config.parallel_config, field, value)
    with pytest.raises(ConfigError, match=message):
        hooks.check_config(config)


def test_offline_ranks_are_refused(moe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    monkeypatch.setenv("VLLM_DP_RANK", "1")
    transfer = KVTransferConfig(**IN_ENGINE)
    with pytest.raises(ValueError, match="VLLM_DP_RANK"):
        EngineArgs(model=moe, max_model_len=512, kv_transfer_config=transfer).create_engine_config()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_port": 65535}, r"kv_port 65535 and up to 65536"),
        ({"kv_connector_extra_config": {"pool": {"dram_size": "1GiB"}}}, r"pool\.master"),
        (
            {"kv_connector_extra_config": {"pool": {"master": "127.0.0.1:5"}}},
            r"pool\.dram_size how much each gives",
        ),
    ],
    ids=["port", "master", "memory"],
)
def test_what_data_parallel_ranks_share_must_be_said(
    model: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(globals(), "IN_ENGINE", IN_ENGINE | fields)
    with pytest.raises(ValueError, match=message):
        configure(model, "--data-parallel-size=2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [
                "--pipeline-parallel-size=2",
                '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}',
            ],
            "speculative decoding with pipeline parallel sizes above 1",
        ),
        (
            ["--pipeline-parallel-size=2", "--data-parallel-size=2"],
            "data parallel ranks with pipeline parallel sizes above 1",
        ),
        (["--runner=pooling"], r"pooling models.* \(leave out --kv-transfer-config\)"),
        (["--no-enable-prefix-caching"], "prefix caching is off"),
        (["--ubatch-size=2", "--all2all-backend=deepep_low_latency"], "leave out --enable-dbo"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_cannot_work_are_named(model: str, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(model, *options)


def test_workers_that_ray_starts_are_refused(model: str) -> None:
    """They would all give peers the address of the engine's host."""
    with pytest.raises(ValueError, match=r"leave out --distributed-executor-backend ray; .*nnodes"):
        configure(model, "--distributed-executor-backend=ray", "--tensor-parallel-size=2")
    configure(model, "--distributed-executor-backend=ray")


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_schedulers_of_several_workers_are_refused(
    moe: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of which each would hear at another time that KV has come. One worker has one scheduler."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vLLM does so for good
    monkeypatch.setenv("RANK", "0")
    launcher = "--distributed-executor-backend=external_launcher"
    with pytest.raises(ValueError, match="leave out --distributed-executor-backend") as refused:
        configure(moe, launcher, f"--{kind}-parallel-size=2")
    assert "context parallel" not in str(refused.value)
    configure(moe, launcher)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_place_among_the_connectors_of_another_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config: dict[str, Any] = IN_ENGINE
    for _ in range(depth):
        connectors = {"connectors": [offloading, config]}
        config = {**IN_ENGINE, "kv_connector": "MultiConnector"}
        config["kv_connector_extra_config"] = connectors
    monkeypatch.setitem(globals(), "IN_ENGINE", config)
    with pytest.raises(ValueError, match=r"InEngine does not support: .*make it the kv_connector"):
        configure(model)


def test_connectors_of_others_are_left_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}] * 2
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": others}}
    monkeypatch.setitem(globals(), "IN_ENGINE", IN_ENGINE | multi)
    assert configure(model).kv_transfer_config.kv_connector == "MultiConnector"


def test_dbo_is_named_where_the_device_could_do_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--enable-dbo", "--all2all-backend=deepep_low_latency"]
    assert not configure(model, *options).parallel_config.enable_dbo  # the platform has seen to it
    keep = classmethod(lambda platform, config: None)
    monkeypatch.setattr(type(current_platform), "check_and_update_config", keep)
    with pytest.raises(ValueError, match="leave out --enable-dbo"):
        configure(model, *options)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, model: str) -> str:
    return str(make_model("mamba2", tmp_path_factory.mktemp("models") / "mamba2", Path(model)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--mamba-cache-mode=all"],
            "say --mamba-cache-mode align",
            marks=pytest.mark.skipif(
                "all" not in get_args(MambaCacheMode), reason="this vLLM has no such mode"
            ),
        ),
        (["--no-enable-prefix-caching"], "prefix caching is off"),
        (
            ['--speculative-config={"method": "ngram", "num_speculative_tokens": 2}'],
            "the method ngram beside layers that keep a state",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_layers_that_keep_a_state_cannot_have_is_named(
    states: str, options: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        configure(states, *options)


def test_states_are_not_refused(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool all of them are cached, as all that is cached is stored."""
    cache = configure(states).cache_config
    assert (cache.mamba_cache_mode, cache.prefix_cache_retention_interval) == ("align", 0)
    pool = {"kv_connector_extra_config": {"pool": {"dram_size": "1GiB"}}}
    monkeypatch.setitem(globals(), "IN_ENGINE", IN_ENGINE | pool)
    cache = configure(states).cache_config
    assert (cache.mamba_cache_mode, cache.prefix_cache_retention_interval) == ("align", None)


def test_a_drafter_of_several_layers_beside_states_is_refused(
    states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of one layer is not, nor with a pool. The command line would ask for a model."""
    config = configure(states)
    text_config = PretrainedConfig(num_hidden_layers=2)
    config.speculative_config = SimpleNamespace(
        method="eagle",
        draft_model_config=SimpleNamespace(hf_config=text_config, hf_text_config=text_config),
        parallel_drafting=False,
        use_multi_module_mtp=lambda: False,
    )
    with pytest.raises(ConfigError, match="a drafter of several layers beside"):
        hooks.check_config(config)
    text_config.num_hidden_layers = 1
    hooks.check_config(config)
    extra = {"pool": {"dram_size": "1GiB"}}
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", extra)
    hooks.check_config(config)


def test_drafter_beside_attention_to_compressed_kv_is_refused(moe: str) -> None:
    """The command line would ask for a module of the model."""
    config = configure(moe, '--hf-overrides={"compress_ratios": [4]}')
    text_config = PretrainedConfig(num_hidden_layers=1)
    config.speculative_config = SimpleNamespace(
        method="mtp",
        draft_model_config=SimpleNamespace(hf_config=text_config, hf_text_config=text_config),
        parallel_drafting=False,
        use_multi_module_mtp=lambda: False,
    )
    with pytest.raises(ConfigError, match="the method mtp beside compressed KV"):
        hooks.check_config(config)


def test_diffusion_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="diffusion models"):
        configure(model, '--hf-overrides={"canvas_length": 32}')


def test_kv_in_host_memory_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model)
    if not hasattr(config.attention_config, "hisparse_config"):
        pytest.skip("this vLLM has no HiSparse")
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(ConfigError, match="leave hisparse_config out"):
        hooks.check_config(config)


def test_pruned_videos_are_refused_where_the_encoder_decides_positions(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which vLLM then knows of the videos alone that it has encoded here."""
    config = configure(model)
    monkeypatch.setattr(config.model_config, "multimodal_config", MultiModalConfig())
    config.model_config.multimodal_config.video_pruning_rate = 0.5
    hooks.check_config(config)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    monkeypatch.setattr(config.model_config.hf_config, "rope_parameters", rope)
    with pytest.raises(ConfigError, match="leave out --video-pruning-rate"):
        hooks.check_config(config)
    config.model_config.multimodal_config.video_pruning_rate = 0.0
    hooks.check_config(config)


def test_rocm_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda platform: True)
    with pytest.raises(ConfigError, match="InEngine does not support: ROCm"):
        hooks.check_config(config)


def test_routed_experts_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own checks, which come first, let through only what a CPU without Triton cannot do."""
    config = configure(model)
    part = getattr(config, "aux_output_config", config.model_config)
    monkeypatch.setattr(part, "enable_return_routed_experts", True)  # the parser's own default
    with pytest.raises(ConfigError, match="leave out --enable-return-routed-experts"):
        hooks.check_config(config)


@pytest.mark.parametrize(
    "options",
    [[], ["--data-parallel-size=1"], ["--data-parallel-size=1", "--data-parallel-size-local=1"]],
    ids=len,
)
def test_one_rank_is_not_refused(model: str, options: list[str]) -> None:
    assert configure(model, *options).parallel_config.data_parallel_size == 1


def test_serve_ends_with_the_reason(model: str) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--max-model-len=512", "--data-parallel-size=2"]
    command += ["--data-parallel-size-local=1", "--port=0"]
    command += ["--kv-transfer-config", json.dumps(IN_ENGINE)]
    ended = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=300
    )
    said = (ended.stdout + ended.stderr).decode()
    assert ended.returncode != 0
    assert ON_SEVERAL_HOSTS in said
    assert "EngineCore" not in said, "no process of the engine was started"
