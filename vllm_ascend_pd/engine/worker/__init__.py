# SPDX-License-Identifier: Apache-2.0
"""Worker process: moves KV between device pages, staging memory and peers."""
