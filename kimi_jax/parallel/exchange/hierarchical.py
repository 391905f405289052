"""As `allgather`, level by level: for ep ranks that a network parts, with tp inside an NVLink domain.

All tp ranks of a group have the same rows. Each sends a tp-th of them over ep, and what has come is gathered over tp;
sums go back the same way. The network carries every row once instead of once for each tp rank.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import all_gather, axis_index, axis_size, reduce_scatter
from kimi_jax.parallel.exchange import all_gather as whole
from kimi_jax.parallel.exchange.base import EP, LocalExperts, Traffic, local_slots, pack_columns, unpack_columns
from kimi_jax.parallel.messages import Message

TP = ("tp",)


def hierarchical(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
) -> Float[Array, "rows hidden"]:
    """Every rank sees the rows of all ep ranks; of the sums each tp rank keeps those of its own part of the rows.

    The parts meet in the sum over tp that ends the layer, in which all others are zeros.
    """
    peers, ranks, count = axis_size("ep"), axis_size("tp"), rows.shape[0]
    if peers == 1 or ranks == 1:
        return whole.allgather(rows, slots, weights, experts, num_local, expert_axes=expert_axes)
    part, nowhere = math.ceil(count / ranks), num_local * axis_size(expert_axes)
    first = jnp.int32(axis_index("tp")) * part

    def padded(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, [(0, ranks * part - count), (0, 0)], constant_values=value)

    with jax.named_scope("exchange"):
        columns = [padded(rows), padded(slots, nowhere), padded(weights)]
        words = jax.lax.dynamic_slice_in_dim(pack_columns(columns), first, part)
        arrived = unpack_columns(all_gather(all_gather(words, "ep"), "tp"), columns)
    partial = experts(arrived[0], local_slots(arrived[1], axis_index(expert_axes), num_local), arrived[2])
    with jax.named_scope("exchange"):
        own = reduce_scatter(reduce_scatter(partial, "tp"), "ep")
        return jax.lax.dynamic_update_slice_in_dim(padded(jnp.zeros_like(rows)), own, first, axis=0)[:count]


def messages(traffic: Traffic) -> Iterator[Message]:
    """Rows with their choices over the network and then inside, and sums inside and then over the network."""
    if traffic.layout.tp == 1:
        yield from whole.messages(traffic)
        return
    rows = traffic.layout.ep * math.ceil(traffic.rows / traffic.layout.tp)
    row_bytes = traffic.row_bytes + traffic.choice_bytes
    yield Message("a part of the rows", "all-gather", EP, rows * row_bytes)
    yield Message("rows to experts", "all-gather", TP, traffic.layout.tp * rows * row_bytes)
    yield Message("sums of a part of the rows", "reduce-scatter", TP, traffic.layout.tp * rows * traffic.sum_bytes)
    yield Message("sums back", "reduce-scatter", EP, rows * traffic.sum_bytes)
