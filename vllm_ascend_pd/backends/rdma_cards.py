# SPDX-License-Identifier: Apache-2.0
"""The RDMA cards of this host, as Linux lists them. Not yet seen on a host that has one."""

from __future__ import annotations

from pathlib import Path

CARDS = Path("/sys/class/infiniband")
VERBS = Path("/dev/infiniband")


def port_states(cards: Path = CARDS) -> dict[str, str]:
    """State by ``card/port``, e.g. ``{"mlx5_0/1": "ACTIVE, Ethernet"}``."""
    found = {}
    for port in sorted(cards.glob("*/ports/*")):
        state = _read(port / "state").partition(":")[2].strip()  # "4: ACTIVE"
        found[f"{port.parts[-3]}/{port.name}"] = f"{state}, {_read(port / 'link_layer')}"
    return found


def usable_ports(cards: Path = CARDS, verbs: Path = VERBS) -> list[str]:
    """Those that are active and whose cards this process may open."""
    if not any(verbs.glob("uverbs*")):
        return []
    return [name for name, state in port_states(cards).items() if state.startswith("ACTIVE")]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
