# SPDX-License-Identifier: Apache-2.0
"""Child processes that are kept up: engines and routers of ``up``, workers of a router."""
