# SPDX-License-Identifier: Apache-2.0
"""What every test needs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from vllm_ascend_pd import envs
from vllm_ascend_pd.log_limit import LimitRepeats

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

WAITING = ("contract", "e2e", "router", "schedulers")
"""Folders whose tests mostly wait."""
settings.register_profile("patient", deadline=None)  # a busy host is no fault
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(
        "stress", "random operations on real engines (tests/integration/stress)"
    )
    group.addoption(
        "--stress-rounds",
        type=int,
        default=8,
        help="how many rounds of them each test does (%(default)s)",
    )
    group.addoption(
        "--stress-seed",
        type=int,
        default=1,
        help="what is drawn (%(default)s); 0: something new, which is printed",
    )
    group = parser.getgroup("gpu", "engines on a GPU (tests/integration)")
    group.addoption("--gpu", action="store_true", help="all of them on the GPU of this host")
    group.addoption(
        "--gpu-graphs",
        choices=["none", "full", "piecewise"],
        default="none",
        help="CUDA graphs there: for steps of one token each, or for all of them (%(default)s)",
    )
    group = parser.getgroup("model-runner-v2", "engines with Model Runner V2 (tests/integration)")
    group.addoption(
        "--triton",
        metavar="FOLDER",
        type=Path,
        help="where Triton lies, which runs the kernels of Model Runner V2 on the CPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ[envs.STATE_ERRORS] = "1"  # engines in other processes inherit it
    # Before anybody imports torch: tests run beside each other, and threads of a parallel region
    # spin for cores that others compute on.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Native modules say what is left when the process ends, and would say that of all that is
    # frozen. Not sooner: pytest looks for garbage five times when its session ends.
    atexit.register(gc.unfreeze)
    config.option.stress_seed = config.option.stress_seed or random.SystemRandom().randrange(
        1 << 32
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays, and to look for garbage among it again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests mostly wait come between those whose tests mostly compute: processes that
    take one file after another then do both, and keep the cores busy.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def of_folder(name: str) -> list[Path]:
        return [path for path in files if path.is_relative_to(Path(__file__).parent / name)]

    computing = of_folder("integration")
    order = list(files)
    for waiting in map(of_folder, WAITING) if computing else ():
        for number, path in enumerate(waiting):
            order.remove(path)
            order.insert(order.index(computing[number * len(computing) // len(waiting)]), path)
    items[:] = [item for path in order for item in files[path]]


def pytest_report_header(config: pytest.Config) -> str:
    return f"stress seed: {config.getoption('--stress-seed')}"


@pytest.fixture(scope="session", autouse=True)
def descriptors_are_closed() -> Iterator[None]:
    """Many thousand tests run in one process."""
    yield
    kinds: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            kinds[os.readlink(entry.path).partition(":[")[0]] += 1
    assert kinds.total() < 512, kinds.most_common(5)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """What vLLM and torch have brought along is not collected again and again.

    A full collection of it stops all threads for half a second and more, which is longer than some
    deadlines here. vLLM's own processes freeze their heap, too, when they have started.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unlimited_repeats() -> None:
    """What other tests have logged leaves out no line of this one."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("vllm_ascend_pd.") and isinstance(logger, logging.Logger):
            for limit in logger.filters:
                if isinstance(limit, LimitRepeats):
                    limit.forget()
