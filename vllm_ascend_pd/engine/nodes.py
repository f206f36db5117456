# SPDX-License-Identifier: Apache-2.0
"""An engine whose workers are on several hosts: each has a command line of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd import hooks
from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.engine.vllm_api.process import config_of
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.trust import Secret

if TYPE_CHECKING:
    from collections.abc import Sequence

Options = dict[str, str]
"""What all processes of an engine must have in common, by the name of the option."""

_FIX = "give each node of an engine the same --kv-transfer-config, but for kv_ip"


def options_of_worker(worker: object) -> Options:
    """Empty without ``InEngine``. Runs in the worker processes."""
    transfer = config_of(worker).kv_transfer_config
    if transfer is None or not hooks.in_engine(transfer):
        return {}
    return options_of(PDConfig.from_kv_transfer_config(transfer))


def options_of(config: PDConfig) -> Options:
    path = config.security.secret_file
    return {
        "kv_role": config.role.value,
        "transfer": msgspec.json.encode(config.transfer).decode(),
        "security.secret_file": "" if path is None else Secret.load(path).derive(b"nodes").hex(),
    }


def check_workers(config: PDConfig, workers: Sequence[Options]) -> None:
    """Of all workers, by rank. One without its part would only be seen by what never arrives.

    Raises:
        ConfigError: one was started with other options.
    """
    ours = options_of(config)
    for rank, theirs in enumerate(workers):
        if not theirs:
            raise ConfigError(f"worker {rank} was started without kv_connector InEngine: {_FIX}")
        if differing := [name for name in ours if ours[name] != theirs.get(name)]:
            names = ", ".join(differing)
            raise ConfigError(f"worker {rank} was started with another {names}: {_FIX}")
