# SPDX-License-Identifier: Apache-2.0
"""Real engines for tests: each in its own processes, stepped by hand, ready in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.integration import on_gpu, triton_interpreter
from tests.zygote import ENVIRONMENT

BLOCK_SIZE = 32
START_TIMEOUT_S = 400.0
CALL_TIMEOUT_S = 120.0
MAX_SHARED = 6
"""Engines that a process of tests keeps for later ones; each takes 0.2 GB of its own."""
MAX_ENDING = 4
"""That are on their way out while tests go on."""

_PROCESS = Path(__file__).with_name("engine_process.py")
_ROOT = Path(__file__).parents[2]
_LOG_LENGTH = 3000


class EngineError(AssertionError):
    """An engine answered with an exception, or not at all."""


@dataclass(frozen=True)
class EngineConfig:
    """What distinguishes engines; equal ones are shared between tests."""

    model: str
    role: str | None = None
    transfer: str = "{}"
    """JSON of ``kv_connector_extra_config.transfer``."""
    secret_file: str | None = None
    pool: str = ""
    """JSON of ``kv_connector_extra_config.pool``; empty for none."""
    faults: str = ""
    pool_faults: str = ""
    kv_port: int | None = None
    kv_ip: str = ""
    allowed_peers: tuple[str, ...] = ()
    forward_peers: tuple[str, ...] = ()
    router: str = ""
    """The URL of what it registers with, and of its front end."""
    network: str = ""
    """The network namespace it runs in, by name."""
    block_size: int = BLOCK_SIZE
    num_blocks: int = 256
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    dtype: str = "float32"
    llm: str = "{}"
    """JSON of further options of ``LLM``."""
    executor: str = ""
    """``uni``: the worker is in the engine's process. ``mp``: it is one of its own. Empty: as vLLM
    has it on a device of its own, ``uni`` for one worker, ``mp`` for several.
    """
    without: str = ""
    """A package that cannot be imported there."""
    runs_ahead: bool = False
    """Plans a step before the output of the last one is there, as on a GPU."""

    def with_transfer(self, **options: Any) -> EngineConfig:
        merged = {**json.loads(self.transfer), **options}
        return replace(self, transfer=json.dumps(merged, sort_keys=True))

    def llm_options(self) -> dict[str, Any]:
        llm = json.loads(self.llm)
        sizes = (llm.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        return {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": 16,
            "block_size": self.block_size,
            "kv_cache_memory_bytes": 64 << 20,
            "num_gpu_blocks_override": self.num_blocks,
            "distributed_executor_backend": self.executor or ("mp" if max(sizes) > 1 else "uni"),
            **llm,
        }

    def transfer_options(self) -> dict[str, Any] | None:
        if self.role is None:
            return None
        small = {"staging_slot_bytes": 2 << 20}  # all of it is written to when an engine starts
        # What other tests, or a slow host, have taught a consumer of its producer changes nothing.
        same = {"max_step_load_ms": 1e6, "breaker_failures": 1000}
        transfer = {"check_integrity": True, **small, **same, **json.loads(self.transfer)}
        extra: dict[str, Any] = {"transfer": transfer}
        security: dict[str, Any] = {}
        if self.secret_file is not None:
            security["secret_file"] = self.secret_file
        if self.allowed_peers:
            security["allowed_peers"] = list(self.allowed_peers)
        if security:
            extra["security"] = security
        if self.pool:
            extra["pool"] = json.loads(self.pool)
        if self.forward_peers:
            extra["forward"] = {"peers": list(self.forward_peers)}
        if self.router:
            extra["router"] = {"url": self.router, "http_url": self.router}
        options: dict[str, Any] = {"kv_role": self.role, "kv_connector_extra_config": extra}
        if self.kv_port is not None:
            options["kv_port"] = self.kv_port
        if self.kv_ip:
            options["kv_ip"] = self.kv_ip
        return options

    def env(self) -> dict[str, str]:
        return {"ASCEND_PD_FAULTS": self.faults, "ASCEND_PD_POOL_FAULTS": self.pool_faults}


@dataclass(frozen=True)
class Answer:
    """A finished request."""

    token_ids: list[int]
    samples: list[list[int]]
    text: str
    finish_reason: str
    num_prompt_logprobs: int
    logprobs: list[dict[int, float]]
    """For each token of the first sample, of the likeliest ones, if asked for."""
    prompt_logprobs: list[dict[int, float]]
    kv_transfer_params: dict[str, Any]

    @property
    def provenance(self) -> dict[str, Any]:
        """Of a request that was added with ``return_provenance``."""
        return self.kv_transfer_params["provenance"]

    @property
    def sources(self) -> tuple[int, int, int]:
        """Prompt tokens that were local, came from the peer, were computed."""
        origin = self.provenance
        return (
            origin["num_local_tokens"],
            origin["num_peer_tokens"],
            origin["num_computed_tokens"],
        )

    @property
    def outcome(self) -> str:
        return self.provenance["outcome"]


def _states_of_group(group_id: int) -> list[str]:
    """What its processes do, as ``/proc`` says it: ``T`` is stopped."""
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(group) == group_id:
            states.append(state)
    return states


def _make_answer(raw: dict[str, Any]) -> Answer:
    samples = raw["token_ids"]
    return Answer(
        token_ids=samples[0],
        samples=samples,
        text=raw["text"],
        finish_reason=raw["finish_reason"],
        num_prompt_logprobs=raw["num_prompt_logprobs"],
        logprobs=raw["logprobs"],
        prompt_logprobs=raw["prompt_logprobs"],
        kv_transfer_params=raw["kv_transfer_params"],
    )


class Engine:
    """A handle on one engine process."""

    def __init__(
        self,
        config: EngineConfig,
        process_id: int,
        connection: Connection,
        log_path: Path,
        name: str,
    ) -> None:
        self.config = config
        self.process_id = process_id
        self.name = name
        self._connection = connection
        self._log_path = log_path
        self._waiting = False
        self.alive = True

    # Commands.

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        kv: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
        priority: int = 0,
        embeds: list[list[float]] | None = None,
        images: list[tuple[int, int, int]] | None = None,
        **sampling: Any,
    ) -> None:
        """Queue a request; ``kv`` is its ``kv_transfer_params``, greedy unless said otherwise.

        ``lora`` is the folder of an adapter. ``embeds`` take the place of the prompt's tokens.
        ``images`` are of one colour each, and have a token in the prompt.
        """
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
        if kv is not None:
            options["extra_args"] = {"kv_transfer_params": kv}
        self._call(
            "add",
            request_id=request_id,
            prompt=prompt,
            cache_salt=cache_salt,
            sampling=options,
            lora=lora,
            priority=priority,
            embeds=embeds,
            images=images,
        )

    def abort(self, request_id: str) -> None:
        self._call("abort", request_id=request_id)

    def abort_in_step(self, request_id: str) -> dict[str, list[list[int]]]:
        """A step during whose forward the abort arrives."""
        return self._call("abort_in_step", request_id=request_id)

    def step(self) -> dict[str, list[list[int]]]:
        """One engine step: tokens so far of the requests that got some in it."""
        return self._call("step")

    def step_until(
        self, request_id: str, key: str, *values: Any, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Step until the request's ``key`` (see ``requests``) has one of the values."""
        return self._call(
            "step_until",
            timeout + CALL_TIMEOUT_S,
            request_id=request_id,
            key=key,
            values=list(values),
            timeout=timeout,
        )

    def run(self, timeout: float = 180.0) -> dict[str, Answer]:
        """Step as the engine's own loop does, until it is idle; what ended since the last run."""
        self.start_run(timeout)
        return self.join_run(timeout)

    def start_run(self, timeout: float = 180.0) -> None:
        self._send("run", {"timeout": timeout})

    def join_run(self, timeout: float = 180.0) -> dict[str, Answer]:
        answers = self._receive("run", timeout + CALL_TIMEOUT_S)
        return {request_id: _make_answer(raw) for request_id, raw in answers.items()}

    def drive(self, num_steps: int) -> dict[str, Answer]:
        """At most so many steps; what ended since the last run."""
        answers = self._call("drive", num_steps + CALL_TIMEOUT_S, num_steps=num_steps)
        return {request_id: _make_answer(raw) for request_id, raw in answers.items()}

    def ask(
        self, prompt: list[int], max_tokens: int = 8, kv: dict[str, Any] | None = None, **more: Any
    ) -> Answer:
        """One request, from start to end."""
        request_id = f"ask-{next(_numbers)}"
        self.add(request_id, prompt, max_tokens, kv, **more)
        return self.run()[request_id]

    def assert_says(self, token_ids: list[int], prompt: list[int], about: object = "") -> None:
        """It answers so, greedily."""
        if not self.would_say(token_ids, prompt):
            assert token_ids == self.ask(prompt, len(token_ids)).token_ids, about

    def would_say(self, token_ids: list[int], prompt: list[int], tie: float = 0.0) -> bool:
        """Whether each of them is the likeliest behind all before it, or so much in logprobs less
        likely: what it decodes in many steps it computes in one as a prompt. No tells nothing where
        kernels round one way in the one and another way in the other.
        """
        likely = self.ask(prompt + token_ids, 1, prompt_logprobs=1).prompt_logprobs[len(prompt) :]
        return all(
            len(place) == 1 or max(place.values()) - place[token_id] < tie
            for token_id, place in zip(token_ids, likely, strict=True)
        )

    def prefill(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Compute a prompt for a consumer; what the client hands to it."""
        answer = self.ask(prompt, 1, {"do_remote_decode": True}, **more)
        return {**answer.kv_transfer_params, "return_provenance": True}

    def requests(self) -> dict[str, dict[str, Any]]:
        return self._call("requests")

    def wait_for(self, request_id: str, key: str, *values: Any, timeout: float = 60.0) -> None:
        """Until the request's ``key`` has one of the values, without any step."""
        deadline = time.monotonic() + timeout
        while (found := self.requests()[request_id][key]) not in values:
            assert time.monotonic() < deadline, f"{key} of {request_id} is still {found}"
            time.sleep(0.005)

    def source(self) -> dict[str, Any]:
        """What requests are taken over from, as the router knows it."""
        return self._call("source")

    def set_ending(self, is_ending: bool) -> None:
        """Whether it forwards its requests, as one does that was asked to end."""
        self._call("set_ending", is_ending=is_ending)

    def block_ids(self, request_id: str, group: int = 0) -> list[int]:
        """The block table of an unfinished request, in one KV cache group."""
        return self._call("block_ids", request_id=request_id, group=group)

    def change_tickets(self, request_id: str, **changes: Any) -> None:
        """What its producer has told a waiting request to show, with other values in it."""
        self._call("change_tickets", request_id=request_id, **changes)

    def evict_blocks(self, block_ids: list[int]) -> None:
        """Out of the prefix cache, as if memory had been short."""
        self._call("evict_blocks", block_ids=block_ids)

    def encoded_images(self) -> list[str]:
        return self._call("encoded_images")

    def counts(self) -> dict[str, int]:
        return self._call("counts")

    def wait_count(self, name: str, value: int, timeout: float = 60.0) -> None:
        """Until this count has the value, without any step."""
        deadline = time.monotonic() + timeout
        while (found := self.counts()[name]) != value:
            assert time.monotonic() < deadline, f"{self.name}: {name} is still {found}"
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        return self._call("metrics")

    def set_faults(self, script: str, rank: int | None = None) -> None:
        """Script the next writes of an engine that was started with ``faults``; those of one
        worker, or of each.
        """
        self._call("set_faults", script=script, rank=rank)

    def set_pool_faults(self, script: str, rank: int | None = None) -> None:
        """Script the next calls on the pool of an engine that was started with ``pool_faults``;
        those of one worker, or of each.
        """
        self._call("set_pool_faults", script=script, rank=rank)

    def remove_pool_values(self, rank: int) -> None:
        """One worker's shares of all that this engine knows to be in the pool, as if evicted."""
        self._call("remove_pool_values", rank=rank)

    def flip_pool_bits(self, rank: int = 0) -> int:
        """In every value of the pool that lies in this worker's memory; how many."""
        return self._call("flip_pool_bits", rank=rank)

    def pool_master_id(self) -> int:
        return self._call("pool_master_id")

    def pool_breakers(self) -> dict[str, str]:
        """The state of the breakers ``get`` and ``put``."""
        return self._call("pool_breakers")

    def reset_prefix_cache(self, connector: bool = False, running: bool = False) -> bool:
        """With ``running``, requests that run are preempted and have none of their KV any more."""
        return self._call("reset_prefix_cache", connector=connector, running=running)

    def call_workers(self, method: str, **options: Any) -> None:
        """As ``/collective_rpc`` does, or a trainer."""
        self._call("call_workers", method=method, **options)

    def scale_norms(self, factor: float) -> None:
        """Change weights in place, by a function that the engine knows nothing of."""
        self._call("scale_norms", factor=factor)

    def add_lora(self, folder: str, inplace: bool = False) -> None:
        self._call("add_lora", folder=folder, inplace=inplace)

    def sleep(self, level: int) -> None:
        self._call("sleep", level=level)

    def release_kv_cache_memory(self) -> bool:
        return bool(self._call("release_kv_cache_memory"))

    def wake_up(self) -> None:
        self._call("wake_up")

    # The process.

    def signal(self, number: signal.Signals) -> None:
        """To the engine and to its worker; returns when they have stopped, if that is asked."""
        os.killpg(self.process_id, number)
        if number == signal.SIGSTOP:
            deadline = time.monotonic() + 60
            while not all(state in "TZ" for state in _states_of_group(self.process_id)):
                assert time.monotonic() < deadline, f"{self.name} does not stop"
                time.sleep(0.005)

    def stop(self) -> None:
        """Close the pipe: the engine ends by itself."""
        self._connection.close()

    def log(self) -> str:
        """The end of its messages, without those of its start."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(line[:200] for line in lines if "INFO " not in line)[-_LOG_LENGTH:]

    def wait_log(self, text: str, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self._log_path.read_text(errors="replace"):
            assert time.monotonic() < deadline, f"{self.name} did not log {text!r}\n{self.log()}"
            time.sleep(0.01)

    def find_in_log(self, pattern: str) -> set[str]:
        """What the pattern's group has stood for so far."""
        return set(re.findall(pattern, self._log_path.read_text(errors="replace")))

    def wait_ready(self) -> None:
        self._waiting = True
        self._receive("start", START_TIMEOUT_S)

    def _call(self, command: str, call_timeout: float = CALL_TIMEOUT_S, **options: Any) -> Any:
        self._send(command, options)
        return self._receive(command, call_timeout)

    def _send(self, command: str, options: dict[str, Any]) -> None:
        assert not self._waiting, f"{self.name} has not answered its last command"
        self._connection.send((command, options))
        self._waiting = True

    def _receive(self, command: str, timeout: float) -> Any:
        what = f"{self.name} ({self._log_path}): {command}"
        if not self._connection.poll(timeout):
            raise EngineError(f"{what}: no answer in {timeout} s\n{self.log()}")
        try:
            status, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as e:
            raise EngineError(f"{what}: the engine has ended\n{self.log()}") from e
        self._waiting = False
        if status != "ok":
            raise EngineError(f"{what}:\n{value}\n--- log\n{self.log()}")
        return value


_numbers = count()


@dataclass
class Fleet:
    """All engines of a test session, forked from one process that has imported vLLM."""

    folder: Path
    triton: Path | None = None
    """Where it lies: engines run Model Runner V2, in Triton's interpreter."""
    gpu_graphs: str | None = None
    """Of engines on a GPU, which all are then: one of ``on_gpu.GRAPHS``."""
    python: Path = Path(sys.executable)
    """Whose vLLM they are."""
    _shared: dict[EngineConfig, Engine] = field(default_factory=dict)
    _kept: list[EngineConfig] = field(default_factory=list)
    _lent: set[EngineConfig] = field(default_factory=set)
    """To the test that runs."""
    _engines: list[Engine] = field(default_factory=list)
    _ending: list[Engine] = field(default_factory=list)

    def __enter__(self) -> Fleet:
        # Paths of sockets must be short.
        self._sockets = tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp")
        listener = self._listen()
        path = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **ENVIRONMENT}
        if self.triton is not None:
            environment |= triton_interpreter.ENVIRONMENT
            path.append(str(self.triton))
        if self.gpu_graphs is not None:
            environment |= {**on_gpu.ENVIRONMENT, on_gpu.VARIABLE: self.gpu_graphs}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.python != Path(sys.executable):
            environment["VLLM_CACHE_ROOT"] = str(self.folder / "vllm")
        self._zygote_log = self.folder / "zygote.log"
        with self._zygote_log.open("wb") as log:
            self._zygote = subprocess.Popen(
                [str(self.python), str(_PROCESS), str(listener.address)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._connection = self._accept(listener)
        self._zygote_answer(START_TIMEOUT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.retire(*self._engines)
        self._reap()
        self._connection.close()
        try:
            self._zygote.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._zygote.pid, signal.SIGKILL)  # engines lead groups of their own
            self._zygote.wait(60)
        self._sockets.cleanup()

    def engine(self, config: EngineConfig) -> Engine:
        """A shared engine of this configuration; tests must leave it as they found it."""
        return self.engines(config)[0]

    @contextlib.contextmanager
    def kept(self, config: EngineConfig) -> Iterator[Engine]:
        """A shared engine for several tests: it does not end meanwhile to make room for others."""
        self._kept.append(config)
        try:
            yield self.engine(config)
        finally:
            self._kept.remove(config)

    def begin_test(self) -> None:
        """What was lent to tests before may be ended to make room for others."""
        self._lent.clear()

    def discard(self, engine: Engine) -> None:
        """A test has left it spoiled: the next one gets another."""
        self._shared = {c: e for c, e in self._shared.items() if e is not engine}
        if engine.alive:
            self.kill(engine)

    def engines(self, *configs: EngineConfig) -> list[Engine]:
        """Several shared ones, started at the same time."""
        for config in configs:
            if config in self._shared:  # the one used last is the last one
                self._shared[config] = self._shared.pop(config)
        self._lent.update(configs)
        missing = [config for config in dict.fromkeys(configs) if config not in self._shared]
        self._make_room(len(missing), self._lent.union(self._kept))
        started = [self.launch(config) for config in missing]
        for engine in started:
            engine.wait_ready()
            self._shared[engine.config] = engine
        return [self._shared[config] for config in configs]

    def _make_room(self, num_new: int, kept: set[EngineConfig]) -> None:
        """Memory is short: end the shared engines that were not used for the longest time."""
        unused = [config for config in self._shared if config not in kept]
        too_many = unused[: max(0, len(self._shared) + num_new - MAX_SHARED)]
        self.retire(*(self._shared.pop(config) for config in too_many))

    def start(self, config: EngineConfig) -> Engine:
        """An engine of one's own, to be spoiled or killed."""
        engine = self.launch(config)
        engine.wait_ready()
        return engine

    def launch(self, config: EngineConfig) -> Engine:
        """Like ``start``, without waiting until it is ready."""
        if self.gpu_graphs is not None:
            on_gpu.skip_what_takes_halves(config.model)
        name = f"engine-{len(self._engines)}-{config.role or 'single'}"
        listener = self._listen()
        log_path = self.folder / f"{name}.log"
        log_path.touch()
        process_id = self._ask_zygote(
            "fork",
            address=listener.address,
            log_path=str(log_path),
            env=config.env(),
            network=config.network,
            without=config.without,
            options={
                "llm_options": config.llm_options(),
                "transfer": config.transfer_options(),
                "runs_ahead": config.runs_ahead,
            },
        )
        engine = Engine(config, process_id, self._accept(listener), log_path, name)
        self._engines.append(engine)
        return engine

    def kill(self, engine: Engine) -> None:
        """SIGKILL to the engine and its worker; returns when they are gone."""
        engine.alive = False
        maps = Path(f"/proc/{engine.process_id}/maps").read_text().splitlines()
        engine.signal(signal.SIGKILL)
        assert self._ask_zygote("reap", process_id=engine.process_id, timeout=60.0)
        # What the engine would have removed itself.
        for path in {line.split()[-1] for line in maps if "/dev/shm/psm_" in line}:
            Path(path).unlink(missing_ok=True)

    def retire(self, *engines: Engine) -> None:
        """End those that are alive. Nobody waits for it while few are at it: Mooncake takes a
        second to close, and three with a master.
        """
        alive = [engine for engine in engines if engine.alive]
        for engine in alive:
            engine.alive = False
            engine.stop()
        self._ending += alive
        self._reap(MAX_ENDING)

    def _reap(self, num_left: int = 0) -> None:
        """Those that have ended; wait for the first ones until no more are left than these."""
        for engine in list(self._ending):
            timeout = 60.0 if len(self._ending) > num_left else 0.0
            if not self._ask_zygote("reap", process_id=engine.process_id, timeout=timeout):
                if not timeout:
                    continue
                self.kill(engine)
            self._ending.remove(engine)

    def _listen(self) -> Listener:
        return Listener(f"{self._sockets.name}/{next(_numbers)}", "AF_UNIX")

    def _accept(self, listener: Listener) -> Connection:
        listener._listener._socket.settimeout(START_TIMEOUT_S)  # type: ignore[attr-defined]
        with listener:
            return listener.accept()

    def _ask_zygote(self, command: str, **options: Any) -> Any:
        self._connection.send((command, options))
        return self._zygote_answer(CALL_TIMEOUT_S)

    def _zygote_answer(self, timeout: float) -> Any:
        log = self._zygote_log
        if not self._connection.poll(timeout):
            raise EngineError(f"no answer of the zygote in {timeout} s\n{log.read_text()}")
        try:
            status, value = self._connection.recv()
        except EOFError as e:
            raise EngineError(f"the zygote has ended\n{log.read_text()}") from e
        if status != "ok":
            raise EngineError(value)
        return value


PromptOf = Callable[..., list[int]]
"""The fixture ``prompt_of``."""


def make_prompt(num_tokens: int, name: str) -> list[int]:
    """Token ids that no other ``name`` has, so that tests that share engines share no blocks."""
    rng = random.Random(zlib.crc32(name.encode()))
    return [rng.randrange(300, 2000) for _ in range(num_tokens)]


def settled_counts(engine: Engine, timeout: float = 10.0) -> dict[str, int]:
    """Before a test. What an earlier one has left for the pool may be stored only now."""
    deadline = time.monotonic() + timeout
    while (counts := engine.counts()).get("pool_saves") and time.monotonic() < deadline:
        time.sleep(0.01)
    return counts


def assert_no_leak(engine: Engine, before: dict[str, int], timeout: float = 60.0) -> None:
    """All counts are as they were ``before`` (staging slots that only rest are not busy, and blocks
    wait for as long as the pool takes none).

    A producer's worker gives up its grants in the next step, so an idle one gets a step to do it.
    """
    deadline = time.monotonic() + timeout
    while True:
        now = engine.counts()
        differing = {
            name: (count, now[name])
            for name, count in before.items()
            if count != now[name] and name != "pool_waiting"
        }
        if not differing:
            return
        if set(differing) == {"worker_grants"}:
            engine.ask(make_prompt(2, f"leak {next(_numbers)}"), 1)
        # Nobody steps the engine any more, so a request that is left will not end.
        if time.monotonic() > deadline or "requests" in differing:
            pytest.fail(f"{engine.name} leaks, (before, now): {differing}\n{engine.log()}")
        time.sleep(0.02)
