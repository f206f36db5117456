# SPDX-License-Identifier: Apache-2.0
"""Foreign libraries behind narrow protocols; the only importer of Mooncake and of `_C`."""
