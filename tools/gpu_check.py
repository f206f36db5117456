#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a GPU tells of the package that a CPU cannot: one run, some minutes, one JSON result.

    python tools/gpu_check.py --out result.json      on a host with a GPU
    python tools/gpu_check.py --cpu                  the same on a device of make-believe

bytes    pages go through the copies whole, whatever their shape, also from several threads, to and
         from memory that is pinned, and through a buffer
fences   copies and whole transfers wait for the kernels that they depend on, and for no others.
         Each check must fail on a device that does not wait: so the kernels are late enough
speeds   copies between pages and staging memory, beside one cudaMemcpyAsync of as many bytes
engines  with --model, where a vLLM is installed and patched: P and D on this GPU, and whether their
         tokens are one engine's
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch  # noqa: TID251 - its streams are what is checked
from gpu_pages import LAYERS, Gpu, MakeBelieve, Pages, Staging, Without

from vllm_ascend_pd.backends.block_copy import GroupPages, WorkerPages, make_block_copier
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.host_pass import MAX_DEFAULT_THREADS
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.shared_memory import (
    NoPinning,
    SharedMapping,
    SharedMemoryTransferEngine,
)
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import SHARED_MEMORY, Transports
from vllm_ascend_pd.config import TransferConfig
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.types import LeaseRef, LoadId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_ascend_pd.backends.device_copy import Device
    from vllm_ascend_pd.backends.shared_memory import HostPinning

EXAMPLE = Path(__file__).parents[1] / "examples/offline_inference/disaggregated_prefill.py"
SHAPES = {"one run": (65536,), "K and V apart": (32768, 32768), "MLA": (131072, 16384)}
"""Bytes of the parts of a page."""
THEIRS, OURS = [5, 2, 3, 17], [20, 1, 9, 8]


class NoPasses(PythonBlockCopier):
    """Of the host, where memory is pinned."""

    def gather(self, *args: Any, **options: Any) -> int:
        raise AssertionError("the memory is not pinned: the host passes over the bytes")


# Checks ------------------------------------------------------------------------------------------


def pages_go_and_come(machine: Any, device: Device, pinned: bool, sizes: tuple[int, ...]) -> None:
    copier = DeviceBlockCopier(device, NoPasses() if pinned else make_block_copier())
    theirs, ours = Pages(machine, sizes, 1), Pages(machine, sizes, 2)
    staging = Staging(theirs.layout, THEIRS, copier if pinned else None)
    sent = staging.gather(copier)
    assert (staging.bytes == theirs.of(THEIRS)).all(), "gather packs other bytes"
    assert sent == staging.scatter(copier, ours, OURS), "the checksums differ"
    assert (ours.of(OURS) == theirs.of(THEIRS)).all(), "scatter puts other bytes"


def threads_do_not_mix(machine: Any, device: Device, pinned: bool) -> None:
    copier = DeviceBlockCopier(device, make_block_copier())
    pages = Pages(machine, SHAPES["MLA"], 1)
    pairs = [[n, n + 8] for n in range(8)]
    stagings = [Staging(pages.layout, pair, copier if pinned else None) for pair in pairs]
    work = [partial(staging.gather, copier) for staging in stagings] * 10
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(lambda gather: gather(), work))
    for pair, staging in zip(pairs, stagings, strict=True):
        assert (staging.bytes == pages.of(pair)).all(), f"blocks {pair} have others' bytes"


def gather_waits_for_its_step(machine: Any, device: Device, pinned: bool) -> None:
    copier = DeviceBlockCopier(device, PythonBlockCopier())
    pages = Pages(machine, SHAPES["K and V apart"], 1)
    staging = Staging(pages.layout, THEIRS, copier if pinned else None)
    staging.gather(copier)  # the first one takes memory, for which CUDA may wait
    fence = copier.fence(THEIRS)
    machine.launch(lambda: pages.fill(THEIRS, 77))
    fence.mark()
    staging.gather(copier)
    assert (staging.bytes == 77).all(), "gather took what was there before"


def gather_does_not_wait_for_later_steps(machine: Any, device: Device, pinned: bool) -> None:
    copier = DeviceBlockCopier(device, PythonBlockCopier())
    pages = Pages(machine, SHAPES["K and V apart"], 1)
    staging = Staging(pages.layout, THEIRS, copier if pinned else None)
    staging.gather(copier)
    copier.fence(THEIRS).mark()
    machine.launch(lambda: pages.fill(OURS, 88))
    staging.gather(copier)
    assert machine.is_busy(), "gather waited for a step that does not concern its blocks"


def scatter_waits_for_former_users(machine: Any, device: Device, pinned: bool) -> None:
    copier = DeviceBlockCopier(device, PythonBlockCopier())
    theirs, ours = (Pages(machine, SHAPES["MLA"], seed) for seed in (1, 2))
    staging = Staging(theirs.layout, THEIRS, copier if pinned else None)
    staging.gather(copier)
    machine.launch(lambda: ours.fill(OURS, 99))
    copier.fence(OURS)
    staging.scatter(copier, ours, OURS)
    machine.finish()
    assert (ours.of(OURS) == theirs.of(THEIRS)).all(), "a former step wrote over what was loaded"


def transfer_waits_on_both_sides(machine: Any, device: Device, pinned: bool) -> None:
    """A data server and a loader, as the workers of P and D run them."""
    sides = [Pages(machine, SHAPES["MLA"], seed) for seed in (1, 2)]
    copiers = [DeviceBlockCopier(device, make_block_copier()) for _ in sides]
    pinnings: Sequence[HostPinning] = copiers if pinned else [NoPinning() for _ in sides]
    transports = [
        Transports({SHARED_MEMORY: SharedMemoryTransferEngine(pinning)}) for pinning in pinnings
    ]
    pools = [
        StagingPool(each, 8, 1 << 20, memory=partial(SharedMapping, pinning=pinning))
        for each, pinning in zip(transports, pinnings, strict=True)
    ]
    pages = [
        WorkerPages(copier, (GroupPages.of(each.layout, 1, range(LAYERS)),))
        for copier, each in zip(copiers, sides, strict=True)
    ]
    grants, lease, num = Grants(), LeaseRef("prompt", 1), len(THEIRS)
    server = DataServer(
        host="127.0.0.1",
        transports=transports[0],
        pages=pages[0],
        pool=pools[0],
        grants=grants,
        allows_host=lambda host: host == "127.0.0.1",
        write_timeout_s=60.0,
        trust=Trust(),
    )
    loader = PeerLoader(transports[1].sessions, pages[1], pools[1], Trust())
    server.start()
    loader.start()
    grants.begin_step([Grant(lease, "epoch", (tuple(THEIRS),), num, num)])
    grants.end_step()
    admitted = (server.page_server.admit(lease, num),)
    try:
        for number in range(2):  # the threads take memory in the first load
            fence = copiers[0].fence(THEIRS)
            if number:
                machine.launch(lambda: sides[0].fill(THEIRS, 7))
            fence.mark()
            if number:
                machine.launch(lambda: sides[1].fill(OURS, 9))
            copiers[1].fence(OURS)
            blocks = (LoadBlocks(0, tuple(range(num)), tuple(OURS)),)
            load = LoadSpec(LoadId(number), admitted, "prompt", "epoch", blocks, True, 60.0)
            loader.start_load(load)
            loader.wait_all()
            [result] = loader.take_results()
            assert not result.cause, f"the load failed: {result.cause}"
        machine.finish()
        assert (sides[1].of(OURS) == 7).all(), "other bytes than the step of P computed"
    finally:
        loader.stop()
        server.stop()
        for pool in pools:
            pool.close()
        for each in transports:
            each.close()


FENCES: dict[Callable[[Any, Device, bool], None], tuple[str, ...]] = {
    gather_waits_for_its_step: ("wait", "synchronize"),
    gather_does_not_wait_for_later_steps: (),
    scatter_waits_for_former_users: ("wait",),
    transfer_waits_on_both_sides: ("wait",),
}
"""With each check the calls of the device without which it must fail."""


def attempt(check: Callable[[], None]) -> str:
    """What is wrong, or an empty text."""
    try:
        check()
    except AssertionError as wrong:
        return str(wrong)
    except Exception:  # noqa: BLE001 - a check's boundary: the others run all the same
        return traceback.format_exc()
    return ""


def run_checks(machine: Any) -> dict[str, str]:
    found = {}
    for way, pinned in (("", True), (", through a buffer", False)):
        for shape, sizes in SHAPES.items():
            check = partial(pages_go_and_come, machine, machine.device, pinned, sizes)
            found[f"bytes: {shape}{way}"] = attempt(check)
        check = partial(threads_do_not_mix, machine, machine.device, pinned)
        found[f"bytes: threads{way}"] = attempt(check)
        for fence, needed in FENCES.items():
            name = f"fences: {fence.__name__.replace('_', ' ')}{way}"
            found[name] = attempt(partial(fence, machine, machine.device, pinned))
            machine.finish()
            for call in needed:
                device: Any = Without(machine.device, call)
                said = attempt(partial(fence, machine, device, pinned))
                machine.finish()
                if said.startswith("Traceback"):
                    wrong = said
                else:
                    wrong = "" if said else "passes: it shows nothing"
                found[f"{name}, not without {call}"] = wrong
    return found


# Speeds ------------------------------------------------------------------------------------------


class NoHost(PythonBlockCopier):
    """Leaves out the pass through host memory, so that the device's part is seen by itself."""

    def gather(self, *args: Any, **options: Any) -> int:
        return 0


PARTS = (
    ("device", NoHost, False, 1),
    ("whole", make_block_copier, True, 1),
    ("buffered", make_block_copier, False, 1),
    ("threaded", make_block_copier, False, MAX_DEFAULT_THREADS),
)
"""The device's part by itself; a copy as engines make it, to and from memory that is pinned, with
the checksum; the same with memory that is not, by one thread and by several.
"""


def median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for number in range(rounds + 2):
        started = time.perf_counter()
        work()
        if number >= 2:  # the first take memory
            times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def copy_ms(device: Device, to: torch.Tensor, source: torch.Tensor, rounds: int) -> float:
    """Of all bytes at once: by cudaMemcpyAsync."""
    stream = device.new_stream()

    def copy() -> None:
        device.run(stream, partial(to.copy_, source, non_blocking=True))
        device.synchronize(stream)

    return median_ms(copy, rounds)


def speeds(machine: Any, layers: int, blocks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Of a prompt with so many blocks: whole, one layer of it, and of that one piece."""
    device = machine.device
    for shape, sizes in SHAPES.items():
        pages = Pages(machine, sizes, 1, (layers, blocks))
        in_a_piece = min(blocks, TransferConfig().staging_slot_bytes // sum(sizes))
        parts = (("prompt", layers, blocks), ("layer", 1, blocks), ("piece", 1, in_a_piece))
        for what, num_layers, num_blocks in parts:
            layout = pages.layout.for_layers(0, num_layers)
            order = np.random.default_rng(0).permutation(blocks)[:num_blocks]
            num_bytes = layout.num_bytes(num_blocks)
            pinned = device.pinned(num_bytes)
            flat = device.scratch(device.new_stream(), num_bytes)
            for way, one_copy in (("gather", (pinned, flat)), ("scatter", (flat, pinned))):
                row: dict[str, Any] = {
                    "shape": shape,
                    "what": what,
                    "way": way,
                    "mb": num_bytes / 1e6,
                }
                row["memcpy_ms"] = copy_ms(device, *one_copy, rounds)
                for part, host, pins, num_threads in PARTS:
                    copier = DeviceBlockCopier(device, host(), num_threads)
                    staging = Staging(layout, order.tolist(), copier if pins else None)
                    copy = partial(getattr(copier, way), layout, order, staging.region)
                    ms = median_ms(copy, rounds)
                    row |= {f"{part}_ms": ms, f"{part}_ratio": row["memcpy_ms"] / ms}
                    staging.close()
                    copier.close()
                yield row


# Engines -----------------------------------------------------------------------------------------


def engines(machine: Any, model: str | None) -> dict[str, str]:
    if model is None:
        return {"skipped": "no --model"}
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed"}
    command = [sys.executable, str(EXAMPLE), "--model", model, "--verify"]
    command += ["--device", machine.name, "--one-device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return {"ok": done.stdout[-2000:]}
    return {"failed": (done.stdout + done.stderr)[-6000:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="without a GPU; speeds mean nothing")
    parser.add_argument("--out", type=Path, help="file for the result, which is printed as well")
    parser.add_argument("--model", help="folder of a small model, for the engines")
    parser.add_argument("--layers", type=int, default=32, help="of the prompt for speeds")
    parser.add_argument("--blocks", type=int, default=256, help="of the prompt for speeds")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; --cpu runs without one")
    machine = MakeBelieve() if options.cpu else Gpu()
    found = run_checks(machine)
    for name, wrong in found.items():
        print(f"{'fail' if wrong else 'ok':5} {name} {wrong}", flush=True)
    rows = []
    for row in speeds(machine, options.layers, options.blocks, options.rounds):
        rows.append(row)
        print(
            f"{row['way']:8}{row['what']:7}{row['shape']:14}{row['mb']:8.1f} MB  one copy"
            f" {row['memcpy_ms']:8.3f} ms, without checksum {row['device_ratio']:.2f} of its speed,"
            f" with it {row['whole_ratio']:.2f}, through a buffer {row['buffered_ratio']:.2f}"
            f" (by {MAX_DEFAULT_THREADS} threads {row['threaded_ratio']:.2f})",
            flush=True,
        )
    answers = engines(machine, options.model)
    print(*(f"engines {state}: {text}" for state, text in answers.items()))
    result = {
        "device": "cpu" if options.cpu else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "ok": not any(found.values()) and "failed" not in answers,
        "checks": {name: wrong or "ok" for name, wrong in found.items()},
        "speeds": rows,
        "engines": answers,
    }
    text = json.dumps(result)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    sys.exit(not result["ok"])


if __name__ == "__main__":
    main()
