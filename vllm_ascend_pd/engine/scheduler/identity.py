# SPDX-License-Identifier: Apache-2.0
"""What this engine computes with may change while it runs: weights in place, adapters by name.

a call that may change weights begins   a random generation: in block hashes and fingerprint;
                                        leases are revoked, requests that wait are hashed anew,
                                        those that have begun are like nothing else from now on,
                                        and what encoders have made of images is made anew
it ends                                 the generation is what the weights are, if that can be
                                        told, and requests that have not begun get it
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.engine.model_identity import model_folder
from vllm_ascend_pd.engine.scheduler.content import Content
from vllm_ascend_pd.engine.scheduler.weights import (
    ReloadSource,
    keeps_weights,
    random_generation,
    settled_generation,
)
from vllm_ascend_pd.engine.vllm_api.config import lora_options
from vllm_ascend_pd.engine.vllm_api.engine import forget_encoded, hash_new_requests
from vllm_ascend_pd.registration import MAX_ADAPTERS, MAX_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm_ascend_pd.engine.vllm_api.types import EngineCore, LoRARequest, Request, Scheduler


logger = logging.getLogger(__name__)


class Identity:
    """Scheduler thread, but for ``Content.hash_blocks``."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine_core: EngineCore,
        full: bool,
        forsake: Callable[[Request], None],
        on_generation: Callable[[str], None],
        on_adapters: Callable[[Mapping[str, str]], None],
    ) -> None:
        """``full``: files of weights are read to the last byte. ``forsake`` gives up all that a
        request would take from elsewhere, and what is kept of it for others. ``on_generation`` is
        told each new one, and gives up all leases. ``on_adapters`` is told of the adapters that the
        last requests have used what they are, by name, when that is new.
        """
        self._scheduler = scheduler
        self._executor = engine_core.model_executor
        self._reload_source = ReloadSource(
            model_folder(scheduler.vllm_config.load_config, scheduler.vllm_config.model_config)
        )
        self._full = full
        self._forsake = forsake
        self._on_generation = on_generation
        self._on_adapters = on_adapters
        self._told_adapters: dict[str, str] = {}
        """By name; the one that was used last at the end."""
        options = lora_options(scheduler.vllm_config.lora_config)
        self._content = Content(engine_core.request_block_hasher, options)
        hash_new_requests(engine_core, self._content.hash_blocks)

    def check(self, request: Request) -> None:
        """Before a request is added: it was hashed a moment ago, by another thread."""
        if self._content.reload_adapter(request, self._executor):
            self._renew_users(request.lora_request)
        if not self._content.is_current(request):
            self._content.renew(request)
        if (lora := request.lora_request) is not None:
            self._tell_adapter(lora.lora_name, self._content.adapter_digest(lora))
            if self._content.has_many_adapters:
                users = (request, *self._scheduler.requests.values())
                in_use = {*self._executor.list_loras(), *map(_adapter_id, users)}
                self._content.forget_adapters(in_use)

    def _tell_adapter(self, name: str, digest: str) -> None:
        if len(msgspec.json.encode(name)) - 2 > MAX_TEXT:
            return
        known = self._told_adapters
        is_news = known.pop(name, None) != digest
        known[name] = digest
        if len(known) > MAX_ADAPTERS:
            del known[next(iter(known))]
        if is_news:
            self._on_adapters(dict(known))

    def adapter_digest(self, request: Request) -> str:
        """Of what its adapter is, which was checked; empty without one."""
        lora = request.lora_request
        return "" if lora is None else self._content.adapter_digest(lora)

    def on_lora_loaded(self, lora: LoRARequest) -> None:
        if self._content.note_loaded(lora):
            self._renew_users(lora)

    def adapter(self, name: str) -> LoRARequest | None:
        """The one of this name here, which the workers have from now on, or ``None``."""
        lora = self._content.loras.get(name)
        if lora is None or lora.lora_int_id in self._executor.list_loras():
            return lora
        try:
            self._executor.add_lora(lora)
        except Exception as e:  # noqa: BLE001 - in a step it would end the engine
            logger.warning("adapter %s could not be loaded: %s", name, e)
            return None
        self.on_lora_loaded(lora)
        return lora

    def _renew_users(self, lora: LoRARequest | None) -> None:
        if lora is not None:
            forget_encoded(self._scheduler, self._executor)
            requests = self._scheduler.requests.values()
            self._renew(r for r in requests if _adapter_id(r) == lora.lora_int_id)

    @contextmanager
    def worker_call(
        self, method: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Around a call of the workers that somebody from outside has asked for."""
        self._reload_source.note_call(method, args, kwargs)
        if keeps_weights(method):
            yield
            return
        self.weights_changed()
        yield
        source = self._reload_source
        generation = settled_generation(method, args, kwargs, self._executor, source, self._full)
        if generation is not None:
            self._set_generation(generation)
            self._renew(r for r in self._scheduler.requests.values() if not r.num_computed_tokens)

    def weights_changed(self) -> None:
        """They are, or may be, other ones from now on."""
        forget_encoded(self._scheduler, self._executor)
        self._set_generation(random_generation())
        self._renew(self._scheduler.requests.values())

    def _set_generation(self, generation: str) -> None:
        self._content.generation = generation
        self._on_generation(generation)

    def _renew(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self._forsake(request)
            self._content.renew(request)


def _adapter_id(request: Request) -> int | None:
    return request.lora_request.lora_int_id if request.lora_request is not None else None
