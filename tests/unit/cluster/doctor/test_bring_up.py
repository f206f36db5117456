# SPDX-License-Identifier: Apache-2.0
"""The bring-up list of an NPU host, on scripted commands."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ascend_pd.cluster.doctor.bring_up import ITEMS, PER_DEVICE, BringUp, Item, link_settings
from vllm_ascend_pd.cluster.doctor.findings import Finding, Verdict

GIB = 1 << 30
Said = tuple[int, str, str]

GOOD = {
    "NPU driver": "\tTotal Count                    : 2\n\tNPU ID : 0\n",
    "CANN": "loads\n",
    "torch_npu": "2.10.0.post4\n",
    "Mooncake for NPUs": "0.3.13.post1\n",
    "HCCN configuration": "address_0=10.20.0.1\nnetmask_0=255.255.255.0\naddress_1=10.20.0.2\n",
    "HCCN address": "ipaddr:10.20.0.{n}\nnetmask:255.255.255.0\n",
    "HCCN link": "link status: UP\n",
    "HCCN health": "net health status: Success\n",
    "HCCN TLS": "dev_id:{n}, tls switch[0](0:disable, 1:enable)\n",
    "device memory": f"0 {60 * GIB} {61 * GIB}\n1 {60 * GIB} {61 * GIB}\n",
}


def name_of(argv: tuple[str, ...]) -> tuple[str, str]:
    """Which item a command is of, and the device that it asks."""
    for item in ITEMS:
        if argv == item.command:
            return item.name, ""
    for item in PER_DEVICE:
        for n in "01":
            if argv == tuple(part.format(n=n) for part in item.command):
                return item.name, n
    assert "mem_get_info" in argv[-1]
    return "device memory", ""


def walk(tmp_path: Path, change: Callable[[str, str], Said | None] = lambda *_: None) -> dict:
    """Findings by check; ``change`` scripts another answer for (item, device)."""
    for n in (0, 1):
        (tmp_path / f"davinci{n}").touch()
    (tmp_path / "davinci_manager").touch()

    async def run(*argv: str) -> Said:
        name, n = name_of(argv)
        return change(name, n) or (0, GOOD[name].replace("{n}", n), "")

    findings = asyncio.run(BringUp(run, tmp_path).run())
    return {finding.check: finding for finding in findings}


def test_host_that_is_ready_passes_every_item(tmp_path: Path) -> None:
    found = walk(tmp_path)
    assert list(found) == ["NPUs", *GOOD, "host memory", "late writes"]
    assert {f.verdict for f in found.values()} == {Verdict.OK}
    assert found["HCCN address"].found == "10.20.0.0, 10.20.0.1"


def test_host_without_npus_is_told_so_and_asked_nothing(tmp_path: Path) -> None:
    async def run(*argv: str) -> Said:
        raise AssertionError(argv)

    (finding,) = asyncio.run(BringUp(run, tmp_path).run())
    assert finding.verdict is Verdict.FAIL
    assert "davinci0" in finding.found


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
@pytest.mark.parametrize("said", [(127, "", "not found"), (0, "something else\n", ""), (1, "", "")])
def test_item_that_is_not_as_expected_fails_with_its_fix(
    tmp_path: Path, item: Item, said: Said
) -> None:
    found = walk(tmp_path, lambda name, n: said if name == item.name else None)
    assert found[item.name].verdict is Verdict.FAIL
    assert item.expected in found[item.name].found
    assert found[item.name].fix == item.fix
    others = {name for name, f in found.items() if f.verdict is not Verdict.OK}
    assert others == {item.name}


@pytest.mark.parametrize("item", PER_DEVICE, ids=lambda item: item.name)
def test_one_device_that_is_not_as_expected_is_named(tmp_path: Path, item: Item) -> None:
    found = walk(
        tmp_path, lambda name, n: (0, "DOWN\n", "") if (name, n) == (item.name, "1") else None
    )
    finding: Finding = found[item.name]
    assert finding.verdict is Verdict.FAIL
    assert finding.found == "NPU 1: DOWN"
    assert "{n}" not in finding.fix


def test_missing_hccn_tool_is_a_warning(tmp_path: Path) -> None:
    found = walk(tmp_path, lambda name, n: (127, "", "not found") if n else None)
    for item in PER_DEVICE:
        assert found[item.name].verdict is Verdict.WARN


def test_tls_that_differs_between_npus_fails(tmp_path: Path) -> None:
    on = (0, GOOD["HCCN TLS"].replace("switch[0]", "switch[1]"), "")
    found = walk(tmp_path, lambda name, n: on if (name, n) == ("HCCN TLS", "1") else None)
    assert found["HCCN TLS"].verdict is Verdict.FAIL


def test_memory_in_use_is_a_warning(tmp_path: Path) -> None:
    out = f"0 {60 * GIB} {61 * GIB}\n1 {2 * GIB} {61 * GIB}\n"
    found = walk(tmp_path, lambda name, n: (0, out, "") if name == "device memory" else None)
    assert found["device memory"].verdict is Verdict.WARN
    assert "1: 2 of 61 GiB free" in found["device memory"].found


def test_document_lists_every_item_with_command_and_expected_output() -> None:
    text = (Path(__file__).parents[4] / "docs" / "ascend.md").read_text()
    for item in (*ITEMS, *PER_DEVICE):
        row = re.search(rf"(?m)^\| {re.escape(item.name)} \|.*$", text)
        assert row, item.name
        command = shlex.join("python" if p == sys.executable else p for p in item.command)
        assert command.replace("'{n}'", "N") in row[0], item.name
        assert item.expected in row[0], item.name


@pytest.mark.parametrize(
    ("settings", "verdict", "found"),
    [
        ({}, Verdict.OK, "not over HCCS"),
        ({"HCCL_INTRA_ROCE_ENABLE": "1"}, Verdict.OK, "by HCCL_INTRA_ROCE_ENABLE"),
        ({"ASCEND_BUFFER_POOL": "4:8"}, Verdict.OK, "by ASCEND_BUFFER_POOL"),
        (
            {"ASCEND_BUFFER_POOL": "4:8", "ASCEND_USE_ASYNC_TRANSFER": "1"},
            Verdict.FAIL,
            "ASCEND_USE_ASYNC_TRANSFER",
        ),
    ],
    ids=str,
)
def test_way_to_host_memory_is_shown(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], verdict: Verdict, found: str
) -> None:
    for name in ("HCCL_INTRA_ROCE_ENABLE", "ASCEND_BUFFER_POOL", "ASCEND_USE_ASYNC_TRANSFER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    host_memory, late_writes = link_settings()
    assert host_memory.verdict is verdict
    assert found in host_memory.found
    assert "rest" in late_writes.found
