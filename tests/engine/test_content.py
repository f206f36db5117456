# SPDX-License-Identifier: Apache-2.0
"""What block hashes cover beside tokens and names, with vLLM's own requests and hashes."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_ascend_pd import envs
from vllm_ascend_pd.engine.scheduler import content as content_module
from vllm_ascend_pd.engine.scheduler.content import Content
from vllm_ascend_pd.engine.scheduler.identity import Identity
from vllm_ascend_pd.engine.vllm_api.config import lora_options
from vllm_ascend_pd.registration import MAX_ADAPTERS, MAX_BODY_BYTES, Registration
from vllm_ascend_pd.types import GENERATION_SALT

init_none_hash(sha256)
HASH_BLOCKS = get_request_block_hasher(16, sha256)
TOKENS = list(range(40))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def content() -> Content:
    return Content(HASH_BLOCKS, "bfloat16")


def make(hasher: Callable[[Request], list[Any]], **options: Any) -> Request:
    sampling = SamplingParams(max_tokens=100)
    return Request("r", TOKENS, sampling, None, block_hasher=hasher, **options)


def adapter(folder: Path, weights: bytes, number: int = 1) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest("name", number, str(folder))


class Executor:
    """Workers that have loaded these adapters."""

    def __init__(self, *loaded: int) -> None:
        self.loaded = set(loaded)
        self.loads: list[LoRARequest] = []

    def list_loras(self) -> set[int]:
        return self.loaded

    def add_lora(self, lora: LoRARequest) -> bool:
        self.loads.append(lora)
        return True


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_hashes_are_vllms_own_as_long_as_weights_are_those_that_were_loaded(
    content: Content, salt: str | None
) -> None:
    ours, plain = make(content.hash_blocks, cache_salt=salt), make(HASH_BLOCKS, cache_salt=salt)
    assert ours.block_hashes == plain.block_hashes
    for request in (ours, plain):
        request.append_output_token_ids(list(range(30)))
    assert ours.block_hashes == plain.block_hashes


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_every_block_of_another_generation_has_another_hash(
    content: Content, salt: str | None
) -> None:
    before = make(content.hash_blocks, cache_salt=salt)
    seen = set(before.block_hashes)
    for generation in ("files-1", "files-2"):
        content.generation = generation
        after = make(content.hash_blocks, cache_salt=salt)
        assert not seen & set(after.block_hashes)
        seen.update(after.block_hashes)
        assert not content.is_current(before)
        content.renew(before)
        assert before.block_hashes == after.block_hashes


def test_a_request_that_has_begun_shares_with_nobody(content: Content) -> None:
    requests = [make(content.hash_blocks) for _ in range(2)]
    content.generation = "files-1"
    for request in requests:
        request.num_computed_tokens = 16
        content.renew(request)
    (a, b), fresh = requests, make(content.hash_blocks)
    assert len({a.block_hashes[0], b.block_hashes[0], fresh.block_hashes[0]}) == 3


@pytest.mark.parametrize("forged", [GENERATION_SALT + "files-1", "pd-content:00"])
def test_a_client_cannot_ask_for_blocks_of_a_generation_by_its_salt(
    content: Content, forged: str
) -> None:
    forger = make(content.hash_blocks, cache_salt=forged)
    content.generation = "files-1"
    honest = make(content.hash_blocks)
    assert forger.block_hashes[0] != honest.block_hashes[0]
    assert forger.cache_salt != forged


def test_adapters_of_one_name_are_told_apart_by_content(content: Content, tmp_path: Path) -> None:
    loras = [adapter(tmp_path / f"{n}", w, n) for n, w in ((1, b"x"), (2, b"x"), (3, b"y"))]
    first, same, other = (make(content.hash_blocks, lora_request=lora) for lora in loras)
    hashes_path = "lora_path" in inspect.getsource(kv_cache_utils._gen_lora_extra_hash_keys)
    assert (first.block_hashes == same.block_hashes) is not hashes_path  # from 0.31 on
    assert not set(first.block_hashes) & set(other.block_hashes)


@pytest.mark.parametrize(
    "options", [{"lora_dtype": "float16"}, {"target_modules": ["o_proj"]}], ids=str
)
def test_an_adapter_that_engines_apply_otherwise_is_another_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    lora = adapter(tmp_path / "a", b"x")

    def request(**options: Any) -> Request:
        config = LoRAConfig(**{"lora_dtype": "bfloat16", "max_lora_rank": 8, **options})
        return make(Content(HASH_BLOCKS, lora_options(config)).hash_blocks, lora_request=lora)

    plain = request().block_hashes
    assert request(max_lora_rank=16).block_hashes == plain
    assert not set(request(**options).block_hashes) & set(plain)


def test_changed_files_count_once_the_workers_have_loaded_them(
    content: Content, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "a", b"old")
    before = make(content.hash_blocks, lora_request=lora)
    adapter(tmp_path / "a", b"newer")
    executor = Executor(1)
    request = make(content.hash_blocks, lora_request=lora)
    assert not content.reload_adapter(request, executor)
    assert request.block_hashes == before.block_hashes
    assert not executor.loads
    executor.loaded.clear()  # evicted: the workers would load what is there now
    assert content.reload_adapter(request, executor)
    content.renew(request)
    assert [lora.load_inplace for lora in executor.loads] == [True]
    assert request.block_hashes != before.block_hashes


def test_a_request_that_asks_for_a_reload_gets_one_and_not_in_every_step(
    content: Content, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "a", b"old")
    make(content.hash_blocks, lora_request=lora)
    adapter(tmp_path / "a", b"newer")
    executor = Executor(1)
    again = LoRARequest("name", 1, str(tmp_path / "a"), load_inplace=True)
    for expected in (True, False):
        request = make(content.hash_blocks, lora_request=again)
        assert content.reload_adapter(request, executor) is expected
        assert not request.lora_request.load_inplace
    assert len(executor.loads) == 1


def test_where_an_adapter_lies_is_not_asked_for_with_each_request(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name on the hub is looked up there. Requests for an adapter that a server has loaded in
    place ask for that, too."""
    folders = [adapter(tmp_path / weights.decode(), weights).lora_path for weights in (b"a", b"b")]
    commits = iter(folders)
    monkeypatch.setattr(content_module, "adapter_folder", lambda lora: next(commits))
    executor, lora = Executor(1), LoRARequest("name", 1, "some/adapter", load_inplace=True)

    def use() -> str:
        request = make(content.hash_blocks, lora_request=lora)
        assert not content.reload_adapter(request, executor)
        return content.adapter_digest(lora)

    before = use()
    assert use() == before
    assert content.note_loaded(lora)  # as somebody asked for from outside
    assert use() == use() != before


def test_an_adapter_that_has_gone_is_looked_up_again(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody has emptied the hub's cache."""
    folders = iter((tmp_path / "one", tmp_path / "other"))
    monkeypatch.setattr(content_module, "adapter_folder", lambda lora: str(next(folders)))
    adapter(tmp_path / "other", b"x")
    files = Path(adapter(tmp_path / "one", b"x").lora_path)
    lora = LoRARequest("name", 1, "some/adapter")
    before = make(content.hash_blocks, lora_request=lora).block_hashes
    files.rename(tmp_path / "elsewhere")
    for _ in range(2):  # workers without it, which load it with each of these
        assert content.reload_adapter(make(content.hash_blocks, lora_request=lora), Executor())
    assert make(content.hash_blocks, lora_request=lora).block_hashes == before


def test_what_the_workers_load_while_a_request_is_hashed_counts(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = adapter(tmp_path / "a", b"old")
    read_adapter = content._read_adapter

    def read(lora: LoRARequest) -> str | None:
        monkeypatch.undo()
        old = read_adapter(lora)
        adapter(tmp_path / "a", b"newer")
        content.note_loaded(lora)  # the scheduler's thread
        return old

    monkeypatch.setattr(content, "_read_adapter", read)
    during = make(content.hash_blocks, lora_request=lora)
    other = adapter(tmp_path / "b", b"newer", 2)
    assert content.is_current(during)
    assert content.adapter_digest(lora) == content.adapter_digest(other)


def test_an_adapter_that_nobody_here_can_read_is_like_no_other(tmp_path: Path) -> None:
    lora = LoRARequest("name", 1, str(tmp_path / "gone"))
    (tmp_path / "gone").mkdir()
    contents = [Content(HASH_BLOCKS, "") for _ in range(2)]
    one, again = (make(contents[0].hash_blocks, lora_request=lora) for _ in range(2))
    assert one.block_hashes == again.block_hashes
    assert make(contents[1].hash_blocks, lora_request=lora).block_hashes != one.block_hashes


def test_files_that_cannot_be_read_where_the_workers_may_have_are_like_no_others(
    content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they held before is not what the workers have loaded, or load now."""
    lora = adapter(tmp_path / "a", b"old")
    before = make(content.hash_blocks, lora_request=lora)
    adapter(tmp_path / "a", b"newer")

    def fail(files: object, full: bool) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    executor = Executor(1)
    with monkeypatch.context() as patch:
        patch.setattr(content_module, "content_digest", fail)
        request = make(content.hash_blocks, lora_request=lora)
        assert not content.reload_adapter(request, executor)  # the workers have the old ones
        assert request.block_hashes == before.block_hashes
        executor.loaded.clear()
        assert content.reload_adapter(request, executor)
        evicted = make(content.hash_blocks, lora_request=lora)
        assert evicted.block_hashes != before.block_hashes
        assert content.note_loaded(lora)  # as somebody asked for from outside
        loaded = make(content.hash_blocks, lora_request=lora)
        assert loaded.block_hashes not in (before.block_hashes, evicted.block_hashes)
    assert content.note_loaded(lora)
    known = make(content.hash_blocks, lora_request=lora)
    other = Content(HASH_BLOCKS, "bfloat16")
    assert make(other.hash_blocks, lora_request=lora).block_hashes == known.block_hashes


class IdentityWorld:
    """An engine whose router and workers are told of adapters."""

    def __init__(self, folder: Path, *loaded: int) -> None:
        self.folder = folder
        self.told: list[dict[str, str]] = []
        self.executor = Executor(*loaded)
        self.core: Any = SimpleNamespace(
            model_executor=self.executor, request_block_hasher=HASH_BLOCKS
        )
        model = SimpleNamespace(model="no/such/folder", model_weights="elsewhere")
        config = SimpleNamespace(lora_config=LoRAConfig(), load_config=None, model_config=model)
        self.scheduler: Any = SimpleNamespace(
            requests={}, vllm_config=config, max_num_encoder_input_tokens=0
        )
        self.identity = Identity(
            self.scheduler,
            self.core,
            False,
            lambda request: None,
            lambda generation: None,
            self.told.append,
        )

    def use(self, name: str, number: int = 1, weights: bytes | None = None) -> Request:
        lora = adapter(self.folder / str(number), weights or name.encode(), number)
        lora.lora_name = name
        request = make(self.core.request_block_hasher, lora_request=lora)
        self.identity.check(request)
        return request


def test_router_is_told_of_the_adapters_that_were_used_last(tmp_path: Path) -> None:
    world = IdentityWorld(tmp_path, 1)
    told, use = world.told, world.use
    for number in range(MAX_ADAPTERS + 10):
        use("busy")
        use(f"other {number}")
    assert len(told) == MAX_ADAPTERS + 11  # and not once for each request
    assert told[-1].keys() == {"busy", *(f"other {n}" for n in range(11, MAX_ADAPTERS + 10))}


def test_what_a_router_is_told_of_adapters_with_long_names_fits(tmp_path: Path) -> None:
    world = IdentityWorld(tmp_path, 1)
    for number in range(MAX_ADAPTERS):
        for letter in "n\N{CJK UNIFIED IDEOGRAPH-540D}\0":
            world.use(f"{number:03d}{letter * 197}")
    assert world.told[-1].keys() == {f"{number:03d}{'n' * 197}" for number in range(MAX_ADAPTERS)}
    told = Registration(url="http://h:1", role="both", epoch="e", adapters=world.told[-1])
    assert len(msgspec.json.encode(told)) < MAX_BODY_BYTES


def test_adapters_that_nobody_uses_any_more_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_module, "_MAX_ADAPTERS", 8)
    world = IdentityWorld(tmp_path, 1)
    world.scheduler.requests["r"] = world.use("running", 2)
    loaded = world.use("loaded", 1)
    hashes = [world.use(f"unloaded {number}", number).block_hashes for number in range(3, 100)]
    content = world.identity._content
    assert max(map(len, (content._adapters, content._read, content.loras))) <= 9
    assert {1, 2} <= content._adapters.keys()
    assert world.use("unloaded 3", 3).block_hashes == hashes[0]
    # The workers have what they loaded, whatever lies there now.
    assert world.use("loaded", 1, b"other").block_hashes == loaded.block_hashes


def test_what_was_encoded_with_an_adapter_is_forgotten_with_its_old_content(tmp_path: Path) -> None:
    """It may change layers of encoders, too, and vLLM knows what these have made by its name."""
    world, reset = IdentityWorld(tmp_path, 1), []
    executor: Any = world.executor
    world.scheduler.max_num_encoder_input_tokens = 16
    world.scheduler.reset_encoder_cache = lambda: reset.append("scheduler")
    executor.reset_encoder_cache = lambda: reset.append("workers")
    lora = world.use("name", weights=b"old").lora_request
    world.identity.on_lora_loaded(lora)
    assert not reset
    adapter(tmp_path / "1", b"other")
    world.identity.on_lora_loaded(lora)
    assert reset == ["scheduler", "workers"]
