# SPDX-License-Identifier: Apache-2.0
"""Requests of one engine move to two others, and from those to one; with drafts and without.

In the real schedulers with real control threads between them; workers are simulated.
"""

from __future__ import annotations

import time

import pytest

from tests.schedulers.harness import BLOCK_SIZE, POLL_LIMIT_S, SLOWLY, Engine, Engines, prompt_of
from tests.schedulers.test_move_faults import coming, shape  # noqa: F401

NUM_REQUESTS = 6
NUM_OUTPUT = 400
PROMPTS = [prompt_of(3 * BLOCK_SIZE + i, 1000 + 100 * i) for i in range(NUM_REQUESTS)]


def hand_over(turn: int, sources: list[Engine], targets: list[Engine]) -> None:
    """All that the sources run, evenly; they compute slowly, so that nothing ends before."""
    ways = [(sources[i % len(sources)], targets[i % len(targets)]) for i in range(NUM_REQUESTS)]
    for i, (prompt, (source, target)) in enumerate(zip(PROMPTS, ways, strict=True)):
        params = {"resume": coming(f"{turn} of {i}", source, prompt)}
        sampling = {"max_tokens": NUM_OUTPUT, "temperature": 0}
        target.add(f"{turn + 1} of {i}", prompt, params, **sampling)

    def is_there(i: int) -> bool:
        """And goes on."""
        source, target = ways[i]
        num_left = len(source.tokens[f"{turn} of {i}"])
        return len(target.tokens[f"{turn + 1} of {i}"]) > num_left

    deadline = time.monotonic() + POLL_LIMIT_S
    num_turns = 0
    while not all(map(is_there, range(NUM_REQUESTS))):
        assert time.monotonic() < deadline, [one.counts() for one in (*sources, *targets)]
        num_turns += 1
        for source in sources:
            if source.scheduler.pd.has_pending_work() or num_turns % SLOWLY == 0:
                source.step()
        for target in targets:
            target.scheduler.pd.has_pending_work()  # as an engine's loop asks
            target.step()
            for load_id, load in list(target.worker.parked.items()):
                grant = target.worker.grant_of(load)
                if grant is not None and grant.num_ready >= (load.num_awaited or 0):
                    target.worker.end_parked(load_id)
    for source in sources:
        while source.in_flight:
            source.finish_step()


@pytest.mark.parametrize(
    ("shape", "num_drafts"),
    [("full", 0), ("windows", 0), ("states", 0), ("full", 2), ("windows", 2)],
    indirect=["shape"],
)
@pytest.mark.usefixtures("shape")
def test_from_one_to_two_and_back_to_one(engines: Engines, num_drafts: int) -> None:
    """States beside a drafter are not copied."""

    def make() -> Engine:
        return engines.make(
            "kv_both", 400, num_drafts=num_drafts, peer_timeout_s=60, max_freeze_s=60
        )

    one, left, right = make(), make(), make()
    one.worker.peers += [left.worker, right.worker]
    for i, prompt in enumerate(PROMPTS):
        one.add(f"0 of {i}", prompt, max_tokens=NUM_OUTPUT, temperature=0)
    one.run(lambda: all(len(given) >= 3 for given in one.tokens.values()))
    hand_over(0, [one], [left, right])
    hand_over(1, [left, right], [one])
    one.run_to_end()
    for i in range(NUM_REQUESTS):
        between = (left, right)[i % 2]
        one.expect_tokens(f"2 of {i}", NUM_OUTPUT)
        between.expect_tokens(f"1 of {i}", len(between.tokens[f"1 of {i}"]))
        assert one.params[f"0 of {i}"] == between.params[f"1 of {i}"] == {"moved": True}
        assert one.params[f"2 of {i}"] == {"resume": {"outcome": "exact"}}
    assert bool(one.worker.num_accepted) is bool(num_drafts)
