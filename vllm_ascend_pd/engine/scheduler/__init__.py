# SPDX-License-Identifier: Apache-2.0
"""EngineCore process: decides. Never blocks, never copies."""
