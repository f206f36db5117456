# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.unit.router.test_many import registered, spec
from vllm_ascend_pd.registration import KVEvents
from vllm_ascend_pd.router import without_effect
from vllm_ascend_pd.router.config import Retries, RouterConfig
from vllm_ascend_pd.router.instances import InstanceSpec
from vllm_ascend_pd.router.without_effect import PATIENCE_S, WithoutEffect

ENGINE = spec(1)
TELLS = spec(2, kv_events=KVEvents(endpoint="tcp://127.0.0.1:5557"))
PREFIX_AWARE = RouterConfig(policy="prefix-aware")
AUTO = RouterConfig(roles="auto")


def told_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == without_effect.__name__]


@pytest.mark.parametrize(
    ("config", "engine", "told"),
    [
        (PREFIX_AWARE, ENGINE, "--kv-events-config"),
        (PREFIX_AWARE, TELLS, ""),
        (AUTO, spec(1, role="prefill"), "kv_role kv_both"),
        (AUTO, ENGINE, ""),
        (AUTO, spec(1, fingerprint=None), "no engine that hands KV over"),
        (RouterConfig(retries=Retries(tool_call_parser="hermse")), ENGINE, "with one of glm47"),
        (RouterConfig(retries=Retries(tool_call_parser="hermes")), ENGINE, ""),
        (RouterConfig(retries=Retries(resume="off", tool_call_parser="x")), ENGINE, ""),
        (RouterConfig(), ENGINE, ""),
    ],
)
def test_option_that_does_nothing_is_told_once(
    caplog: pytest.LogCaptureFixture, config: RouterConfig, engine: InstanceSpec, told: str
) -> None:
    options = WithoutEffect.of(config, registered(engine))
    for now in (0.0, PATIENCE_S / 2, PATIENCE_S, 2 * PATIENCE_S):
        assert not told_in(caplog) or now > PATIENCE_S
        options.look(now)
    assert len(told_in(caplog)) == bool(told)
    assert told in caplog.text


def test_it_is_told_again_when_the_engine_that_let_it_act_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = registered()
    options = WithoutEffect.of(PREFIX_AWARE, registry)
    for number, change in enumerate(
        (
            lambda: None,  # nobody knows yet what engines there will be
            lambda: registry.put(ENGINE),
            lambda: registry.put(TELLS),
            lambda: registry.remove(TELLS.instance_id, "gone"),
        )
    ):
        change()
        now = number * 10 * PATIENCE_S
        options.look(now)
        options.look(now + PATIENCE_S)
    assert len(told_in(caplog)) == 2
