# SPDX-License-Identifier: Apache-2.0
"""P2P transfer: its states, its leases, its sockets. Knows neither vLLM nor torch."""
