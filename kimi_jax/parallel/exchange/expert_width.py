"""Experts cut along their width over tp: every rank does its part of every expert, and the sum over tp joins them."""

from jaxtyping import Array, Float, Int

from kimi_jax.parallel.exchange.all_gather import allgather
from kimi_jax.parallel.exchange.base import LocalExperts


def tensor(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep",),
) -> Float[Array, "rows hidden"]:
    """No message with ep 1: rows are on every tp rank already. Whole experts on more ep ranks are all-gathered.

    Raises:
      ValueError: expert slots lie on tp, so an expert is not cut but whole on one of its ranks.
    """
    if "tp" in expert_axes:
        raise ValueError(
            "exchange 'tensor' is for experts cut along their width over tp: set the layout's experts to 'width', "
            "or choose another exchange"
        )
    return allgather(rows, slots, weights, experts, num_local, expert_axes=expert_axes)
