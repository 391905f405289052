"""Named shapes, Kimi K2.6's routed experts as ranks see them, and random problems: for tests, checks and benchmarks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.draws import Draws
from pallas_kernels.int4_moe.reference import Stack
from pallas_kernels.int4_moe.selection import Shape
from pallas_kernels.int4_moe.tile import GROUP
from pallas_kernels.operation import Case

HIDDEN, WIDTH, EXPERTS, TOP_K = 7168, 2048, 384, 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_ROWS = (1024, 2048, 4096)
EP_SLOTS = (6, 8, 12, 24, 48, 384)
TP_SIZES = (2, 4, 8, 16, 32)


def expert_parallel(rows: int, slots: int) -> Shape:
    """A rank that holds `slots` whole experts."""
    return Shape(rows, TOP_K, slots, HIDDEN, WIDTH, EXPERTS)


def tensor_parallel(rows: int, tp: int) -> Shape:
    """A rank that holds 1/`tp` of every expert's width."""
    return Shape(rows, TOP_K, EXPERTS, HIDDEN, WIDTH // tp, EXPERTS)


SHAPES = {
    **{f"ep-{slots}-rows-{rows}": expert_parallel(rows, slots) for slots in EP_SLOTS for rows in ROWS},
    **{f"tp-{tp}-rows-{rows}": tensor_parallel(rows, tp) for tp in TP_SIZES for rows in ROWS},
    **{f"ep-48-rows-{rows}": expert_parallel(rows, 48) for rows in PREFILL_ROWS},
}

TENSOR_CORE = ("hopper", "blackwell")

# Unused shared and device memory is NaN in the interpreter, so a padded row that was read would show.
CASES = {
    "random": Case(Shape(11, 2, 3, 128, 64, 5), {"extremes": True}, {"stages": 2, "ctas": 2}),
    "foreign": Case(Shape(11, 2, 3, 128, 64, 3), {"routing": "foreign"}, {"stages": 2, "ctas": 2}, slow=True),
    "one expert": Case(Shape(33, 3, 5, 128, 128, 5), {"routing": "one expert"}, {"stages": 2, "ctas": 2}, slow=True),
    "every expert once": Case(
        Shape(7, 3, 5, 128, 128, 5), {"routing": "every expert once"}, {"stages": 2, "ctas": 2}, slow=True
    ),
    "one row": Case(Shape(1, 3, 5, 128, 128, 7), {}, {"stages": 2}, slow=True),
    "257 rows": Case(Shape(257, 3, 5, 128, 128, 7), {}, {"stages": 2}, slow=True),
    # Scales as boxes of the matrix, a ring that wraps within an item, two warpgroups; then k shared between CTAs.
    "several steps": Case(Shape(9, 2, 3, 512, 256, 3), {}, {"stages": 2, "ctas": 3}, slow=True),
    "shared k": Case(Shape(9, 2, 3, 512, 256, 3), {}, {"stages": 2, "ctas": 3, "split": 2}, slow=True),
    "32 rows a tile": Case(
        Shape(70, 2, 3, 128, 64, 3), {}, {"rows": 32, "stages": 2, "ctas": 2}, slow=True, only=TENSOR_CORE
    ),
    "64 rows a tile": Case(
        Shape(70, 2, 3, 128, 64, 3), {}, {"rows": 64, "stages": 2, "ctas": 2}, slow=True, only=TENSOR_CORE
    ),
}
"""The table that the tests take every implementation through."""

CHECKS = {
    # Every kernel's ring of stages wraps, its CTAs have many items, and k of gate and up is shared between CTAs.
    "ring": Case(Shape(48, 2, 6, 1024, 256, 8), {}, {"ctas": 2, "split": 2}),
    # A row's scales of a step do not fill a copy: rows are copied together. The tensor core takes tiles of 32 rows.
    "narrow scales": Case(Shape(64, 2, 16, 128, 64, 17), {}, {"rows": 32, "ctas": 1}),
    "64 rows a tile": Case(Shape(160, 2, 3, 1024, 256, 4), {}, {"rows": 64, "ctas": 2}, only=TENSOR_CORE),
}
"""What a card computes when a checkpoint is opened."""


def problem(
    shape: Shape, seed: int = 0, *, routing: str = "random", extremes: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, Stack, Stack, Stack]:
    """Random arguments of `int4_moe`: rows, ids, router weights, and three stacks of weights.

    `routing` is "random" (to `num_experts` experts, of which this rank holds the first `slots`), "one expert", "every
    expert once" or "foreign" (to none of this rank's). `extremes` sets codes to q = -8 and scales to zero.
    """
    draws = Draws(seed)
    x = draws.normal(shape.rows, shape.hidden)
    router = draws.uniform(shape.rows, shape.top_k, low=0.1, high=1.0)
    ids = jnp.asarray(_ids(shape, routing, np.random.default_rng(seed)), jnp.int32)
    gate, up, down = (
        Stack(
            draws.words(shape.slots, out, into // 8),
            draws.uniform(shape.slots, out, into // GROUP, low=0.005, high=0.02, dtype=jnp.bfloat16),
        )
        for out, into in ((shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width))
    )
    if extremes:
        gate = gate._replace(packed=gate.packed.at[0].set(0))
        down = down._replace(scale=down.scale.at[1].set(0))
    return x, ids, router, gate, up, down


def _ids(shape: Shape, routing: str, rng: np.random.Generator) -> np.ndarray:
    pairs = np.arange(shape.rows * shape.top_k).reshape(shape.rows, shape.top_k)
    if routing == "random":
        return np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.rows)])
    if routing == "one expert":
        return np.where(pairs % shape.top_k == 0, shape.slots - 1, shape.slots)
    if routing == "every expert once":
        return np.where(pairs < shape.slots, pairs[::-1] % shape.slots, -1)
    if routing == "foreign":
        return np.where(pairs % 2 == 0, -1, shape.slots)
    raise ValueError(f"unknown routing {routing!r}: give 'random', 'one expert', 'every expert once' or 'foreign'")


def necessary(shape: Shape, arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Bytes of the experts that have rows, 4.5 bits a weight, and operations of the pairs that are here."""
    ids = np.asarray(arguments[1])
    here = ids[(ids >= 0) & (ids < shape.slots)]
    weights = 3 * shape.hidden * shape.width
    return np.unique(here).size * weights * (0.5 + 2 / GROUP), 2.0 * weights * here.size
