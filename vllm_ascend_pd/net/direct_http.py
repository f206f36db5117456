# SPDX-License-Identifier: Apache-2.0
"""HTTP to engines, routers and masters: never by way of a proxy that the environment names."""

from __future__ import annotations

import urllib.request


def direct_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
