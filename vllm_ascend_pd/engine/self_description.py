# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself to a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.registrar import find_http_url
from vllm_ascend_pd.engine.vllm_api.config import data_parallel_rank, rank_at_front_end
from vllm_ascend_pd.engine.vllm_api.events import endpoint_of_rank
from vllm_ascend_pd.registration import (
    ROLE_OF,
    KVEndpoint,
    KVEvents,
    Registration,
    default_id,
    name_of_rank,
)

if TYPE_CHECKING:
    from vllm_ascend_pd.config import PDConfig, RouterLink
    from vllm_ascend_pd.engine.scheduler.maker import Maker
    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig
    from vllm_ascend_pd.engine.vllm_api.types import Scheduler
    from vllm_ascend_pd.types import Endpoint, Epoch


def describe(
    scheduler: Scheduler,
    config: PDConfig,
    epoch: Epoch,
    maker: Maker,
    endpoint: Endpoint | None,
) -> Registration:
    """``endpoint`` is where consumers reach this engine; ``None`` when it produces nothing."""
    names = scheduler.vllm_config.model_config.served_model_name
    kv = None
    if endpoint is not None:
        kv = KVEndpoint(
            engine_id=config.engine_id,
            host=endpoint.host,
            port=endpoint.port,
            key=endpoint.key,
            supports_concurrent=True,
        )
    return Registration(
        url=find_http_url(config.router, config.host),
        role=config.router.role or ROLE_OF[config.role.value],
        data_parallel_rank=rank_at_front_end(scheduler.vllm_config),
        epoch=epoch,
        models=(names,) if isinstance(names, str) else tuple(names or ()),
        labels=config.router.labels,
        fingerprint=maker.fingerprint,
        sampling=maker.sampling,
        kv=kv,
        kv_events=_kv_events(scheduler.vllm_config, config.host),
        block_size=scheduler.block_size,
        num_blocks=scheduler.kv_cache_config.num_blocks,
    )


def name_at_router(vllm_config: VllmConfig, link: RouterLink, description: Registration) -> str:
    """What is given may be the same for all ranks, whatever front end each has; URLs differ."""
    if link.instance_id:
        return name_of_rank(link.instance_id, data_parallel_rank(vllm_config))
    return name_of_rank(default_id(description.url), description.data_parallel_rank)


def _kv_events(vllm_config: VllmConfig, host: str) -> KVEvents | None:
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    replay, rank = events.replay_endpoint, vllm_config.parallel_config.data_parallel_index

    def reachable(endpoint: str) -> str:
        """A publisher that binds to every address is reached at the one of this engine."""
        address = f"[{host}]" if ":" in host else host
        for everywhere in ("*", "0.0.0.0", "[::]"):
            endpoint = endpoint.replace(f"tcp://{everywhere}:", f"tcp://{address}:")
        return endpoint_of_rank(endpoint, rank)

    if not endpoint_is_tcp(events.endpoint):
        return None
    return KVEvents(
        endpoint=reachable(events.endpoint),
        replay_endpoint=reachable(replay) if replay and endpoint_is_tcp(replay) else None,
        topic=events.topic,
    )


def endpoint_is_tcp(endpoint: str) -> bool:
    """Only such an endpoint can be reached by a router on another host."""
    return endpoint.startswith("tcp://")
