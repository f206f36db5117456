# SPDX-License-Identifier: Apache-2.0
"""Several engines and a router as one thing: planned, started, watched, examined."""
