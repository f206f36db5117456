# SPDX-License-Identifier: Apache-2.0
"""Frames between processes: threads that own sockets, connections, and who may speak."""
