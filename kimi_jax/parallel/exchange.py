"""How rows reach the experts they chose and come back: backends of one signature, exact, never dropping a token."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import all_gather, axis_index, reduce_scatter

LocalExperts = Callable[
    [Float[Array, "rows hidden"], Int[Array, "rows top_k"], Float[Array, "rows top_k"]], Float[Array, "rows hidden"]
]
"""Rows, slots within this rank (ids outside are someone else's) and weights to the weighted sum over those slots."""


class Exchange(Protocol):
    """Applies the routed experts to this rank's rows; the result is this tp rank's part, to be summed over tp.

    `num_local` counts the slots this rank holds; a slot id past all ranks' slots is a padding row's and goes nowhere.
    """

    def __call__(
        self,
        rows: Float[Array, "rows hidden"],
        slots: Int[Array, "rows top_k"],
        weights: Float[Array, "rows top_k"],
        experts: LocalExperts,
        num_local: int,
    ) -> Float[Array, "rows hidden"]: ...


def allgather(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
) -> Float[Array, "rows hidden"]:
    """All-gathers rows over ep, applies the local experts, reduce-scatters over ep: the simplest exact exchange.

    Slots lie on `expert_axes`; rows are the same on every tp rank, so tp ranks share the experts without a message
    and their parts meet in the sum over tp that follows the layer anyway.
    """
    with jax.named_scope("exchange"):
        rows, slots, weights = (all_gather(x, "ep") for x in (rows, slots, weights))
    local = slots - axis_index(expert_axes) * num_local
    held = (local >= 0) & (local < num_local)
    partial = experts(rows, jnp.where(held, local, num_local), weights)
    with jax.named_scope("exchange"):
        return reduce_scatter(partial, "ep")
