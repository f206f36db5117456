# SPDX-License-Identifier: Apache-2.0
"""Examines a host, and engines that run, and names what to do about what is wrong."""
