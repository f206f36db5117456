# SPDX-License-Identifier: Apache-2.0
"""Loads Mooncake such that it uses the protocol that it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.backends.rdma_cards import CARDS, VERBS, usable_ports
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

# Mooncake reads these when it is loaded or started; a value that the user has set stays.
ENV_DEFAULTS = {
    # A peer that makes no progress fails the write, and the connection is dropped before that is
    # reported. The third one bounds a whole write and must be at least twice the others.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TRANSFER_TIMEOUT": "10",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
    # The default of 1024 queued writes for each peer refuses the next one.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}

_ASCEND_BUILD = "ascend_transport.so"
"""A library that only the package for NPUs has; another one would go over TCP without a word."""
_FORCE_TCP = "MC_FORCE_TCP"
_BY_US = "true"
"""A value that tells us apart from a user, who writes 1; to Mooncake all are the same."""

_USE_IPV6 = "MC_USE_IPV6"

IMPORT_HELP = (
    "Mooncake cannot be loaded: {error}. Install the extra of this host, vllm-ascend-pd[cpu], "
    "[cuda] or [ascend], and on Debian or Ubuntu the libraries that its wheel needs: "
    "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"
)


def set_mooncake_env(protocol: str, host: str) -> None:
    """Before Mooncake is imported: the protocol, the version of IP of ``host``, and shorter
    timeouts than its own.

    Mooncake itself takes no notice of the protocol that it is asked for: its build for NPUs goes
    over their links, and any other over RDMA where the host has a card for it, but not with this
    variable, whatever its value.

    Raises:
        BackendError: the variable is set, for another protocol than TCP.
    """
    if os.environ.get(_FORCE_TCP) == _BY_US:
        del os.environ[_FORCE_TCP]
    if protocol == "tcp":
        os.environ.setdefault(_FORCE_TCP, _BY_US)
    elif _FORCE_TCP in os.environ:
        raise BackendError(
            f"{_FORCE_TCP} is set, with which Mooncake uses TCP whatever it is asked for, here"
            f" {protocol}: unset it, or set transfer.protocol to tcp"
        )
    # With it Mooncake reaches nobody at an IPv4 address, and without it nobody at another one.
    if ":" in host:
        os.environ[_USE_IPV6] = "1"
    else:
        os.environ.pop(_USE_IPV6, None)
    for name, value in ENV_DEFAULTS.items():
        os.environ.setdefault(name, value)


def load_mooncake(protocol: str) -> Callable[[], Any]:
    """``mooncake.engine.TransferEngine``, after `set_mooncake_env`.

    Raises:
        ImportError: it is not there; says what to install.
        BackendError: it, or this host, has another protocol.
    """
    try:
        from mooncake import engine
        from mooncake.engine import TransferEngine as NativeEngine
    except ImportError as error:
        raise ImportError(IMPORT_HELP.format(error=error)) from error
    is_for_npus = Path(engine.__file__).with_name(_ASCEND_BUILD).exists()
    if protocol == "ascend" and not is_for_npus:
        raise BackendError(
            "transfer.protocol is ascend, and this Mooncake is not the build for NPUs: install"
            " vllm-ascend-pd[ascend], or set it to tcp"
        )
    if protocol == "rdma" and is_for_npus:
        raise BackendError(
            "transfer.protocol is rdma, and this Mooncake is the build for NPUs, which goes over"
            " their links: set it to ascend or tcp"
        )
    if protocol == "rdma" and not usable_ports():
        raise BackendError(
            "transfer.protocol is rdma, and Mooncake would go over TCP: this host, or container,"
            f" has no card with an active port in {CARDS}, or no {VERBS}. Pass --device {VERBS}"
            " and --ulimit memlock=-1 to the container, or set it to tcp"
        )
    native: Callable[[], Any] = NativeEngine
    return native
