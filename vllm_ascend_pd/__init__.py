# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation and a tiered KV pool for vLLM and vLLM Ascend."""

__version__ = "0.1.0"
