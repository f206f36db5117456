# SPDX-License-Identifier: Apache-2.0
"""The KV pool: tiers beyond the engine's own prefix cache, one value for each block."""
