"""Rows to tiles and back, on GPUs: what is moved follows the pairs that are here, not the worst routing.

The sizes of arrays are static, so XLA's own gather would write a grouped row for every pair that could be on this rank,
and read as many to sum them: on 72 ranks about 72 times what is needed. These two kernels touch the rows of pairs that
are here. A *run* is the columns that a warpgroup moves at once, up to 1024.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.int4_moe.matmul import Launch
from pallas_kernels.int4_moe.routing import Groups
from pallas_kernels.mosaic import store

CTAS_PER_CORE = 4
MOST_COLUMNS = 1024
THREADS = 128


def gather(
    x: BFloat16[Array, "rows hidden"], groups: Groups, tile_rows: int, launch: Launch
) -> BFloat16[Array, "grouped hidden"]:
    """The grouped activations; grouped rows that hold no pair are left as they were."""
    grouped = groups.tile_expert.shape[0] * tile_rows

    def kernel(position_ref, x_ref, out):
        def move(row, positions, one_of_them, columns):
            @pl.when(one_of_them < grouped)
            def _():
                values = plgpu.load(x_ref.at[row, columns], layout=_strided(columns.size, x.dtype), optimized=False)
                for position in positions:
                    pl.when(position < grouped)(functools.partial(store, out.at[position, columns], values))

        _for_runs(position_ref, x.shape[1], CTAS_PER_CORE * launch.ctas, move)

    out_type = jax.ShapeDtypeStruct((grouped, x.shape[1]), x.dtype)
    return _kernel(kernel, "int4_gather", out_type, launch)(groups.position, x)


def combine(
    shares: Float[Array, "split grouped hidden"],
    groups: Groups,
    expert_weights: Float[Array, "rows top_k"],
    dtype: DTypeLike,
    launch: Launch,
) -> Float[Array, "rows hidden"]:
    """Each row's experts weighted and summed in float32, over all shares; grouped rows without a pair are not read."""
    split, grouped, hidden = shares.shape

    def kernel(position_ref, weight_ref, shares_ref, out):
        def add(row, positions, one_of_them, columns):
            layout = _strided(columns.size, jnp.float32)
            total = plgpu.layout_cast(jnp.zeros((columns.size,), jnp.float32), layout)

            @pl.when(one_of_them < grouped)
            def _():
                result = total
                for k, position in enumerate(positions):
                    present = position < grouped
                    # All loads are in flight at once: an absent pair reads a present one's row, and adds nothing.
                    position = jnp.where(present, position, one_of_them)
                    weight = jnp.where(present, weight_ref[row, k], 0.0)
                    for share in range(split):
                        ref = shares_ref.at[share, position, columns]
                        result += weight * plgpu.load(ref, layout=layout, optimized=False)
                store(out.at[row, columns], result.astype(dtype))

            pl.when(one_of_them >= grouped)(lambda: store(out.at[row, columns], total.astype(dtype)))

        _for_runs(position_ref, hidden, CTAS_PER_CORE * launch.ctas, add)

    out_type = jax.ShapeDtypeStruct((expert_weights.shape[0], hidden), dtype)
    weights = expert_weights.astype(jnp.float32)
    return _kernel(kernel, "int4_combine", out_type, launch)(groups.position, weights, shares)


Body = Callable[[jax.Array, Sequence[jax.Array], jax.Array, Any], None]
"""Row, the grouped positions of its pairs, the smallest of them, and the columns of a run."""


def _for_runs(position_ref: Any, hidden: int, ctas: int, body: Body) -> None:
    """`body` for every run of the rows that are this CTA's; runs of a row are shared out where rows are few."""
    rows, top_k = position_ref.shape
    columns = THREADS * math.gcd(hidden // THREADS, MOST_COLUMNS // THREADS)
    runs = hidden // columns
    parts = runs if rows * runs <= 2 * ctas else 1
    cta = lax.axis_index("cta")

    def item(i, carry):
        row, part = lax.div(cta + i * ctas, parts), lax.rem(cta + i * ctas, parts)
        positions = [position_ref[row, k] for k in range(top_k)]
        one_of_them = functools.reduce(jnp.minimum, positions)

        def run(j, carry):
            first = (part * (runs // parts) + j) * columns
            body(row, positions, one_of_them, pl.ds(pl.multiple_of(first, columns), columns))
            return carry

        return lax.fori_loop(0, runs // parts, run, carry)

    lax.fori_loop(0, jnp.maximum(lax.div(rows * parts - cta + (ctas - 1), ctas), 0), item, None)


def _strided(columns: int, dtype: DTypeLike) -> Any:
    """A run's columns in registers, up to 16 bytes of neighbours in a thread."""
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=min(columns // THREADS, 16 // jnp.dtype(dtype).itemsize))


def _kernel(kernel: Any, name: str, out_type: Any, launch: Launch) -> Any:
    grid = (CTAS_PER_CORE * launch.ctas,)
    return plgpu.kernel(
        kernel, out_type=out_type, grid=grid, grid_names=("cta",), kernel_name=name, interpret=launch.interpret
    )
