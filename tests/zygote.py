# SPDX-License-Identifier: Apache-2.0
"""A process that imports vLLM once and forks engines, which are ready in a second or two."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

IMPORTS = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.compilation.backends",  # drafters are compiled by it
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.tokenizers.hf",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm_ascend_pd.engine.carrier",
    "vllm_ascend_pd.engine.scheduler.build",
    "vllm_ascend_pd.engine.worker.side",
)
ON_CPU = (
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
)
"""They change ``torch.cuda``: streams and events do nothing then."""
ON_GPU = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.attention.backends.triton_attn",
)
PLUGINS = ("vllm.general_plugins", "vllm.logits_processors", "vllm.stat_logger_plugins")
_SLOW_WHILE = "TESTS_SLOW_WHILE"
"""In an engine's environment it names a file: while that exists, the engine is slow."""
_SLOW_STEP_S = 0.03
_SPIN_S = 0.001
_LOOK_MS = 50
ENVIRONMENT = {
    "NUMBA_CACHE_DIR": str(Path(__file__).parents[1] / ".cache/numba"),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # n-gram drafts have threads all the same
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Of every engine. Models are tiny, and engines more than cores: threads of a parallel region spin,
and each worker would have compiled what it samples with when the test is over.
"""


def prepare_to_fork(*more_imports: str) -> None:
    """Import what every engine does. No torch operation runs before a fork, so no thread of a
    parallel region is lost in it.
    """
    from vllm.platforms import current_platform

    of_platform = ON_CPU if current_platform.is_cpu() else ON_GPU
    gc.disable()  # what is imported stays, and to look at it again and again takes seconds
    _look_for_plugins_once()
    for name in (*IMPORTS, *of_platform, *more_imports):
        importlib.import_module(name)
    _compile_n_gram_drafts_once()
    fork_processes()
    gc.collect()
    gc.freeze()  # or each engine's first collection would copy all of it
    # vLLM thaws the heap when an engine ends, for a process that goes on. These end, too.
    gc.unfreeze = lambda: None  # type: ignore[assignment]
    gc.enable()
    _leave_threads_behind()


def _look_for_plugins_once() -> None:
    """An engine asks several times, and each time what every installed package has is read."""
    importlib.metadata.entry_points = find = functools.cache(importlib.metadata.entry_points)
    for group in PLUGINS:
        find(group=group)


def _leave_threads_behind() -> None:
    """The caller goes on in a fork, which has no other thread; what it was waits for that."""
    if os.fork():
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import os; os.wait()"])


def fork_processes() -> None:
    """The processes of an engine are forks of the one that has imported everything."""
    import torch
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.models import registry
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    # The CPU platform asks for "spawn", which imports everything again.
    context = multiprocessing.get_context("fork")
    for module in (coordinator, multiproc_executor, utils):
        module.get_mp_context = lambda: context
    # Another process would import vLLM to look at a model's class: that of each new architecture,
    # and once for each engine that meets it at the same time.
    registry._run_in_subprocess = lambda look: look()
    # An engine and its worker spin for a second after each message: engines that have nothing to
    # do would keep every core from those that are tested.
    shm_broadcast.SpinCondition.__init__.__defaults__ = (_SPIN_S,)
    # One that sleeps misses the wake-up that comes within a millisecond of the one before (ZMQ has
    # not heard yet that there is room for it), and would look for itself after five seconds.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_MS
    # The same kernels on every host: those for AMX take no float32, in which tokens are compared.
    torch.cpu._is_amx_tile_supported = lambda: False
    # Through shared memory, which pipelines need, workers spin until the others are as far: with
    # more workers than cores those do not get there.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda group: (
        group.unique_name.startswith("pp")
    )
    _normalize_with_kernels()
    _share_gloo_threads()
    _let_tests_slow_engines_down()


def fork_engine() -> None:
    fork_processes()
    gc.freeze()
    gc.enable()


def _normalize_with_kernels() -> None:
    """vLLM has kernels for norms on a CPU, but puts each together of seven operations: of the
    forward of a tiny model a quarter of the time. All engines of tests do it alike.
    """
    import torch
    from vllm.model_executor.layers.layernorm import RMSNorm

    composed, kernels = RMSNorm.forward_native, torch.ops._C

    def normalize(
        norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight = norm.weight.data
        is_plain = norm.has_weight and norm.variance_size_override is None
        if not is_plain or weight.dtype != x.dtype or x.shape[-1] % 32:
            return composed(norm, x, residual)
        x = x.contiguous()
        if residual is not None:
            kernels.fused_add_rms_norm(x, residual, weight, norm.variance_epsilon)
            return x, residual
        normal = torch.empty_like(x)
        kernels.rms_norm(normal, x, weight, norm.variance_epsilon)
        return normal

    RMSNorm.forward_cpu = normalize


def _compile_n_gram_drafts_once() -> None:
    """And not in each engine that drafts so, which takes it longer than to start. vLLM imports them
    late: its search for kernels, in 0.32.0, fails in what they import.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    make = GPUModelRunner.__init__

    def make_and_keep(runner: GPUModelRunner, *args: Any, **options: Any) -> None:
        make(runner, *args, **options)
        drafts = sys.modules.get("vllm.v1.spec_decode.ngram_proposer")
        if drafts is not None:
            drafts.batch_propose_numba.enable_caching()
            drafts._find_longest_matched_ngram_and_propose_tokens.enable_caching()

    GPUModelRunner.__init__ = make_and_keep


def _let_tests_slow_engines_down() -> None:
    """An engine of a tiny model may have answered all before a busy host does what a test is about:
    with each of its steps it waits a moment for as long as the test needs."""
    from vllm.v1.engine.core import EngineCore

    def slowed(step: Callable[[EngineCore], Any]) -> Callable[[EngineCore], Any]:
        def stepped(core: EngineCore) -> Any:
            if os.path.exists(os.environ.get(_SLOW_WHILE, "")):
                time.sleep(_SLOW_STEP_S)
            return step(core)

        return stepped

    EngineCore.step = slowed(EngineCore.step)
    EngineCore.step_with_batch_queue = slowed(EngineCore.step_with_batch_queue)


@contextlib.contextmanager
def slow(log: Path) -> Iterator[None]:
    """The engine with this log does not come to an end of what it answers meanwhile."""
    slow_while = Path(slowable(log)[_SLOW_WHILE])
    slow_while.touch()
    try:
        yield
    finally:
        slow_while.unlink()


def slowable(log: Path) -> dict[str, str]:
    """The environment of an engine with this log that ``slow`` slows down."""
    return {_SLOW_WHILE: str(log.with_suffix(".slow"))}


def _share_gloo_threads() -> None:
    """The groups of a process have one thread that looks after their sockets. An engine has a dozen
    groups, and each thread would wake up a hundred times a second, whatever the engine does. Those
    of one member have no sockets: their thread stays behind in the process that forks.
    """
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device_of = functools.cache(lambda process_id: gloo.create_default_device())
    of_one = device_of(os.getpid())
    # Never freed: a fork would wait for the end of a thread that it has not got.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_one))

    class OneThread(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices = [of_one if size == 1 else device_of(os.getpid())]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread


_NO_COLLECTION = """\
import gc, sys
if any(arg.endswith("/vllm") or "multiprocessing.spawn" in arg for arg in sys.orig_argv):
    gc.disable()
"""
"""In ``vllm`` and what spawns an engine, until plugins are loaded: that is behind most imports."""


def forking_plugin(folder: Path) -> dict[str, str]:
    """The environment of engines in which vLLM loads ``fork_engine``, a plugin in ``folder``."""
    plugin = folder / "plugin/forking-1.dist-info"
    plugin.mkdir(parents=True)
    entry = "[vllm.general_plugins]\nforking = tests.zygote:fork_engine\n"
    (plugin / "entry_points.txt").write_text(entry)
    (plugin.parent / "sitecustomize.py").write_text(_NO_COLLECTION)
    path = os.pathsep.join([str(plugin.parent), str(Path(__file__).parents[1])])
    return {"PYTHONPATH": path, **ENVIRONMENT}
