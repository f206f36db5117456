# SPDX-License-Identifier: Apache-2.0
"""How fast one P and one D are, as ``vllm-pd profile`` measured it: a small JSON file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from vllm_ascend_pd import parsing
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
"""Raised when a field changes its meaning."""

Count = Annotated[int, Meta(ge=1, description="must be at least 1")]
Seconds = Annotated[float, Meta(ge=0, lt=1e6, description="must be within 0 and 1e6 seconds")]


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """``batch`` prompts that came at once, until P had computed all of them."""

    num_tokens: Count
    """Of each prompt."""
    batch: Count
    seconds: Seconds


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One step of D, in which each of ``batch`` requests got a token."""

    batch: Count
    context_tokens: Count
    """Of each request: its prompt, and what of its answer it had."""
    seconds: Seconds


class HandoverPoint(msgspec.Struct, frozen=True, kw_only=True):
    """From P's end to the client's first token: what a request through the router took longer than
    P alone."""

    num_tokens: Count
    seconds: Seconds


class BesidePoint(msgspec.Struct, frozen=True, kw_only=True):
    """How P does while D answers."""

    tokens_per_second: Annotated[float, Meta(ge=0, lt=1e9, description="must be within 0 and 1e9")]
    """That D answers with."""
    slowdown: Annotated[float, Meta(gt=0, lt=1e3, description="must be above 0, and below 1000")]
    """What P's steps take, of the seconds in ``prefill``."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    format: int
    model: str
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    handover: tuple[HandoverPoint, ...]
    sending_seconds_per_token: Seconds = 0.0
    """Of the hand-over, by tokens of the prompt: what keeps P from computing the next prompt."""
    prefill_beside: tuple[BesidePoint, ...] = ()
    """Of engines that share a host; without: P does not mind what D does."""
    decode_alone: Annotated[float, Meta(gt=0, le=1, description="must be above 0, at most 1")] = 1.0
    """What D's steps take of the seconds in ``decode`` while P has nothing to do."""
    block_size: Count = 1
    """Of both: of a prompt of which D lacks less, it computes that itself."""
    max_num_batched_tokens: Count
    """Of P: prompts that one step computes have so many tokens together."""
    max_num_seqs: Count
    """Of D: requests that decode at once."""
    prefill_kv_tokens: Count
    """Tokens that P's KV cache holds."""
    decode_kv_tokens: Count


def load(path: Path) -> Profile:
    """Read and check a profile; ``ConfigError`` names the file, the field and what is wrong."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror})") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{path}: not JSON: {e}") from e
    try:
        return check(raw)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def check(raw: object) -> Profile:
    """A profile from plain values; ``ConfigError`` names the field."""
    known = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and known != FORMAT:
        raise ConfigError(f"format must be {FORMAT}, not {known!r}: take a new profile")
    profile = parsing.parse(raw, Profile, top="the profile")
    for name in ("prefill", "decode", "handover"):
        if not getattr(profile, name):
            raise ConfigError(f"{name}: at least one point is needed; take a new profile")
    if not any(point.batch == 1 for point in profile.prefill):
        raise ConfigError("prefill: no point has a batch of 1; take a new profile")
    return profile


def save(profile: Profile, path: Path) -> None:
    """Indented, so that two profiles can be compared by eye."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
