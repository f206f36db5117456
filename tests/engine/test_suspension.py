# SPDX-License-Identifier: Apache-2.0
"""Before its KV caches are unmapped, a worker lets go of them; afterwards it takes them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.test_worker_step import GRANT, LEASE, NAMES, Side, load_spec
from tests.engine.test_worker_step import side as side
from vllm_ascend_pd.engine.metadata import StepMeta
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.suspension import Suspension, resume, suspend
from vllm_ascend_pd.engine.worker import step
from vllm_ascend_pd.errors import BackendError, TransferError
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def direct(side: Side) -> Iterator[Side]:
    """Its transports know the KV pages by address."""
    side.live_regions += [
        (side.caches[name].data_ptr(), side.caches[name].nbytes) for name in NAMES
    ]
    for region in side.live_regions:
        side.transports.register(*region)
    yield side
    side.worker.resume()
    for addr, _ in side.live_regions:
        side.transports.unregister(addr)


def test_what_was_granted_is_gone_when_it_returns(side: Side) -> None:
    side.step(GRANT)
    assert side.load().cause == ""
    side.worker.suspend()
    assert LEASE not in side.grants
    assert side.load().cause == Cause.LEASE_EXPIRED.value


def test_registered_pages_are_registered_anew(direct: Side) -> None:
    before = direct.transports.num_regions()
    direct.worker.suspend()
    assert direct.transports.num_regions() == before - len(NAMES)
    direct.worker.resume()
    assert direct.transports.num_regions() == before


def test_pages_that_could_not_be_registered_are_when_it_is_woken_again(
    direct: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = direct.transports.num_regions()
    direct.worker.suspend()
    register = direct.transports.register

    def refuse(addr: int, num_bytes: int) -> None:
        if addr == direct.live_regions[-1][0]:
            raise BackendError("no room for it")
        register(addr, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(direct.transports, "register", refuse)
        with pytest.raises(BackendError, match="no room"):
            direct.worker.resume()
    direct.worker.resume()
    assert direct.transports.num_regions() == before


def test_what_is_mapped_or_unmapped_already_is_left_alone(direct: Side) -> None:
    """As when weights alone wake up before another sleep, or KV caches before all the rest."""
    before = direct.transports.num_regions()
    for _ in range(2):
        direct.worker.suspend()
        assert direct.transports.num_regions() == before - len(NAMES)
    for _ in range(2):
        direct.worker.resume()
        assert direct.transports.num_regions() == before


def test_pages_that_are_still_loaded_are_not_let_go(direct: Side) -> None:
    regions = direct.transports.num_regions()
    direct.worker.begin_step(
        type("Output", (), {"pd_metadata": StepMeta(loads=(load_spec(direct, in_step=False),))})
    )
    with pytest.raises(TransferError, match="still loaded"):
        direct.worker.suspend()
    assert direct.transports.num_regions() == regions


def test_pages_that_are_still_read_are_not_let_go(
    direct: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer's piece that does not end."""
    monkeypatch.setattr(step, "_DRAIN_S", 0.05)
    regions = direct.transports.num_regions()
    reading: Any = {1: object()}
    monkeypatch.setattr(direct.server, "_rings", _Rings(direct.server._rings, reading))
    with pytest.raises(TransferError, match="still read"):
        direct.worker.suspend()
    assert direct.transports.num_regions() == regions


@pytest.mark.parametrize("level", [1, 2])
def test_worker_that_cannot_let_go_has_the_others_take_theirs_again(level: int) -> None:
    """And the weights are what they were."""
    asked = []

    class Executor:
        def collective_rpc(self, method: Any) -> None:
            asked.append(method)
            if method is suspend:
                raise TransferError("still read")

    untouched: Any = None
    executor: Any = Executor()
    with pytest.raises(TransferError, match="still read"):
        Suspension(Loads(1), untouched, [], untouched, executor).begin(level)
    assert asked == [suspend, resume]


class _Rings:
    """Rings of which one goes on."""

    def __init__(self, real: Any, going_on: Any) -> None:
        self._real = real
        self._going_on = going_on

    def __bool__(self) -> bool:
        return bool(self._going_on)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
