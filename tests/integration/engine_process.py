# SPDX-License-Identifier: Apache-2.0
"""The other side of ``engines``: a process that imports vLLM once and forks engines.

    tests ──"fork"──► zygote ──fork──► engine (EngineCore, stepped by hand) ──fork──► worker

Started as ``engine_process.py ADDRESS``. The zygote and each engine connect back to the tests and
obey one command at a time; every answer is ``("ok", value)`` or ``("error", traceback)``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from tests.integration import (
    compressed_kernels,
    on_gpu,
    sparse_kernels,
    state_kernels,
    triton_interpreter,
)
from tests.zygote import prepare_to_fork

_VLLM_METRICS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
"""Counters of vLLM's own, and their names here."""

_RESTS_S = (0.002, 0.002, 0.005, 0.01)
"""Behind the first step that gives nothing, the second, and so on: each takes a millisecond and
more of what other processes compute with.
"""
_INNER_PORTS = range(20000, 32000)
_CLONE_NEWNET = 0x40000000  # of <sched.h>


def _worker_counts(worker: object) -> dict[str, int]:
    """Runs in the worker process."""
    from vllm_ascend_pd import hooks

    side: Any = hooks.worker
    if side is None:
        return {}
    loaders = side._loader._all if side._loader is not None else ()
    loads = [load for loader in loaders for parts in loader._loads.values() for load in parts]
    return {**side.counts(), "loads_under_way": sum(load.ended is None for load in loads)}


def _set_worker_faults(worker: object, script: str, rank: int | None) -> None:
    """Runs in the worker process of an engine that was started with a fault script: a new one."""
    from vllm_ascend_pd import hooks
    from vllm_ascend_pd.backends.fault_script import FaultScript

    side: Any = hooks.worker
    if rank is not None and side.rank != rank:
        return
    parsed = FaultScript.parse(script)
    for engine in side.transports.engines.values():
        engine.script = parsed


def _set_pool_faults(worker: object, script: str, rank: int | None) -> None:
    """Runs in the worker processes of an engine that was started with a pool fault script."""
    from vllm_ascend_pd import hooks
    from vllm_ascend_pd.pool.fake_tier import TierScript

    side: Any = hooks.worker
    if rank is None or side.rank == rank:
        side.pool.tier.script = TierScript(script)


def _pool_keys(side: Any, known: list[bytes]) -> list[str]:
    """What the scheduler knows to be in the pool."""
    from vllm_ascend_pd.engine.vllm_api.blocks import split_key

    blocks = map(split_key, known)
    return [side.pool.values[group].key(block_hash) for block_hash, group in blocks]


def _remove_pool_values(worker: object, known: list[bytes], rank: int) -> None:
    """Runs in the worker processes."""
    from vllm_ascend_pd import hooks

    side: Any = hooks.worker
    if side.rank == rank:
        side.pool.tier.remove(_pool_keys(side, known))


def _flip_pool_bits(worker: object, known: list[bytes], rank: int) -> int:
    """Runs in the worker processes."""
    import ctypes

    from vllm_ascend_pd import hooks

    side: Any = hooks.worker
    if side.rank != rank:
        return 0
    (values,) = side.pool.values
    with side.pool.tier.store.in_own_memory(_pool_keys(side, known), values.num_bytes) as addresses:
        found = [address for address in addresses if address]
        for address in found:
            ctypes.c_uint8.from_address(address + 1000).value ^= 8
    return len(found)


def _scale_norms(worker: Any, factor: float) -> None:
    """Runs in the worker processes."""
    import torch

    with torch.no_grad():
        for name, parameter in worker.model_runner.model.named_parameters():
            if "input_layernorm" in name or "layer_norm1" in name:  # of images, too
                parameter[::2] *= factor


def _pool_master_id(worker: object) -> int | None:
    """Runs in the worker processes; the first one has started it."""
    from vllm_ascend_pd import hooks

    side: Any = hooks.worker
    tier = side.pool.tier
    master = getattr(tier, "inner", tier).master
    return master.process_id if master is not None else None


def _plain_logprobs(positions: Any) -> list[dict[int, float]]:
    return [
        {token_id: entry.logprob for token_id, entry in (position or {}).items()}
        for position in positions or ()
    ]


def _external_id(internal_id: str) -> str:
    """vLLM appends a random part to what the client calls a request."""
    return internal_id.rpartition("-")[0]


class EngineServer:
    """One engine. Every public method is a command; its value must be plain data."""

    def __init__(
        self, llm_options: dict[str, Any], transfer: dict[str, Any] | None, runs_ahead: bool
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        state_kernels.install()
        sparse_kernels.install()
        compressed_kernels.install()
        if on_gpu.is_on():
            llm_options = on_gpu.options(llm_options, runs_ahead)
        elif runs_ahead:
            from tests.integration.run_ahead import let_engines_run_ahead

            let_engines_run_ahead()
        kv_transfer_config = None
        if transfer is not None:
            kv_transfer_config = KVTransferConfig(kv_connector="InEngine", **transfer)
        self._llm = LLM(
            **llm_options, kv_transfer_config=kv_transfer_config, disable_log_stats=False
        )
        self._engine = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._answers: dict[str, dict[str, Any]] = {}
        self._loras: dict[str, int] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        cache_salt: str | None,
        sampling: dict[str, Any],
        lora: str | None = None,
        priority: int = 0,
        embeds: list[list[float]] | None = None,
        images: list[tuple[int, int, int]] | None = None,
    ) -> None:
        import torch
        from PIL import Image
        from vllm import SamplingParams
        from vllm.inputs import EmbedsPrompt, TokensPrompt
        from vllm.sampling_params import (
            RepetitionDetectionParams,
            RequestOutputKind,
            StructuredOutputsParams,
        )

        if sampling.get("n", 1) > 1:
            sampling = {**sampling, "output_kind": RequestOutputKind.FINAL_ONLY}
        if structured := sampling.get("structured_outputs"):
            sampling = {**sampling, "structured_outputs": StructuredOutputsParams(**structured)}
        if repetition := sampling.get("repetition_detection"):
            params = RepetitionDetectionParams(**repetition)
            sampling = {**sampling, "repetition_detection": params}
        lora_request = None if lora is None else self._lora_request(lora)
        inputs: Any = TokensPrompt(prompt_token_ids=prompt)
        if embeds is not None:
            inputs = EmbedsPrompt(prompt_embeds=torch.tensor(embeds))
        if images is not None:
            pictures = [Image.new("RGB", (128, 128), color) for color in images]
            inputs["multi_modal_data"] = {"image": pictures}
        if cache_salt is not None:
            inputs["cache_salt"] = cache_salt
        self._engine.add_request(
            request_id,
            inputs,
            SamplingParams(**sampling),
            lora_request=lora_request,
            priority=priority,
        )

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def abort_in_step(self, request_id: str) -> dict[str, list[list[int]]]:
        """A step during whose forward the abort arrives."""
        internal_ids = self._engine.output_processor.abort_requests([request_id], internal=False)
        self._core.aborts_queue.put(internal_ids)
        return self.step()

    def step(self) -> dict[str, list[list[int]]]:
        """One step; the tokens so far of every request that got some in it."""
        return {
            output.request_id: [list(sample.token_ids) for sample in output.outputs]
            for output in map(self._note, self._engine.step())
        }

    def run(self, timeout: float) -> dict[str, dict[str, Any]]:
        """Step as the engine's own loop does, until it would sleep; the answers since the last."""
        deadline, num_idle = time.monotonic() + timeout, 0
        while self._has_work():
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests did not end in {timeout} s: {self.requests()}")
            num_idle = self._step_or_rest(num_idle)
        return self._take_answers()

    def drive(self, num_steps: int) -> dict[str, dict[str, Any]]:
        """Like ``run``, but not more steps than these."""
        num_idle = 0
        for _ in range(num_steps):
            if not self._has_work():
                break
            num_idle = self._step_or_rest(num_idle)
        return self._take_answers()

    def step_until(
        self, request_id: str, key: str, values: list[Any], timeout: float
    ) -> dict[str, Any]:
        """Step until ``requests()[request_id][key]`` is one of ``values``."""
        deadline, num_idle = time.monotonic() + timeout, 0
        while True:
            found = self.requests().get(request_id, {})
            if found.get(key) in values:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key} of {request_id} not in {values}: {self.requests()}")
            num_idle = self._step_or_rest(num_idle)

    def _step_or_rest(self, num_idle: int) -> int:
        """How many steps have given nothing now, if so many had before this one."""
        if self.step():
            return 0
        time.sleep(_RESTS_S[min(num_idle, len(_RESTS_S) - 1)])
        return num_idle + 1

    def _consumer(self) -> Any:
        from vllm_ascend_pd.engine.scheduler.consumer import Consumer

        return self._scheduler.pd.part(Consumer)

    def _pool_side(self) -> Any:
        from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide

        return self._scheduler.pd.part(PoolSide)

    def requests(self) -> dict[str, dict[str, Any]]:
        """The unfinished requests, as the scheduler sees them."""
        pd = self._scheduler.pd
        consumer = self._consumer() if pd is not None else None
        if consumer is not None:
            consumer.collect()
        seen = {}
        for internal_id, request in self._scheduler.requests.items():
            session = consumer.find(request) if consumer is not None else None
            seen[_external_id(internal_id)] = {
                "status": request.status.name,
                "num_computed_tokens": request.num_computed_tokens,
                "num_output_tokens": request.num_output_tokens,
                "num_preemptions": request.num_preemptions,
                "num_in_flight_tokens": request.num_in_flight_tokens,
                "is_scheduled": request in self._scheduler.running,
                "session": session.state.name if session is not None else None,
                "loads": session.num_loads if session is not None else 0,
            }
        return seen

    def source(self) -> dict[str, Any]:
        """What a request is taken over from, as the router knows it."""
        from vllm_ascend_pd.engine.scheduler.producer import Producer

        producer = self._scheduler.pd.part(Producer)
        at = producer.endpoint
        return {"host": at.host, "port": at.port, "key": at.key, "epoch": producer.epoch}

    def set_ending(self, is_ending: bool) -> None:
        """For forwards. vLLM asks no engine to end that lives in its client's process."""
        from vllm_ascend_pd.engine.scheduler.forwards_out import ForwardsOut

        self._scheduler.pd.part(ForwardsOut).is_ending = lambda: is_ending

    def block_ids(self, request_id: str, group: int) -> list[int]:
        """The block table of an unfinished request."""
        manager = self._scheduler.kv_cache_manager
        return list(manager.get_block_ids(self._internal_id(request_id))[group])

    def change_tickets(self, request_id: str, **changes: Any) -> None:
        """Of a request whose producer has answered."""
        import msgspec

        request = self._scheduler.requests[self._internal_id(request_id)]
        session = self._consumer().find(request)
        session._workers = tuple(
            msgspec.structs.replace(
                worker, ticket=msgspec.structs.replace(worker.ticket, **changes)
            )
            for worker in session._workers
        )

    def evict_blocks(self, block_ids: list[int]) -> None:
        self._scheduler.kv_cache_manager.evict_blocks(set(block_ids))

    def encoded_images(self) -> list[str]:
        """Hashes of those whose encoder has run here, lately."""
        return sorted(self._scheduler.encoder_cache_manager.cached)

    def counts(self) -> dict[str, int]:
        """Of the scheduler and of the worker side, in one."""
        pd = self._scheduler.pd
        if pd is None:
            pool = self._scheduler.kv_cache_manager.block_pool
            return {"free_blocks": pool.get_num_free_blocks()}
        workers = self._core.model_executor.collective_rpc(_worker_counts)
        worker_counts = {name: sum(counts[name] for counts in workers) for name in workers[0]}
        return {
            "requests": len(self._scheduler.requests) + self._engine.get_num_unfinished_requests(),
            **pd.counts(),
            **{f"worker_{name}": count for name, count in worker_counts.items()},
        }

    def metrics(self) -> dict[str, float]:
        """``{name or name/label: total}`` of the exposed counters, and what waits to be exposed."""
        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if name := _VLLM_METRICS.get(metric.name):
                totals[name] = metric.value
            if not metric.name.startswith("vllm:pd_"):
                continue
            labels = [
                value for key, value in metric.labels.items() if key not in ("model_name", "engine")
            ]
            name = "/".join([metric.name.removeprefix("vllm:pd_"), *labels])
            totals[name] = totals.get(name, 0) + metric.value
        if self._scheduler.pd is not None:
            for name, value in self._scheduler.pd.common.stats.values.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def set_faults(self, script: str, rank: int | None) -> None:
        self._core.model_executor.collective_rpc(_set_worker_faults, args=(script, rank))

    def set_pool_faults(self, script: str, rank: int | None) -> None:
        self._core.model_executor.collective_rpc(_set_pool_faults, args=(script, rank))

    def remove_pool_values(self, rank: int) -> None:
        known = list(self._pool_side().known)
        self._core.model_executor.collective_rpc(_remove_pool_values, args=(known, rank))

    def flip_pool_bits(self, rank: int) -> int:
        """In every value of the pool that lies in the memory of this worker; how many."""
        known = list(self._pool_side().known)
        return self._core.model_executor.collective_rpc(_flip_pool_bits, args=(known, rank))[rank]

    def pool_master_id(self) -> int:
        """The process id of the engine's own master."""
        return self._core.model_executor.collective_rpc(_pool_master_id)[0]

    def pool_breakers(self) -> dict[str, str]:
        pool = self._pool_side()
        pool.collect()
        return {"get": pool.source.breaker.state.value, "put": pool.saves.breaker.state.value}

    def reset_prefix_cache(self, connector: bool, running: bool) -> bool:
        return self._engine.reset_prefix_cache(running, reset_connector=connector)

    def call_workers(self, method: str, **options: Any) -> None:
        """As ``/collective_rpc`` does, or a trainer."""
        self._llm.collective_rpc(method, kwargs=options)

    def scale_norms(self, factor: float) -> None:
        """Other weights in place, by a function of the trainer's. CPUs pack those of projections
        when they are loaded, so these alone can be changed.
        """
        self._llm.collective_rpc(_scale_norms, args=(factor,))

    def add_lora(self, folder: str, inplace: bool) -> None:
        self._engine.add_lora(self._lora_request(folder, inplace))

    def sleep(self, level: int) -> None:
        self._llm.sleep(level=level)

    def release_kv_cache_memory(self) -> bool:
        """While it is paused, as vLLM 0.32 can; false where vLLM cannot."""
        if not hasattr(self._llm, "release_kv_cache_memory"):
            return False
        self._llm.sleep(level=0)
        try:
            self._llm.release_kv_cache_memory()
        except RuntimeError as e:
            if "not supported on CPU" not in str(e):
                raise
        return True

    def wake_up(self) -> None:
        self._llm.wake_up()

    def _lora_request(self, folder: str, inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        number = self._loras.setdefault(folder, len(self._loras) + 1)
        return LoRARequest(os.path.basename(folder), number, folder, load_inplace=inplace)

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    def _has_work(self) -> bool:
        return (
            self._engine.has_unfinished_requests()
            or self._scheduler.has_requests()
            or bool(self._core.batch_queue)
        )

    def _take_answers(self) -> dict[str, dict[str, Any]]:
        answers, self._answers = self._answers, {}
        return answers

    def _internal_id(self, request_id: str) -> str:
        return next(i for i in self._scheduler.requests if _external_id(i) == request_id)

    def _note(self, output: Any) -> Any:
        if output.finished:
            self._answers[output.request_id] = {
                "token_ids": [list(sample.token_ids) for sample in output.outputs],
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "num_prompt_logprobs": len(output.prompt_logprobs or ()),
                "logprobs": _plain_logprobs(output.outputs[0].logprobs),
                "prompt_logprobs": _plain_logprobs(output.prompt_logprobs),
                "kv_transfer_params": output.kv_transfer_params or {},
            }
        return output


def _serve(connection: Connection, target: Callable[[str, dict[str, Any]], Any]) -> None:
    """Obey until the other side is gone."""
    while True:
        try:
            name, options = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = ("ok", target(name, options))
        except BaseException:  # noqa: BLE001 - a process boundary: the tests raise it
            answer = ("error", traceback.format_exc())
        connection.send(answer)


def _enter_network(name: str) -> None:
    """Join a network namespace of ``ip netns``, with all processes and threads to come."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def _run_engine(
    address: str,
    log_path: str,
    env: dict[str, str],
    network: str,
    without: str,
    options: dict[str, Any],
) -> None:
    os.setsid()
    if network:
        _enter_network(network)
    if without:
        assert without not in sys.modules
        sys.modules[without] = None  # type: ignore[assignment]
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.environ.update(env)
    # Not one that the system hands out: somebody's connection has it by the time vLLM listens.
    os.environ["VLLM_PORT"] = str(_INNER_PORTS[os.getpid() * 16 % len(_INNER_PORTS)])
    connection = Client(address, "AF_UNIX")
    try:
        server = EngineServer(**options)
    except BaseException:  # noqa: BLE001 - a process boundary: the tests raise it
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("ok", None))
    _serve(connection, lambda name, arguments: getattr(server, name)(**arguments))
    server.shutdown()


class Zygote:
    """Forks engines, and kills what is left of them when the tests are gone."""

    def __init__(self) -> None:
        self._engine_ids: set[int] = set()

    def fork(self, **options: Any) -> int:
        process_id = os.fork()
        if process_id:
            self._engine_ids.add(process_id)
            return process_id
        try:
            _run_engine(**options)
        except BaseException:  # noqa: BLE001 - must not return into the zygote's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def reap(self, process_id: int, timeout: float) -> bool:
        """Whether this engine has ended by then."""
        deadline = time.monotonic() + timeout
        while process_id in self._engine_ids:
            if os.waitpid(process_id, os.WNOHANG)[0]:
                self._engine_ids.discard(process_id)
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(0.01)
        return True

    def kill_all(self) -> None:
        for process_id in self._engine_ids:
            try:
                os.killpg(process_id, signal.SIGKILL)
            except ProcessLookupError:
                continue


def main() -> None:
    connection = Client(sys.argv[1], "AF_UNIX")
    if triton_interpreter.VARIABLE in os.environ:
        triton_interpreter.let_vllm_take_it()
    prepare_to_fork("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine")
    connection.send(("ok", len(os.listdir("/proc/self/task"))))
    zygote = Zygote()
    try:
        _serve(connection, lambda name, options: getattr(zygote, name)(**options))
    finally:
        zygote.kill_all()


if __name__ == "__main__":
    main()
