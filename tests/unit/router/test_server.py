# SPDX-License-Identifier: Apache-2.0
"""The socket on which a router listens."""

from __future__ import annotations

import socket

import pytest

from tests.router.harness import needs_ipv6
from vllm_ascend_pd.router.server import bind


@needs_ipv6
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_all_of_ipv6_is_all_of_ipv4_too_with_one_process_and_with_several(
    shared: bool, client: str
) -> None:
    with bind("::", 0, shared=shared) as sock:
        sock.listen()
        socket.create_connection((client, sock.getsockname()[1]), 20).close()
