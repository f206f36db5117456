# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-pd``. Each subcommand is a module here, imported when it is called."""
