# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.tickets import TicketKey
from vllm_ascend_pd.transfer.watchers import _MAX_WATCHERS, Watchers
from vllm_ascend_pd.types import Cause, LeaseRef
from vllm_ascend_pd.wire import Progress, Watch

NUM_LAYERS = 4


class CountedGrants(Grants):
    def __init__(self) -> None:
        super().__init__()
        self.looked_at: list[str] = []

    def look(self, lease: LeaseRef) -> tuple[Grant | None, int, bool]:
        self.looked_at.append(lease.transfer_id)
        return super().look(lease)


def test_layer_costs_nothing_for_those_that_wait_for_other_prompts() -> None:
    grants, key = CountedGrants(), TicketKey()
    told: list[tuple[bytes, Progress]] = []
    watchers = Watchers(grants, lambda identity, progress: told.append((identity, progress)))
    leases = {name: LeaseRef(name, 1) for name in ("done", "running", "queued")}
    for name, lease in leases.items():
        watchers.add(name.encode(), Watch(name, "e", key.issue(lease, 32), each_layer=True))
    grants.begin_step([Grant(leases["done"], "e", ((1, 2),), 0, 32)])
    grants.end_step()
    watchers.tell()
    grants.begin_step([Grant(leases["running"], "e", ((3, 4),), 0, 32)])
    told.clear()
    grants.looked_at.clear()
    for layer in range(NUM_LAYERS):
        grants.layer_done(layer)
        watchers.tell_layer()
    assert grants.looked_at == ["running"] * NUM_LAYERS
    layers = [Progress("running", 0, 32, layer + 1) for layer in range(NUM_LAYERS)]
    assert told == [(b"running", progress) for progress in layers]
    grants.discard_all()
    watchers.tell()
    gone = {progress.transfer_id for _, progress in told if progress.cause}
    assert gone == {"done", "running"}
    assert told[-1][1].cause == Cause.LEASE_EXPIRED.value
    assert len(watchers) == 1


def test_prompt_is_not_compared_with_all_of_its_step() -> None:
    compared: list[str] = []

    class Compared(LeaseRef):
        def __eq__(self, other: object) -> bool:
            compared.append(self.transfer_id)
            return super().__eq__(other)

        __hash__ = LeaseRef.__hash__

    grants = Grants()
    leases = [Compared(f"t{number}", number) for number in range(50)]
    grants.begin_step(Grant(lease, "e", ((1,),), 0, 16) for lease in leases)
    grants.layer_done(2)
    asked = [Compared(*lease) for lease in leases]
    assert [grants.look(lease)[1] for lease in asked] == [3] * len(leases)
    assert len(compared) <= 3 * len(leases)


def test_of_those_that_watch_a_prompt_the_last_ones_are_told() -> None:
    """A connection that has ended leaves its watch behind."""
    grants, key = Grants(), TicketKey()
    told: list[bytes] = []
    watchers = Watchers(grants, lambda identity, progress: told.append(identity))
    lease = LeaseRef("t", 1)
    watch = Watch("t", "e", key.issue(lease, 32), each_layer=True)
    identities = [number.to_bytes(8, "big") for number in range(2 * _MAX_WATCHERS)]
    for identity in identities:
        watchers.add(identity, watch)
    assert told == identities
    grants.begin_step([Grant(lease, "e", ((1, 2),), 0, 32)])
    told.clear()
    watchers.tell()
    assert told == identities[-_MAX_WATCHERS:]
