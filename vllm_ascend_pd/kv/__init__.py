# SPDX-License-Identifier: Apache-2.0
"""What transfers and pool have in common: loads of KV, and the contract of what runs them."""
