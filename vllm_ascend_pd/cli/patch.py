# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd patch``: the patch tool of the source tree, or the copy in the installed package."""

from __future__ import annotations

import typer

app = typer.Typer(add_completion=False)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="""Patch the vLLM of this environment, or say whether it is: apply, status, revert, check.

    vllm-pd patch apply

`vllm-pd patch --help` and `vllm-pd patch apply --help` list the options.""",
)
def patch(context: typer.Context) -> None:
    import subprocess
    import sys

    from vllm_ascend_pd.patching import patch_tool

    done = subprocess.run([sys.executable, str(patch_tool()), *context.args], check=False)
    sys.exit(done.returncode)
