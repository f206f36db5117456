# SPDX-License-Identifier: Apache-2.0
"""What the router says of itself: the page at ``/``, its JSON, the description of its API."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from vllm_ascend_pd import __version__
from vllm_ascend_pd.registration import InstanceStatus
from vllm_ascend_pd.router.metrics import OUTCOMES

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.snapshot import Snapshot

_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> web.Response:
    """One file, nothing from elsewhere."""
    text = files("vllm_ascend_pd.router").joinpath("page.html").read_text()
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}
    return web.Response(text=text, content_type="text/html", headers=headers)


def seen_by(tenant: str | None, snapshot: Snapshot) -> Snapshot:
    """By one of several tenants: its own requests, and of engines no errors, which may tell of
    others' requests. ``None`` sees all."""
    if tenant is None:
        return snapshot
    return msgspec.structs.replace(
        snapshot,
        timelines=[one for one in snapshot.timelines if one.tenant == tenant],
        instances=[msgspec.structs.replace(one, errors=[]) for one in snapshot.instances],
    )


def status(snapshot: Snapshot, config: RouterConfig, tenant: str | None = None) -> dict[str, Any]:
    """What the router is doing, as plain JSON values, as ``tenant`` may see it."""
    snapshot = seen_by(tenant, snapshot)
    count = snapshot.num_recent
    requests = {labels[0]: int(count) for labels, count in snapshot.counters["requests"]}
    return {
        "version": __version__,
        "policy": config.policy,
        "order": config.order,
        "tenant": tenant,
        "num_workers": config.num_workers,
        "in_progress": snapshot.num_requests,
        "queued": snapshot.num_queued,
        "degraded": snapshot.degraded,
        "requests": {outcome: requests.get(outcome, 0) for outcome in OUTCOMES},
        "break_even_tokens": snapshot.break_evens,
        "prefix_tokens": {name: _total(snapshot, name) for name in ("expected", "cached")},
        "ttft_mean_s": snapshot.recent_ttft_s / count if count else None,
        "answers_per_s": count / config.stats_window_s,
        "instances": msgspec.to_builtins(snapshot.instances),
        "timelines": [timeline.since_start() for timeline in snapshot.timelines],
    }


def _total(snapshot: Snapshot, name: str) -> int:
    """Tokens of prompts whose engine told what it had: as expected, or as told."""
    counts = snapshot.counters[f"prefix_{name}_tokens"]
    return int(sum(count for labels, count in counts if "false" not in labels))


def instances(snapshot: Snapshot) -> list[InstanceStatus]:
    """For ``/instances``."""
    return msgspec.convert(snapshot.instances, list[InstanceStatus], from_attributes=True)
