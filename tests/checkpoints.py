# SPDX-License-Identifier: Apache-2.0
"""Copies of models and adapters whose tensors differ."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np


def copy_with_other_tensors(source: Path, out: Path, pattern: str) -> Path:
    """The folder ``source`` at ``out``, with the values of the float32 tensors whose names match
    in reverse order. Nothing else in its files changes.
    """
    shutil.copytree(source, out, dirs_exist_ok=True)
    num_turned = 0
    for file in out.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__" or not re.search(pattern, name):
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            data[begin:end] = np.frombuffer(bytes(data[begin:end]), np.float32)[::-1].tobytes()
            num_turned += 1
        file.write_bytes(data)
    assert num_turned
    return out
