# SPDX-License-Identifier: Apache-2.0
"""Fetch the released source of a pinned package, as the pin's sha256 names it.

    python tools/fetch_sdist.py vllm-ascend-0.30.0rc2 [--to .cache/sdists]

Prints the path; a file that is there already is only checked. `pip download` would run the
package's setup.py, which wants the accelerator's libraries, so pip is asked for the address alone
and the file is fetched with pip's own settings (index, proxy, certificates).
"""

import argparse
import dataclasses
import hashlib
import sys
import tempfile
import warnings
from pathlib import Path

from patch_series import REFUSED, PatchError, Pin, ToolError, read_pin

REPO_ROOT = Path(__file__).resolve().parent.parent


def fetch(series: str, to: Path, patches_dir: Path = REPO_ROOT / "patches") -> Path:
    """The sdist of a series' pin, below `to`; `ToolError` when no index has it."""
    return fetch_pin(read_pin(patches_dir / series / "pin.toml"), to)[0]


def fetch_pin(pin: Pin, to: Path) -> tuple[Path, Pin]:
    """The same for a pin, which is completed if it has no sha256 yet."""
    target = to / f"{pin.package}-{pin.version}.tar.gz"
    if target.is_file() and _digest(target.read_bytes()) == pin.sdist_sha256:
        return target, pin
    try:
        data, sha256 = _download(pin)
    except OSError as error:
        raise ToolError(
            f"{target.name}: cannot be fetched ({error}); on a host without a package index put"
            f" that file into {to}",
            REFUSED,
        ) from error
    expected = pin.sdist_sha256 or sha256
    if _digest(data) != expected:
        raise PatchError(f"{target.name}: these bytes have not the sha256 {expected}")
    to.mkdir(parents=True, exist_ok=True)
    # Another process may fetch the same.
    with tempfile.TemporaryDirectory(dir=to) as folder:
        partial = Path(folder) / target.name
        partial.write_bytes(data)
        partial.replace(target)
    return target, dataclasses.replace(pin, sdist_sha256=expected)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _download(pin: Pin) -> tuple[bytes, str]:
    """The bytes, and the sha256 that the index gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what pip brings along is deprecated here and there
        return _download_quietly(pin)


def _download_quietly(pin: Pin) -> tuple[bytes, str]:
    from pip._internal.commands import create_command

    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", pin.package])
    with command.main_context():
        session = command.get_default_session(options)  # type: ignore[attr-defined]
        finder = command._build_package_finder(options, session)  # type: ignore[attr-defined]
        for candidate in finder.find_all_candidates(pin.package.replace("_", "-")):
            if str(candidate.version) == pin.version:
                response = session.get(candidate.link.url_without_fragment)
                response.raise_for_status()
                data = bytes(response.content)
                named = candidate.link.hash if candidate.link.hash_name == "sha256" else None
                return data, named or _digest(data)
    raise OSError(f"no index of pip's has the source of {pin.package} {pin.version}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("series", help="a directory below patches/")
    parser.add_argument("--to", type=Path, default=REPO_ROOT / ".cache" / "sdists")
    args = parser.parse_args(argv)
    try:
        print(fetch(args.series, args.to))
    except ToolError as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
