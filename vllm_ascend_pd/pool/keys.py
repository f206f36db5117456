# SPDX-License-Identifier: Apache-2.0
"""Under which key a block lies in the pool.

A block hash says which tokens (and which LoRA, ``cache_salt``, images) came before and in a block.
It says nothing about the model or how its KV is laid out, so two engines share a key only when
their fingerprints are equal too; nor about the KV cache group, which has layers of its own.

    pd2/3f0c9a…(16)/8e17…   = format / digest of fingerprint, share and group / block hash

With tensor parallelism each worker stores its share of the KV heads under a key of its own. Workers
that hold the same share (fewer KV heads than workers, MLA) have the same keys. With pipeline
parallelism each stage has keys of its own, which name its layers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_pd.types import TENANT_END

if TYPE_CHECKING:
    from vllm_ascend_pd.types import Layers

FORMAT_VERSION = 2
"""Of keys and values. 1: header of 64 bytes, then the pages, layer-major. 2: keys of each group."""

PREFIX = f"pd{FORMAT_VERSION}/"
"""All keys of this format begin with it."""

_DIGEST_LENGTH = 16


def tenant_of(salt: str | None) -> str:
    """16 letters for whose ``cache_salt`` it is: all that are equal up to ``TENANT_END`` are one
    tenant's. Requests without one are all nobody's, which is one more tenant.
    """
    if not salt:
        return ""
    name = salt.partition(TENANT_END)[0].encode(errors="surrogateescape")
    return hashlib.blake2b(name, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The keys of one KV cache group of all engines whose KV is interchangeable."""

    prefix: str
    seed: int
    """Starts every checksum of this space: a value of another space never verifies."""
    _secret: bytes = field(default=b"", repr=False)

    @classmethod
    def of(
        cls,
        fingerprint: str,
        share: int = 0,
        num_shares: int = 1,
        secret: bytes = b"",
        group: int = 0,
        layers: Layers | None = None,
    ) -> KeySpace:
        """``fingerprint`` names model, dtype, layout, block size and packing; ``share`` of
        ``num_shares`` are the KV heads, ``layers`` those of a pipeline stage. Who has another
        ``secret`` shares no key.
        """
        named = f"format={FORMAT_VERSION} tp={share}/{num_shares} group={group}"
        if layers is not None:
            named += f" layers={layers.first}-{layers.stop}"
        text = f"{fingerprint} {named}".encode()
        digest = hmac.digest(secret, text, "sha256") if secret else hashlib.sha256(text).digest()
        seed = int.from_bytes(digest[-8:], "little") >> 1
        return cls(f"{PREFIX}{digest.hex()[:_DIGEST_LENGTH]}/", seed, secret)

    def sign(self, checksum: int, block_hash: bytes) -> int:
        """What a value shows as its checksum: with a secret, only who has it can say."""
        if not self._secret:
            return checksum
        said = checksum.to_bytes(8, "little") + block_hash
        return int.from_bytes(hmac.digest(self._secret, said, "sha256")[:8], "little")

    def key(self, block_hash: bytes) -> str:
        return self.prefix + block_hash.hex()


class PoolNames:
    """What a block is called in the pool: its hash, until the engine has been told to forget what
    the pool has; then a hash of both, so that nothing from before is found. Engines that have been
    told so equally often share their blocks again, where the pool is shared; else the engine's next
    start must not find what this one has forgotten.
    """

    def __init__(self, is_shared: bool = True) -> None:
        self._is_shared = is_shared
        self._num_resets = 0
        self._key = b""

    def forget(self) -> None:
        self._num_resets += 1
        count = self._num_resets.to_bytes(8, "little")
        self._key = count if self._is_shared else os.urandom(16)

    def name(self, block_hash: bytes) -> bytes:
        """As long as ``block_hash``."""
        if not self._key:
            return block_hash
        return hashlib.blake2b(block_hash, digest_size=len(block_hash), key=self._key).digest()
