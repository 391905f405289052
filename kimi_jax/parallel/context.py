"""Decode-context parallelism: attention where each tp rank holds a part of every request's context.

A rank attends to its part for the heads of all ranks; each head's parts then meet on the rank that holds the head and
are joined by their log-sum-exps, which is exact. Two messages a layer: the queries out, the partial outputs back.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.parallel.collectives import all_gather, all_to_all, axis_index, axis_size
from kimi_jax.parallel.exchange.base import pack_columns, unpack_columns
from pallas_kernels.tree_attention import merge

Queries = tuple[Float[Array, "requests rows heads _"], Float[Array, "requests rows heads _"]]
"""The parts of a query that meet the latent or the expanded key, and the rope key."""

Attend = Callable[
    [Queries, Int[Array, " requests"], Bool[Array, "requests rows rows"],
     Bool[Array, "requests rows"]],
    tuple[Float[Array, "requests rows heads width"], Float[Array, "requests rows heads"]],
]  # fmt: skip
"""Queries, cached positions, mask among the rows, and which rows are real, to outputs and log-sum-exps."""


def part_lengths(lengths: Int[Array, " requests"], axis: str) -> Int[Array, " requests"]:
    """How many of each request's first `length` positions this rank holds, which stand first in its part."""
    ranks = axis_size(axis)
    return (lengths - axis_index(axis) + ranks - 1) // ranks


def attend_in_parts(
    attend: Attend,
    queries: Queries,
    lengths: Int[Array, " requests"],
    ancestors: Bool[Array, "requests rows rows"],
    axis: str,
) -> Float[Array, "requests rows heads width"]:
    """Outputs of this rank's heads over the whole context.

    Args:
      attend: over this rank's part of the cache, for all heads.
      queries: of this rank's heads.
    """
    width = queries[0].shape[-1]
    with jax.named_scope("reductions"):
        every_head = all_gather(jnp.concatenate(queries, axis=-1), axis, dimension=2)
    # Every rank has the step's own rows; the first one attends to them.
    mine = ancestors & (axis_index(axis) == 0)
    everyone = (every_head[..., :width], every_head[..., width:])
    out, lse = attend(everyone, part_lengths(lengths, axis), mine, ancestors.any(axis=-1))
    return join_parts(out, lse, axis)


def join_parts(
    out: Float[Array, "requests rows all_heads width"], lse: Float[Array, "requests rows all_heads"], axis: str
) -> Float[Array, "requests rows heads width"]:
    """This rank's heads of the attention over all ranks' parts, from the outputs over each part."""
    requests, rows, heads, width = out.shape
    columns = [out.reshape(-1, width), lse.reshape(-1, 1)]
    words = pack_columns(columns).reshape(requests, rows, heads, -1)
    with jax.named_scope("reductions"):
        received = all_to_all(words, axis, split=2, join=0)
    outs, lses = unpack_columns(received.reshape(-1, received.shape[-1]), columns)
    parts = (axis_size(axis), requests, rows, -1)
    return merge(outs.reshape(*parts, width), lses.reshape(parts))[0]
