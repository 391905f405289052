"""Seeded faults: each wait and fence of the race-checked kernels removed in turn is caught, or listed with the reason
why the interpreter cannot see it and why the code is right there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DRAIN = (
    "nothing follows it in the kernel; it keeps late arrivals from a block that has ended "
    "(the interpreter of jax 0.11 insists on it)"
)
FENCE = (
    "the interpreter has one memory proxy; test_assembly.py asserts fence.proxy.async and a barrier between the stores "
    "and the arrival"
)
UNSEEN = {
    "hopper": {"plgpu.commit_smem() #1": FENCE, "plgpu.barrier_wait(p_free) #3": DRAIN},
    "blackwell": {"plgpu.barrier_wait(q_free) #2": DRAIN, "plgpu.barrier_wait(kv_free.at[slot_of(tile)]) #1": DRAIN},
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", UNSEEN)
def test_every_removed_wait_is_caught_or_explained(kernel):
    command = [sys.executable, str(Path(__file__).with_name("faults.py")), kernel]
    run = subprocess.run(
        command, env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=3000, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert len(outcomes) > 5
    assert {statement for statement, outcome in outcomes.items() if outcome == "unseen"} == set(UNSEEN[kernel])
