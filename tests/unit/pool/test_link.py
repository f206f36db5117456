# SPDX-License-Identifier: Apache-2.0
"""What carries the pool's messages between processes."""

from __future__ import annotations

import socket
from pathlib import Path

from vllm_ascend_pd.net.connection import MAX_WAITING_BYTES
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.messages import Lookup

LIMIT_S = 10.0


def test_worker_that_reads_late_gets_all_messages(tmp_path: Path) -> None:
    """A save that is lost would keep its blocks pinned for ever."""
    path = str(tmp_path / "pool")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        link = PoolLink("test", lambda message: None)
        link.connect(path)
        link.start()
        worker, _ = listening.accept()
    worker.settimeout(LIMIT_S)
    hashes = bytes(2 << 20)
    num_messages = MAX_WAITING_BYTES // len(hashes) + 4
    for i in range(num_messages):
        link.send(Lookup(i, hashes, 32, bytes(1), 0.0))
    worker.sendall(bytes(4))
    num_left = num_messages * len(hashes)
    while num_left > 0:
        num_left -= len(worker.recv(1 << 20))
    worker.close()
    link.stop()
    assert num_left <= 0
