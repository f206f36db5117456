# SPDX-License-Identifier: Apache-2.0
"""Several processes that are one router: a keeper, and workers that share its port."""
