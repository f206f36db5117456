# SPDX-License-Identifier: Apache-2.0
"""Waits that end in time whatever signals come."""

from __future__ import annotations

import ast
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_ascend_pd

PACKAGE = Path(vllm_ascend_pd.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def simple_queues(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and "SimpleQueue" in ast.unparse(node.annotation):
            yield name_of(node.target)
        if isinstance(node, ast.Assign) and "SimpleQueue" in ast.unparse(node.value):
            yield from map(name_of, node.targets)


def waited_for(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_timed = any(keyword.arg == "timeout" for keyword in node.keywords)
            if node.func.attr == "get" and is_timed:
                yield name_of(node.func.value)


def test_nothing_waits_for_a_while_for_a_queue_that_a_signal_makes_wait_for_ever() -> None:
    trees = [ast.parse(file.read_text()) for file in FILES]
    waits = {name for tree in trees for name in waited_for(tree)}
    assert {"_answers", "answers", "batches"} <= waits
    for file, tree in zip(FILES, trees, strict=True):
        assert not set(waited_for(tree)) & set(simple_queues(tree)), file


def test_such_a_queue_waits_no_longer_beside_a_slow_handler() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(queue.Empty):
            queue.Queue[int]().get(timeout=0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
