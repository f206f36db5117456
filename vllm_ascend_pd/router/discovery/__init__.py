# SPDX-License-Identifier: Apache-2.0
"""Where instances come from: flags and a file, their own registration, or Kubernetes."""
