# SPDX-License-Identifier: Apache-2.0
"""Check that a commit message is signed off (``git commit -s``)."""

import re
import sys
from pathlib import Path

SIGNED_OFF = re.compile(r"^Signed-off-by: .+ <[^<>@\s]+@[^<>\s]+>$", re.MULTILINE)


def is_signed_off(message: str) -> bool:
    return SIGNED_OFF.search(message) is not None


def main(message_file: str) -> int:
    if is_signed_off(Path(message_file).read_text()):
        return 0
    print("the message has no Signed-off-by line: git commit -s (or --amend -s)")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
