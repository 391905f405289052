"""How many rows a round may verify, and how a batch shares them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.parallel.collectives import Axis, all_gather, axis_index

ROW_COUNTS = (1, 8, 16, 24, 32, 64)
"""Rows a request, the root included, that an automatic budget chooses from: with 8 heads a device (tp 8) all but the
first fill whole 64-row tiles."""


def share_nodes(
    cum_log_probs: Float[Array, "requests rows"],
    active: Bool[Array, " requests"],
    total: Int[Array, ""] | int,
    axis: Axis = "ep",
) -> Int[Array, " requests"]:
    """Nodes of each request when the best `total` of the whole batch are verified, whosever they are.

    A request's share is at most its tree. `axis` names the mesh axes whose requests share the budget.
    """
    nodes = jnp.where(active[:, None], cum_log_probs[:, 1:], -jnp.inf)
    everyone = all_gather(nodes, axis)
    order = jnp.argsort(-everyone.reshape(-1), stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    taken = (place.reshape(everyone.shape) < total) & (everyone > -jnp.inf)
    own = jax.lax.dynamic_slice_in_dim(taken, axis_index(axis) * nodes.shape[0], nodes.shape[0])
    return jnp.sum(own, axis=1, dtype=jnp.int32)
