# SPDX-License-Identifier: Apache-2.0
"""Pure values and rules that several parts share: no I/O, no threads, no vLLM."""
