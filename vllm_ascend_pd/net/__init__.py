# SPDX-License-Identifier: Apache-2.0
"""Frames between processes: threads that own sockets, connections, who may speak; direct HTTP."""
