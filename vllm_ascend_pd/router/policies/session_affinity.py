# SPDX-License-Identifier: Apache-2.0
"""The same instances for the same session, so that its prefix is cached there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.ranking import affinity_key, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

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
    return instances[owner(session, rows(instances)["affinity_key"])]


def owner(session: str, keys: NDArray[np.uint64]) -> int:
    """Of instances with these keys the one with the greatest weight: that of its key and the
    session's, well mixed."""
    import numpy as np

    shift = np.uint64(33)
    weights = keys ^ np.uint64(affinity_key(session))
    for factor in _FACTORS:
        weights ^= weights >> shift
        weights *= np.uint64(factor)
    weights ^= weights >> shift
    return int(weights.argmax())


_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
"""MurmurHash3's last step, in which each bit of 64 decides about all of them."""
