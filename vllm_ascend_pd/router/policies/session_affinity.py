# SPDX-License-Identifier: Apache-2.0
"""The same instances for the same session, so that its prefix is cached there."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance


class SessionAffinity(Policy):
    """Rendezvous hashing: an instance that comes or goes moves only the sessions that it gets or
    had. Nothing is remembered, so all routers and all workers agree. Requests without a session
    go to the least loaded."""

    name = "session-affinity"

    def __init__(self) -> None:
        self._others = LeastLoaded()

    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        if request.session is None:
            return self._others.choose(request, prefills, decodes)
        prefill = _owner(request.session, prefills)
        return Pair(prefill, _owner(request.session, partners(prefill, decodes)))


def _owner(session: str, instances: Sequence[Instance]) -> Instance:
    def weight(instance: Instance) -> bytes:
        text = f"{instance.instance_id}\n{session}"
        return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest()

    return max(instances, key=weight)
