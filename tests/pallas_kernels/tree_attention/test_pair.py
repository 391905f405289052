"""The pair kernel through the shim of pair_interpreter.py: numerics and progress, not races."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import blackwell_pair, schedule
from pallas_kernels.tree_attention.shapes import SCALE, Shape, parents, problem

pytestmark = pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12), reason="the shim knows the interpreter of jax 0.12"
)
RNG = np.random.default_rng(5)
CASES = {
    # Three pieces over two requests and their 128-position tiles; one tree with padding rows, 160 query rows.
    "trees": (Shape(2, 20, 8, 272, (270, 129), 256), {"splits": 3}, [parents("random", 20, RNG), [-1, 0]], 0.5),
    "peaked": (Shape(1, 9, 8, 384, (384,), 256), {}, None, 20.0),
}
SLOW = {
    "rescale always": (Shape(1, 16, 8, 392, (390,), 256), {"lazy": 0.0}, None, 0.5),
    "lengths": (Shape(5, 3, 8, 264, (0, 1, 127, 128, 129), 256), {"splits": 2}, None, 0.5),
    "full width": (Shape(1, 65, 2, 200, (200,)), {"splits": 2}, None, 0.5),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_it_matches_the_oracle(name, monkeypatch, oracle, assert_matches):
    runpy.run_path(str(Path(__file__).with_name("pair_interpreter.py")))["install"](monkeypatch)
    shape, options, trees, query_std = (CASES | SLOW)[name]
    arguments = problem(shape, trees=trees, query_std=query_std)
    config = blackwell_pair.Config(**options)
    interpret = plgpu.InterpretGPUParams(detect_races=False)
    run = jax.jit(lambda *a: schedule.launch(blackwell_pair.attend, config, *a, scale=SCALE, interpret=interpret))
    # As in test_kernels.py: bfloat16 probabilities and outputs, float32 sums.
    lse_tolerance = 1e-5 if query_std < 1 else 1e-3
    assert_matches(run(*arguments), oracle(*arguments, scale=SCALE), tolerance=2**-7, lse_tolerance=lse_tolerance)
