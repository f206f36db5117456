# SPDX-License-Identifier: Apache-2.0
"""What decides a request's KV beside its tokens goes into its block hashes.

vLLM's hashes cover tokens, salt, images and the *name* of an adapter. Here they also cover the
adapter's content and the generation of the weights, so that the prefix cache, leases and the pool's
keys all tell apart what differs in them. Both are added to the salt, which is hashed with the
first block and so with all that follow. As long as there is neither, hashes are vLLM's own.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.digest import digest
from vllm_ascend_pd.engine.model_identity import weight_files
from vllm_ascend_pd.engine.vllm_api.hashes import salt_anew, salt_of_client, use_hasher
from vllm_ascend_pd.engine.vllm_api.lora import adapter_folder, ask_no_reload, with_reload
from vllm_ascend_pd.engine.weight_files import content_digest, stat_key
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.types import GENERATION_SALT

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from vllm_ascend_pd.engine.vllm_api.types import BlockHash, Executor, LoRARequest, Request


logger = limited_logger(__name__)

_OURS = "pd-"
"""Salts of clients that begin like that are hashed too, so that none can be made to look like one
of these."""
_MAX_ADAPTERS = 1024
"""That are remembered, beside those in use. Servers load and unload them for weeks, and say nothing
of the latter."""


class Content:
    """``hash_blocks`` runs where requests are made, in a thread of its own; all else belongs to the
    scheduler's thread, which looks at every request again when it is added.
    """

    def __init__(
        self, hash_blocks: Callable[[Request], list[BlockHash]], lora_options: object
    ) -> None:
        """``lora_options``: what decides beside its files what an adapter changes."""
        self._hash_blocks = hash_blocks
        self._lora_options = repr(lora_options)
        self.generation = ""
        """Of the weights; empty as long as they are those that were loaded at start."""
        self._adapters: dict[int, str] = {}
        """By ``lora_int_id``: the content that the workers have, or will load."""
        self.loras: dict[str, LoRARequest] = {}
        """By name: the last one that the workers have loaded, or that a request has brought."""
        self._read: dict[str, tuple[str, str, str]] = {}
        """By path, which may be a name on the hub: the folder, when its files were read last, and
        what they held."""
        self._max_adapters = _MAX_ADAPTERS

    def hash_blocks(self, request: Request) -> list[BlockHash]:
        """vLLM's block hasher, for new requests."""
        use_hasher(request, self._hash_blocks, self._salt(request))
        return self._hash_blocks(request)

    def is_current(self, request: Request) -> bool:
        """Whether its hashes say what it would be computed with now."""
        return request.cache_salt == self._salt(request)

    def renew(self, request: Request) -> None:
        """Hash it anew. What was computed with the content before and goes on with this one is
        like nothing else.
        """
        is_mixed = request.num_computed_tokens > 0
        salt_anew(request, self._salt(request, secrets.token_hex(8) if is_mixed else ""))

    def _salt(self, request: Request, mixture: str = "") -> str | None:
        salt, lora = salt_of_client(request), request.lora_request
        adapter = "" if lora is None else self._adapter(lora)
        if not (self.generation or adapter or mixture or (salt or "").startswith(_OURS)):
            return salt
        if not (salt or adapter or mixture):
            return GENERATION_SALT + self.generation
        text = repr((salt, self.generation, adapter, mixture))
        return "pd-content:" + hashlib.sha256(text.encode()).hexdigest()

    # Adapters.

    def adapter_digest(self, lora: LoRARequest) -> str:
        """Of the content that the workers have, or will load."""
        return digest(self._adapter(lora))

    def _adapter(self, lora: LoRARequest) -> str:
        if (known := self._adapters.get(lora.lora_int_id)) is None:
            content = self._read_adapter(lora) or _like_no_other()
            # What the workers have loaded while it was read, in another thread, is newer.
            known = self._adapters.setdefault(lora.lora_int_id, content)
        return known

    def note_loaded(self, lora: LoRARequest) -> bool:
        """The workers have loaded it; whether it differs from what they had."""
        return self._note_adapter(lora, self._read_adapter(lora) or _like_no_other())

    def _note_adapter(self, lora: LoRARequest, content: str) -> bool:
        changed = self._adapters.get(lora.lora_int_id, content) != content
        self._adapters[lora.lora_int_id] = content
        self._remember(lora)
        return changed

    def _remember(self, lora: LoRARequest) -> None:
        self.loras.pop(lora.lora_name, None)
        self.loras[lora.lora_name] = with_reload(lora, False)
        if len(self.loras) > _MAX_ADAPTERS:
            del self.loras[next(iter(self.loras))]

    @property
    def has_many_adapters(self) -> bool:
        return max(len(self._adapters), len(self._read)) > self._max_adapters

    def forget_adapters(self, in_use: Set[int | None]) -> None:
        """Those that neither the workers have nor a request names. When such a one is used again,
        the workers load what is there then, and so it is read anew.
        """
        for lora_id in list(self._adapters):
            if lora_id not in in_use:
                del self._adapters[lora_id]
        self._read = {}
        self._max_adapters = max(_MAX_ADAPTERS, 2 * len(self._adapters))

    def reload_adapter(self, request: Request, executor: Executor) -> bool:
        """If this request asks for a reload, or the workers would load other files than they had,
        load them now, for all requests; whether that was so.

        Files that have changed without anybody asking for a reload are not looked at while the
        workers have the adapter.
        """
        lora = request.lora_request
        if lora is None:
            return False
        content = self._read_adapter(lora, look_up=False)
        known = self._adapters.get(lora.lora_int_id)
        changed = content != known and (
            (lora.load_inplace and content is not None)
            or lora.lora_int_id not in executor.list_loras()
        )
        if changed:
            try:
                executor.add_lora(with_reload(lora, True))
            except Exception as e:  # noqa: BLE001 - the request itself says what is wrong with it
                logger.warning("adapter %s could not be loaded again: %s", lora.lora_name, e)
                return False
            self._note_adapter(lora, content or _like_no_other())
        if lora.load_inplace:
            ask_no_reload(request, lora)
        self._remember(lora)
        return changed

    def _read_adapter(self, lora: LoRARequest, look_up: bool = True) -> str | None:
        """A digest of all its files, which are read when they have changed; ``None`` where they
        cannot be read. To ``look_up`` a name takes a request to the hub.
        """
        read = self._read.get(lora.lora_path)
        folder = adapter_folder(lora) if look_up or read is None else read[0]
        try:
            files = weight_files(Path(folder))
            if not files:
                raise FileNotFoundError("no file of weights")
            files += Path(folder).glob("adapter_config.json")
            key = stat_key(files)
            if read is None or read[:2] != (folder, key):
                content = f"{content_digest(files, full=True)} {self._lora_options}"
                self._read[lora.lora_path] = read = folder, key, content
        except OSError as e:
            logger.warning("adapter %s: its files cannot be read: %s", lora.lora_name, e)
            self._read.pop(lora.lora_path, None)
            return None
        return read[2]


def _like_no_other() -> str:
    """Content that nobody can tell."""
    return secrets.token_hex(8)
