# SPDX-License-Identifier: Apache-2.0
"""Options that no engine lets the router act on, told in its log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.resumable import EXACT_TOOL_PARSERS
from vllm_ascend_pd.router.roles import may_switch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.instances import Instance, Registry

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""So long engines may take to say what they can."""

NO_KV_EVENTS = (
    "--policy prefix-aware goes by load alone: no engine tells of its prefix cache. Start engines"
    " with --kv-events-config, and give kv_events in their registration or the instances file"
)
NO_ROLES = (
    "--roles auto has nothing to change: no engine that hands KV over can do both. Start engines"
    " with kv_role kv_both and router.role both"
)
NO_TOOL_STREAMS = (
    "--tool-call-parser %s: streams with tools do not go on elsewhere when their engine is lost;"
    " with one of %s they do"
)


@dataclass(slots=True)
class WithoutEffect:
    """Event loop thread."""

    registry: Registry
    lets: dict[str, Callable[[Instance], bool]]
    """By what is told where no engine does."""
    _since: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, config: RouterConfig, registry: Registry) -> WithoutEffect:
        lets: dict[str, Callable[[Instance], bool]] = {}
        if config.policy == "prefix-aware":
            lets[NO_KV_EVENTS] = lambda instance: instance.spec.kv_events is not None
        if config.roles == "auto":
            lets[NO_ROLES] = may_switch
        parser = config.retries.tool_call_parser
        if config.retries.resume != "off" and parser and parser not in EXACT_TOOL_PARSERS:
            exact = ", ".join(sorted(EXACT_TOOL_PARSERS))
            lets[NO_TOOL_STREAMS % (parser, exact)] = lambda instance: False
        return cls(registry, lets)

    def look(self, now: float) -> None:
        """Called every second or so; ``now`` is monotonic."""
        engines = [instance for instance in self.registry if instance.is_available]
        for message, lets in self.lets.items():
            if not engines or any(map(lets, engines)):
                self._since.pop(message, None)
                self._told.discard(message)
            elif now - self._since.setdefault(message, now) >= PATIENCE_S:
                if message not in self._told:
                    logger.warning("%s", message)
                self._told.add(message)
