"""Named shapes and random problems, shared by tests, checks and benchmarks."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.draws import Draws
from pallas_kernels.operation import Case
from pallas_kernels.tree_attention.tile import PAGE

SCALE = 0.14467962580268923
"""Kimi K2.6's softmax scale: 192^-0.5 times the square of YaRN's 0.1 ln(64) + 1."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The per-device sizes of one call; `filled` is the length of each request (None: all positions).

    A table has as many pages as `positions` need.
    """

    requests: int
    rows: int
    heads: int
    positions: int
    filled: tuple[int, ...] | None = None
    kv_lora_rank: int = 512
    rope: int = 64
    page: int = PAGE

    @property
    def tiles(self) -> int:
        """Pages of a request's table."""
        return -(-self.positions // self.page)

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
    seed: int = 0,
    *,
    dtype=jnp.bfloat16,
    trees: Sequence[Sequence[int]] | None = None,
    query_std: float = 0.5,
) -> tuple[Array, ...]:
    """Random arguments of `tree_attention`, in its order; trees as parents (None: random).

    Pages lie in random order. Those that nobody's length reaches hold NaN, and the entries behind name no page.
    """
    if trees is None:
        rng = np.random.default_rng(seed)
        trees = [parents("random", shape.rows, rng) for _ in range(shape.requests)]
    normal = functools.partial(Draws(seed).normal, dtype=dtype)
    queries = (shape.requests, shape.rows, shape.heads)
    own = (shape.requests, shape.rows)
    count = shape.requests * shape.tiles + 1
    table = np.random.default_rng(seed).permutation(count)[1:].reshape(shape.requests, shape.tiles)
    filled = np.arange(shape.tiles) < -(-np.array(shape.lengths)[:, None] // shape.page)
    nobodys = np.setdiff1d(np.arange(count), table[filled])

    def cache(width):
        return normal(count, shape.page, width).at[nobodys].set(jnp.nan)

    return (
        normal(*queries, shape.kv_lora_rank, std=query_std),
        normal(*queries, shape.rope, std=query_std),
        cache(shape.kv_lora_rank),
        cache(shape.rope),
        jnp.asarray(np.where(filled, table, 10**6), jnp.int32),
        jnp.asarray(shape.lengths, jnp.int32),
        normal(*own, shape.kv_lora_rank),
        normal(*own, shape.rope),
        jnp.asarray(ancestors_of(trees, shape.rows)),
    )


_CHAIN, _STAR = list(range(-1, 8)), [-1] + [0] * 8

# A narrow latent keeps the interpreter quick: the code is the same, the tiles of the value columns are narrower.
CASES = {
    # Contexts that end before, at and after a tile, none at all, and a request that is padding throughout.
    "lengths": Case(
        Shape(7, 3, 8, 200, (0, 1, 63, 64, 65, 200, 130), kv_lora_rank=128),
        {"trees": [*([[-1, 0, 1], [-1, 0, 0]] * 3), []]},
        {"splits": 1, "min_tiles": 1},
    ),
    # Kinds of trees, two query tiles, of which a cluster shares copies; rows that fill no tile; pieces over requests.
    "trees": Case(
        Shape(4, 9, 8, 136, (100, 136, 7, 64), kv_lora_rank=128),
        {"trees": [_CHAIN, _STAR, [-1, 0, 0, 1, 2, 1], [-1]]},
        {"splits": 4, "min_tiles": 1},
    ),
    # One request cut into more parts than the join kernel reads at a time, and pieces with nothing to do.
    "one request": Case(
        Shape(1, 1, 8, 648, (641,), kv_lora_rank=128), {}, {"splits": 14, "min_tiles": 1, "lazy": 0.0}, slow=True
    ),
    # 65 rows: the tree takes two tiles, the mask three words and the validity word.
    "65 rows": Case(
        Shape(2, 65, 1, 72, (70, 3), kv_lora_rank=128), {}, {"splits": 3, "min_tiles": 2, "cluster": 1}, slow=True
    ),
    # The maximum rises all the time: values are rescaled at most tiles.
    "peaked": Case(
        Shape(2, 9, 4, 256, (256, 190), kv_lora_rank=128), {"query_std": 20.0}, {"splits": 2, "min_tiles": 1}
    ),
    # Tables of no pages, in a pool of one page.
    "no cache": Case(Shape(2, 3, 8, 0, (0, 0), kv_lora_rank=128), {}, {"splits": 1, "min_tiles": 1}),
    # Four pages a tile, of which a length reaches some.
    "small pages": Case(
        Shape(3, 9, 8, 144, (136, 64, 17), kv_lora_rank=128, page=16), {}, {"splits": 3, "min_tiles": 1}, slow=True
    ),
    "full width": Case(Shape(2, 8, 8, 128, (128, 60)), {}, {"splits": 2, "min_tiles": 1}, slow=True),
}
"""The table that the tests take every implementation through."""

CHECKS = {
    # One tile of query rows; contexts around a tile and none at all; pieces of many tiles that span and cut requests,
    # and one with nothing to do.
    "lengths": Case(Shape(6, 8, 8, 1280, (1280, 0, 1, 63, 65, 1000)), {}, {"splits": 5, "min_tiles": 12}),
    # Query tiles that share copies, two tiles of rows, sharp scores: every rescale path. One request is cut into more
    # parts than the join kernel reads at a time.
    "65 rows, peaked": Case(Shape(2, 65, 8, 4032, (3900, 5)), {"query_std": 20.0}, {"splits": 13}),
}
"""What a card computes when a checkpoint is opened."""


def necessary(shape: Shape, arguments: tuple[Array, ...]) -> tuple[float, float]:
    """Bytes of the filled cache, and operations over it."""
    return shape.cache_bytes, shape.operations
