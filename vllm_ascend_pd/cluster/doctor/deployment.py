# SPDX-License-Identifier: Apache-2.0
"""What a topology says should run, against what runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.cluster.commands import MASTER_PORTS, has_mooncake, place, wants_master
from vllm_ascend_pd.cluster.doctor.engines import not_applicable
from vllm_ascend_pd.cluster.doctor.findings import (
    Finding,
    Verdict,
    fail,
    ok,
    reason_of,
    skipped,
    warn,
)
from vllm_ascend_pd.cluster.placement import http_url
from vllm_ascend_pd.config import ETCD
from vllm_ascend_pd.registration import name_of_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.cluster.doctor.engines import Engine, Web
    from vllm_ascend_pd.cluster.topology import Topology
    from vllm_ascend_pd.registration import Role

_FOUND_AT_START = 0
"""For a port that ``vllm-pd up`` chooses on its host."""
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Expected:
    """One instance of the topology. Without ``url``, only its router knows where it is."""

    engine: str
    role: Role
    host: str
    url: str | None
    rank: int | None = None

    @property
    def name(self) -> str:
        return name_of_rank(self.engine, self.rank)


def router_url(topology: Topology) -> str:
    """Where the topology's router is."""
    host = topology.host(topology.router.host)
    return http_url(host.address, topology.router.port)


def expected_engines(topology: Topology) -> list[Expected]:
    """All of them, under the names that ``vllm-pd up`` gives."""
    choose = (lambda address: _FOUND_AT_START) if len(topology.hosts) == 1 else None
    return [
        Expected(one.name, one.role, one.host, one.url if one.port else None, rank)
        for one in place(topology, choose)
        for rank in one.ranks
    ]


class Complete:
    """Whether the router knows every engine of the topology, and no other one."""

    name = "topology"

    def __init__(self, expected: Sequence[Expected], listed: Sequence[Engine]) -> None:
        """``listed`` are those that the router told of."""
        self._expected = expected
        self._listed = listed

    async def run(self) -> Sequence[Finding]:
        findings = []
        names = {e.name for e in self._listed}
        places = {(e.url, e.rank) for e in self._listed}
        missing = [
            e
            for e in self._expected
            if e.name not in names and not {(e.url, e.rank), (e.url, None)} & places
        ]
        for engine in missing:
            log = f"{engine.engine}.log"
            fix = f"on host {engine.host}: vllm-pd up --config FILE; then see its {log}"
            where = f" at {engine.url}" if engine.url else ""
            found = f"the router does not know {engine.name} of host {engine.host}{where}"
            findings.append(fail(self.name, found, fix))
        wanted = {e.name for e in self._expected}
        wanted |= {e.url for e in self._expected if e.url}
        findings += not_applicable(self.name, self._listed)
        for other in self._listed:
            if other.generates and other.name not in wanted and other.url not in wanted:
                fix = "stop it, or add it to the topology"
                found = f"the router knows {other} at {other.url}, which the topology has not"
                findings.append(warn(self.name, found, fix))
        if all(finding.verdict is Verdict.SKIPPED for finding in findings):
            found = f"the router knows all {len(self._expected)} engines"
            findings.append(ok(self.name, found, num_engines=len(self._expected)))
        return findings


class Master:
    """Whether the pool's master can be reached, and every engine uses that one. Whether it works is
    seen from the engines: ``engines.Pool``.
    """

    name = "master"

    def __init__(self, web: Web, topology: Topology, known: Sequence[Engine]) -> None:
        self._web = web
        self._topology = topology
        self._known = [engine for engine in known if not engine.error]

    async def run(self) -> Sequence[Finding]:
        if not has_mooncake(self._topology):
            return [skipped(self.name, "the topology has no pool with the tier mooncake")]
        pool = self._topology.extra_config["pool"]
        used = {str(e): e.info.get("pool_master", "") for e in self._known if e.info}
        wanted = self._given(pool) or next(iter(sorted(filter(None, used.values()))), None)
        if wanted is None:
            fix = "see why the engines do not answer; they know its address"
            return [fail(self.name, "no engine says where it is", fix)]
        findings = [await self._ask(wanted)]
        others = [f"{e} uses {master or 'none'}" for e, master in used.items() if master != wanted]
        if others:
            fix = "start all engines from the same topology file"
            findings.append(fail(self.name, f"not {wanted}: {', '.join(others)}", fix))
        return findings

    def _given(self, pool: dict[str, object]) -> str | None:
        """Its ``host:port`` by the topology."""
        if isinstance(pool.get("master"), str):
            return str(pool["master"])
        if wants_master(self._topology) and len(self._topology.hosts) > 1:
            return f"{self._topology.host(self._topology.router.host).address}:{MASTER_PORTS[0]}"
        return None

    async def _ask(self, master: str) -> Finding:
        """Of several that tell who leads, whether one answers."""
        wrong = ""
        for address in master.removeprefix(ETCD).split(";"):
            host, _, port = address.rpartition(":")
            try:
                opening = asyncio.open_connection(host.strip("[]"), int(port))
                _, writer = await asyncio.wait_for(opening, _CONNECT_TIMEOUT_S)
            except (OSError, asyncio.TimeoutError, ValueError) as e:
                wrong = f"{address}: {reason_of(e)}"
                continue
            writer.close()
            return ok(self.name, f"{address} accepts connections")
        fix = "see its log on that host; without it engines serve, but share no pool"
        return fail(self.name, wrong, fix)
