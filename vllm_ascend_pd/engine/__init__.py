# SPDX-License-Identifier: Apache-2.0
"""The engine side: the only package that imports vLLM."""
