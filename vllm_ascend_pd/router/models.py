# SPDX-License-Identifier: Apache-2.0
"""Which model a request is for."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vllm_ascend_pd.router.bodies import ENGINE_PARAMS, XARGS, BadRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

    from vllm_ascend_pd.router.instances import Registry

# It warns of what a client has sent wrong; the client is told, and the access log has its 400.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
MAX_NAME = 4096
"""Characters of a model's name, which may be a path. It is kept, shown and logged."""
MAX_PARTS = 128
"""Of a form."""
_UTF_8 = (b"utf-8", b"utf8")
_STARRED = re.compile(rb"(?:^|;)\s*(?:name|boundary|charset)\*", re.IGNORECASE)
_COUNT = (b"model", XARGS.encode())
_FORBIDDEN = [word.encode() for word in (*ENGINE_PARAMS, "\\u")]
"""The last may begin one of the others, written otherwise."""


def model_meant(model: str | None, registry: Registry) -> str | None:
    """By a request that names this one: if it names none, the one that all engines serve, for it
    may wait until there are others. ``BadRequest`` if all that answer have none in common, or if no
    model can have that name."""
    if model is not None and len(model) > MAX_NAME:
        raise BadRequest(f"'model' is longer than {MAX_NAME} characters", "model")
    served = [one.models for one in registry.decodes if one.models] if model is None else []
    if not served:
        return model
    common = set(served[0]).intersection(*served)
    if not common:
        names = ", ".join(sorted(set().union(*served)))
        raise BadRequest(f"'model' is missing, and there are several: {names}", "model")
    common.intersection_update(*(one.models for one in registry.prefills if one.models))
    return next((name for name in served[0] if name in common), None)


def model_of_form(raw: bytes, content_type: str) -> str | None:
    """Of a ``multipart/form-data`` body, as engines read it: by the parser of their web framework.
    ``BadRequest`` also if it names a peer of the engine. Any thread."""
    options = _options(content_type.encode("utf-8", "surrogateescape"))
    boundary = options.get(b"boundary", b"")
    if not boundary or not boundary.isascii():
        raise BadRequest("the multipart body's Content-Type has no boundary of ASCII")
    if options.get(b"charset", b"utf-8").lower() not in _UTF_8:
        raise BadRequest("the multipart body's charset must be utf-8")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        parser.write(raw)
        parser.finalize()
    except FormParserError as e:
        raise BadRequest(f"the body is not multipart/form-data: {e}") from e
    return form.model


def _options(header: bytes) -> dict[bytes, bytes]:
    """What follows the value of a header. Not all versions of the parser read a parameter with a
    star, and those that do take it for the one without."""
    if _STARRED.search(header):
        raise BadRequest("name, boundary and charset of a multipart body must be plain parameters")
    return parse_options_header(header)[1]


class _Form:
    """What counts of a form, of which it gets one part after the other."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._num_parts = 0
        self._key = self._value = self._disposition = b""
        self._name: bytes | None = None
        self._data = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_key,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequest(f"the multipart body has more than {MAX_PARTS} parts")
        self._disposition = b""
        self._data.clear()

    def _add_key(self, data: bytes, start: int, end: int) -> None:
        self._key += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._key.lower() == b"content-disposition":
            self._disposition = self._value
        self._key = self._value = b""

    def _end_headers(self) -> None:
        self._name = _options(self._disposition).get(b"name")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name in _COUNT:
            self._data += data[start:end]

    def _end(self) -> None:
        if self._name == b"model":
            self.model = self._data.decode(errors="replace") or None
        elif self._name == XARGS.encode() and any(word in self._data for word in _FORBIDDEN):
            raise BadRequest(f"'{XARGS}' must not hold {' or '.join(ENGINE_PARAMS)}", XARGS)
