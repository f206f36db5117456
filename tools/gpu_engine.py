# SPDX-License-Identifier: Apache-2.0
"""vLLM's build for CUDA, patched, small enough to be carried to a GPU host without a network.

Its wheel has kernels of every GPU since Turing, 300 MB. Here those of one architecture are left,
and of what vLLM asks for what the other host lacks.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import apply_patches
from bootstrap_host import VLLM

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

TOOLS = Path(__file__).parent
UV = TOOLS.parent / ".venv/uv/bin/uv"
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
BESIDE_TORCH = (
    *("torch", "nvidia-", "cuda-", "triton", "flashinfer", "tilelang", "quack", "humming"),
    *("tokenspeed", "pynvvideocodec", "fastsafetensors", "instanttensor", "opencv"),
)
"""Beginnings of names: what a host with torch has, and kernels without which vLLM runs as well."""
KERNELS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "spinloop", "fs_io_C")
WITHOUT = (
    *("vllm/vllm-rs", "vllm/third_party/*/include"),
    *("mooncake/transfer_engine_bench", "mooncake/mooncake_client"),
    *("pycountry/locales", "mistral_common/data/tekken*"),
)
"""Programs, and data, that no engine reads."""
_EVERYWHERE = ("libc.", "libm.", "libdl.", "libpthread.", "librt.", "libstdc++.", "libgcc_s.")
_NO_FLASH_ATTENTION = '"""Left out: engines take ``--attention-backend TRITON_ATTN``."""\n'
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header, bytes behind it
_IMAGE = struct.Struct("<HHIQ12xI")  # kind, version, header, bytes behind it, architecture
_MAGIC = 0xBA55ED50
_SASS = 2


def keep_architecture(data: bytes, architecture: int) -> bytes:
    """A library without the device code of other architectures: that is zero, and packs to nothing.

    NVIDIA does not document the format of these containers. What is taken for granted here is what
    vLLM's wheel has, whose kernels ran so; a container stays as it is behind an image whose header
    is not like that.
    """
    left = bytearray(data)
    magic = struct.pack("<I", _MAGIC)
    at = data.find(magic)
    while at >= 0:
        if at + _FATBIN.size > len(data):
            break
        _, version, header, num_bytes = _FATBIN.unpack_from(data, at)
        end = at + header + num_bytes
        if version != 1 or header != _FATBIN.size or end > len(data):
            at = data.find(magic, at + 4)
            continue
        image = at + header
        while image + _IMAGE.size <= end:
            kind, _, header, num_bytes, found = _IMAGE.unpack_from(data, image)
            if kind not in (1, _SASS) or not _IMAGE.size <= header <= 1024:
                break
            if (kind, found) != (_SASS, architecture):
                left[image + header : image + header + num_bytes] = bytes(num_bytes)
            image += header + num_bytes
        at = data.find(magic, end)
    return bytes(left)


def add_engine(
    site: Path, extra: Iterable[str], python: str, machine: str, architecture: int, has: set[str]
) -> None:
    """Puts vLLM, the ``extra`` requirements and what they need into this folder. Asks the package
    registry. ``has`` names distributions of the other host.
    """
    place = ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_34"]
    place += ["--only-binary", ":all:"]
    target = ["pip", "install", "--quiet", "--target", str(site), "--no-deps", *place]
    _uv([*target, f"vllm=={VLLM}"])
    [metadata] = site.glob("vllm-*.dist-info/METADATA")
    wanted = [*requirements(metadata.read_text(), has), *extra, *TESTS]
    pins = _uv(["pip", "compile", "--quiet", "--no-header", "--no-annotate", *place, "-"], wanted)
    _uv([*target, *(pin for pin in pins.splitlines() if not is_there(pin, has))])
    for path in [path for pattern in WITHOUT for path in site.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in (site / "vllm").rglob("*.so"):
        if library.name.split(".")[0] in KERNELS:
            library.write_bytes(keep_architecture(library.read_bytes(), architecture))
        else:
            library.unlink()
    (site / "vllm/vllm_flash_attn/_vllm_fa2_C.py").write_text(_NO_FLASH_ATTENTION)
    _add_libraries(site)
    if apply_patches.main(["apply", "--source-tree", str(site)]):
        sys.exit("the patches do not fit vLLM's build for CUDA")


def requirements(metadata: str, has: Collection[str]) -> list[str]:
    """What a wheel asks for without extras, but for what the other host has."""
    found = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    return [one for one in found if "extra ==" not in one and not is_there(one, has)]


def read_names(listed: str) -> set[str]:
    """Of ``pip list --format freeze``, or of names alone."""
    lines = (line.strip() for line in listed.splitlines())
    return {_name(line) for line in lines if line and not line.startswith("#")}


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0]).lower()


def is_there(requirement: str, has: Collection[str]) -> bool:
    """Whether the other host has it, or needs none of it beside its torch."""
    return _name(requirement) in has or _name(requirement).startswith(BESIDE_TORCH)


def _add_libraries(site: Path) -> None:
    """Those of the system that Mooncake needs: of this host, for one that has none."""
    engines = [*site.glob("mooncake/*.so"), site / "mooncake/mooncake_master"]
    needed: set[str] = set()
    for one in (*engines, *site.glob("mooncake*.libs/*")):
        said = subprocess.run(["readelf", "-d", one], capture_output=True, text=True, check=True)
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", said.stdout))
    for library in site.glob("mooncake*.libs/*"):
        if library.name not in needed:
            library.unlink()
    subprocess.run(["strip", *site.glob("mooncake*/libetcd_wrapper*")], check=True)
    (site / "lib").mkdir(exist_ok=True)
    for one in engines:
        said = subprocess.run(["ldd", one], capture_output=True, text=True, check=True)
        for name, path in re.findall(r"^\s*(\S+) => (/\S+)", said.stdout, re.MULTILINE):
            if not path.startswith(str(site)) and not name.startswith(_EVERYWHERE):
                shutil.copy(path, site / "lib" / name)


def _uv(arguments: list[str], lines: Iterable[str] = ()) -> str:
    if not UV.is_file():
        sys.exit(f"{UV} is not there: make venv")
    done = subprocess.run(
        [UV, *arguments], input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"uv {' '.join(arguments[:2])} failed; its message is above")
    return done.stdout
