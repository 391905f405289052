"""All-gather rows, local experts, reduce-scatter: the simplest exact exchange."""

from collections.abc import Iterator

import jax
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import axis_index, reduce_scatter
from kimi_jax.parallel.exchange.base import EP, LocalExperts, Traffic, gather_together, local_slots
from kimi_jax.parallel.messages import Message


def allgather(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
) -> Float[Array, "rows hidden"]:
    """Every rank sees the rows of all ep ranks; two messages, whatever the routing."""
    with jax.named_scope("exchange"):
        rows, slots, weights = gather_together((rows, slots, weights), "ep")
    partial = experts(rows, local_slots(slots, axis_index(expert_axes), num_local), weights)
    with jax.named_scope("exchange"):
        return reduce_scatter(partial, "ep")


def messages(traffic: Traffic) -> Iterator[Message]:
    """All rows of all ep ranks with their choices, and as many sums back."""
    rows = traffic.layout.ep * traffic.rows
    yield Message("rows to experts", "all-gather", EP, rows * (traffic.row_bytes + traffic.choice_bytes))
    yield Message("sums back", "reduce-scatter", EP, rows * traffic.sum_bytes)
