# SPDX-License-Identifier: Apache-2.0
"""P and D on two hosts, as far as the network goes: a cable that is cut, and a slow one.

Each engine runs in a network namespace of its own; a pair of virtual interfaces is the cable.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import Engine, assert_no_leak, make_prompt
from tests.integration.test_fault_matrix import (
    EVERY_LAYER,
    MOMENTS,
    NUM_OUTPUT,
    PROMPTS,
    TIMES,
    Crowd,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

PRODUCER_IP = "10.213.0.1"
CONSUMER_IP = "10.213.0.2"
OVER_THE_CABLE = {**TIMES, "transport": "mooncake"}
"""They share a file system, so they would find each other's memory."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Cable:
    """Two namespaces and what joins them."""

    def __init__(self) -> None:
        self.producer, self.consumer = (f"pd-{os.getpid()}-{side}" for side in "pd")
        self._ends = {self.producer: PRODUCER_IP, self.consumer: CONSUMER_IP}

    def lay(self) -> None:
        for name in self._ends:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = ("cable", "netns", self.producer, "type", "veth")
        ip("link", "add", *ends, "peer", "name", "cable", "netns", self.consumer)
        for name, address in self._ends.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")

    def cut(self) -> None:
        """From now on what either side sends is lost, without a word."""
        ip("-n", self.consumer, "link", "set", "cable", "down")

    def mend(self) -> None:
        ip("-n", self.consumer, "link", "set", "cable", "up")

    def slow_down(self, mbit_per_s: int) -> None:
        """What the producer sends."""
        rate = ("rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "500ms")
        command = ["tc", "-n", self.producer, "qdisc", "add", "dev", "cable", "root", "tbf", *rate]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this kernel has no token bucket filter: {done.stderr.strip()}")

    def remove(self) -> None:
        for name in self._ends:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc (Debian: iproute2)")
    cable = Cable()
    try:
        try:
            cable.lay()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces are not allowed here: {e.stderr.strip()}")
        yield cable
    finally:
        cable.remove()


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o600)
    return str(file)


@pytest.fixture
def producer(engines: Engines, cable: Cable, secret: str) -> Engine:
    return engines.own(
        "kv_producer",
        transfer=OVER_THE_CABLE,
        num_blocks=700,
        network=cable.producer,
        kv_ip=PRODUCER_IP,
        allowed_peers=(CONSUMER_IP,),
        secret_file=secret,
    )


@pytest.fixture
def consumer(engines: Engines, cable: Cable, secret: str) -> Engine:
    return engines.own(
        "kv_consumer",
        transfer={**OVER_THE_CABLE, **EVERY_LAYER},
        num_blocks=700,
        network=cable.consumer,
        kv_ip=CONSUMER_IP,
        allowed_peers=(PRODUCER_IP,),
        secret_file=secret,
    )


def wait_for_transfers(producer: Engine, consumer: Engine, single: SingleEngine, part: str) -> None:
    """They work again by themselves, and meanwhile every answer is right.

    Mooncake's connections still wait for the end of TCP's backoff when the cable is mended.
    """
    deadline = time.monotonic() + 40
    for number in itertools.count():
        prompt = make_prompt(100, f"{part} {number}")
        answer = consumer.ask(prompt, 4, producer.prefill(prompt))
        assert answer.token_ids == single(prompt, 4).token_ids
        if answer.outcome == "loaded":
            assert answer.provenance["transport"] == "mooncake"
            return
        assert time.monotonic() < deadline, answer.outcome


@pytest.mark.parametrize("moment", MOMENTS)
def test_cable_is_cut_and_mended(
    cable: Cable, producer: Engine, consumer: Engine, single: SingleEngine, moment: str
) -> None:
    before = producer.counts(), consumer.counts()
    crowd = Crowd(producer, consumer)
    crowd.reach(moment)
    cable.cut()
    consumer.start_run(timeout=60)
    producer.run(timeout=60)
    answers = consumer.join_run(timeout=60)
    for name, prompt in PROMPTS.items():
        assert answers[name].token_ids == single(prompt, NUM_OUTPUT).token_ids, name
    cable.mend()
    assert_no_leak(producer, before[0], timeout=60)
    assert_no_leak(consumer, before[1], timeout=60)
    wait_for_transfers(producer, consumer, single, f"mended {moment}")


def test_slow_cable(cable: Cable, producer: Engine, consumer: Engine, single: SingleEngine) -> None:
    """What does not come in time is computed; what can wait for it comes."""
    cable.slow_down(mbit_per_s=20)
    before = producer.counts(), consumer.counts()
    crowd = Crowd(producer, consumer)
    consumer.start_run(timeout=90)
    producer.run(timeout=90)
    answers = consumer.join_run(timeout=90)
    for name, prompt in PROMPTS.items():
        assert answers[name].token_ids == single(prompt, NUM_OUTPUT).token_ids, name
    outcomes = {answers[name].outcome for name in crowd.early}
    assert outcomes <= {"loaded", "deadline", "not_needed", "peer_unreachable"}, outcomes
    assert_no_leak(producer, before[0], timeout=60)
    assert_no_leak(consumer, before[1], timeout=60)
