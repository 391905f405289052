"""Both kernels in the interpreter, with race detection: one suite, small sizes, every path of the kernels."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.selection import kernel_module
from pallas_kernels.tree_attention.shapes import SCALE, Shape, parents, problem

RNG = np.random.default_rng(3)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    options: dict = dataclasses.field(default_factory=dict)
    trees: list | None = None
    query_std: float = 0.5


# A narrow latent keeps the interpreter quick: the code is the same, the tiles of the value columns are narrower.
BOTH = {
    # Contexts that end before, at and after a tile, none at all, and a request that is padding throughout.
    "lengths": Case(
        Shape(7, 3, 8, 200, (0, 1, 63, 64, 65, 200, 130), kv_lora_rank=128),
        trees=[*([[-1, 0, 1], [-1, 0, 0]] * 3), []],
    ),
    # Every kind of tree, two query tiles, 36 rows that fill no tile; 4 pieces, of which one spans requests.
    "trees": Case(
        Shape(4, 9, 4, 136, (100, 136, 7, 64), kv_lora_rank=128),
        {"splits": 4},
        [parents("chain", 9, RNG), parents("star", 9, RNG), parents("random", 6, RNG), [-1]],
    ),
    # One request cut into more parts than the join kernel reads at a time, and pieces with nothing to do.
    "one request": Case(Shape(1, 1, 8, 648, (641,), kv_lora_rank=128), {"splits": 14}),
    # 65 rows: the tree takes two tiles, the mask three words and the validity word.
    "65 rows": Case(Shape(2, 65, 1, 72, (70, 3), kv_lora_rank=128), {"splits": 3, "min_tiles": 2}),
    # The maximum rises all the time: values are rescaled at most tiles.
    "peaked": Case(Shape(2, 9, 8, 256, (256, 190), kv_lora_rank=128), {"splits": 2}, query_std=20.0),
    "full width": Case(Shape(2, 8, 8, 128, (128, 60)), {"splits": 2}),
}
ONE = {
    ("hopper", "cluster"): Case(Shape(2, 17, 8, 136, (130, 40), kv_lora_rank=128), {"splits": 2, "cluster": 2}),
    ("blackwell", "rescale always"): Case(Shape(1, 4, 8, 256, (250,), kv_lora_rank=128), {"lazy": 0.0}),
}
CASES = {(kernel, name): case for name, case in BOTH.items() for kernel in ("hopper", "blackwell")} | ONE


@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_it_matches_the_oracle_without_races(kernel, name, oracle, assert_matches):
    case, module = CASES[kernel, name], kernel_module(kernel)
    arguments = problem(case.shape, trees=case.trees, query_std=case.query_std)
    options = {"implementation": kernel, "config": module.Config(**case.options)}
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    run = jax.jit(lambda *a: tree_attention(*a, scale=SCALE, interpret=interpret, **options))
    # Probabilities and outputs are rounded to bfloat16 (2^-8 of the value); sums and scores are float32.
    lse_tolerance = 1e-5 if case.query_std < 1 else 1e-3
    assert_matches(run(*arguments), oracle(*arguments, scale=SCALE), tolerance=2**-7, lse_tolerance=lse_tolerance)
