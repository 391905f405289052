"""How rows reach the experts they chose and come back: backends of one signature, exact, never dropping a token."""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt32

from kimi_jax.parallel.collectives import all_gather, axis_index, axis_size, reduce_scatter

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
        rows, slots, weights = gather_together((rows, slots, weights), "ep")
    local = slots - axis_index(expert_axes) * num_local
    held = (local >= 0) & (local < num_local)
    partial = experts(rows, jnp.where(held, local, num_local), weights)
    with jax.named_scope("exchange"):
        return reduce_scatter(partial, "ep")


def gather_together(arrays: Sequence[Array], axis: str) -> list[Array]:
    """All-gathers matrices with equal first dimensions in one message: at decode sizes latency is all it costs."""
    if axis_size(axis) == 1:
        return list(arrays)
    words = [_as_words(array) for array in arrays]
    gathered = all_gather(jnp.concatenate(words, axis=1), axis)
    ends = np.cumsum([word.shape[1] for word in words])
    parts = jnp.split(gathered, ends[:-1], axis=1)
    return [_from_words(part, array) for part, array in zip(parts, arrays, strict=True)]


def _as_words(x: Shaped[Array, "rows columns"]) -> UInt32[Array, "rows words"]:
    per_word = 4 // x.dtype.itemsize
    pairs = x if per_word == 1 else x.reshape(x.shape[0], -1, per_word)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def _from_words(words: UInt32[Array, "rows words"], like: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(words.shape[0], like.shape[1])
