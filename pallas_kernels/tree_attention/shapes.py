"""Named shapes and random problems, shared by the tests, the benchmark and the self-check."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

SCALE = 0.14467962580268923
"""Kimi K2.6's softmax scale: 192^-0.5 times the square of YaRN's 0.1 ln(64) + 1."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The per-device sizes of one call; `filled` is the length of each request (None: all positions)."""

    requests: int
    rows: int
    heads: int
    positions: int
    filled: tuple[int, ...] | None = None
    kv_lora_rank: int = 512
    rope: int = 64

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached positions of each request."""
        return self.filled or (self.positions,) * self.requests

    @property
    def cache_bytes(self) -> int:
        """Bytes of bfloat16 cache that must be read once."""
        return 2 * sum(self.lengths) * (self.kv_lora_rank + self.rope)

    @property
    def operations(self) -> int:
        """Multiplications and additions over the context, both products, all rows and heads."""
        return 2 * self.rows * self.heads * sum(self.lengths) * (2 * self.kv_lora_rank + self.rope)


SHAPES = {
    # TP 8: 8 heads a GPU; the context is what costs.
    "tp8-decode": Shape(8, 1, 8, 32768),
    "tp8-tree9": Shape(8, 9, 8, 32768),
    "tp8-tree33": Shape(8, 33, 8, 32768),
    "tp8-long": Shape(1, 33, 8, 262144),
    "tp8-unequal": Shape(8, 17, 8, 131072, (131072, 70000, 8192, 4096, 4096, 1024, 300, 17)),
    # DP attention: 64 heads a GPU; trees are compute-bound.
    "dp-decode": Shape(64, 1, 64, 8192),
    "dp-tree9": Shape(32, 9, 64, 8192),
    "dp-tree33": Shape(8, 33, 64, 8192),
    "dp-tree65": Shape(4, 65, 64, 8192),
    "dp-many": Shape(256, 1, 64, 4096),
}


def parents(kind: str, rows: int, rng: np.random.Generator) -> list[int]:
    """The parent of each row, −1 for the root: "chain", "star" or "random"."""
    if kind == "chain":
        return list(range(-1, rows - 1))
    if kind == "star":
        return [-1] + [0] * (rows - 1)
    if kind == "random":
        return [-1] + [int(rng.integers(row)) for row in range(1, rows)]
    raise ValueError(f"unknown tree {kind!r}: give 'chain', 'star' or 'random'")


def ancestors_of(trees: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """The mask of trees given as parents (a parent comes before its children); shorter trees leave padding rows."""
    mask = np.zeros((len(trees), rows, rows), bool)
    for tree, sees in zip(trees, mask, strict=True):
        for row, parent in enumerate(tree):
            if parent >= 0:
                sees[row] = sees[parent]
            sees[row, row] = True
    return mask


def problem(
    shape: Shape,
    *,
    seed: int = 0,
    dtype=jnp.bfloat16,
    trees: Sequence[Sequence[int]] | None = None,
    query_std: float = 0.5,
) -> tuple[Array, ...]:
    """Random arguments of `tree_attention`, in its order; `trees` as parents, None for random ones of full size."""
    rng = np.random.default_rng(seed)
    if trees is None:
        trees = [parents("random", shape.rows, rng) for _ in range(shape.requests)]

    def normal(*sizes, std=1.0):
        return jnp.asarray(rng.standard_normal(sizes, np.float32) * std, dtype)

    queries = (shape.requests, shape.rows, shape.heads)
    cache = (shape.requests, shape.positions)
    own = (shape.requests, shape.rows)
    return (
        normal(*queries, shape.kv_lora_rank, std=query_std),
        normal(*queries, shape.rope, std=query_std),
        normal(*cache, shape.kv_lora_rank),
        normal(*cache, shape.rope),
        jnp.asarray(shape.lengths, jnp.int32),
        normal(*own, shape.kv_lora_rank),
        normal(*own, shape.rope),
        jnp.asarray(ancestors_of(trees, shape.rows)),
    )
