# SPDX-License-Identifier: Apache-2.0
"""Identifiers and small values that several layers share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar, NamedTuple, NewType

Epoch = NewType("Epoch", str)
"""Random, new at each start of an engine: a restarted peer is never taken for the old one."""
TransferId = NewType("TransferId", str)
"""Random and unguessable: it names one prompt's blocks on their producer."""
LoadId = NewType("LoadId", int)
"""Names one load of a consumer, counted by its scheduler."""

GENERATION_SALT = "pd-weights:"
"""What the salt of a block that nobody has salted begins with, once weights have been changed."""
TENANT_END = "|"
"""After the tenant's name in a salt. vLLM allows it in salts, and no tenant's name has it."""


def serves(producer: str, consumer: str) -> bool:
    """Whether an engine can read the KV of another one, by their fingerprints: they are equal, or
    differ only in that the producer has a drafter, whose layers come behind the model's.
    """
    return consumer in (producer, without_drafter(producer))


@lru_cache(maxsize=1024)
def without_drafter(fingerprint: str) -> str:
    """That of an engine which is like this one otherwise."""
    return " ".join(part for part in fingerprint.split(" ") if not part.startswith("draft="))


class LeaseRef(NamedTuple):
    """Names one lease of a producer: a router may use a transfer id again, a lease is numbered."""

    transfer_id: str
    generation: int


class Layers(NamedTuple):
    """Those of one pipeline stage, of all attention layers of a model in the order in which they
    run: ``first`` and the following ones before ``stop``.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and TCP port of a control or data socket, and the key of its process.

    Where engines share a secret the key is the same for all of them and may be left out.
    """

    host: str
    port: int
    key: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Place(int):
    """Where a value lies, seen from this process: a small number, for lookups answer one byte for
    each key. A tier of another kind declares places of its own, in every process alike.
    """

    label: str
    """Of metrics and provenance."""
    medium: str
    """Of KV events, as vLLM names it."""
    bytes_per_ms: float
    """What reading it is expected to give before anything has been measured."""

    _declared: ClassVar[dict[int, Place]] = {}
    NOWHERE: ClassVar[Place]
    DRAM: ClassVar[Place]
    """Memory of this host that this process contributes."""
    REMOTE: ClassVar[Place]
    """Memory that another process contributes, here or on another host."""
    SSD: ClassVar[Place]

    def __new__(cls, number: int) -> Place:
        """The one that was declared with this number."""
        if (place := cls._declared.get(number)) is None:
            raise ValueError(f"no place has the number {number}")
        return place

    @classmethod
    def declare(cls, number: int, label: str, medium: str, bytes_per_ms: float) -> Place:
        """``number`` is from 1 to 255, and nobody else's."""
        if number in cls._declared:
            raise ValueError(f"place {number} is {cls._declared[number]!r} already")
        place = cls._declared[number] = super().__new__(cls, number)
        place.label, place.medium, place.bytes_per_ms = label, medium, bytes_per_ms
        return place

    @classmethod
    def of(cls, numbers: bytes) -> list[Place]:
        """Of many lookups."""
        places = {number: cls(number) for number in set(numbers)}
        return [places[number] for number in numbers]

    @classmethod
    def all(cls) -> list[Place]:
        """But nowhere."""
        return [place for number, place in sorted(cls._declared.items()) if number]

    def __repr__(self) -> str:
        return f"Place({self.label})"


# What a slow network and a slow disk give.
Place.NOWHERE = Place.declare(0, "nowhere", "", 0.0)
Place.DRAM = Place.declare(1, "dram", "CPU", 2_000_000.0)
Place.REMOTE = Place.declare(2, "remote", "CPU", 300_000.0)
Place.SSD = Place.declare(3, "ssd", "STORAGE", 500_000.0)


class Cause(str, Enum):
    """Why a transfer did not happen. The value is the label of the failure metric."""

    BAD_PARAMS = "bad_params"
    WRONG_ROLE = "wrong_role"
    PEER_NOT_ALLOWED = "peer_not_allowed"
    PEER_UNREACHABLE = "peer_unreachable"
    UNAUTHENTICATED = "unauthenticated"
    INCOMPATIBLE = "incompatible"
    WRONG_EPOCH = "wrong_epoch"
    NOT_NEEDED = "not_needed"
    NOT_ARRIVED = "not_arrived"
    NOT_COMPUTED = "not_computed"
    NOT_RUNNING = "not_running"
    BUSY = "busy"
    BEHIND_REASONING = "behind_reasoning"
    TOO_SLOW = "too_slow"
    NO_MEMORY = "no_memory"
    NO_ADAPTER = "no_adapter"
    NO_TICKET = "no_ticket"
    LEASE_EXPIRED = "lease_expired"
    HASH_MISMATCH = "hash_mismatch"
    CHECKSUM = "checksum"
    TRANSFER_FAILED = "transfer_failed"
    EVICTED = "evicted"
    POOL_FAILED = "pool_failed"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
