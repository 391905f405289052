"""Group (row, expert) pairs by expert on the device, with static shapes.

A *pair* is one routed expert of one row. Pairs of one expert are laid side by side in a grouped array whose experts
start at multiples of `tile_rows`, so that a *tile* of `tile_rows` grouped rows belongs to one expert. Only tiles that
hold pairs are numbered: work that walks `tile_count` tiles costs nothing for an expert without rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Up to this many pairs, ranks come from comparing every pair with every other: one fused reduction instead of a sort.
COMPARE_LIMIT = 4096


class Groups(NamedTuple):
    """Where each pair lies in the grouped array, and which expert each tile reads.

    `max_tiles` is `tile_bound(pairs, slots, tile_rows)`; only the first `tile_count[0]` entries of `tile_expert` are
    meaningful.
    """

    tile_count: Int[Array, "1"]
    tile_expert: Int[Array, "max_tiles"]
    position: Int[Array, "rows top_k"]
    """Grouped row of each pair; `max_tiles * tile_rows` for a pair that is not on this rank."""


def tile_bound(pairs: int, slots: int, tile_rows: int) -> int:
    """Largest number of tiles any routing of `pairs` pairs over `slots` experts can need: Σ ceil(count / tile_rows)."""
    return min(slots, pairs) + pairs // tile_rows


def group_pairs(expert_ids: Int[Array, "rows top_k"], slots: int, tile_rows: int) -> Groups:
    """Assign every pair whose id lies in 0..slots-1 a row of the grouped array; other pairs take no part.

    Pairs keep their order within an expert, so the result does not depend on scheduling.
    """
    ids = expert_ids.reshape(-1)
    pairs = ids.shape[0]
    max_tiles = tile_bound(pairs, slots, tile_rows)
    here = (ids >= 0) & (ids < slots)
    ids = jnp.where(here, ids, slots)
    experts = jnp.arange(slots, dtype=jnp.int32)
    if pairs <= COMPARE_LIMIT:
        counts = jnp.sum(ids[:, None] == experts, axis=0, dtype=jnp.int32)
        pair = jnp.arange(pairs, dtype=jnp.int32)
        rank = jnp.sum((ids[:, None] == ids) & (pair < pair[:, None]), axis=1, dtype=jnp.int32)
    else:
        order = jnp.argsort(ids, stable=True)
        bounds = jnp.searchsorted(ids[order], jnp.arange(slots + 1, dtype=jnp.int32)).astype(jnp.int32)
        counts = bounds[1:] - bounds[:-1]
        rank = jnp.zeros_like(ids).at[order].set(jnp.arange(pairs, dtype=jnp.int32) - bounds[ids[order]])
    tiles = (counts + (tile_rows - 1)) // tile_rows
    ends = jnp.cumsum(tiles)
    start = ((ends - tiles) * tile_rows)[jnp.minimum(ids, slots - 1)]
    position = jnp.where(here, start + rank, max_tiles * tile_rows)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    tile_expert = jnp.minimum(jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32), slots - 1)
    return Groups(ends[-1:], tile_expert, position.reshape(expert_ids.shape))


def gather_rows(
    x: Float[Array, "rows hidden"], groups: Groups, tile_rows: int
) -> Float[Array, "max_tiles*tile_rows hidden"]:
    """The grouped activations; grouped rows that hold no pair are zero."""
    rows, top_k = groups.position.shape
    grouped = groups.tile_expert.shape[0] * tile_rows
    row_of = jnp.full((grouped,), rows, jnp.int32)
    source = lax.broadcasted_iota(jnp.int32, (rows, top_k), 0)
    row_of = row_of.at[groups.position].set(source, mode="drop", unique_indices=True)
    return x.at[row_of].get(mode="fill", fill_value=0)


def combine(
    y: Float[Array, "grouped hidden"], groups: Groups, expert_weights: Float[Array, "rows top_k"]
) -> Float[Array, "rows hidden"]:
    """Sum each row's experts in float32, weighted; grouped rows that hold no pair are never read."""
    picked = y.at[groups.position].get(mode="fill", fill_value=0).astype(jnp.float32)
    weights = jnp.where(groups.position < y.shape[0], expert_weights.astype(jnp.float32), 0.0)
    return jnp.sum(picked * weights[..., None], axis=1)


def varying_over(arrays: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
    """`value` typed as varying over every mesh axis that an array in `arrays` varies over (a loop carry needs it)."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    axes -= jax.typeof(value).manual_axis_type.varying
    return lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value
