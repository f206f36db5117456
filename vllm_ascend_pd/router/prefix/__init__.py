# SPDX-License-Identifier: Apache-2.0
"""Which prompt prefixes each engine holds, from the KV events that it publishes."""
