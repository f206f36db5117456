# SPDX-License-Identifier: Apache-2.0
"""The bring-up list of a host with Ascend NPUs: what to look at, by which command, before P/D.

Commands and what they should say are those of the documents of vllm-ascend; docs/ascend.md lists
the same items. None of it has been run on an NPU yet.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.npu_links import host_memory_route, late_write_s
from vllm_ascend_pd.cluster.doctor.findings import Finding, fail, ok, skipped, warn
from vllm_ascend_pd.cluster.doctor.host import run_command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Run = Callable[..., Awaitable[tuple[int, str, str]]]

CANN, TORCH_NPU, MOONCAKE = "9.2.0", "2.10.0.post4", "0.3.13.post1"
"""What vllm-ascend 0.30.0rc2 is released with; Mooncake's is our pin."""

_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_MEMORY = (
    "import torch, torch_npu; "
    "[print(n, *torch.npu.mem_get_info(n)) for n in range(torch.npu.device_count())]"
)
_MIN_FREE = 0.9


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the list."""

    name: str
    command: tuple[str, ...]
    expected: str
    """What the command prints when all is well, for the document."""
    pattern: str
    """Of the same, as a regular expression; its groups are what is reported."""
    fix: str


ITEMS = (
    Item(
        "NPU driver",
        ("npu-smi", "info", "-l"),
        "Total Count : 8 (more on A3)",
        r"Total Count\s*:\s*([1-9]\d*)",
        "install driver and firmware; in a container mount /usr/local/bin/npu-smi,"
        " /usr/local/Ascend/driver and pass --device /dev/davinci0 and so on",
    ),
    Item(
        "CANN",
        (sys.executable, "-c", "import ctypes; ctypes.CDLL('libascendcl.so'); print('loads')"),
        "loads",
        r"(loads)",
        f"install CANN {CANN} or use the image of vllm-ascend; then {_SET_ENV}",
    ),
    Item(
        "torch_npu",
        (sys.executable, "-c", "import torch_npu; print(torch_npu.__version__)"),
        TORCH_NPU,
        rf"^({re.escape(TORCH_NPU)}\S*)",
        f"pip install torch-npu=={TORCH_NPU}",
    ),
    Item(
        "Mooncake for NPUs",
        (
            sys.executable,
            "-c",
            "import importlib.metadata as m; print(m.version('mooncake-transfer-engine-npu'))",
        ),
        MOONCAKE,
        rf"^({re.escape(MOONCAKE)})$",
        "pip uninstall -y mooncake-transfer-engine;"
        f" pip install mooncake-transfer-engine-npu=={MOONCAKE}",
    ),
    Item(
        "HCCN configuration",
        ("cat", "/etc/hccn.conf"),
        "address_0=… and so on, one for each NPU",
        r"address_(\d+)=",
        "configure the NPUs' addresses with hccn_tool -i N -ip -s …; in a container mount"
        " /etc/hccn.conf",
    ),
)

PER_DEVICE = (
    Item(
        "HCCN address",
        ("hccn_tool", "-i", "{n}", "-ip", "-g"),
        "ipaddr:A.B.C.D",
        r"ipaddr:\s*(\d+\.\d+\.\d+\.\d+)",
        "hccn_tool -i {n} -ip -s address A.B.C.D netmask M.M.M.M",
    ),
    Item(
        "HCCN link",
        ("hccn_tool", "-i", "{n}", "-link", "-g"),
        "link status: UP",
        r"link status:\s*(UP)",
        "see the cable and the switch port: hccn_tool -i {n} -lldp -g",
    ),
    Item(
        "HCCN health",
        ("hccn_tool", "-i", "{n}", "-net_health", "-g"),
        "net health status: Success",
        r"(?i)health status:\s*(success)",
        "hccn_tool -i {n} -netdetect -g and -gateway -g: the address that is probed must answer",
    ),
    Item(
        "HCCN TLS",
        ("hccn_tool", "-i", "{n}", "-tls", "-g"),
        "tls switch[0], the same on every NPU of every host",
        r"tls switch\[(\d)\]",
        "hccn_tool -i {n} -tls -s enable 0, on all NPUs or on none",
    ),
)


def link_settings() -> list[Finding]:
    """What the environment says to Mooncake's transport for NPUs; engines must have the same."""
    rest = f"blocks of a failed write rest {late_write_s():.0f} s"
    route = host_memory_route()
    if route == "ASCEND_BUFFER_POOL" and "ASCEND_USE_ASYNC_TRANSFER" in os.environ:
        found = fail(
            "host memory",
            "ASCEND_BUFFER_POOL and ASCEND_USE_ASYNC_TRANSFER: Mooncake starts with one of them",
            "unset ASCEND_USE_ASYNC_TRANSFER",
        )
    else:
        found = ok("host memory", f"by {route}" if route else "not over HCCS: no pool, not staged")
    return [
        found,
        ok("late writes", rest),
    ]


class BringUp:
    """Walks through the list on this host."""

    name = "ascend"

    def __init__(self, run: Run = run_command, devices: Path = Path("/dev")) -> None:
        """``devices``: where ``davinci0`` and so on are."""
        self._run = run
        self._devices = devices

    async def run(self) -> Sequence[Finding]:
        numbers = sorted(
            int(path.name.removeprefix("davinci"))
            for path in self._devices.glob("davinci[0-9]*")
            if path.name.removeprefix("davinci").isdigit()
        )
        if not numbers:
            return [
                fail(
                    "NPUs",
                    f"no {self._devices}/davinci0: this host, or this container, has no NPU",
                    "pass --device /dev/davinci0 (and davinci_manager, devmm_svm, hisi_hdc)",
                )
            ]
        listed = ", ".join(map(str, numbers))
        findings = [ok("NPUs", f"{len(numbers)}: {listed}", devices=numbers)]
        for item in ITEMS:
            findings.append(self._judge(item, await self._run(*item.command)))
        for item in PER_DEVICE:
            findings.append(await self._over_devices(item, numbers))
        findings.append(self._memory(await self._run(sys.executable, "-c", _MEMORY)))
        return [*findings, *link_settings()]

    def _judge(self, item: Item, said: tuple[int, str, str]) -> Finding:
        code, out, err = said
        if code == 0 and (found := re.search(item.pattern, out, re.MULTILINE)):
            return ok(item.name, found[1])
        text = (out.strip() or err.strip()).splitlines() or [f"exit code {code}"]
        return fail(item.name, f"{text[-1][:200]} (expected: {item.expected})", item.fix)

    async def _over_devices(self, item: Item, numbers: Sequence[int]) -> Finding:
        """One finding: what all devices say, or the first that says otherwise."""
        found: dict[int, str] = {}
        for n in numbers:
            code, out, err = await self._run(*(part.format(n=n) for part in item.command))
            if code == 127:
                return warn(
                    item.name,
                    "hccn_tool is not there",
                    "in a container mount /usr/local/Ascend/driver/tools/hccn_tool and add its"
                    " folder to PATH",
                )
            match = re.search(item.pattern, out, re.MULTILINE)
            if match is None:
                said = (out.strip() or err.strip() or f"exit code {code}").splitlines()[-1]
                return fail(item.name, f"NPU {n}: {said[:200]}", item.fix.format(n=n))
            found[n] = match[1]
        values = sorted(set(found.values()))
        if item.name == "HCCN TLS" and len(values) > 1:
            return fail(item.name, f"differs: {found}", item.fix.format(n="N"))
        return ok(item.name, ", ".join(values), **{str(n): value for n, value in found.items()})

    def _memory(self, said: tuple[int, str, str]) -> Finding:
        code, out, err = said
        rows = re.findall(r"^(\d+) (\d+) (\d+)$", out, re.MULTILINE)
        if code != 0 or not rows:
            reason = (err.strip() or "torch_npu lists no device").splitlines()[-1]
            return skipped("device memory", reason[:200])
        used = {n: 1 - int(free) / int(total) for n, free, total in rows}
        listed = ", ".join(
            f"{n}: {int(free) >> 30} of {int(total) >> 30} GiB free" for n, free, total in rows
        )
        if all(share <= 1 - _MIN_FREE for share in used.values()):
            return ok("device memory", listed)
        return warn("device memory", listed, "npu-smi info lists the processes; end what is left")
