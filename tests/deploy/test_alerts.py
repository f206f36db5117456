# SPDX-License-Identifier: Apache-2.0
"""The alert rules, as Prometheus' own tool reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.e2e.observed import ALERTS, needs_prometheus

CASES = Path(__file__).with_name("alerts_test.yaml")


@needs_prometheus
def test_each_alert_fires_on_what_it_is_for_and_not_on_what_is_well(tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(CASES, tmp_path)
    command = ["promtool", "test", "rules", CASES.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_alert_is_without_a_case() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    tried = set(re.findall(r"VllmPd\w+", CASES.read_text()))
    assert {rule["alert"] for rule in rules} == tried
