# SPDX-License-Identifier: Apache-2.0
"""Few characters for all that a value says, equal in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from typing import Any


def digest(value: Any) -> str:
    """16 hexadecimal ones."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)
