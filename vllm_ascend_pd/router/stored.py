# SPDX-License-Identifier: Apache-2.0
"""Responses that an engine stores: their ids say in which instance.

So every router and every worker of one finds it again, after a restart too, and remembers nothing.
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

_ID = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{24}")
_PATH = re.compile(r"/v1/responses/(resp_[^/]+)(?:/[a-z_]+)?")


def new_response_id(instance_id: str) -> str:
    """As long as vLLM's own."""
    return f"resp_{_tag(instance_id)}{secrets.token_hex(12)}"


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


@lru_cache(maxsize=4096)
def _tag(instance_id: str) -> str:
    return hashlib.blake2b(instance_id.encode(), digest_size=4).hexdigest()
