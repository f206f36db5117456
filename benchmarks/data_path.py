#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The transfer alone, without engines: pages of one process into pages of another.

A data server and a loader, as the workers of a producer and a consumer run them, in two processes:
packed with a checksum, written piece by piece or through a ring of shared memory, verified, put in
place. In the same run, in turns: Mooncake's own write of the same bytes in one piece, a TCP
socket, a memcpy.

    python benchmarks/data_path.py
    python benchmarks/data_path.py --transport shared_memory
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from handover import RawTransfer

from vllm_ascend_pd.backends.block_copy import (
    GroupPages,
    PageLayout,
    Region,
    WorkerPages,
    make_block_copier,
)
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.shared_memory import SharedMemoryTransferEngine
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import MOONCAKE, SHARED_MEMORY, Transports
from vllm_ascend_pd.config import TransferConfig
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.net.trust import Secret, Trust
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.types import LeaseRef, LoadId

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LEASE = LeaseRef("prompt", 1)


def make_pages(options: argparse.Namespace) -> tuple[np.ndarray, PageLayout]:
    memory = np.ones(options.layers * options.blocks * options.page_bytes, dtype=np.uint8)
    layer_bytes = options.blocks * options.page_bytes
    offsets = np.arange(options.layers, dtype=np.int64) * layer_bytes
    region = Region(memory.ctypes.data, memory.nbytes)
    return memory, PageLayout.packed(region, offsets, options.page_bytes)


def one_group(layout: PageLayout) -> tuple[GroupPages, ...]:
    """Of blocks of one token."""
    return (GroupPages.of(layout, 1, range(len(layout.layer_offsets))),)


def make_trust(options: argparse.Namespace) -> Trust:
    return Trust(Secret(b"0123456789abcdef" * 2) if options.secret else None)


def open_transport(name: str) -> Transports:
    if name == SHARED_MEMORY:
        return Transports({name: SharedMemoryTransferEngine()})
    return Transports({name: MooncakeTransferEngine("127.0.0.1")})


def produce(pipe: Connection, options: argparse.Namespace) -> None:
    memory, layout = make_pages(options)
    memory[:] = np.arange(memory.size, dtype=np.uint8)
    transports = open_transport(options.transport)
    grants = Grants()
    ids = tuple(range(options.blocks))
    grants.begin_step([Grant(LEASE, "epoch", (ids,), len(ids), len(ids))])
    server = DataServer(
        host="127.0.0.1",
        transports=transports,
        pages=WorkerPages(make_block_copier(), one_group(layout)),
        pool=StagingPool(transports, options.slots, options.slot_bytes),
        grants=grants,
        allows_host=lambda host: host == "127.0.0.1",
        write_timeout_s=10,
        trust=make_trust(options),
    )
    server.start()
    pipe.send(server.page_server.admit(LEASE, len(ids)))
    pipe.recv()
    server.stop()
    transports.close()


def main() -> None:
    defaults = TransferConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=32, help="of 128 tokens of the bench model")
    parser.add_argument("--page-bytes", type=int, default=196608, help="of a block in a layer")
    parser.add_argument("--slots", type=int, default=defaults.staging_slots)
    parser.add_argument("--slot-bytes", type=int, default=defaults.staging_slot_bytes)
    parser.add_argument("--transport", choices=(MOONCAKE, SHARED_MEMORY), default=MOONCAKE)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tail", action="store_true", help="the last block travels first")
    parser.add_argument("--secret", action="store_true", help="with security.secret_file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    producer = context.Process(target=produce, args=(child, options))
    producer.start()
    admitted = pipe.recv()
    memory, layout = make_pages(options)
    transports = open_transport(options.transport)
    pool = StagingPool(transports, options.slots, options.slot_bytes)
    pages = WorkerPages(make_block_copier(), one_group(layout))
    loader = PeerLoader(transports.sessions, pages, pool, make_trust(options))
    loader.start()
    raw = RawTransfer(memory.nbytes)
    ids = tuple(range(options.blocks))
    times: dict[str, list[float]] = {}
    for number in range(options.rounds + 3):
        memory[:] = 0
        spec = LoadSpec(
            load_id=LoadId(number),
            peers=(admitted,),
            transfer_id="prompt",
            epoch="epoch",
            blocks=(LoadBlocks(0, ids, ids, options.tail),),
            in_step=True,
            timeout_s=10.0,
        )
        started = time.perf_counter()
        loader.start_load(spec)
        loader.wait_all()
        measured = {"transfer": (time.perf_counter() - started) * 1000}
        [result] = loader.take_results()
        assert not result.cause, result
        assert (memory == np.arange(memory.size, dtype=np.uint8)).all()
        measured |= raw.measure()
        if number >= 3:  # the first rounds open connections and touch memory
            for name, value in measured.items():
                times.setdefault(name, []).append(value)
    raw.close()
    loader.stop()
    transports.close()
    pipe.send(None)
    producer.join()
    print(
        f"{memory.nbytes / 1e6:.1f} MB by {options.transport}, {options.rounds} rounds;"
        " medians in ms (min..max)"
    )
    for name, values in times.items():
        middle = statistics.median(values)
        print(
            f"  {name:>9} {middle:8.1f}  ({min(values):.1f}..{max(values):.1f})"
            f"  {memory.nbytes / middle / 1e6:6.2f} GB/s"
        )
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(times["transfer"], times["raw"], strict=True)
    )
    print(f"transfer / raw = {ratio:.3f}")
    ratio = statistics.median(
        theirs / ours for ours, theirs in zip(times["transfer"], times["memcpy"], strict=True)
    )
    print(f"speed of transfer / speed of memcpy = {ratio:.3f}")


if __name__ == "__main__":
    main()
