#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the patches cost an engine that transfers nothing.

Three engines in one run, taking turns on the same prompts:

  unpatched     a copy of the installed vLLM with the patches reverted
  patched-off   the patched vLLM without kv_transfer_config
  patched-idle  the patched vLLM with kv_connector InEngine, role kv_both, and nothing to transfer

With --control, a second unpatched engine takes part: its ratio to the first is what two equal
engines differ by.

Each turn decodes --batch requests of --tokens tokens. Reported: tokens per second, the ratio to
the unpatched engine of the same turn (median over turns), and whether all tokens were equal.

    python benchmarks/off_is_off.py --model .cache/models/60m
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from host import usual_dtype

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("unpatched", "patched-off", "patched-idle")
CONTROL = "unpatched-again"
SPIN_S = 1.2
"""The processes of an engine spin for a second after a step."""


def engine_main(options: argparse.Namespace) -> None:
    """The child: one engine, one JSON line a turn."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if options.engine == "patched-idle":
        transfer = KVTransferConfig(kv_connector="InEngine", kv_role="kv_both", kv_port=0)
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=options.batch,
        kv_cache_memory_bytes=options.kv_cache_mb << 20,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    )
    prompts = [
        {"prompt_token_ids": [10 + (7 * i + 3 * j) % 900 for j in range(64)]}
        for i in range(options.batch)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    patched = getattr(vllm.config.kv_transfer, "pd_hooks", "unpatched") != "unpatched"
    print(json.dumps({"ready": True, "patched": patched}), flush=True)
    for _ in sys.stdin:
        # All requests wait when the first step is scheduled, so every step of a turn has the same
        # batch in every engine; in bfloat16 another batch may round to another token.
        llm.sleep(level=0, mode="keep")
        llm.enqueue(prompts, sampling, use_tqdm=False)
        started = time.perf_counter()
        llm.wake_up(tags=["scheduling"])
        outputs = llm.wait_for_completion(use_tqdm=False)
        elapsed = time.perf_counter() - started
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
        rate = options.batch * options.tokens / elapsed
        print(json.dumps({"tokens_per_s": rate, "digest": digest}), flush=True)


class Child:
    """An engine process that answers one line per line it is sent."""

    def __init__(self, name: str, options: argparse.Namespace, tree: Path) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        if name.startswith("unpatched"):
            environment["PYTHONPATH"] = str(tree)
        command = [sys.executable, __file__, "--engine", name, "--model", options.model]
        for option in ("dtype", "batch", "tokens", "kv_cache_mb"):
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        self.name = name
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"error: the {self.name} engine ended; its messages are above")

    def turn(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def unpatched_tree(folder: Path) -> Path:
    """A copy of the installed vLLM (hard links) in which the patches are reverted."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "vllm", copy_function=os.link)
    command = [sys.executable, str(ROOT / "tools" / "apply_patches.py"), "revert"]
    subprocess.run([*command, "--source-tree", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default=usual_dtype())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kv-cache-mb", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--control", action="store_true", help="an unpatched engine more")
    parser.add_argument("--engine", choices=(*ENGINES, CONTROL), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine_main(options)
        return
    # Beside the installed package, because hard links do not cross file systems.
    beside = Path(find_spec("vllm").origin).parent.parent  # type: ignore[union-attr, arg-type]
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        tree = unpatched_tree(Path(folder))
        names = (*ENGINES, CONTROL) if options.control else ENGINES
        children = [Child(name, options, tree) for name in names]
        try:
            ready = {child.name: child.read() for child in children}
            assert not ready["unpatched"]["patched"], "the copy is still patched"
            assert ready["patched-off"]["patched"], "the installed vLLM is not patched: make patch"
            turns = []
            for number in range(options.rounds):
                first = number % len(children)  # nobody is always the one after a pause
                order = children[first:] + children[:first]
                turn = {}
                for child in order:
                    turn[child.name] = child.turn()
                    time.sleep(SPIN_S)
                turns.append(turn)
        finally:
            for child in children:
                child.stop()
    report(turns, options)


def report(turns: list[dict[str, dict[str, Any]]], options: argparse.Namespace) -> None:
    names = list(turns[0].keys() & {*ENGINES, CONTROL})
    names.sort(key=(*ENGINES, CONTROL).index)
    # Compared within a turn: the first computes the prompts, the others find them in the cache.
    equal = all(len({turn[name]["digest"] for name in names}) == 1 for turn in turns)
    counted = turns[1:] or turns  # the first turn fills caches
    rates = {name: [turn[name]["tokens_per_s"] for turn in counted] for name in names}
    ratios = {
        name: statistics.median(
            turn[name]["tokens_per_s"] / turn["unpatched"]["tokens_per_s"] for turn in counted
        )
        for name in names
    }
    if options.json:
        print(json.dumps({"equal": equal, "ratios": ratios}))
        return
    print(f"{options.batch} requests x {options.tokens} tokens, {len(counted)} turns each")
    for name in names:
        print(
            f"  {name:>15}  {statistics.median(rates[name]):8.0f} tokens/s"
            f"   ratio {ratios[name]:.3f}"
        )
    if equal:
        print("all tokens equal")
        return
    for name in names:
        seen = [turn[name]["digest"][:6] for turn in turns]
        print(f"TOKENS DIFFER  {name:>15}: {', '.join(dict.fromkeys(seen))}")


if __name__ == "__main__":
    main()
