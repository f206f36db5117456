# SPDX-License-Identifier: Apache-2.0
"""What a worker's step gives back."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.outputs import KVConnectorOutput as _KVConnectorOutput

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import KVConnectorOutput, ModelRunnerOutput


def step_output(report: object = None) -> KVConnectorOutput:
    """What carries ``report`` to the scheduler."""
    return _KVConnectorOutput(kv_connector_worker_meta=report)


def attach_report(output: KVConnectorOutput, report: object) -> None:
    """For the scheduler."""
    output.kv_connector_worker_meta = report


def attach_stats(output: KVConnectorOutput, stats: object) -> None:
    """For the front end."""
    output.kv_connector_stats = stats


def output_without_forward(report: object) -> ModelRunnerOutput:
    """Of a step that computes nothing."""
    output = copy(EMPTY_MODEL_RUNNER_OUTPUT)
    output.kv_connector_output = step_output(report)
    return output
