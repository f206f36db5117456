# SPDX-License-Identifier: Apache-2.0
"""What follows from the settings of Mooncake's transport for NPUs."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.backends.npu_links import host_memory_route, late_write_s

NAMES = [
    *(
        "MC_TRANSFER_TIMEOUT",
        "ASCEND_CONNECT_TIMEOUT",
        "ASCEND_TRANSFER_TIMEOUT",
        "HCCL_RDMA_TIMEOUT",
    ),
    *("HCCL_RDMA_RETRY_CNT", "HCCL_INTRA_ROCE_ENABLE", "ASCEND_BUFFER_POOL"),
    "ASCEND_GLOBAL_RESOURCE_CONFIG",
]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 35 + 80 + 30),
        ({"ASCEND_TRANSFER_TIMEOUT": "33064"}, 35 + 264.5 + 30),  # what vllm-ascend's own sets
        ({"ASCEND_CONNECT_TIMEOUT": "20000"}, 35 + 160 + 30),
        ({"ASCEND_CONNECT_TIMEOUT": "soon"}, 35 + 80 + 30),  # Mooncake takes no notice of it
        ({"MC_TRANSFER_TIMEOUT": "30"}, 55 + 80 + 30),
        ({"HCCL_RDMA_TIMEOUT": "15", "HCCL_RDMA_RETRY_CNT": "1"}, 35 + 80 + 0.1),
    ],
)
def test_blocks_rest_until_mooncake_and_the_network_card_have_given_up(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], seconds: float
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert late_write_s() == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(
    ("name", "value", "is_way"),
    [
        ("HCCL_INTRA_ROCE_ENABLE", "1", True),
        ("HCCL_INTRA_ROCE_ENABLE", "0", False),
        ("ASCEND_BUFFER_POOL", "4:8", True),
        ("ASCEND_BUFFER_POOL", "0:0", False),
        (
            "ASCEND_GLOBAL_RESOURCE_CONFIG",
            '{"protocol_desc": ["roce:device"]}',
            True,
        ),
        ("ASCEND_GLOBAL_RESOURCE_CONFIG", "{}", False),
    ],
)
def test_way_to_host_memory(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_way: bool
) -> None:
    assert host_memory_route() is None
    monkeypatch.setenv(name, value)
    assert host_memory_route() == (name if is_way else None)
