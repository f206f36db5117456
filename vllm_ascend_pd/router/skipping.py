# SPDX-License-Identifier: Apache-2.0
"""When the decode engine computes a prompt itself, because a prefill leg would cost more."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.break_even import BreakEven

if TYPE_CHECKING:
    from vllm_ascend_pd.router.bodies import Body
    from vllm_ascend_pd.router.config import SkipMode
    from vllm_ascend_pd.router.policies.base import Pair, Routed

logger = logging.getLogger(__name__)

MAX_MODELS = 64
_MEASURES = (None, "short_prompt", "measuring")
"""Ways of a request whose time says something: by P, or by D for its length alone."""


class Skipper:
    """Event loop thread."""

    def __init__(self, mode: SkipMode) -> None:
        self._mode = mode
        self._models: OrderedDict[str | None, BreakEven] = OrderedDict()

    def reason(self, body: Body, routed: Routed, pair: Pair) -> str | None:
        """Why this request needs no prefill leg; ``None``: it needs one."""
        if pair.alone is not None:
            return pair.alone
        if pair.prefill is pair.decode:
            return "same_instance"
        if self._mode == "always":
            return "forced"
        if self._mode == "never":
            return None
        missing = routed.num_prompt_tokens - routed.num_decode_hit_tokens
        if routed.num_decode_hit_tokens and missing <= (routed.block_size or 0):
            return "decode_holds_prefix"
        if isinstance(self._mode, int):
            return "short_prompt" if routed.num_prompt_tokens < self._mode else None
        known = self._models.get(body.model)
        if self._mode != "auto" or known is None:
            return None
        return known.choose(missing, max(pair.decode.num_active, int(pair.decode.load.num_running)))

    def learn(self, body: Body, routed: Routed, reason: str | None, ttft_s: float) -> None:
        """The first token of a stream came, without a retry; ``reason`` as given before."""
        if self._mode != "auto" or reason not in _MEASURES:
            return
        if body.model not in self._models:
            self._models[body.model] = BreakEven()
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        known = self._models[body.model]
        before = known.num_tokens
        missing = routed.num_prompt_tokens - routed.num_decode_hit_tokens
        known.learn(missing, with_prefill=reason is None, seconds=ttft_s)
        if known.num_tokens != before:
            logger.info(
                "model %s: D computes prompts of up to %d tokens sooner than P hands them over",
                body.model,
                known.num_tokens,
            )

    def break_evens(self) -> dict[str, int]:
        """Tokens, by model; empty unless they are measured."""
        return {model or "": known.num_tokens for model, known in self._models.items()}
