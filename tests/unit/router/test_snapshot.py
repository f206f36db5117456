# SPDX-License-Identifier: Apache-2.0
"""What several workers counted, added up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_ascend_pd.router.http_client import EngineClient
from vllm_ascend_pd.router.instances import Instance, InstanceSpec
from vllm_ascend_pd.router.prefix.index import Holders, PrefixIndex
from vllm_ascend_pd.router.snapshot import (
    NUM_RECENT_ERRORS,
    PREFIX,
    SECONDS,
    Histogram,
    InstanceSnapshot,
    RecentError,
    Snapshot,
    add_up,
)
from vllm_ascend_pd.router.trace import NUM_TIMELINES, Stage, Timeline


def instance(name: str, **changes: Any) -> InstanceSnapshot:
    fields: dict[str, Any] = {
        "instance_id": name,
        "url": "http://127.0.0.1:1",
        "data_parallel_rank": None,
        "role": "decode",
        "used_for": "decode",
        "num_decoding": 1,
        "num_background": 1,
        "source": "static",
        "state": "ready",
        "breaker": "closed",
        "is_available": True,
        "models": (),
        "num_admitted": 1,
        "num_active": 1,
        "num_active_tokens": 10,
        "num_connections": 2,
        "num_running": 3.0,
        "num_waiting": 0.0,
        "kv_usage": 0.5,
        "prefix_hit_rate": None,
        "prefix_index": "exact",
        "num_prefix_blocks": 7,
        "load_read_at": 1.0,
        "num_failures": 0,
        "errors": [],
        **changes,
    }
    return InstanceSnapshot(**fields)


def timeline(ended_at: float) -> Timeline:
    return Timeline(
        ended_at=ended_at,
        request_id="r",
        path="/v1/completions",
        model="m",
        order="prefill-first",
        outcome="ok",
        status=200,
        num_attempts=1,
        error="",
        ttft_s=0.1,
        start_s=5.0,
        end_s=5.2,
        stages=[Stage("decode", "d", 5.0, 5.2, 5.1)],
    )


@pytest.mark.parametrize(("index", "shown"), [(None, None), (PrefixIndex(Holders()), "fallback")])
def test_index_that_knows_no_block_is_an_index(
    index: PrefixIndex | None, shown: str | None
) -> None:
    spec = InstanceSpec(instance_id="d", url="http://127.0.0.1:1", role="decode", source="static")
    real = Instance(spec, EngineClient(spec.url, connect_timeout_s=1), 3)
    real.prefix_index = index
    snapshot = InstanceSnapshot.of(real)
    assert (snapshot.prefix_index, snapshot.num_prefix_blocks) == (shown, 0)


def counted(**counts: float) -> Snapshot:
    values = [((outcome,), count) for outcome, count in counts.items()]
    return Snapshot(counters={"requests": values}, num_requests=1)


def test_counts_are_added_and_those_of_the_ended_stay() -> None:
    total = add_up([counted(ok=5)], [counted(ok=2, failed=1), counted(ok=3)])
    assert total.sample("requests_total", outcome="ok") == 10
    assert total.sample("requests_total", outcome="failed") == 1
    assert total.num_requests == 2


def test_memory_is_that_of_the_processes_that_run() -> None:
    total = add_up([Snapshot(memory_bytes=5)], [Snapshot(memory_bytes=2), Snapshot(memory_bytes=3)])
    assert total.sample("memory_bytes") == 5


def test_histograms_are_added() -> None:
    first, second = Histogram(), Histogram()
    first.observe(0.003)
    second.observe(0.003)
    second.observe(1000)
    total = add_up([], [Snapshot(histograms={"ttft": h}) for h in (first, second)])
    assert total.histograms["ttft"].counts[2] == 2
    assert total.histograms["ttft"].counts[len(SECONDS)] == 1
    assert total.sample("ttft_seconds_bucket", le="+Inf") == 3
    assert sum(first.counts) == 1  # what was added up is as it was


def test_of_two_views_of_an_engine_the_worse_and_the_newer_count() -> None:
    one = instance("d", load_read_at=5.0, num_running=4.0)
    other = instance("d", breaker="open", is_available=False, prefix_index="degraded")
    total = add_up([], [Snapshot(instances=[one]), Snapshot(instances=[other, instance("e")])])
    d, e = total.instances
    assert (d.breaker, d.is_available, d.prefix_index) == ("open", False, "degraded")
    assert (d.num_active, d.num_active_tokens, d.num_connections) == (2, 20, 4)
    assert d.num_running == 4.0
    assert e.num_active == 1
    assert one.num_active == 1


def test_what_an_engine_does_not_tell_is_not_0() -> None:
    """An alert would take it for one that computes nothing."""
    read = instance("read", load_read_at=5.0, num_running=0.0)
    page = Snapshot(instances=[read, instance("unread", load_read_at=0.0)]).expose().decode()
    for name in ("running", "waiting", "kv_usage"):
        series = [it for it in page.splitlines() if it.startswith(f"{PREFIX}instance_{name}{{")]
        assert len(series) == 1
        assert 'instance="read"' in series[0]


def test_recent_errors_are_the_latest_of_all() -> None:
    first = [RecentError(float(at), "a") for at in range(0, 40, 2)]
    second = [RecentError(float(at), "b") for at in range(1, 41, 2)]
    total = add_up([], [Snapshot(instances=[instance("d", errors=e)]) for e in (first, second)])
    found = [error.at for error in total.instances[0].errors]
    assert found == [float(at) for at in range(40 - NUM_RECENT_ERRORS, 40)]


def test_last_timelines_are_those_of_all_also_of_workers_that_ended() -> None:
    first, second, third = (
        Snapshot(timelines=[timeline(float(at)) for at in range(start, NUM_TIMELINES, 3)])
        for start in range(3)
    )
    newest = Snapshot(timelines=[timeline(float(NUM_TIMELINES))])
    total = add_up([first], [second, third, newest])
    assert [one.ended_at for one in total.timelines] == [*range(1, NUM_TIMELINES + 1)]


def test_break_even_is_that_of_the_most_careful_worker() -> None:
    total = add_up([], [Snapshot(break_evens={"m": 90}), Snapshot(break_evens={"m": 45, "n": 0})])
    assert total.break_evens == {"m": 45, "n": 0}
    assert total.sample("break_even_tokens", model="m") == 45


def test_it_crosses_processes_unchanged() -> None:
    snapshot = Snapshot(
        counters={"legs": [(("d", "decode", "ok"), 3.0)], "requests": []},
        histograms={"ttft": Histogram()},
        instances=[instance("d", errors=[RecentError(1.0, "x")])],
        break_evens={"m": 1},
        timelines=[timeline(1.0)],
    )
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot
