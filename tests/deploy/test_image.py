# SPDX-License-Identifier: Apache-2.0
"""The image, as far as there is no container runtime: its steps, run in a clean folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bootstrap_host as host
import pytest
from bootstrap_install import UV, Environment, clean_env
from engine_alias import write_alias_wheel

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "image" / "Dockerfile"
UV_FOLDER = Path(sys.prefix) / "uv"
needs_uv = pytest.mark.skipif(not UV_FOLDER.is_dir(), reason="needs uv, as make venv fetches it")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", "")
    return [(words[0], words[2]) for line in text.splitlines() if (words := line.partition(" "))[0]]


def told(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_its_versions_are_those_of_the_environment() -> None:
    [torch] = re.findall(r"torch==[\w.]+", " ".join(told("ARG")))
    assert torch == f"torch=={host.TORCH}"
    steps = " ".join(told("RUN"))
    assert re.findall(r"uv==([\w.]+)", steps) == [UV]
    assert set(host.LIBRARIES.values()) <= set(steps.split())


def test_the_base_is_an_argument() -> None:
    assert told("FROM") == ["${BASE}"]
    [base] = [one for one in told("ARG") if one.startswith("BASE=")]
    assert "/" not in base  # whichever registry the builder uses


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``make wheel`` fills it."""
    folder = tmp_path_factory.mktemp("image")
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(
        ROOT,
        source,
        ignore=lambda _, names: [n for n in names if n.startswith(".") or n in ("build", "dist")],
    )
    command = [str(UV_FOLDER / "bin" / "uv"), "build", "--quiet", "--wheel", "--no-build-isolation"]
    command += ["--python", sys.executable, "--out-dir", str(dist)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=source, env=clean_env({"PATH": path}), check=True)
    write_alias_wheel(dist)
    for one in (ROOT / "tools" / "requirements").glob("*.txt"):
        shutil.copy(one, dist)
    return dist


@needs_uv
@pytest.mark.engine
def test_its_steps_make_a_patched_engine_and_a_router(dist: Path, tmp_path: Path) -> None:
    fetched = Environment(tmp_path / "fetched")
    fetched.make()
    settings = fetched.fetch_uv()
    torch = host.plan_for("cpu").requirements[0]
    options = " ".join([*(fetched.source_of(torch, settings) or []), torch])
    here = str(tmp_path / "opt")
    env = {
        **clean_env(settings),
        "KIND": "cpu",
        "TORCH": options,
        "VIRTUAL_ENV": f"{here}/vllm-pd",
        "PATH": os.pathsep.join(
            (f"{here}/vllm-pd/bin", f"{sys.base_prefix}/bin", os.environ["PATH"])
        ),
    }
    shutil.copytree(dist, f"{here}/dist")
    steps = [step for step in told("RUN") if not step.startswith("apt-get")]
    assert len(steps) == len(told("RUN")) - 1
    native = "python -c 'import vllm_ascend_pd._C'"
    for step in (*steps, "vllm-pd patch status", native, "vllm-pd router --help"):
        command = ["sh", "-ec", step.replace("/opt/", f"{here}/")]
        done = subprocess.run(
            command, cwd=f"{here}/dist", env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{step}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
        if step == "vllm-pd patch status":
            assert f"applied ({here}" in done.stdout
