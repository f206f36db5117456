# SPDX-License-Identifier: Apache-2.0
"""Identifiers and small values that several layers share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

Epoch = NewType("Epoch", str)
"""Random, new at each start of an engine: a restarted peer is never taken for the old one."""
TransferId = NewType("TransferId", str)
"""Random and unguessable: it names one prompt's blocks on their producer."""
LoadId = NewType("LoadId", int)
"""Names one load of a consumer, counted by its scheduler."""

GENERATION_SALT = "pd-weights:"
"""What the salt of a block that nobody has salted begins with, once weights have been changed."""


class LeaseRef(NamedTuple):
    """Names one lease of a producer: a router may use a transfer id again, a lease is numbered."""

    transfer_id: str
    generation: int


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
    NO_TICKET = "no_ticket"
    LEASE_EXPIRED = "lease_expired"
    HASH_MISMATCH = "hash_mismatch"
    CHECKSUM = "checksum"
    TRANSFER_FAILED = "transfer_failed"
    EVICTED = "evicted"
    POOL_FAILED = "pool_failed"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
