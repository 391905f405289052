"""What a warpgroup does with a tile of scores in its registers, on Hopper and Blackwell alike.

Scores are in base 2 (scaled by log2 e), the running maximum starts finite, and masked scores are −inf: then
`exp2(masked − maximum)` is 0 whatever the maximum is, and no NaN can arise.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import store, swizzled

FLOOR = -1e30
LN2 = math.log(2)


# pyright takes jax's lazily exported names for private and its transforms for abstract.
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def tiles(columns: int, *shape: int):
    """Shared memory for bfloat16 tiles, swizzled in rows of `columns`."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(columns, 2))


def spread(vector, shape):
    """One value a row, repeated along the columns."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def segment(piece, request, first_request):
    """Where the partial result of a cut request goes: a piece's first request in its even slot, its last in the odd."""
    return 2 * piece + (request != first_request).astype(jnp.int32)


def hide(scores, tile, context_tiles, length, load_word, layout):
    """Scores with −inf at positions past the length and at rows that are no ancestors.

    `load_word(i)` gives the i-th mask word of each query row. A tile is all context or all rows.
    """
    shape = scores.shape
    block = shape[1]
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    in_rows = (tile >= context_tiles).astype(jnp.int32)
    limit = jnp.where(tile < context_tiles, length - tile * block, 0)
    first_word = jnp.maximum(tile - context_tiles, 0) * (block // 32)
    word = spread(load_word(first_word) * in_rows, shape)
    for k in range(1, block // 32):
        word = jnp.where(column < 32 * k, word, spread(load_word(first_word + k) * in_rows, shape))
    bit = lax.shift_right_logical(word, column & 31) & 1
    return jnp.where((column < limit) | (bit != 0), scores, -jnp.inf)


def normaliser(maximum, total, valid):
    """Reciprocal sum and base-2 log-sum-exp of each query row; 0 and −inf where it is padding or saw nothing."""
    seen = (valid != 0) & (total > 0)
    return jnp.where(seen, 1.0 / total, 0.0), jnp.where(seen, maximum + jnp.log2(total), -jnp.inf)


def base2(scale: float) -> float:
    """The factor that brings a dot product to a base-2 score."""
    return scale * math.log2(math.e)


class Result:
    """Where a query tile's outcome goes: a whole request to the results, a cut one to its piece's partial results."""

    def __init__(self, refs):
        self.out, self.lse, *self.parts = refs

    def write_values(self, value, request, segment, whole, rows, columns) -> None:
        """Store normalised values (float32 registers) of the query rows and value columns given."""

        def to_result():
            store(self.out.at[request, rows, columns], value.astype(self.out.dtype))

        self._write(whole, to_result, lambda: store(self.parts[0].at[segment, rows, columns], value))

    def write_lse(self, lse, request, segment, whole, rows) -> None:
        """Store the base-2 log-sum-exp: natural in the results, base 2 in the partial results."""

        def to_result():
            store(self.lse.at[request, rows], lse * LN2)

        self._write(whole, to_result, lambda: store(self.parts[1].at[segment, rows], lse))

    def _write(self, whole, to_result, to_partial):
        if self.parts:
            pl.when(whole)(to_result)
            pl.when(jnp.logical_not(whole))(to_partial)
        else:
            to_result()
