# SPDX-License-Identifier: Apache-2.0
"""When the decode engine computes a prompt itself, because a prefill leg would cost more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_pd.router.bodies import Body
    from vllm_ascend_pd.router.config import Skipping
    from vllm_ascend_pd.router.policies.base import Pair, Routed


class Skipper:
    """Event loop thread."""

    def __init__(self, skipping: Skipping) -> None:
        self._mode = skipping.mode

    def reason(self, body: Body, routed: Routed, pair: Pair) -> str | None:
        """Why this request needs no prefill leg; ``None``: it needs one."""
        if body.decode_only is not None:
            return body.decode_only
        if pair.prefill is pair.decode:
            return "same_instance"
        if self._mode == "always":
            return "forced"
        if self._mode == "never":
            return None
        missing = routed.num_prompt_tokens - routed.num_decode_hit_tokens
        if routed.num_decode_hit_tokens and missing <= (routed.block_size or 0):
            return "decode_holds_prefix"
        if isinstance(self._mode, int) and routed.num_prompt_tokens < self._mode:
            return "short_prompt"
        return None
