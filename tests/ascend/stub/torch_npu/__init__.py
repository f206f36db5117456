# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch_npu, so that vllm-ascend's Python can be imported and run without an NPU.

A name in lower case is a namespace that can be called and returns another one, a capitalised one is
a class. What a test needs to be real, it puts in itself. Nothing here computes.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


class Namespace(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else Namespace(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Namespace:
        return Namespace(f"{self.__name__}()")


_everything = Namespace("torch_npu")
npu = Namespace("torch.npu")
torch.npu = npu  # type: ignore[attr-defined]
sys.modules["torch.npu"] = npu


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_everything, name)
