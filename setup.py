# SPDX-License-Identifier: Apache-2.0
"""Builds the native extension with CMake; everything else is in pyproject.toml.

Without CMake, Ninja or a C++17 compiler the build goes on, and the package copies KV in Python.
VLLM_ASCEND_PD_REQUIRE_NATIVE=1 makes that an error.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE_SOURCES = [ROOT / "CMakeLists.txt", *(ROOT / "csrc").glob("*")]
REQUIRE_NATIVE = os.environ.get("VLLM_ASCEND_PD_REQUIRE_NATIVE") == "1"


def is_newer(made: Path, sources: list[Path]) -> bool:
    return made.is_file() and all(made.stat().st_mtime > s.stat().st_mtime for s in sources)


def replace_file(source: Path, target: Path) -> None:
    """By another file: a process may have loaded the one that is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)


class CMakeBuild(build_ext):
    """Hands each extension to CMake."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        in_source = ROOT / self.get_ext_filename(ext.name)
        if self.editable_mode and in_source != target and is_newer(in_source, NATIVE_SOURCES):
            replace_file(in_source, target)
            return
        try:
            self._build_with_cmake(ext)
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            if REQUIRE_NATIVE:
                raise
            print(
                f"WARNING: {ext.name} was not built ({error}).\n"
                "WARNING: vllm-ascend-pd will copy KV in Python, slowly and with the GIL held.\n"
                "WARNING: install CMake, Ninja and a C++17 compiler, and install again.",
                file=sys.stderr,
            )

    def _build_with_cmake(self, ext: Extension) -> None:
        import pybind11

        build_dir = Path(self.build_temp).resolve() / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        # The cache names tools of the last build's environment, which isolated builds delete.
        (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
        staged = build_dir / "out"
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-GNinja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={staged}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build_dir)], check=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        replace_file(staged / self.get_ext_filename(ext.name.rpartition(".")[2]), target)


class PythonBuild(build_py):
    """Adds the patch series and the tool that applies it: ``vllm-pd patch``.

    An editable install finds both in the source tree.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "vllm_ascend_pd" / "_patching"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / "patches", target / "patches")
        (target / "tools").mkdir()
        for tool in (*(ROOT / "tools").glob("*patch*.py"), ROOT / "tools" / "scratch_repo.py"):
            shutil.copy2(tool, target / "tools" / tool.name)


# `optional` lets an editable or wheel build go on where the file is missing.
setup(
    ext_modules=[Extension("vllm_ascend_pd._C", sources=[], optional=not REQUIRE_NATIVE)],
    cmdclass={"build_ext": CMakeBuild, "build_py": PythonBuild},
)
