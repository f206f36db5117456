# SPDX-License-Identifier: Apache-2.0
"""What weights that were changed in place are called, and which calls change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_pd import envs
from vllm_ascend_pd.engine.scheduler.identity import Identity
from vllm_ascend_pd.engine.scheduler.weights import (
    ReloadSource,
    digest_weights,
    keeps_weights,
    settled_generation,
)


class Executor:
    """Workers that hold these models."""

    def __init__(self, *models: torch.nn.Module, drafter: torch.nn.Module | None = None) -> None:
        self._models = models
        self._drafter = SimpleNamespace(model=drafter) if drafter is not None else None
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: Any) -> list[Any]:
        runners = [
            SimpleNamespace(get_model=lambda m=model: m, drafter=self._drafter)
            for model in self._models
        ]
        return [method(SimpleNamespace(model_runner=runner)) for runner in runners]


class Lost(Executor):
    def collective_rpc(self, method: Any) -> list[Any]:
        raise RuntimeError("a worker is out of memory")


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.BatchNorm1d(33))
    return made.to(torch.bfloat16)


def generation(*models: torch.nn.Module, method: object = "finish_weight_update") -> str | None:
    return settled_generation(method, (), {}, Executor(*models), ReloadSource(None))


def test_equal_weights_in_memory_agree() -> None:
    assert generation(model()) == generation(model())
    assert generation(model(), model(1)) != generation(model(1), model())


def test_weights_of_a_drafter_count() -> None:
    drafts = [
        settled_generation(
            "finish_weight_update", (), {}, Executor(model(), drafter=drafter), ReloadSource(None)
        )
        for drafter in (None, model(1), model(2), model(2))
    ]
    assert len(set(drafts)) == 3
    assert drafts[2] == drafts[3]


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.running_var"])
def test_every_value_in_memory_counts(name: str) -> None:
    other = model()
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        tensors[name].view(-1)[-1] += 1
    assert generation(other) != generation(model())


def test_values_that_change_places_count() -> None:
    other = model()
    with torch.no_grad():
        other[0].weight.copy_(other[0].weight.flip(0))
    assert generation(other) != generation(model())


def test_weights_that_a_kernel_keeps_to_itself_cannot_be_told() -> None:
    packed = model()
    packed[0].weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    assert Executor(packed).collective_rpc(digest_weights) == [None]
    assert generation(model(), packed) is None


def test_between_the_parts_of_an_update_nothing_is_told() -> None:
    assert generation(model(), method="update_weights") is None
    assert generation(model(), method="start_weight_update") is None


def identified(executor: Executor, told: list[str]) -> Identity:
    """Of an engine without requests, whose generations are ``told``."""
    scheduler: Any = SimpleNamespace(
        requests={},
        max_num_encoder_input_tokens=0,
        vllm_config=SimpleNamespace(
            lora_config=None,
            load_config=None,
            model_config=SimpleNamespace(model="no/such/folder", model_weights="elsewhere"),
        ),
    )
    core: Any = SimpleNamespace(model_executor=executor, request_block_hasher=None)
    return Identity(
        scheduler, core, False, lambda request: None, told.append, lambda adapters: None
    )


def test_an_update_in_parts_makes_engines_agree_only_when_it_has_ended() -> None:
    """As a trainer sends weights: engines with the same ones agree, those before it with none."""
    told: list[list[str]] = [[], []]
    for generations in told:
        weights = model()
        identity = identified(Executor(weights), generations)
        for method in ("start_weight_update", "update_weights", "finish_weight_update"):
            with identity.worker_call(method, (), {}):
                if method == "update_weights":
                    weights.load_state_dict(model(1).state_dict())
    assert told[0][-1] == told[1][-1] == generation(model(1)) != generation(model())
    early = [one for generations in told for one in generations[:-1]]
    assert len(set(early)) == len(early) == 6
    assert told[0][-1] not in early


def test_an_update_that_breaks_off_leaves_weights_that_nobody_else_has() -> None:
    told: list[str] = []
    identity = identified(Executor(model()), told)
    with (
        pytest.raises(RuntimeError, match="trainer"),
        identity.worker_call("update_weights", (), {}),
    ):
        raise RuntimeError("the trainer is gone")
    assert [one.partition("-")[0] for one in told] == ["random"]


def test_weights_that_are_asleep_or_a_worker_that_fails_tell_nothing() -> None:
    asleep = Executor(model())
    asleep.sleeping_tags = {"weights", "kv_cache"}
    for executor in (asleep, Lost(model())):
        assert settled_generation("any", (), {}, executor, ReloadSource(None)) is None


class Reloads:
    """An engine started with the weights of one folder, whose workers are asked to reload."""

    def __init__(self, started_with: Path) -> None:
        self._source = ReloadSource(started_with)
        self._executor = Executor(model())
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens while the workers reload."""

    def call(self, method: object, *args: Any, **kwargs: Any) -> str | None:
        self._source.note_call(method, args, kwargs)
        self.meanwhile()
        return settled_generation(method, args, kwargs, self._executor, self._source)

    def __call__(self, *args: Any, **kwargs: Any) -> str | None:
        return self.call("reload_weights", *args, **kwargs)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Folders, by name and what their tensors hold."""
    monkeypatch.setattr(envs, "cache_folder", lambda: tmp_path / "cache")

    def make(name: str, **tensors: float) -> Path:
        (tmp_path / name).mkdir()
        values = {key: torch.full((4,), value) for key, value in tensors.items()}
        save_file(values, tmp_path / name / "model.safetensors")
        return tmp_path / name

    return make


def test_a_reload_is_called_after_its_files(checkpoints: Callable[..., Path]) -> None:
    a, b = checkpoints("a", x=1, y=1), checkpoints("b", x=1, y=1)
    c = str(checkpoints("c", x=2, y=2, z=2))
    assert Reloads(a)() == Reloads(b)() != Reloads(Path(c))()
    assert Reloads(a)(weights_path=c) == Reloads(a)(None, c) == Reloads(Path(c))()
    assert Reloads(a)(weights_iterator=iter(())) == generation(model())
    assert Reloads(a)(None, c, False) == generation(model())


def test_a_reload_of_some_tensors_is_not_called_after_its_files(
    checkpoints: Callable[..., Path],
) -> None:
    """The others stay as they were, whatever that is."""
    reload = Reloads(checkpoints("all", x=1, y=1))
    assert reload(weights_path=str(checkpoints("part", x=2))) == generation(model())


def test_a_reload_without_a_path_reads_what_the_last_one_named(
    checkpoints: Callable[..., Path],
) -> None:
    """So vLLM's worker does; the scheduler's configuration still names the first one."""
    started, tuned = checkpoints("started", x=1), checkpoints("tuned", x=2)
    reload = Reloads(started)
    assert reload() != reload(weights_path=str(tuned))
    assert reload() == Reloads(tuned)()


def test_a_reload_is_not_called_after_files_that_are_written_meanwhile(
    checkpoints: Callable[..., Path],
) -> None:
    started, tuned = checkpoints("started", x=1), checkpoints("tuned", x=2)
    reload = Reloads(started)
    reload.meanwhile = lambda: shutil.copy(tuned / "model.safetensors", started)
    assert reload() == generation(model())
    reload.meanwhile = lambda: None
    assert reload() == Reloads(tuned)()


@pytest.mark.parametrize("method", ["update_config", print])
def test_a_reload_is_not_called_after_files_once_any_may_be_meant(
    checkpoints: Callable[..., Path], method: object
) -> None:
    folder = checkpoints("a", x=1)
    reload = Reloads(folder)
    reload.call(method)
    assert reload() == generation(model())
    assert reload(weights_path=str(folder)) == Reloads(folder)()


@pytest.mark.parametrize(
    "method",
    [
        "compute_weight_checksums",
        "shutdown_weight_transfer_engine",
        "release_late_interaction_query_cache",
    ],
)
def test_calls_that_only_read_or_let_go_keep_weights(method: str) -> None:
    assert keeps_weights(method)


def test_calls_of_which_nothing_is_known_may_change_weights() -> None:
    assert keeps_weights("add_lora")
    assert not keeps_weights("update_weights_from_ipc")
    assert not keeps_weights(model)


def test_a_function_may_say_that_it_keeps_weights() -> None:
    def look(worker: object) -> None: ...

    look.keeps_weights = True  # type: ignore[attr-defined]
    assert keeps_weights(look)
