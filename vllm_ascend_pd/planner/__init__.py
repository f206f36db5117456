# SPDX-License-Identifier: Apache-2.0
"""How many engines, and of which role: from measured speeds, by simulation over a trace."""
