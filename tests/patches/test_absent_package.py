# SPDX-License-Identifier: Apache-2.0
"""A patched engine without this package runs as stock.

In a process of its own, in which the package cannot be found.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_ascend_pd.testing.tiny_model import make_tiny_model

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm_ascend_pd":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

import importlib.util
_find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] == "vllm_ascend_pd" else _find_spec(name, package)
)
sys.meta_path.insert(0, Hidden())
"""

SCHEDULER = """
import torch
from vllm.config import (
    CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig,
)
from vllm.config.kv_transfer import pd_hooks
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

assert pd_hooks is None
init_none_hash(sha256)
config = VllmConfig(
    model_config=ModelConfig(model=sys.argv[1], dtype="float32", seed=0, max_model_len=512),
    scheduler_config=SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
    ),
    cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
    device_config=DeviceConfig("cpu"),
)
config.cache_config.num_gpu_blocks = 32
spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
for scheduler_class in (Scheduler, AsyncScheduler):
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(32, [], [KVCacheGroupSpec(["layer"], spec)]),
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
    )
    assert scheduler.pd is None
    assert scheduler.kv_cache_manager.pd is None
    pool = scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    for request_id in ("r", "again"):
        scheduler.add_request(Request(
            request_id=request_id,
            prompt_token_ids=list(range(100)),
            sampling_params=SamplingParams(max_tokens=3, ignore_eos=True, extra_args={
                "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}
            }),
            pooling_params=None,
            block_hasher=get_request_block_hasher(16, sha256),
        ))
        tokens = []
        while scheduler.has_requests():
            output = scheduler.schedule()
            assert output.pd_metadata is None
            ids = list(output.num_scheduled_tokens)
            outputs = scheduler.update_from_output(output, ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=[[7] for _ in ids],
            ))
            for one in outputs.values():
                tokens += [token for item in one.outputs for token in item.new_token_ids]
                assert all(item.kv_transfer_params is None for item in one.outputs)
        assert tokens == [7, 7, 7], tokens
    assert scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == num_free
    scheduler.shutdown()
assert not [name for name in sys.modules if name.startswith("vllm_ascend_pd")]
print("the scheduler ran as stock")
"""

WORKER = """
from types import SimpleNamespace
from vllm.config import DeviceConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_initialized, ensure_kv_transfer_shutdown,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
import vllm.v1.worker.gpu.model_runner
import vllm.v1.worker.gpu_model_runner

@maybe_transfer_kv_layer
def attention(query, layer_name):
    return query + 1

config = VllmConfig(device_config=DeviceConfig("cpu"))
ensure_kv_transfer_initialized(config, None)
with set_forward_context({"attn": object()}, config):
    with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(SimpleNamespace()) as output:
        assert output is None
        assert attention(1, "layer") == 2
assert get_kv_connector(config, {}) is NO_OP_KV_CONNECTOR
ensure_kv_transfer_shutdown()
assert not [name for name in sys.modules if name.startswith("vllm_ascend_pd")]
print("the worker ran as stock")
"""

IN_ENGINE = SCHEDULER.replace(
    "    device_config=DeviceConfig",
    '    kv_transfer_config=KVTransferConfig(kv_connector="InEngine", kv_role="kv_both"),\n'
    "    device_config=DeviceConfig",
)


def run_without_the_package(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """All of it in one process, for vLLM is imported once then."""
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny").path
    assert IN_ENGINE != SCHEDULER
    return run_without_the_package(WORKER + SCHEDULER + IN_ENGINE, str(model))


def test_package_is_found_unless_it_is_hidden() -> None:
    """Else the tests below would show nothing."""
    code = "from importlib.util import find_spec; print(find_spec('vllm_ascend_pd') is not None)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert found.stdout.strip() == "True"
    assert run_without_the_package(code).stdout.strip() == "False"


@pytest.mark.parametrize("part", ["worker", "scheduler"])
def test_patched_engine_runs_as_stock(done: subprocess.CompletedProcess[str], part: str) -> None:
    assert done.stdout.count(f"the {part} ran as stock") == 1, done.stderr[-4000:]


def test_in_engine_without_the_package_is_an_error_not_silence(
    done: subprocess.CompletedProcess[str],
) -> None:
    """The user asked for transfers, and the engine cannot do them."""
    assert done.returncode == 1
    assert "vllm_ascend_pd" in done.stderr.splitlines()[-1]
