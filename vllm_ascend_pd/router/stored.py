# SPDX-License-Identifier: Apache-2.0
"""Responses that an engine stores: their ids say in which instance, and whose they are.

So every router and every worker of one finds it again, after a restart too, and remembers nothing.

    resp_1c0f9a3b 5d0e…(16) 77ab01c2  = instance / random / tenant

Who has an id of another tenant's cannot make one of his own of it: the engine knows only the whole.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_ascend_pd.router.instances import Instance

_ID = re.compile(r"resp_([0-9a-f]{8})([0-9a-f]{16})([0-9a-f]{8})")
_PATH = re.compile(r"/v1/responses/(resp_[^/]+)(?:/[a-z_]+)?")


def new_response_id(instance_id: str, tenant: str = "") -> str:
    """As long as vLLM's own. ``tenant``: empty if the router tells none apart."""
    drawn = secrets.token_hex(8)
    return f"resp_{_tag(instance_id)}{drawn}{_digest(drawn + tenant)}"


def response_of(path: str) -> str | None:
    """The stored response that a path is about."""
    match = _PATH.fullmatch(path)
    return match[1] if match else None


def owner(response_id: str, instances: Iterable[Instance]) -> Instance | None:
    """Who has it, if its id is one of ours and the instance is still known."""
    match = _ID.fullmatch(response_id)
    if match is None:
        return None
    return next((one for one in instances if _tag(one.instance_id) == match[1]), None)


def is_of(response_id: str, tenant: str) -> bool:
    """Whether it was given to a request of this tenant."""
    match = _ID.fullmatch(response_id)
    return match is not None and _digest(match[2] + tenant) == match[3]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


_tag = lru_cache(maxsize=4096)(_digest)
