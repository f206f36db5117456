# SPDX-License-Identifier: Apache-2.0
"""The contract of `kv.loader.Loader` as a suite for pytest: derive from ``LoaderContract``, and
define a fixture ``make_subject``, which returns a function that makes a ``LoaderSubject``.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from vllm_ascend_pd.types import Cause, LoadId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_ascend_pd.backends.block_copy import BlockCopier
    from vllm_ascend_pd.backends.staging import StagingPool
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.loader import Loader

LONG_S = 20.0
SHORT_S = 0.2
NUM_THEIRS = 8
"""Blocks that the source has, from the first."""


class Gate:
    """Opened and closed by the test; counts who has come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()
        self.close, self.open = self._open.clear, self._open.set

    def enter(self) -> None:
        self.reached.set()
        assert self._open.wait(LONG_S)


class GatedCopier:
    """Any copier, with a gate before what it takes from pages, and one before what it places."""

    def __init__(self, inner: BlockCopier) -> None:
        self._inner = inner
        self.source, self.target = Gate(), Gate()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def gather(self, *args: Any) -> int:
        self.source.enter()
        return self._inner.gather(*args)

    def scatter(self, *args: Any) -> int:
        self.target.enter()
        return self._inner.scatter(*args)


class Pages(Protocol):
    """KV pages of one engine."""

    @property
    def bytes(self) -> np.ndarray:
        """What they hold: ``uint8 [layers, at least 32 blocks, bytes of a page]``."""


class LoaderSubject(ABC):
    """A loader that copies with ``copier``, and a source for it, which can be held and damaged."""

    loader: Loader[Any, Any]
    theirs: Pages
    """Of the source."""
    ours: Pages
    slots: Sequence[StagingPool]
    """All that loads use."""

    def __init__(self, inner: BlockCopier) -> None:
        self.copier = GatedCopier(inner)
        self._load_ids = count(1)

    @abstractmethod
    def make_spec(
        self,
        load_id: LoadId,
        indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        options: dict[str, Any],
    ) -> Any:
        """To load these blocks of the source into those of ours."""

    @abstractmethod
    def spoil(self, kind: str) -> None:
        """From now on the source answers with failures, or with other bytes than it should."""

    @abstractmethod
    def hold(self) -> None:
        """Have all threads of the loader stand still, until ``copier.source`` opens."""

    @abstractmethod
    def close(self) -> None:
        """Stop the loader, and what it uses."""

    def start(
        self,
        indices: Sequence[int],
        block_ids: Sequence[int],
        *,
        in_step: bool = True,
        has_tail: bool = False,
        timeout_s: float = LONG_S,
    ) -> LoadId:
        load_id = LoadId(next(self._load_ids))
        options = {"in_step": in_step, "has_tail": has_tail, "timeout_s": timeout_s}
        spec = self.make_spec(load_id, tuple(indices), tuple(block_ids), options)
        self.loader.start_load(spec)
        return load_id

    def results(self, num_results: int = 1) -> dict[LoadId, LoadResult]:
        """As steps take them."""
        results: dict[LoadId, LoadResult] = {}
        deadline = time.monotonic() + LONG_S
        while len(results) < num_results:
            assert time.monotonic() < deadline
            for result in self.loader.take_results():
                assert result.load_id not in results
                results[result.load_id] = result
            time.sleep(0.001)
        return results

    def expect_loaded(self, indices: Sequence[int], block_ids: Sequence[int]) -> None:
        np.testing.assert_array_equal(
            self.ours.bytes[:, list(block_ids)], self.theirs.bytes[:, list(indices)]
        )

    def check_nothing_more_is_written(self) -> None:
        """Once what was held goes on: the blocks are somebody else's."""
        before = self.ours.bytes.copy()
        self.copier.source.open()
        self.wait_at_rest()
        np.testing.assert_array_equal(self.ours.bytes, before)

    def wait_at_rest(self) -> None:
        """Until no thread works on a slot; some may be in quarantine."""
        deadline = time.monotonic() + LONG_S
        while any(slots.num_held for slots in self.slots):
            assert time.monotonic() < deadline
            time.sleep(0.001)


class LoaderContract:
    """Of every loader."""

    @pytest.fixture
    def subject(self, make_subject: Callable[[], LoaderSubject]) -> Iterator[LoaderSubject]:
        subject = make_subject()
        yield subject
        subject.copier.source.open()
        subject.copier.target.open()
        subject.wait_at_rest()
        subject.close()

    @pytest.mark.parametrize("in_step", [True, False])
    def test_blocks_of_a_load_hold_what_the_source_has_and_no_other_is_touched(
        self, subject: LoaderSubject, in_step: bool
    ) -> None:
        before = subject.ours.bytes.copy()
        load_id = subject.start((7, 0, 3), (20, 11, 30), in_step=in_step)
        result = subject.results()[load_id]
        assert (result.cause, result.failed) == ("", ())
        num_layers, num_blocks, page_bytes = before.shape
        assert result.num_bytes >= 3 * num_layers * page_bytes
        subject.expect_loaded((7, 0, 3), (20, 11, 30))
        others = sorted(set(range(num_blocks)) - {20, 11, 30})
        np.testing.assert_array_equal(subject.ours.bytes[:, others], before[:, others])

    def test_result_is_taken_once(self, subject: LoaderSubject) -> None:
        subject.start((0,), (1,))
        assert (subject.loader.is_idle, subject.loader.num_loads()) == (False, 1)
        subject.results()
        assert subject.loader.take_results() == []
        assert (subject.loader.is_idle, subject.loader.num_loads()) == (True, 0)

    def test_layer_that_was_waited_for_is_in_place(self, subject: LoaderSubject) -> None:
        subject.start(range(NUM_THEIRS), range(10, 10 + NUM_THEIRS))
        for layer in range(len(subject.ours.bytes)):
            subject.loader.wait_layer(layer)
            np.testing.assert_array_equal(
                subject.ours.bytes[layer, 10 : 10 + NUM_THEIRS],
                subject.theirs.bytes[layer, :NUM_THEIRS],
            )
        subject.loader.wait_all()
        assert not subject.loader.in_step_under_way()
        assert [result.cause for result in subject.loader.take_results()] == [""]

    def test_tail_that_was_waited_for_is_in_place(self, subject: LoaderSubject) -> None:
        subject.start((4, 5, 6), (1, 2, 3), has_tail=True)
        subject.loader.wait_tails()
        subject.expect_loaded((6,), (3,))
        assert subject.results().popitem()[1].cause == ""

    def test_loads_that_no_step_waits_for_hold_none_up(self, subject: LoaderSubject) -> None:
        subject.copier.source.close()
        subject.start((0, 1), (2, 3), in_step=False, has_tail=True)
        assert not subject.loader.in_step_under_way()
        subject.loader.wait_tails()
        subject.loader.wait_layer(0)
        subject.loader.wait_all()
        assert subject.loader.take_results() == []
        subject.copier.source.open()
        assert subject.results().popitem()[1].cause == ""

    @pytest.mark.parametrize("in_step", [True, False])
    def test_load_of_a_source_that_says_nothing_ends_at_its_deadline(
        self, subject: LoaderSubject, in_step: bool
    ) -> None:
        subject.copier.source.close()
        load_id = subject.start((0, 1), (2, 3), in_step=in_step, timeout_s=SHORT_S)
        before = subject.ours.bytes.copy()
        if in_step:
            subject.loader.wait_all()
            assert not subject.loader.in_step_under_way()
        result = subject.results()[load_id]
        assert result.cause == Cause.DEADLINE.value
        assert set(result.failed) <= {2, 3}
        subject.copier.source.open()
        subject.wait_at_rest()
        np.testing.assert_array_equal(subject.ours.bytes, before)

    def test_load_ends_though_all_threads_of_the_loader_are_held(
        self, subject: LoaderSubject
    ) -> None:
        subject.hold()
        load_id = subject.start((0, 1), (2, 3), in_step=False, timeout_s=SHORT_S)
        assert subject.results()[load_id].cause == Cause.DEADLINE.value
        subject.check_nothing_more_is_written()

    def test_nothing_is_written_for_a_load_that_was_cancelled(self, subject: LoaderSubject) -> None:
        subject.copier.source.close()
        load_id = subject.start((0, 1), (2, 3), in_step=False)
        assert subject.copier.source.reached.wait(LONG_S)
        subject.loader.cancel(load_id)
        assert subject.results()[load_id].cause == Cause.CANCELLED.value
        subject.check_nothing_more_is_written()

    def test_end_of_a_load_waits_for_the_copy_that_is_under_way(
        self, subject: LoaderSubject
    ) -> None:
        subject.copier.target.close()
        load_id = subject.start((0, 1), (2, 3), in_step=False)
        assert subject.copier.target.reached.wait(LONG_S)
        ends = threading.Thread(target=subject.loader.cancel, args=(load_id,))
        ends.start()
        assert subject.loader.take_results() == []
        assert ends.is_alive()
        subject.copier.target.open()
        ends.join(LONG_S)
        before = subject.ours.bytes.copy()
        assert subject.results()[load_id].cause in ("", Cause.CANCELLED.value)
        subject.wait_at_rest()
        np.testing.assert_array_equal(subject.ours.bytes, before)

    @pytest.mark.parametrize(
        ("kind", "causes"),
        [
            ("fail", {Cause.TRANSFER_FAILED.value, Cause.POOL_FAILED.value}),
            ("corrupt", {Cause.CHECKSUM.value}),
        ],
    )
    @pytest.mark.parametrize("in_step", [True, False])
    def test_what_the_source_spoils_fails_the_load(
        self, subject: LoaderSubject, kind: str, causes: set[str], in_step: bool
    ) -> None:
        subject.spoil(kind)
        load_id = subject.start((0, 1), (2, 3), in_step=in_step)
        subject.loader.wait_layer(0)
        result = subject.results()[load_id]
        assert result.cause in causes
        assert set(result.failed) <= {2, 3}

    def test_end_of_one_load_is_none_of_another(self, subject: LoaderSubject) -> None:
        subject.copier.source.close()
        first = subject.start((0, 1), (2, 3), in_step=False)
        second = subject.start((4, 5), (6, 7))
        subject.loader.cancel(first)
        subject.copier.source.open()
        results = subject.results(2)
        assert results[first].cause == Cause.CANCELLED.value
        assert results[second].cause == ""
        subject.expect_loaded((4, 5), (6, 7))

    def test_what_has_ended_cannot_be_cancelled(self, subject: LoaderSubject) -> None:
        load_id = subject.start((0,), (1,))
        subject.loader.wait_all()
        subject.loader.cancel(load_id)
        assert subject.results()[load_id].cause == ""
        subject.loader.cancel(load_id)
        subject.loader.cancel(LoadId(99))
        assert subject.loader.is_idle

    def test_copier_that_raises_fails_its_load_and_no_later_one(
        self, subject: LoaderSubject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> int:
            raise OSError("no such device")

        monkeypatch.setattr(subject.copier, "scatter", refuse)
        load_id = subject.start((0,), (1,))
        assert subject.results()[load_id].cause
        monkeypatch.undo()
        load_id = subject.start((0,), (1,))
        assert subject.results()[load_id].cause == ""
        subject.expect_loaded((0,), (1,))
