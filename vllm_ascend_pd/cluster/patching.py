# SPDX-License-Identifier: Apache-2.0
"""Where the tool that applies the patches is."""

from __future__ import annotations

from pathlib import Path

import vllm_ascend_pd


def patch_tool() -> Path:
    """``apply_patches.py`` of the source tree, or the copy that an installed package carries."""
    package = Path(vllm_ascend_pd.__file__).parent
    source = package.parent / "tools" / "apply_patches.py"
    return source if source.is_file() else package / "_patching" / "tools" / "apply_patches.py"
