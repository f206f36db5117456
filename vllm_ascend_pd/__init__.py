# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation for vLLM: the package that the patched engine calls."""

__version__ = "0.1.0"
