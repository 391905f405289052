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

# Up to this many pairs, every pair is compared with every other: a few fused reductions instead of sorts and scatters.
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
    pair = jnp.arange(pairs, dtype=jnp.int32)
    if pairs <= COMPARE_LIMIT:
        # Three fused reductions, whatever the number of slots: a pair's rank within its expert; the tiles that experts
        # before its own open, counted by the pairs that open one; and the expert of every tile.
        rank = jnp.sum((ids[:, None] == ids) & (pair < pair[:, None]), axis=1, dtype=jnp.int32)
        opens = here & (rank % tile_rows == 0)
        tile = rank // tile_rows + jnp.sum(opens & (ids < ids[:, None]), axis=1, dtype=jnp.int32)
        numbers = jnp.arange(max_tiles, dtype=jnp.int32)
        tile_expert = jnp.max(jnp.where(here & (tile == numbers[:, None]), ids, 0), axis=1)
    else:
        order = jnp.argsort(ids, stable=True)
        by_expert = ids[order]
        # Where each expert begins, by a running maximum: a search would be a loop of kernels outside CUDA graphs.
        begins = jnp.concatenate([jnp.ones(1, bool), by_expert[1:] != by_expert[:-1]])
        sorted_rank = pair - lax.cummax(jnp.where(begins, pair, 0))
        opens = (by_expert < slots) & (sorted_rank % tile_rows == 0)
        sorted_tile = jnp.cumsum(opens, dtype=jnp.int32) - 1
        tile_expert = jnp.zeros((max_tiles,), jnp.int32)
        tile_expert = tile_expert.at[jnp.where(opens, sorted_tile, max_tiles)].set(by_expert, mode="drop")
        rank = jnp.zeros_like(ids).at[order].set(sorted_rank)
        tile = jnp.zeros_like(ids).at[order].set(sorted_tile)
    position = jnp.where(here, tile * tile_rows + rank % tile_rows, max_tiles * tile_rows)
    count = jnp.sum(opens, dtype=jnp.int32).reshape(1)
    return Groups(count, tile_expert.astype(jnp.int32), position.reshape(expert_ids.shape))


def gather_rows(x: Float[Array, "rows hidden"], groups: Groups, tile_rows: int) -> Float[Array, "grouped hidden"]:
    """The grouped activations; grouped rows that hold no pair are zero."""
    rows, top_k = groups.position.shape
    grouped = groups.tile_expert.shape[0] * tile_rows
    position = groups.position.reshape(-1)
    row = jnp.arange(rows * top_k, dtype=jnp.int32) // top_k
    if position.size <= COMPARE_LIMIT:
        found = position == jnp.arange(grouped, dtype=jnp.int32)[:, None]
        row_of = rows + jnp.sum(jnp.where(found, row - rows, 0), axis=1)
    else:
        row_of = jnp.full((grouped,), rows, jnp.int32).at[position].set(row, mode="drop")
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
