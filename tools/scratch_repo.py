# SPDX-License-Identifier: Apache-2.0
"""A series as git commits in a scratch repository that holds only the touched files.

Used by the commands check, export and port of ``apply_patches.py``; the only code that needs git.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from patch_series import GIT_FAILED, Contents, ToolError, slug

BASE_TAG = "pd-base"  # the commit below the series

FORMAT_PATCH = (
    *("format-patch", "--stdout", "--zero-commit", "--no-signature", "--no-stat", "--full-index"),
    *("--no-numbered", "--keep-subject", "--no-encode-email-headers", "--no-renames"),
    *("--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers", "-1"),
)


def git(
    repo: Path, *args: str, data: bytes | None = None, show: bool = False, most: int = 0
) -> bytes:
    """Run git in `repo` only: without the user's settings and never in a repository around it. An
    exit code above `most` is an error.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    env.update(GIT_CEILING_DIRECTORIES=str(repo.resolve().parent))
    for role in ("AUTHOR", "COMMITTER"):
        env.update({f"GIT_{role}_NAME": "scratch", f"GIT_{role}_EMAIL": "scratch@localhost"})
    settings = ("-c", "core.autocrlf=false", "-c", f"core.attributesFile={os.devnull}")
    command = ["git", *settings, *args]
    try:
        done = subprocess.run(command, cwd=repo, env=env, input=data, capture_output=True)
    except FileNotFoundError as error:
        raise ToolError(f"git, or the directory {repo}, was not found", GIT_FAILED) from error
    if show:
        print((done.stdout + done.stderr).decode(errors="replace"), end="", file=sys.stderr)
    if not 0 <= done.returncode <= most:
        said = "" if show else done.stderr.decode(errors="replace")
        raise ToolError(f"git {args[0]} failed in {repo}\n{said}".rstrip(), GIT_FAILED)
    return done.stdout


def write_files(root: Path, contents: Contents) -> None:
    for path, data in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def make_scratch(repo: Path, contents: Contents) -> None:
    write_files(repo, contents)
    git(repo, "init", "--quiet", "--template=", "--initial-branch=series")
    git(repo, "add", "--force", ".")
    git(repo, "commit", "--quiet", "--allow-empty", "--message=The files as released")
    git(repo, "tag", BASE_TAG)


def export_commits(repo: Path, base: str) -> Contents:
    """Patch file name -> text, in order. Only From and Subject stay of the mail's headers."""
    exported: Contents = {}
    for rev in git(repo, "rev-list", "--reverse", f"{base}..HEAD").decode().split():
        mail, _, rest = git(repo, *FORMAT_PATCH, rev).partition(b"\n\n")
        fields = re.sub(rb"\n[ \t]+", b" ", mail).split(b"\n")
        kept = [field for field in fields if field.startswith((b"From: ", b"Subject: "))]
        subject = kept[-1].partition(b": ")[2].decode()
        name = f"{slug(subject)}.patch"
        if name in exported:
            raise ToolError(f"two commits are named {subject!r}: reword one", GIT_FAILED)
        exported[name] = b"\n".join(kept) + b"\n\n" + rest
    return exported


def reorder(text: str, names: list[str]) -> str:
    """A `series` text with these names; blank lines and comments stay with the name below them."""
    above: dict[str, str] = {}
    waiting = ""
    for line in text.splitlines():
        if name := line.partition("#")[0].strip():
            above[name], waiting = waiting, ""
        else:
            waiting += line + "\n"
    return "".join(above.get(name, "") + name + "\n" for name in names) + waiting
