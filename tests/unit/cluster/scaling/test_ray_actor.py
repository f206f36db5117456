# SPDX-License-Identifier: Apache-2.0
"""An actor of an engine, as far as it needs no Ray."""

from __future__ import annotations

import subprocess
import sys

from vllm_ascend_pd.cluster.scaling.keeper import KeeperReport
from vllm_ascend_pd.cluster.scaling.ray_actor import EngineHost

KEEPER = """
print('{"phase": "ready"}')
print("a library that has something to say")
raise SystemExit(3)
"""


def test_keeper_that_ends_after_a_line_of_a_library_is_known_to_have_ended() -> None:
    host = EngineHost()
    with subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE) as keeper:
        host._keeper = keeper
        host._listen()
    assert host.report() == KeeperReport("ended", "its keeper ended with code 3")
