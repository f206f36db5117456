# SPDX-License-Identifier: Apache-2.0
"""A fleet without a cluster: nodes with room for engines, which a test adds and removes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_pd.cluster.scaling.fleet import Member, Phase


@dataclass(slots=True)
class FakeFleet:
    """Passes ``FleetContract``. Nothing happens but in ``look`` and by the test's own calls."""

    nodes: dict[str, int] = field(default_factory=dict)
    """Engines that each has room for."""
    comes_up: bool = True
    """Who starts is ready at the next look."""
    members: dict[str, Member] = field(default_factory=dict)

    async def start(self, name: str) -> None:
        if name in self.members:
            raise ValueError(f"{name} was asked for before")
        self.members[name] = Member(name, Phase.WAITING)

    async def look(self) -> tuple[Member, ...]:
        for one in list(self.members.values()):
            if one.phase is Phase.WAITING:
                self._place(one.name)
            elif one.phase is Phase.STARTING and self.comes_up:
                self._set(one.name, Phase.READY, one.node)
            elif one.phase is Phase.ENDING:
                self._set(one.name, Phase.ENDED, one.node)
        told = tuple(self.members.values())
        self.members = {one.name: one for one in told if not one.is_over}
        return told

    async def end(self, name: str) -> None:
        one = self.members.get(name)
        if one is not None and not one.is_over:
            phase = Phase.ENDED if one.phase is Phase.WAITING else Phase.ENDING
            self._set(name, phase, one.node)

    async def close(self) -> None:
        for name in self.members:
            await self.end(name)

    def remove_node(self, node: str) -> None:
        """With all that runs there."""
        del self.nodes[node]
        for one in self._on(node):
            self._set(one.name, Phase.LOST, node, f"node {node} is gone")

    def kill(self, name: str, note: str = "killed by SIGKILL") -> None:
        """The engine's process."""
        self._set(name, Phase.ENDED, self.members[name].node, note)

    def _on(self, node: str) -> list[Member]:
        return [one for one in self.members.values() if one.node == node and not one.is_over]

    def _place(self, name: str) -> None:
        for node, room in self.nodes.items():
            if len(self._on(node)) < room:
                self._set(name, Phase.STARTING, node)
                return
        self._set(name, Phase.WAITING, note=f"no room on {sorted(self.nodes)}")

    def _set(self, name: str, phase: Phase, node: str = "", note: str = "") -> None:
        self.members[name] = Member(name, phase, note, node)
