# SPDX-License-Identifier: Apache-2.0
"""What clients ask, and when: traces in Mooncake's format (JSONL) and Azure's (CSV)."""

from __future__ import annotations

import csv
import itertools
import math
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TOKENS_PER_ID = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

Length = Annotated[int, Meta(ge=1, le=1 << 27)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of Mooncake's format."""

    timestamp_ms: float = msgspec.field(name="timestamp")
    """From the start of the trace."""
    input_length: Length
    """Tokens, as ``output_length``."""
    output_length: Length
    hash_ids: tuple[int, ...] = ()
    """One for each 512 tokens (``tokens_per_id``) of the input, the last for what is left: two
    requests share a prefix as far as their ids are equal. Empty: nothing is known of prefixes."""


def read_trace(
    path: Path,
    max_requests: int | None = None,
    *,
    needs_prefixes: bool = False,
    tokens_per_id: int = TOKENS_PER_ID,
) -> list[TraceRequest]:
    """The first requests of a file, in order of arrival; ``.csv`` is Azure's format.

    Raises:
        ConfigError: it names the line that is not of the format.
    """
    is_azure = path.suffix.lower() == ".csv"
    lines = _read_azure(path) if is_azure else _read_mooncake(path, needs_prefixes, tokens_per_id)
    try:
        requests = list(itertools.islice(lines, max_requests))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror})") from e
    if not requests:
        raise ConfigError(f"{path}: no request is in it")
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _read_mooncake(path: Path, needs_prefixes: bool, tokens_per_id: int) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(TraceRequest)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = decoder.decode(line)
                num_ids = len(request.hash_ids)
                if num_ids != math.ceil(request.input_length / tokens_per_id) and (
                    num_ids or needs_prefixes
                ):
                    raise ValueError(f"{num_ids} hash_ids for {request.input_length} tokens")
            except (ValueError, RecursionError) as e:
                message = f"{path}:{number} is not a line of Mooncake's format: {e}"
                raise ConfigError(message) from e
            yield request


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        rows = csv.DictReader(lines)
        if missing := set(AZURE_COLUMNS) - set(rows.fieldnames or ()):
            raise ConfigError(
                f"{path}: columns {sorted(missing)} are missing; a .csv is a trace of Azure's with"
                f" {', '.join(AZURE_COLUMNS)}, anything else one of Mooncake's"
            )
        first = None
        for row in rows:
            values = [row[name] or "" for name in AZURE_COLUMNS]
            try:
                at = _time(values[0])
                first = at if first is None else first
                since_ms = float((at - first) / np.timedelta64(1, "ms"))
                fields = {"timestamp": since_ms, "input_length": _number(1, values)}
                fields["output_length"] = _number(2, values)
                request = msgspec.convert(fields, TraceRequest)
            except ValueError as e:
                message = f"{path}:{rows.line_num} is not a line of Azure's format: {e}"
                raise ConfigError(message) from e
            yield request


def _time(text: str) -> np.datetime64:
    """``ValueError`` names the column, as that of ``_number``."""
    try:
        text.encode("ascii")  # of anything after a time numpy would warn as of a time zone
        at = np.datetime64(text.removesuffix("Z").removesuffix("+00:00"), "us")
        if np.isnat(at):
            raise ValueError("empty")
    except ValueError as e:
        raise ValueError(f"{AZURE_COLUMNS[0]} {text!r} is no time") from e
    return at


def _number(column: int, values: list[str]) -> int:
    try:
        return int(values[column])
    except ValueError as e:
        raise ValueError(f"{AZURE_COLUMNS[column]} {values[column]!r} is no number") from e


class RequestTrace:
    """Requests as columns, in order of arrival; the first one comes at 0 s."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        *,
        speed: float = 1.0,
        tokens_per_id: int = TOKENS_PER_ID,
    ) -> None:
        """``speed`` 2: twice as many requests in a second."""
        rows = list(requests)
        arrivals = np.array([row.timestamp_ms for row in rows], float) / 1000 / speed
        self.arrival_s = arrivals - arrivals[0]
        self.num_prompt_tokens = np.array([row.input_length for row in rows])
        self.num_output_tokens = np.array([row.output_length for row in rows])
        self.prefixes = [row.hash_ids for row in rows]
        self.tokens_per_id = tokens_per_id

    def __len__(self) -> int:
        return len(self.arrival_s)
