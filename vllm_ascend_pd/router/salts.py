# SPDX-License-Identifier: Apache-2.0
"""What engines cache of a tenant's requests is found by that tenant alone: the names by which they
find it begin with the tenant's.

    cache_salt              of the prompt's prefixes
    messages[].content[].uuid, content_parts[].uuid, features.mm_hashes
                            of an image or the like, in what is scored, too. Engines take what they
                            have by such a name for it and look at no byte of the request's own
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.router.auth import digest_of
from vllm_ascend_pd.router.bodies import decode_any, string_of
from vllm_ascend_pd.types import TENANT_END

if TYPE_CHECKING:
    from vllm_ascend_pd.router.bodies import Fields

MAX_SALT = 128
"""Characters that vLLM allows."""
MAX_SALTED_NAME = MAX_SALT - len(TENANT_END) - 2 * hashlib.sha256().digest_size
_has_uuid = re.compile(rb'"(?:u|\\u0075){2}(?:i|\\u0069)(?:d|\\u0064)"').search
"""As a name may be written in JSON."""


def salt(fields: Fields, tenant: str) -> None:
    """Of a request of the tenant. ``BadRequest`` if the client's own salt is no string."""
    begin = tenant + TENANT_END
    own = string_of(fields, "cache_salt") or ""
    if len(begin + own) > MAX_SALT:
        own = digest_of(own).hex()
    fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(begin + own))
    for name, raw in fields.items():
        if _has_uuid(raw) or name == "features":
            value = decode_any(bytes(raw))
            _rename_media(value, begin)
            fields[name] = msgspec.Raw(msgspec.json.encode(value))


def _rename_media(value: Any, begin: str) -> None:
    for message in _objects(value):
        for part in (message, *_objects(message.get("content"))):
            if part.get("uuid") is not None:
                part["uuid"] = f"{begin}{part['uuid']}"
        for hashes in _objects(message.get("mm_hashes")):
            for kind, names in hashes.items():
                if isinstance(names, list):
                    hashes[kind] = [f"{begin}{one}" for one in names]


def _objects(value: Any) -> list[dict[str, Any]]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, dict)]
