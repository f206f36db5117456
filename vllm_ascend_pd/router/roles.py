# SPDX-License-Identifier: Apache-2.0
"""Which engines compute prompts and which answer, where they can do both."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_ascend_pd.registration import Role
    from vllm_ascend_pd.router.instances import Instance


def role_obstacle(instances: Iterable[Instance], switching: Instance, role: Role) -> str | None:
    """Why an engine cannot be used for this role only."""
    name = switching.instance_id
    if role == "both":
        return None
    if switching.spec.role != "both":
        return f"{name} can only {switching.spec.role}: start it with kv_role kv_both"
    other = "decode" if role == "prefill" else "prefill"
    left = [
        one
        for one in instances
        if one is not switching
        and one.is_available
        and one.spec.role in (other, "both")
        and (one.spec.role == other or one.used_for in (other, "both"))
    ]
    return None if left else f"no engine for {other} would be left without {name}"
