# SPDX-License-Identifier: Apache-2.0
"""What a user wrote, as structs. Errors name the field, what it must be, and what is valid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from vllm_ascend_pd.errors import ConfigError

_T = TypeVar("_T")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_NAMES = {str: "a string", dict: "a mapping", tuple: "a list"}
_MAY_BE_SECRET = re.compile(r"(^|\.)env(\.|$)")


Size = Annotated[int, msgspec.Meta(description="bytes")]
"""Also as a text, see ``parse_size``."""


def parse_size(path: str, value: Any) -> int:
    """Bytes: a number, or a text such as ``"512MiB"`` or ``"8G"`` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        if value.isdecimal():
            return int(value)
        if match := _SIZE.fullmatch(value.strip()):
            return int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))
    raise ConfigError(f'{path} must be bytes or a text such as "8GiB", not {value!r}')


def parse(raw: Any, wanted: type[_T], path: str = "", top: str = "") -> _T:
    """Plain values as a struct.

    Args:
        raw: As JSON or YAML is read.
        wanted: A struct, or what one has. A ``msgspec.Meta`` describes its bounds.
        path: Of ``raw`` within the whole.
        top: What the whole is called.

    Raises:
        ConfigError: It names the innermost value that is wrong.
    """
    kind: Any = wanted
    origin, inner, name = get_origin(kind), get_args(kind), path or top
    found: Any
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found = kind(**_fields(raw, kind, path, name))
    elif origin is not Annotated and type(None) in inner:
        found = None if raw is None else parse(raw, inner[0], path)
    elif origin is dict and isinstance(raw, Mapping):
        found = {
            parse(key, inner[0], f"a key of {name}"): parse(item, inner[1], f"{path}.{key}")
            for key, item in raw.items()
        }
    elif origin is tuple and isinstance(raw, list | tuple):
        found = tuple(parse(item, inner[0], f"{path}[{i}]") for i, item in enumerate(raw))
    elif kind == Size:
        found = parse_size(name, raw)
    else:
        if int in (kind, *inner) and isinstance(raw, float) and raw.is_integer():
            raw = int(raw)  # some writers of JSON make 8e6 of 8000000
        try:
            found = msgspec.convert(raw, kind)
        except msgspec.ValidationError as e:
            raise ConfigError(_wrong(name, raw, kind)) from e
    return found  # type: ignore[no-any-return]


def _fields(raw: Any, kind: type[msgspec.Struct], path: str, name: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} must be a mapping, not {type(raw).__name__}")
    fields = _fields_of(kind)
    if unknown := [str(key) for key in raw if key not in fields]:
        raise ConfigError(f"{name}: unknown keys {unknown}; valid: {sorted(fields)}")
    if missing := [key for key, field in fields.items() if field.required and key not in raw]:
        raise ConfigError(f"{name}: {missing} is missing")
    within = f"{path}." if path else ""
    return {key: parse(value, fields[key].type, within + key) for key, value in raw.items()}


@cache
def _fields_of(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """By name; msgspec evaluates their annotations each time."""
    return {field.name: field for field in msgspec.structs.fields(kind)}


def _wrong(name: str, raw: Any, kind: Any) -> str:
    bounds = None
    if get_origin(kind) is Annotated:
        kind, bounds = get_args(kind)
    is_told = get_origin(kind) not in (dict, tuple) and not isinstance(raw, Mapping | list | tuple)
    found = repr(raw) if is_told and not _MAY_BE_SECRET.search(name) else type(raw).__name__
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{name}: {found} is not one of {[member.value for member in kind]}"
    if bounds is not None and (type(raw) is kind or (kind is float and type(raw) is int)):
        return f"{name} {bounds.description}, not {raw!r}"
    kind = get_origin(kind) or kind
    return f"{name} must be {_NAMES.get(kind) or kind.__name__}, not {found}"
