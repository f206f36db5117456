# SPDX-License-Identifier: Apache-2.0
"""The live page at ``/`` and the JSON that it shows."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from vllm_ascend_pd import __version__
from vllm_ascend_pd.router.metrics import OUTCOMES

if TYPE_CHECKING:
    from vllm_ascend_pd.router.app import Router
    from vllm_ascend_pd.router.instances import Instance

_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> web.Response:
    """One file, nothing from elsewhere."""
    text = files("vllm_ascend_pd.router").joinpath("page.html").read_text()
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}
    return web.Response(text=text, content_type="text/html", headers=headers)


def status(router: Router) -> dict[str, Any]:
    """What the router is doing, as plain JSON values."""
    metrics = router.metrics
    num_first_bytes = sum(metrics.ttft.counts)
    return {
        "version": __version__,
        "policy": router.policy.name,
        "order": router.config.order,
        "in_progress": metrics.num_requests,
        "requests": {
            outcome: int(metrics.value("requests_total", outcome=outcome)) for outcome in OUTCOMES
        },
        "ttft_mean_s": metrics.ttft.total / num_first_bytes if num_first_bytes else None,
        "instances": [_instance(instance) for instance in router.registry],
    }


def _instance(instance: Instance) -> dict[str, Any]:
    load = instance.load
    return {
        "instance_id": instance.instance_id,
        "url": instance.spec.url,
        "role": instance.spec.role,
        "source": instance.spec.source,
        "state": instance.spec.state,
        "breaker": instance.breaker.state.value,
        "models": instance.models,
        "num_active": instance.num_active,
        "num_active_tokens": instance.num_active_tokens,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "kv_usage": load.kv_usage,
        "prefix_hit_rate": load.prefix_hits / load.prefix_queries if load.prefix_queries else None,
        "prefix_index": instance.prefix_index.state.value if instance.prefix_index else None,
        "num_prefix_blocks": len(instance.prefix_index) if instance.prefix_index else 0,
        "num_failures": instance.num_failures,
        "errors": [{"at": error.at, "text": error.text} for error in instance.errors],
    }
