# SPDX-License-Identifier: Apache-2.0
"""Which model a request is for."""

from __future__ import annotations

from email.message import Message
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.bodies import ENGINE_PARAMS, XARGS, BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm_ascend_pd.router.instances import Instance


def check_model(model: str | None, instances: Iterable[Instance]) -> None:
    """``BadRequest`` if a request names no model and the engines do not all serve the same one."""
    if model is not None:
        return
    served = [set(one.models) for one in instances if one.models]
    if served and not set.intersection(*served):
        names = ", ".join(sorted(set.union(*served)))
        raise BadRequest(f"'model' is missing, and there are several: {names}", "model")


def model_of_form(raw: bytes, content_type: str) -> str | None:
    """Of a ``multipart/form-data`` body. ``BadRequest`` also if it names a peer of the engine."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary or not boundary.isascii():
        raise BadRequest("the multipart body's Content-Type has no boundary of ASCII")
    model = None
    for name, value in _fields(raw, boundary.encode()):
        if name == "model":
            model = value.decode(errors="replace") or None
        elif name == XARGS and any(param.encode() in value for param in (*ENGINE_PARAMS, "\\u")):
            raise BadRequest(f"'{XARGS}' must not hold {' or '.join(ENGINE_PARAMS)}", XARGS)
    return model


def _fields(raw: bytes, boundary: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and values of the parts."""
    for part in raw.split(b"--" + boundary)[1:]:
        head, separator, value = part.partition(b"\r\n\r\n")
        if not separator:
            continue
        for line in head.split(b"\r\n"):
            key, _, content = line.partition(b":")
            if key.strip().lower() == b"content-disposition":
                disposition = Message()
                disposition["Content-Disposition"] = content.decode(errors="replace").strip()
                name = disposition.get_param("name", header="Content-Disposition")
                if isinstance(name, str):
                    yield name, value.removesuffix(b"\r\n")
