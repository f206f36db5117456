# SPDX-License-Identifier: Apache-2.0
"""What tests, examples and benchmarks share; the rest of the package never imports it."""
