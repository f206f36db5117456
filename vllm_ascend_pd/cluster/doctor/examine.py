# SPDX-License-Identifier: Apache-2.0
"""Which checks are made, in which order, and how their findings are shown."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from rich.table import Table
from rich.text import Text

from vllm_ascend_pd.cluster.doctor import (
    deployment,
    engines,
    host,
    moves,
    requests,
    transfers,
)
from vllm_ascend_pd.cluster.doctor.bandwidth import Bandwidth
from vllm_ascend_pd.cluster.doctor.bring_up import BringUp
from vllm_ascend_pd.cluster.doctor.findings import (
    Check,
    Finding,
    Verdict,
    exit_code,
    fail,
    ok,
    reason_of,
)
from vllm_ascend_pd.config import DEFAULT_KV_PORT

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Sequence

    from rich.console import Console

    from vllm_ascend_pd.cluster.topology import Topology

_STYLES = {
    Verdict.OK: "green",
    Verdict.SKIPPED: "dim",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What to examine. With neither a router nor engines, this host alone."""

    router: str | None = None
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    api_key: str | None = None
    """Of the router."""
    engine_api_key: str | None = None
    """Of the engines."""
    token: str | None = None
    """Of an operator of the router."""
    tls: ssl.SSLContext | None = None
    """Of https servers; ``None``: the system's certificate authorities."""
    measure: bool = True
    """Whether the transports of this host are measured, which takes some seconds of a core."""
    topology: Topology | None = None
    """What should run; its router is ``router``, unless that is given."""
    on_ray: bool = False
    """Whether a Ray cluster says which engines the topology has."""
    ascend: bool = False
    """Whether this host is to have NPUs: walk through their bring-up list too."""

    @property
    def runs(self) -> bool:
        """Whether there is anything but this host."""
        return bool(self.router or self.prefill or self.decode or self.topology)


async def examine(subject: Subject, report: Callable[[Finding], None]) -> list[Finding]:
    """Make every check that fits, telling of each finding as it comes."""
    findings: list[Finding] = []
    async for finding in _findings(subject):
        findings.append(finding)
        report(finding)
    return findings


async def _findings(subject: Subject) -> AsyncIterator[Finding]:
    checks: list[Check] = [
        host.Versions(),
        host.Patches(),
        host.NativeExtension(),
        host.Compiler(),
        host.MooncakeLibraries(),
        host.RdmaCards(),
    ]
    if subject.ascend:
        checks.append(BringUp())
    if not subject.runs:
        wanted = {
            "the router": ("127.0.0.1", 8000),
            "the first producer": ("127.0.0.1", DEFAULT_KV_PORT),
        }
        checks.append(host.Ports(wanted))
    if subject.measure:
        checks.append(Bandwidth())
    for check in checks:
        for finding in await _guarded(check):
            yield finding
    if not subject.runs:
        return
    router_session = _session(subject.api_key, subject.tls)
    engine_session = _session(subject.engine_api_key, subject.tls)
    async with router_session as asks_router, engine_session as asks:
        async for finding in _running(subject, engines.Web(asks_router), engines.Web(asks)):
            yield finding


def _session(key: str | None, tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=tls or True))


async def _running(
    subject: Subject, asks_router: engines.Web, web: engines.Web
) -> AsyncIterator[Finding]:
    known = [engines.Engine(url.rstrip("/"), "prefill") for url in subject.prefill]
    known += [engines.Engine(url.rstrip("/"), "decode") for url in subject.decode]
    listed: list[engines.Engine] = []
    if subject.router:
        try:
            listed = await engines.discover(asks_router, subject.router)
        except engines.ERRORS as e:
            fix = {
                401: "name a file with one of its --api-keys-file's keys with --api-key-file",
                404: "give the URL of a router with --router; engines with --prefill and --decode",
            }.get(getattr(e, "status", 0), f"curl -i {subject.router}/health; then see its log")
            reason = reason_of(e)
            yield fail("router", f"{subject.router}: {reason}", engines.fix_of_tls(reason) or fix)
            if not known and subject.topology is None:
                return
        else:
            yield ok("router", f"{subject.router} knows {len(listed)} engines")
            urls = {engine.url for engine in known}
            known += [engine for engine in listed if engine.url not in urls]
    expected: list[deployment.Expected] = []
    if subject.topology is not None and not subject.on_ray:
        expected = deployment.expected_engines(subject.topology)
        urls, names = {engine.url for engine in known}, {engine.name for engine in known}
        known += [
            engines.Engine(one.url, one.role, one.name, one.rank)
            for one in expected
            if one.url and one.url not in urls and one.name not in names
        ]
    await engines.ask_all(web, known)
    checks: list[Check] = []
    if subject.topology is not None:
        if not subject.on_ray:
            checks.append(deployment.Complete(expected, listed))
        checks.append(deployment.Master(web, subject.topology, known))
    checks += [
        engines.Reachable(known),
        engines.InEngine(known),
        engines.Fitting(known),
        requests.SameRequests(web, known),
        engines.ClockSkew(web, known),
        transfers.Transfer(web, known),
    ]
    if subject.router:
        checks.append(transfers.ThroughRouter(asks_router, subject.router, known))
        checks.append(moves.MoveThroughRouter(asks_router, subject.router, listed, subject.token))
    checks.append(engines.Pool(web, known))
    for check in checks:
        for finding in await _guarded(check):
            yield finding


async def _guarded(check: Check) -> Sequence[Finding]:
    try:
        return await check.run()
    except Exception as e:  # noqa: BLE001 - one check that breaks must not hide what the others find
        where = traceback.extract_tb(e.__traceback__)[-1]
        found = (
            f"the check itself failed: {type(e).__name__}: {e} ({where.filename}:{where.lineno})"
        )
        return [fail(check.name, found, "report this")]


def to_json(findings: Sequence[Finding]) -> str:
    """``{"ok": false, "findings": [{"check", "verdict", "found", "fix", "values"}]}``."""
    body = {"ok": exit_code(findings) == 0, "findings": findings}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def show(console: Console, finding: Finding) -> None:
    """One finding for a person."""
    line = Table.grid(padding=(0, 2))
    for width in (7, 19):
        line.add_column(width=width, no_wrap=True)
    line.add_column(overflow="fold")
    verdict = Text(finding.verdict.value, _STYLES[finding.verdict])
    line.add_row(verdict, finding.check, Text(finding.found))
    if finding.fix:
        line.add_row("", "", Text(f"fix: {finding.fix}", "cyan"))
    console.print(line)
