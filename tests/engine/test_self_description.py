# SPDX-License-Identifier: Apache-2.0
"""What an engine core says of itself to a router, by what vLLM's configuration says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.engine.self_description import describe, name_at_router
from vllm_ascend_pd.registration import Registration
from vllm_ascend_pd.types import Epoch


def described(
    engine_id: str, rank: int, endpoint: str = "tcp://*:5557", **parallel: Any
) -> Registration:
    """``parallel``: fields of vLLM's configuration."""
    scheduler, config = configured(engine_id, rank, endpoint, **parallel)
    maker: Any = SimpleNamespace(fingerprint="f", sampling={})
    return describe(scheduler, config, Epoch("e"), maker, None)


def named(rank: int, instance_id: str | None = None, **parallel: Any) -> str:
    """At a router."""
    scheduler, config = configured(f"p_dp{rank}", rank, "tcp://*:5557", **parallel)
    link = msgspec.structs.replace(config.router, instance_id=instance_id)
    told = described(f"p_dp{rank}", rank, **parallel)
    return name_at_router(scheduler.vllm_config, link, told)


def configured(engine_id: str, rank: int, endpoint: str, **parallel: Any) -> tuple[Any, PDConfig]:
    """A scheduler, as far as it is asked, and the configuration of this package."""
    parallel = {
        "data_parallel_index": rank,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        **parallel,
    }
    transfer: Any = SimpleNamespace(
        kv_role="kv_producer",
        engine_id=engine_id,
        kv_ip="127.0.0.1",
        kv_port=0,
        kv_connector_extra_config={"router": {"url": "http://r:1", "http_url": "http://e:2"}},
    )
    events = SimpleNamespace(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint="tcp://0.0.0.0:5600",
        topic="",
    )
    scheduler: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="tiny"),
            parallel_config=SimpleNamespace(**parallel),
            kv_transfer_config=transfer,
            kv_events_config=events,
        ),
        block_size=16,
        kv_cache_config=SimpleNamespace(num_blocks=8),
    )
    return scheduler, PDConfig.from_kv_transfer_config(transfer)


@pytest.mark.parametrize(
    ("engine_id", "rank", "found"), [("p", 0, None), ("p_dp0", 0, 0), ("p_dp1", 1, 1)]
)
def test_rank_is_told_by_index_and_engine_id(engine_id: str, rank: int, found: int | None) -> None:
    """Of a dense model vLLM tells each rank that it is alone."""
    assert described(engine_id, rank).data_parallel_rank == found


def test_rank_with_a_front_end_of_its_own_has_no_number_there() -> None:
    """That takes 0 only, whichever rank it is. Its events are where vLLM has the rank publish."""
    told = described("p_dp1", 1, data_parallel_external_lb=True)
    assert told.data_parallel_rank is None
    assert told.kv_events is not None
    assert told.kv_events.endpoint == "tcp://127.0.0.1:5558"


ALONE: dict[str, Any] = {"data_parallel_external_lb": True}
SECOND_PAIR: dict[str, Any] = {"data_parallel_hybrid_lb": True, "data_parallel_rank_local": 1}


def test_rank_whose_front_end_has_the_last_ones_is_counted_among_these() -> None:
    told = described("p_dp3", 3, **SECOND_PAIR)
    assert told.data_parallel_rank == 1
    assert told.kv_events is not None
    assert told.kv_events.endpoint == "tcp://127.0.0.1:5560"


@pytest.mark.parametrize(
    ("parallel", "name"), [({}, "e:2-dp3"), (ALONE, "e:2"), (SECOND_PAIR, "e:2-dp1")]
)
def test_ranks_may_share_a_name_as_no_two_have_one_url(parallel: dict[str, Any], name: str) -> None:
    """What is given is completed by the rank, and the address by what requests name there."""
    assert named(3, "p", **parallel) == "p-dp3"
    assert named(3, **parallel) == name


@pytest.mark.parametrize("everywhere", ["*", "0.0.0.0", "[::]"])
def test_events_published_everywhere_are_listened_to_here(everywhere: str) -> None:
    events = described("p", 0, endpoint=f"tcp://{everywhere}:5557").kv_events
    assert events is not None
    assert events.endpoint == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(("rank", "ports"), [(0, ("5557", "5600")), (1, ("5558", "5601"))])
def test_each_rank_names_the_port_on_which_vllm_has_it_publish(
    rank: int, ports: tuple[str, str]
) -> None:
    events = described(f"p_dp{rank}", rank).kv_events
    assert events is not None
    assert (events.endpoint, events.replay_endpoint) == tuple(
        f"tcp://127.0.0.1:{port}" for port in ports
    )


def test_events_on_a_socket_of_the_host_are_not_told() -> None:
    """vLLM itself has no such endpoint for a rank beside the first."""
    assert described("p_dp0", 0, "ipc:///run/events").kv_events is None
