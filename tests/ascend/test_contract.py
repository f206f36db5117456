# SPDX-License-Identifier: Apache-2.0
"""What the hooks rely on in the pinned vllm-ascend, read from its source (released, unpatched).

A test here fails when a new vllm-ascend has moved the ground under a hook that still applies.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

from check_patches import trailers  # noqa: E402
from patch_series import load_series  # noqa: E402

CORE = "vllm_ascend/core"
# Every class that brings its own schedule(): (file, class, does it always run its own copy?)
SCHEDULER_COPIES = [
    ("vllm_ascend/patch/platform/patch_balance_schedule.py", "BalanceScheduler"),
    (f"{CORE}/recompute_scheduler.py", "RecomputeScheduler"),
    (f"{CORE}/scheduler_profiling_chunk.py", "ProfilingChunkScheduler"),
    (f"{CORE}/dyntra_lb_scheduler.py", "DyntraLBScheduler"),
]
# What two of the copies do between it and their return: diagnostics.
AFTER_UPDATE = {"getattr", "print_scheduler_summary"}
RUNNER_V1 = "vllm_ascend/worker/model_runner_v1.py"
RUNNER_V2 = "vllm_ascend/worker/v2/model_runner.py"


@dataclass(frozen=True)
class Method:
    path: str
    owner: str
    bases: tuple[str, ...]
    node: ast.FunctionDef


class Sources:
    """Parsed files of the package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}
        self._methods: dict[str, list[Method]] = {}

    def paths(self) -> Iterator[str]:
        for path in sorted(self.root.glob("vllm_ascend/**/*.py")):
            yield str(path.relative_to(self.root))

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse((self.root / path).read_text())
        return self._trees[path]

    def methods(self, path: str) -> list[Method]:
        if path not in self._methods:
            self._methods[path] = list(self._methods_of(path))
        return self._methods[path]

    def _methods_of(self, path: str) -> Iterator[Method]:
        for owner in ast.walk(self.tree(path)):
            if isinstance(owner, ast.ClassDef):
                bases = tuple(ast.unparse(base) for base in owner.bases)
                for node in owner.body:
                    if isinstance(node, ast.FunctionDef):
                        yield Method(path, owner.name, bases, node)

    def method(self, path: str, owner: str, name: str) -> ast.FunctionDef:
        found = [
            method.node
            for method in self.methods(path)
            if (method.owner, method.node.name) == (owner, name)
        ]
        assert found, f"{path}: no {owner}.{name}"
        return found[-1]  # a class that is defined twice (under an if): the same in both

    def function(self, path: str, name: str) -> ast.FunctionDef:
        (found,) = (
            node
            for node in self.tree(path).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
        return found


@pytest.fixture(scope="session")
def sources(released: Path) -> Sources:
    return Sources(released)


@functools.cache
def calls(node: ast.AST) -> dict[str, list[ast.Call]]:
    found: dict[str, list[ast.Call]] = {}
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            found.setdefault(ast.unparse(call.func), []).append(call)
    return found


def calls_super(node: ast.FunctionDef) -> bool:
    return f"super().{node.name}" in calls(node)


# The scheduler copies ---------------------------------------------------------------------------


def test_no_other_class_brings_its_own_schedule(sources: Sources) -> None:
    own = {
        (method.path, method.owner)
        for path in sources.paths()
        for method in sources.methods(path)
        if method.node.name == "schedule"
        and any(base.endswith("Scheduler") or "Mixin" in base for base in method.bases)
        and calls_super(method.node) is False
    }
    assert own | {SCHEDULER_COPIES[0]} == set(SCHEDULER_COPIES)
    balance = sources.method(*SCHEDULER_COPIES[0], "schedule")
    assert calls_super(balance)  # vLLM's own while balancing is off


@pytest.mark.parametrize(("path", "owner"), SCHEDULER_COPIES)
def test_scheduler_copy_calls_every_hooked_method(sources: Sources, path: str, owner: str) -> None:
    called = calls(sources.method(path, owner, "schedule"))
    assert "self.kv_cache_manager.allocate_slots" in called
    assert "self.kv_cache_manager.get_computed_blocks" in called
    assert "self._is_blocked_waiting_status" in called
    assert "self._try_promote_blocked_waiting_request" in called
    assert len(called["self._update_after_schedule"]) == 1


@pytest.mark.parametrize(("path", "owner"), SCHEDULER_COPIES)
def test_scheduler_copy_ends_in_update_after_schedule(
    sources: Sources, path: str, owner: str
) -> None:
    """Of the very output that it returns, and nothing is scheduled after it."""
    body = sources.method(path, owner, "schedule").body
    assert ast.unparse(body[-1]) == "return scheduler_output"
    (place,) = (n for n, part in enumerate(body) if "self._update_after_schedule" in calls(part))
    update = body[place]
    assert isinstance(update, ast.With)
    assert [ast.unparse(part) for part in update.body] == [
        "self._update_after_schedule(scheduler_output)"
    ]
    assert {name for part in body[place + 1 :] for name in calls(part)} <= AFTER_UPDATE


@pytest.mark.parametrize(("path", "owner"), SCHEDULER_COPIES)
def test_scheduler_copy_commits_the_blocks_of_the_lookup(
    sources: Sources, path: str, owner: str
) -> None:
    """Loads are attached when ``allocate_slots`` is given the blocks that the lookup found."""
    schedule = sources.method(path, owner, "schedule")
    (of_waiting,) = (
        call
        for call in calls(schedule)["self.kv_cache_manager.allocate_slots"]
        if any(keyword.arg == "new_computed_blocks" for keyword in call.keywords)
        or len(call.args) > 3
    )
    given = {k.arg: ast.unparse(k.value) for k in of_waiting.keywords}
    assert given["new_computed_blocks"] == "new_computed_blocks"
    assert given["num_external_computed_tokens"] == "num_external_computed_tokens"


def test_balance_scheduler_still_admits_beside_requests_that_are_stopped(sources: Sources) -> None:
    """``queues.take_out`` counts their rows where the other copies look. If this one looks there,
    the refusal of ``enable_balance_scheduling`` is needless: drop it.
    """
    looks = [
        "num_waiting_for_streaming_input" in ast.unparse(sources.method(*copy, "schedule"))
        for copy in SCHEDULER_COPIES
    ]
    assert looks == [False, True, True, True]
    balance = ast.unparse(sources.method(*SCHEDULER_COPIES[0], "schedule"))
    assert "if len(self.running) == self.max_num_running_reqs:" in balance
    assert "assert len(self.running) <= self.max_num_running_reqs" in balance


@pytest.mark.parametrize("path", sorted({path for path, _ in SCHEDULER_COPIES}))
def test_preemption_takes_what_recovery_passes(sources: Sources, path: str) -> None:
    """``_preempt_request(request, timestamp, drop_stale_output=True)``: scheduler/recovery.py."""
    for method in sources.methods(path):
        if method.node.name == "_preempt_request":
            names = [argument.arg for argument in method.node.args.args]
            assert names == ["self", "request", "timestamp", "drop_stale_output"]
            assert calls_super(method.node)


# What vllm-ascend overrides or replaces of the hooked functions ---------------------------------


OF_STATES = {"build", "prepare_attn"}
"""Metadata of layers that keep a state; models that have some are refused on NPUs."""


def hooked_names() -> set[str]:
    names = set()
    for patch in load_series(REPO / "patches" / "vllm-0.30.0").patches:
        for hook in re.split(r"[,\s]+", trailers(patch)["Hook"]):
            names.add(hook.partition(":")[2].rpartition(".")[2])
    return names - {"__init__", "pd_hooks"} - OF_STATES


# Overrides that do not call super(), and why that is right.
OWN_COPIES = {
    ("NPUModelRunner", "_prepare_inputs"): "the step is armed in _update_states",
    ("NPUModelRunner", "execute_model"): "ascend-begin-step",
    ("NPUModelRunner", "initialize_kv_cache"): "ascend-install-worker-hooks",
    ("NPUModelRunner", "_determine_batch_execution_and_padding"): (
        "ascend-overlap-loads-instead-of-full-graph"
    ),
    ("NPUModelRunner", "_sample"): "ascend-draw-nothing-for-discarded-samples",
    ("NPUModelRunner", "_bookkeeping_sync"): "ascend-draw-nothing-for-discarded-samples",
    ("NPUModelRunner", "sync_and_gather_intermediate_tensors"): (
        "an NPU has the dummy run that makes them, in eager mode too"
    ),
    ("NPUModelRunner310", "_prepare_inputs"): "the step is armed in _update_states",
    ("NPUModelRunner310V2", "initialize_kv_cache"): "310P is refused at start",
    ("NPUPlatform", "check_and_update_config"): "the patch is to that of the CPU's platform",
    ("NPUWorker", "execute_model"): "the worker's method, not the runner's",
    ("AscendExtractHiddenStatesProposer", "_determine_batch_execution_and_padding"): (
        "a drafter's method; drafters are refused at start"
    ),
    ("NPUWorker", "add_lora"): "the worker's method; EngineCore's calls it",
    ("KpoolTailManager", "get_num_blocks_to_allocate"): (
        "no manager of states: the patch is to that of MambaManager"
    ),
    **dict.fromkeys(
        (
            ("DyntraLBScheduler", "schedule"),
            ("ProfilingChunkScheduler", "schedule"),
            ("RecomputeScheduler", "schedule"),
        ),
        "copies of vLLM's, which count adapters as it does: docs/models.md says so",
    ),
    **dict.fromkeys(
        (
            ("NPUWorker", "sleep"),
            ("NPUWorker", "wake_up"),
            ("CaMemAllocator", "sleep"),
            ("CaMemAllocator", "wake_up"),
            ("SleepWakeupManager", "sleep"),
            ("AclGraphSleepWakeupManager", "sleep"),
            ("HcclSleepWakeupManager", "sleep"),
        ),
        "what the executor's method, which is not overridden, has workers do",
    ),
}


def test_hooked_methods_are_overridden_only_as_known(sources: Sources) -> None:
    names = hooked_names()
    assert {"_update_states", "_update_after_schedule", "update_from_output"} <= names
    own = {
        (method.owner, method.node.name)
        for path in sources.paths()
        for method in sources.methods(path)
        if method.node.name in names and not calls_super(method.node)
    }
    assert own == set(OWN_COPIES)


# Assignments to a hooked attribute: (file, what) -> the original function, which is still called,
# or the patch of ours.
REPLACED = {
    ("patch_pp_mtp.py", "Scheduler._update_after_schedule"): "original_update_after_schedule",
    ("patch_pp_mtp.py", "Scheduler.update_from_output"): "original_update_from_output",
    ("patch_profiling_chunk.py", "cls.update_from_output"): "_original_update_from_output",
    ("patch_profiling_chunk.py", "EngineCore.__init__"): "original_init",
    ("patch_profiling_chunk.py", "cls.schedule"): None,
    ("patch_model_runner.py", "upstream.GPUModelRunner.initialize_kv_cache"): None,
}


def test_hooked_functions_are_replaced_only_as_known(sources: Sources) -> None:
    names = hooked_names()
    found = {}
    for path in sources.paths():
        for node in ast.walk(sources.tree(path)):
            if not isinstance(node, ast.Assign):
                continue
            target = ast.unparse(node.targets[0])
            attribute = target.rpartition(".")[2]
            if (
                "." in target
                and not target.startswith("self.")
                and (attribute in names or target == "EngineCore.__init__")
            ):
                found[Path(path).name, target] = path
    assert found.keys() == REPLACED.keys()
    for key, original in REPLACED.items():
        if original is not None:
            assert original in calls(sources.tree(found[key])), key


# Model Runner V1 --------------------------------------------------------------------------------


def test_update_states_reaches_vllms(sources: Sources) -> None:
    assert calls_super(sources.method(RUNNER_V1, "NPUModelRunner", "_update_states"))


def test_producer_tells_earlier_stages_no_sampled_token(sources: Sources) -> None:
    """Why one whose pipeline runs ahead is refused."""
    apply = sources.method(
        RUNNER_V1, "NPUModelRunner", "_apply_pp_sampled_tokens_from_scheduler_output"
    )
    (leaves, *_) = (node for node in ast.walk(apply) if isinstance(node, ast.If))
    assert "self._is_pd_prefill_worker()" in ast.unparse(leaves.test)
    assert isinstance(leaves.body[0], ast.Return)
    names = {name for method in sources.methods(RUNNER_V1) for name in calls(method.node)}
    assert not any("_pp_receive" in name or "_pp_broadcast" in name for name in names)


def test_forward_runs_inside_context_and_report(sources: Sources) -> None:
    """One ``with``: the forward context (which waits), the output (which reports), the model."""
    execute = sources.method(RUNNER_V1, "NPUModelRunner", "execute_model")
    (forward,) = (
        node
        for node in ast.walk(execute)
        if isinstance(node, ast.With) and "self._model_forward" in calls(node)
    )
    entered = [call for item in forward.items for call in calls(item.context_expr)]
    assert entered.index("set_ascend_forward_context") < entered.index(
        "self.maybe_get_kv_connector_output"
    )
    (context,) = calls(forward)["set_ascend_forward_context"]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in context.keywords}
    assert given["aclgraph_runtime_mode"] == "cudagraph_mode"
    assert ast.unparse(context.args[0]) == "attn_metadata"


def test_what_a_drafter_writes_is_granted_behind_it(sources: Sources) -> None:
    sample = ast.unparse(sources.method(RUNNER_V1, "NPUModelRunner", "sample_tokens"))
    drafted, ended = "propose_draft_token_ids(", "self.finalize_kv_connector()"
    assert 0 <= sample.rindex(drafted) < sample.index(ended)
    assert "finalize_kv_connector" not in {m.node.name for m in sources.methods(RUNNER_V1)}


def test_forward_context_is_vllms(sources: Sources) -> None:
    path = "vllm_ascend/ascend_forward_context.py"
    context = sources.function(path, "set_ascend_forward_context")
    (call,) = calls(context)["set_forward_context"]
    assert ast.unparse(call) == "set_forward_context(**forward_context_kwargs)"
    assert "'cudagraph_runtime_mode': aclgraph_runtime_mode" in ast.unparse(context)
    imported = {
        (node.module, alias.name)
        for node in ast.walk(sources.tree(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert ("vllm.forward_context", "set_forward_context") in imported


def test_report_reaches_the_output(sources: Sources) -> None:
    for name in ("execute_model", "sample_tokens"):
        method = ast.unparse(sources.method(RUNNER_V1, "NPUModelRunner", name))
        assert "self.kv_connector_output" in method
    for method in sources.methods(RUNNER_V1):
        assert method.node.name != "maybe_get_kv_connector_output"
        assert method.node.name != "kv_connector_no_forward"


def test_every_exit_without_a_forward_is_patched(sources: Sources, patched: Path) -> None:
    """Before each ``return EMPTY_MODEL_RUNNER_OUTPUT`` stands our report."""
    execute = Sources(patched).method(RUNNER_V1, "NPUModelRunner", "execute_model")
    exits = 0
    for block in ast.walk(execute):
        body = getattr(block, "body", None)
        for n, statement in enumerate(body if isinstance(body, list) else []):
            if isinstance(statement, ast.If) and ast.unparse(statement.body[0]) == (
                "return EMPTY_MODEL_RUNNER_OUTPUT"
            ):
                exits += 1
                assert ast.unparse(body[n - 1].body[0]) == "return pd_hooks.no_forward()"
    assert exits == 2
    released = sources.method(RUNNER_V1, "NPUModelRunner", "execute_model")
    assert ast.unparse(released).count("return EMPTY_MODEL_RUNNER_OUTPUT") == exits


def test_worker_side_ends_with_the_worker(sources: Sources) -> None:
    path = "vllm_ascend/worker/worker.py"
    assert "ensure_kv_transfer_shutdown" in calls(sources.method(path, "NPUWorker", "shutdown"))


# Model Runner V2 --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["execute_model", "initialize_kv_cache"])
def test_v2_runs_the_method_of_vllm(sources: Sources, name: str) -> None:
    assert calls_super(sources.method(RUNNER_V2, "NPUModelRunner", name))


def test_v2_takes_a_loading_prompt_for_a_decode_with_the_recompute_scheduler_only(
    sources: Sources,
) -> None:
    """Which is refused: else a FULL graph would be chosen for it, and would have to wait."""
    method = sources.method(RUNNER_V2, "NPUModelRunner", "gather_batch_req_state")
    assert calls_super(method)
    (condition,) = (node.test for node in method.body if isinstance(node, ast.If))
    switch = "is_pd_decode_recompute_scheduler_enabled"
    assert f"and {switch}(self.vllm_config)" in ast.unparse(condition)
    enabled = ast.unparse(sources.function("vllm_ascend/utils.py", switch))
    assert "recompute_scheduler_enable" in enabled


def test_v2_gets_its_connector_where_ours_is_made(sources: Sources) -> None:
    path = "vllm_ascend/patch/worker/patch_v2/patch_model_runner.py"
    initialize = sources.function(path, "initialize_kv_cache")
    assert len(calls(initialize)["upstream.get_kv_connector"]) == 1


# Attention --------------------------------------------------------------------------------------

# Where the operators that vLLM's decorator does not wrap wait and save: file -> number of waits.
WAITS = {
    "attention/context_parallel/dsa_cp.py": 1,
    "attention/dsa_v1.py": 1,
    "attention/mla_v1.py": 1,
    "attention/sfa_v1.py": 2,
    "models/glm5next/kda.py": 1,
    "ops/gdn.py": 1,
    "ops/kimi_kda.py": 1,
}


def test_operators_wait_in_the_patched_helpers(sources: Sources) -> None:
    found = {
        path.removeprefix("vllm_ascend/"): len(waits)
        for path in sources.paths()
        if path != "vllm_ascend/attention/utils.py"
        and (waits := calls(sources.tree(path)).get("wait_for_kv_layer_from_connector"))
    }
    assert found == WAITS


def test_grouped_query_attention_is_an_operator_of_vllm(sources: Sources) -> None:
    """So vLLM's decorated ``unified_attention_with_output`` runs, and its patch covers it."""
    path = "vllm_ascend/platform.py"
    opaque = sources.method(path, "NPUPlatform", "opaque_attention_op")
    assert ast.unparse(opaque.body[-1]) == "return True"


def test_no_attention_is_cascade_attention(sources: Sources) -> None:
    """Why ``uses_cascade_attention`` does not believe the switch that the platform sets."""
    own = {
        m.owner
        for path in sources.paths()
        for m in sources.methods(path)
        if m.node.name == "use_cascade_attention"
    }
    assert own == set()


def test_mla_still_waits_only_for_prefills(sources: Sources) -> None:
    """Else ascend-wait-for-layer-in-mla-decode is needless: drop it."""
    path = "vllm_ascend/attention/mla_v1.py"
    preprocess = sources.method(path, "AscendMLAImpl", "_mla_preprocess")
    (guard,) = (
        node
        for node in ast.walk(preprocess)
        if isinstance(node, ast.If) and "wait_for_kv_layer_from_connector" in calls(node)
    )
    assert ast.unparse(guard.test) == "has_prefill"
    only_decode = sources.method(path, "AscendMLAImpl", "mla_preprocess_only_decode")
    assert "wait_for_kv_layer_from_connector" not in calls(only_decode)


# Memory and roles -------------------------------------------------------------------------------


def test_caches_are_aligned_whenever_there_is_a_kv_transfer_config(sources: Sources) -> None:
    allocate = sources.method(RUNNER_V1, "NPUModelRunner", "_allocate_int8_cache_tensor")
    assert "if self.vllm_config.kv_transfer_config is None:" in ast.unparse(allocate)
    every = ast.unparse(sources.method(RUNNER_V1, "NPUModelRunner", "_allocate_kv_cache_tensors"))
    assert "alignment = 2 * 1024 * 1024" in every


@pytest.mark.parametrize(
    ("path", "text"),
    [
        # Weights that a consumer's local prefill needs are freed; the refusal in ascend_roles.py.
        ("attention/mla_v1.py", "not ascend_config.mlapo_keep_prefill_weights"),
        ("attention/mla_v1.py", "max_num_batched_tokens <= MLAPO_MAX_SUPPORTED_TOKENS"),
        ("attention/utils.py", "MLAPO_MAX_SUPPORTED_TOKENS = 1024"),
        # A pure producer keeps the last block that EAGLE would drop.
        ("patch/platform/patch_kv_cache_coordinator.py", "def _skips_eagle_block_drop"),
        # A producer's C8 cache is bf16, a consumer's int8.
        ("quantization/methods/kv_cache/kv_c8.py", "if not self.is_kv_producer:"),
        ("attention/attention_c8_mxfp.py", "not uses_mooncake_connector("),
        # A consumer cuts the prompts of models with states between blocks.
        (
            "patch/platform/patch_mamba_block_aligned_split.py",
            "kv_transfer_config.is_kv_consumer and has_computed_prefix:",
        ),
        # A producer takes no notice of it; elsewhere a preempted request ends there and must be
        # sent to a producer again.
        ("platform.py", 'additional_scheduler_config["recompute_scheduler_enable"] = False'),
        ("core/recompute_scheduler.py", "def _finish_recomputed_request"),
    ],
)
def test_role_effect_that_is_respected_is_still_there(
    sources: Sources, path: str, text: str
) -> None:
    assert text in (sources.root / "vllm_ascend" / path).read_text()


def test_mlapo_frees_nothing_of_an_engine_that_also_produces(sources: Sources) -> None:
    """It is off there, but on devices on which nothing is freed."""
    enabling = ast.unparse(sources.function("vllm_ascend/attention/utils.py", "enabling_mlapo"))
    assert "not vllm_config.kv_transfer_config.is_kv_producer" in enabling
    assert enabling.count("return") == 2
    assert "supports(HardwareCapability.UNRESTRICTED_MLAPO)" in enabling
    (frees,) = (
        node
        for method in sources.methods("vllm_ascend/attention/mla_v1.py")
        for node in ast.walk(method.node)
        if isinstance(node, ast.If) and "self.q_proj.weight = None" in map(ast.unparse, node.body)
    )
    conditions = ast.unparse(frees.test)
    assert "self.enable_mlapo" in conditions
    assert "not get_current_hardware_profile().supports(HardwareCapability.FP8_ATTENTION)" in (
        conditions
    )
    devices = [
        ast.unparse(found)
        for found in ast.walk(sources.tree("vllm_ascend/device/hardware_profile.py"))
        if isinstance(found, ast.Set)
    ]
    unrestricted = [it for it in devices if "HardwareCapability.UNRESTRICTED_MLAPO" in it]
    assert unrestricted
    assert all("HardwareCapability.FP8_ATTENTION" in it for it in unrestricted)


def test_prompts_are_written_into_nd_pages_and_decoded_from_nz_pages(sources: Sources) -> None:
    """Why ``enable_kv_nz`` is refused: vllm-ascend's own connector changes what it has pulled."""
    path, owner = "vllm_ascend/attention/mla_v1.py", "AscendMLAImpl"
    prompt, decode, attention = (
        ast.unparse(sources.method(path, owner, name))
        for name in ("exec_kv_prefill", "exec_kv_decode", "_forward_decode")
    )
    assert "cache_mode = 'PA'\n" in prompt
    assert "kv_nz" not in prompt
    assert "'PA_NZ' if self.enable_kv_nz else 'PA'" in decode
    assert "elif self.enable_kv_nz:" in attention


# Mooncake and streams ---------------------------------------------------------------------------


def test_mooncake_is_opened_as_vllm_ascend_opens_it(sources: Sources) -> None:
    """``backends/mooncake_engine.py`` makes the same calls, with ``protocol="ascend"``."""
    path = "vllm_ascend/distributed/kv_transfer/utils/mooncake_transfer_engine.py"
    opened = calls(sources.method(path, "GlobalTE", "get_transfer_engine"))
    (initialize,) = opened["self.transfer_engine.initialize"]
    assert [ast.unparse(argument) for argument in initialize.args] == [
        "hostname",
        "'P2PHANDSHAKE'",
        "'ascend'",
        "device_name",
    ]
    registered = calls(sources.method(path, "GlobalTE", "register_buffer"))
    (register,) = registered["self.transfer_engine.register_memory"]
    assert [ast.unparse(argument) for argument in register.args] == ["ptr", "size"]


def test_store_shares_the_engine_of_the_transfers(sources: Sources) -> None:
    path = "vllm_ascend/distributed/kv_transfer/kv_pool/ascend_store/backend/mooncake_backend.py"
    setup, _ = calls(sources.method(path, "MooncakeBackend", "_setup_store"))["store.setup"]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in setup.keywords}
    assert given["engine"] == "transfer_engine.get_engine()"
    assert given["protocol"] == "self.config.protocol"
    names = {name for name in given if name is not None}
    assert names >= {"local_hostname", "metadata_server", "global_segment_size", "rdma_devices"}


@pytest.mark.parametrize(
    "call",
    [
        "torch.npu.set_device",
        "torch.npu.Stream",
        "torch.npu.Event",
        "torch.npu.current_stream",
        "torch.npu.stream",
        "wait_event",
        r"event\w*\.synchronize",
        "pin_memory",
        "index_select",
        "index_copy_",
    ],
)
def test_streams_of_torch_npu_are_used_as_vllm_ascend_uses_them(
    sources: Sources, call: str
) -> None:
    """``backends/torch_device.py`` calls nothing of ``torch.npu`` that vllm-ascend does not."""
    text = "\n".join((sources.root / path).read_text() for path in sources.paths())
    assert re.search(rf"{call}\s*[(=]", text)
