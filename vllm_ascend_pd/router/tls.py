# SPDX-License-Identifier: Apache-2.0
"""TLS towards clients and towards engines."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.private_file import read_private

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import TLS

_MAX_KEY_BYTES = 1 << 20


def server_context(tls: TLS) -> ssl.SSLContext | None:
    """For the router's own port; ``None``: plain HTTP."""
    if tls.certificate is None:
        return None
    if tls.key is not None:
        read_private("--tls-key", str(tls.key), _MAX_KEY_BYTES)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"--tls-certificate, --tls-key: {e}") from e
    return context


def engine_context(tls: TLS) -> ssl.SSLContext | None:
    """For https engines; ``None``: the system's certificate authorities."""
    if tls.engine_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(tls.engine_ca))
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"--engine-ca: {e}") from e
