"""Remove each wait and fence of a kernel in turn and say whether the interpreter notices. Run by test_faults.py.

Argument: a kernel's module name. Prints one JSON object: "statement #occurrence" -> "race", "wrong", "error", "hang"
or "unseen". Each mutant runs in a forked child, because an interpreter that failed or hangs cannot be used again.
"""

import importlib
import json
import os
import re
import runpy
import signal
import sys
import time
import types
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import schedule
from pallas_kernels.tree_attention.shapes import SCALE, Shape, problem
from pallas_kernels.tree_attention.tile import Config

STATEMENT = re.compile(r"(\s+)(plgpu\.(?:barrier_wait|commit_smem|commit_tmem|wait_load_tmem)\(.*?\))(\s*#.*)?$")
# One piece over two requests, so that every buffer is used again; sharp scores, so that values are rescaled.
CASE = Shape(2, 8, 8, 200, (100, 200), kv_lora_rank=128)
QUERY_STD = 20.0
SECONDS = float(os.environ.get("FAULT_SECONDS", "60"))


def mutants(source):
    """Each removable statement's name, and the source without it."""
    lines, seen = source.splitlines(), Counter()
    for number, line in enumerate(lines):
        if match := STATEMENT.fullmatch(line):
            seen[match[2]] += 1
            without = [*lines[:number], match[1] + "pass", *lines[number + 1 :]]
            yield f"{match[2]} #{seen[match[2]]}", "\n".join(without)


def outcome(source):
    """Run the case on a kernel given as source text."""
    module = types.ModuleType("mutant")
    sys.modules["mutant"] = module
    exec(compile(source, "mutant.py", "exec"), module.__dict__)
    oracle = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["softmax_over_paths"]
    arguments = problem(CASE, query_std=QUERY_STD)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    run = jax.jit(lambda *a: schedule.launch(module.attend, Config(), *a, scale=SCALE, interpret=interpret))
    try:
        out, lse = (np.asarray(a, np.float64) for a in run(*arguments))
    except Exception as error:
        return "race" if "RACE" in str(error) else "error"
    want_out, want_lse = oracle(*arguments, scale=SCALE)
    right = np.abs(out - want_out).max() < 2**-7 * np.abs(want_out).max() and np.abs(lse - want_lse).max() < 1e-3
    return "unseen" if right else "wrong"


def in_child(source):
    """`outcome` in a forked child, "hang" after SECONDS."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, outcome(source).encode())
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return os.read(read, 100).decode() or "error"
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hang"


def main():
    name = sys.argv[1]
    module = importlib.import_module(f"pallas_kernels.tree_attention.{name}")
    source = Path(module.__file__).read_text()
    unchanged = in_child(source)
    assert unchanged == "unseen", f"the kernel as it is must pass, but: {unchanged}"
    results = {}
    for statement, mutant in mutants(source):
        results[statement] = in_child(mutant)
        print(statement, results[statement], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
