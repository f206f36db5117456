# SPDX-License-Identifier: Apache-2.0
"""Who shares the engines: quotas, weights and priorities by tenant, from a file.

{"header": "X-Tenant",
 "cache_salts": true,
 "tenants": {"search": {"keys": ["sk-..."], "tokens_per_minute": 600000, "max_requests": 32,
                        "weight": 2, "priority": 1}},
 "others": {"tokens_per_minute": 60000}}
"""

from __future__ import annotations

import logging
import math
import re
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from vllm_ascend_pd import parsing, registration
from vllm_ascend_pd.errors import UNREADABLE, ConfigError
from vllm_ascend_pd.private_file import read_private
from vllm_ascend_pd.router.admission import TooMany
from vllm_ascend_pd.router.auth import bearer_token, digest_of
from vllm_ascend_pd.router.bodies import BadRequest, decode_fields
from vllm_ascend_pd.router.salts import MAX_SALTED_NAME, salt
from vllm_ascend_pd.router.stored import is_of
from vllm_ascend_pd.router.watched_file import WatchedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from aiohttp import web

    from vllm_ascend_pd.router.bodies import Body
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.policies.base import Routed

logger = logging.getLogger(__name__)

OPTION = "--tenants-file"
OTHERS = "others"
BUSY_RETRY_AFTER_S = 1
_MAX_BYTES = 4 << 20

Positive = Annotated[int, Meta(ge=1, description="must be at least 1")]
Weight = Annotated[float, Meta(gt=0, description="must be positive")]


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may do. Left out: as much as it likes."""

    keys: tuple[str, ...] = ()
    """API keys by which it is known."""
    tokens_per_minute: Positive | None = None
    """Of prompts and answers; until a request ends, the longest answer that it asks for."""
    max_requests: Positive | None = None
    """In progress, and in line."""
    weight: Weight = 1.0
    """Of two that wait, one with 2 gets twice the tokens of one with 1."""
    priority: int = 0
    """Who waits with a higher one goes first."""


class TenantsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    tenants: dict[str, Quota]
    others: Quota = Quota()
    """For all that are none of these, together."""
    header: str = ""
    """Of a gateway in front, that names the tenant. It counts more than a key."""
    cache_salts: bool = False
    """Prefixes are cached for each tenant by itself, so that none learns another's by timing."""


class Tenant:
    """One, and what it has in progress. Event loop thread."""

    def __init__(self, name: str, quota: Quota, share: int, clock: Callable[[], float]) -> None:
        """``share``: of so many processes."""
        self.name = name
        self.num_requests = 0
        self.due = 0.0
        """Of the virtual time that ``turns`` keeps: what it has been served, by its weight."""
        self._clock = clock
        self._share = share
        self.quota = quota
        self._level = self._capacity
        self._filled_at = clock()

    @property
    def _capacity(self) -> float:
        """A minute's tokens, which it may use at once."""
        return (self.quota.tokens_per_minute or 0) / self._share

    def change(self, quota: Quota) -> None:
        """What is used stays used; without a bound nothing was."""
        had_bound = self.quota.tokens_per_minute is not None
        used = self._capacity - self._level if had_bound else 0
        self.quota = quota
        self._level = self._capacity - used
        if not had_bound:
            self._filled_at = self._clock()

    @property
    def num_left(self) -> float:
        """Requests that it may have in progress beside those that it has."""
        most = self.quota.max_requests
        if most is None:
            return math.inf
        return max(0, math.ceil(most / self._share) - self.num_requests)

    def take(self, num_tokens: int) -> TooMany | None:
        """Tokens of one request. One of more than a minute's waits for a full minute."""
        if self.quota.tokens_per_minute is None:
            return None
        now, capacity = self._clock(), self._capacity
        self._level = min(capacity, self._level + capacity * (now - self._filled_at) / 60)
        self._filled_at = now
        missing = min(num_tokens, capacity) - self._level
        if missing > 1e-6:
            return TooMany(
                f"tenant {self.name} has used its {self.quota.tokens_per_minute} tokens a minute",
                max(1, math.ceil(60 * missing / capacity)),
            )
        self._level -= num_tokens
        return None

    def give_back(self, num_tokens: int) -> None:
        """What was taken and not used; below 0, what was used and not taken."""
        if self.quota.tokens_per_minute is None:
            return
        self._level = min(self._capacity, self._level + num_tokens)


class Tenants:
    """All of them. The file is read again when it changes."""

    def __init__(
        self,
        path: Path,
        metrics: Metrics,
        share: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``share``: of the quotas, one in so many processes."""
        self._path, self._metrics, self._share, self._clock = path, metrics, share, clock
        self._by_name: dict[str, Tenant] = {}
        self._by_key: dict[bytes, Tenant] = {}
        self._watched = WatchedFile(
            OPTION, path, lambda: read_private(OPTION, str(path), _MAX_BYTES), self._take
        )
        self._watched.read()

    def refresh(self) -> None:
        if self._watched.refresh():
            logger.info("%s: read %d tenants again", OPTION, len(self._by_name) - 1)

    def get(self, name: str) -> Tenant | None:
        """One of the file, or all others."""
        return self._by_name.get(name)

    def of(self, request: web.BaseRequest) -> Tenant:
        """Whose request it is."""
        if self._file.header:
            found = self.get(request.headers.get(self._file.header, ""))
            if found is not None:
                return found
        key = bearer_token(request.headers.get("Authorization"))
        return self._by_key.get(digest_of(key or ""), self._by_name[OTHERS])

    def add_salt(self, body: Body, tenant: Tenant) -> None:
        """What is cached of it is its tenant's alone, if the file says so; ``BadRequest`` if the
        client's own salt is no string."""
        if self._file.cache_salts:
            salt(body.fields, tenant.name)
            body.fields_changed()

    def salted(self, raw: bytes, tenant: Tenant) -> bytes:
        """The same for the JSON of a request that is only passed on."""
        if not self._file.cache_salts:
            return raw
        fields = decode_fields(raw)
        salt(fields, tenant.name)
        return msgspec.json.encode(fields)

    def charge(self, routed: Routed) -> TooMany | None:
        """The tokens of a request of a tenant, before it is routed."""
        tenant = routed.tenant
        assert tenant is not None
        num_tokens = routed.num_prompt_tokens + routed.num_max_tokens
        refused = tenant.take(num_tokens)
        if refused is None and tenant.quota.tokens_per_minute is not None:
            routed.num_charged_tokens = num_tokens
        return refused

    def settle(self, routed: Routed, num_answer_tokens: int | None) -> None:
        """A request has ended, with so long an answer; ``None``: no engine has taken it."""
        tenant = routed.tenant
        assert tenant is not None
        num_used = 0
        if num_answer_tokens is not None:
            num_used = routed.num_prompt_tokens + num_answer_tokens
        if routed.num_charged_tokens is not None:
            tenant.give_back(routed.num_charged_tokens - num_used)
        tenant.due += (num_used - routed.num_turn_tokens) / tenant.quota.weight
        if num_answer_tokens is None:
            return
        self._metrics.add("tenant_tokens", tenant.name, "prompt", by=routed.num_prompt_tokens)
        self._metrics.add("tenant_tokens", tenant.name, "answer", by=num_answer_tokens)

    def _take(self, content: bytes) -> None:
        try:
            file = parsing.parse(msgspec.json.decode(content), TenantsFile, top="the file")
        except UNREADABLE as e:
            raise ConfigError(f"{OPTION} {str(self._path)!r}: not JSON: {e}") from e
        except ConfigError as e:
            raise ConfigError(f"{OPTION} {str(self._path)!r}: {e}") from e
        for name in file.tenants:
            if not re.fullmatch(registration.NAME, name) or name == OTHERS:
                raise ConfigError(f"{OPTION}: tenants.{name}: not a name that logs can carry")
            if file.cache_salts and len(name) > MAX_SALTED_NAME:
                message = f"with cache_salts a name has at most {MAX_SALTED_NAME} characters"
                raise ConfigError(f"{OPTION}: tenants.{name}: {message}")
        quotas = {**file.tenants, OTHERS: file.others}
        by_key: dict[bytes, str] = {}
        for name, quota in quotas.items():
            for index, key in enumerate(quota.keys):
                other = by_key.setdefault(digest_of(key), name)
                if other != name:
                    raise ConfigError(f"{OPTION}: tenants.{name}.keys[{index}] is {other}'s, too")
        self._file = file
        self._by_name = {name: self._tenant(name, quota) for name, quota in quotas.items()}
        self._by_key = {digest: self._by_name[name] for digest, name in by_key.items()}

    def _tenant(self, name: str, quota: Quota) -> Tenant:
        known = self._by_name.get(name)
        if known is None:
            return Tenant(name, quota, self._share, self._clock)
        known.change(quota)
        return known


def in_progress(tenant: Tenant | None) -> AbstractContextManager[TooMany | None]:
    """A request of a tenant, if it is one's; or why it may not be now."""
    return nullcontext() if tenant is None else _in_progress(tenant)


@contextmanager
def _in_progress(tenant: Tenant) -> Iterator[TooMany | None]:
    if not tenant.num_left:
        message = f"tenant {tenant.name} has {tenant.num_requests} requests in progress"
        yield TooMany(message, BUSY_RETRY_AFTER_S)
    else:
        tenant.num_requests += 1
        try:
            yield None
        finally:
            tenant.num_requests -= 1


@contextmanager
def more_in_progress(tenant: Tenant | None, num: int) -> Iterator[int]:
    """Parts of a request beside the first: so many, or as many as its tenant has left; how many."""
    if tenant is None:
        yield num
        return
    num = int(min(num, tenant.num_left))
    tenant.num_requests += num
    try:
        yield num
    finally:
        tenant.num_requests -= num


def check_response(response_id: str | None, tenant: Tenant | None) -> None:
    """``BadRequest``, as of one that nobody has stored, if the response that a request is about, or
    goes on from, is another tenant's."""
    if tenant is None or response_id is None or is_of(response_id, tenant.name):
        return
    raise BadRequest(f"Response with id {response_id!r} not found.", status=404)
