# SPDX-License-Identifier: Apache-2.0
"""As many engines as a cluster has room for, in a ratio of P to D that is kept."""
