# SPDX-License-Identifier: Apache-2.0
"""Check that each named file states its licence in the first three lines."""

import sys
from pathlib import Path

LINE = "SPDX-License-Identifier: Apache-2.0"


def states_licence(text: str) -> bool:
    return any(LINE in line for line in text.splitlines()[:3])


def main(paths: list[str]) -> int:
    wrong = [path for path in paths if not states_licence(Path(path).read_text(errors="replace"))]
    for path in wrong:
        print(f"{path}: add the comment '{LINE}' at its top")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
