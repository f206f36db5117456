# SPDX-License-Identifier: Apache-2.0
"""On a CPU, prefix caching stays on for MLA with InEngine, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tests.integration.architectures import make_model
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX vLLM leaves prefix caching on by itself"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "tiny")
    return str(make_model("mla", folder / "mla", folder / "tiny"))


@pytest.mark.parametrize(
    ("connector", "is_on"), [(None, False), ("ExampleConnector", False), ("InEngine", True)]
)
def test_who_keeps_prefix_caching(model: str, connector: str | None, is_on: bool) -> None:
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both") if connector else None
    arguments = EngineArgs(
        model=model,
        max_model_len=512,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    )
    config = arguments.create_engine_config()
    assert config.cache_config.enable_prefix_caching is is_on
    assert config.scheduler_config.enable_chunked_prefill is is_on
    assert (config.scheduler_config.max_num_batched_tokens == 256) is is_on
