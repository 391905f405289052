"""K2.6's tower compiled for cards that are not here, in a process of its own, at the largest number of patches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import dataclasses, json, sys
from meshes.devices import use_cpu_if_no_gpu
use_cpu_if_no_gpu()
from kimi_jax.ledger.models import k26_vision
from kimi_jax.profiling.tower import compile_tower
from meshes.presets import preset
found = compile_tower(k26_vision(), preset(sys.argv[1]), sys.argv[2], 18_432)
print(json.dumps(dataclasses.asdict(found)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "gpu"), [("local", "h200"), ("hgx-ib-16", "h200"), ("nvl72", "gb300")])
def test_temporaries(mesh, gpu):
    """The scores of 18,432 patches alone would be 22 GB; temporaries stay below 2 GB."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, mesh, gpu], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["temporaries"] < 2e9
    assert found["arguments"] == pytest.approx(942_287_840 + 18_432 * 588 + 12, rel=1e-3)
