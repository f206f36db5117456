# SPDX-License-Identifier: Apache-2.0
"""Opens that wait for their prompt, and what is left of them."""

from __future__ import annotations

from tests.unit.transfer.test_leases import make_open
from vllm_ascend_pd.transfer.early_opens import EarlyOpens, num_hashes


def test_open_that_waits_no_more_leaves_nothing_and_the_others_there() -> None:
    waiting, request = EarlyOpens(), make_open()
    for until, identity in enumerate((b"a", b"b", b"c")):
        waiting.add(identity, request, float(until))
    first, second, third = waiting.of("t")
    waiting.remove(first[0])
    assert waiting.of("t") == waiting.all() == [second, third]
    assert (waiting.next_end, waiting.num_hashes) == (1.0, 2 * num_hashes(request))
    waiting.release(b"b", "t")
    assert waiting.of("t") == [third]
    for number, _ in waiting.over(2.0):
        waiting.remove(number)
    assert (len(waiting), waiting.num_hashes, waiting.next_end, waiting._of) == (0, 0, None, {})
