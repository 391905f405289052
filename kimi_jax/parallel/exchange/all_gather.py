"""All-gather rows, local experts, reduce-scatter: the simplest exact exchange."""

import jax
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import axis_index, reduce_scatter
from kimi_jax.parallel.exchange.base import LocalExperts, gather_together, local_slots


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
