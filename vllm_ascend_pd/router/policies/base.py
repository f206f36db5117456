# SPDX-License-Identifier: Apache-2.0
"""What a policy is asked, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from vllm_ascend_pd.router.ranking import Ranking
from vllm_ascend_pd.types import serves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.tenants import Tenant


@dataclass(slots=True)
class Routed:
    """What is known of a request when its instances are chosen."""

    num_prompt_tokens: int = 0
    """Exact for token ids, an estimate for text."""
    num_max_tokens: int = 0
    session: str | None = None
    """What the client sent to be recognised by."""
    model: str | None = None
    alone: str | None = None
    """Why no prefill instance is looked for."""
    excluded: set[Instance] = field(default_factory=set)
    """Those that failed it."""
    target: Instance | None = None
    """The only one that may get it."""
    token_ids: tuple[int, ...] | None = None
    """Of the prompt, when a policy asked for them."""
    num_decode_hit_tokens: int = 0
    """Set by a policy: tokens of the prompt that the chosen decode instance holds."""
    num_prefill_hit_tokens: int = 0
    block_size: int | None = None
    """Of the chosen decode instance, if it is known."""
    has_own_blocks: bool = False
    """Its prefix is cached for requests with the same salt, or adapter, only."""
    previous_response: str | None = None
    """The stored response that it goes on from, or is about."""
    tenant: Tenant | None = None
    """Whose it is, if the router tells tenants apart."""
    num_charged_tokens: int | None = None
    """Taken of its tenant's quota, if it has one."""
    num_turn_tokens: int = 0
    """Counted for its tenant when it was given its turn in line."""


@dataclass(frozen=True, slots=True)
class Pair:
    """``prefill`` and ``decode`` may be one instance of role ``both``."""

    prefill: Instance
    decode: Instance
    alone: str | None = None
    """Why ``decode`` does all of it, if not by a policy's choice."""


class Policy(ABC):
    """Event loop thread; never blocks. Both sequences are not empty and hold only instances that
    may be used; each prefill instance has at least one partner among ``decodes``."""

    name: ClassVar[str]
    needs_token_ids: ClassVar[bool] = False

    @abstractmethod
    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        """A pair of partners."""

    def choose_decode(self, request: Routed, decodes: Sequence[Instance]) -> Instance:
        """For a request without a prefill leg."""
        return self.choose(request, decodes, decodes).prefill  # the first choice of all of them


@runtime_checkable
class WatchesInstances(Protocol):
    """A policy that follows what the engines do."""

    def watch(self, instance: Instance) -> None:
        """A new instance."""

    def forget(self, instance: Instance) -> None:
        """It is gone."""

    async def close(self) -> None:
        """The router stops."""


def are_partners(prefill: Instance, decode: Instance) -> bool:
    """``decode`` can read KV of ``prefill``, as far as they told."""
    return may_serve(prefill.told_fingerprint, decode.told_fingerprint)


def may_serve(producer: str | None, consumer: str | None) -> bool:
    """`serves`, or one of them has not told its fingerprint."""
    return producer is None or consumer is None or serves(producer, consumer)


def partners(prefill: Instance, decodes: Sequence[Instance]) -> Sequence[Instance]:
    """Those that can decode what ``prefill`` computes; without itself, if there are others."""
    if isinstance(decodes, Ranking):
        return decodes.without(prefill)
    found = [decode for decode in decodes if are_partners(prefill, decode)]
    others = [decode for decode in found if decode is not prefill]
    return others or found
