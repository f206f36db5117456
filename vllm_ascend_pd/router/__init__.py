# SPDX-License-Identifier: Apache-2.0
"""The P/D router: OpenAI's API in front of prefill and decode engines, without vLLM or torch."""
