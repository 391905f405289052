"""Rows to the ranks they chose through bounded buffers, dense `all_to_all` both ways; exact when they overflow.

A rank's buffer takes rows with the ids of its local slots, not rows grouped by expert: a row that chose two experts of
one rank travels once and comes back as one weighted sum, and the INT4 kernel groups rows by expert itself.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import axis_size
from kimi_jax.parallel.counters import report_overflow
from kimi_jax.parallel.exchange.all_gather import allgather
from kimi_jax.parallel.exchange.base import (
    LocalExperts,
    column_ranks,
    local_slots,
    pack_columns,
    unpack_columns,
)
from meshes.presets import Layout

IMBALANCE = 1.5
"""How much more than its even share of the choices a rank is given room for: max over mean of balanced placements is
1.0 to 1.3 for 64 ranks, of the public measurements with expert replicas 1.11 (docs/parallel.md)."""
OVERFLOW_PROBABILITY = 1e-4
"""Of any buffer of a layer overflowing in a step, for rows that choose independently and as unevenly as that."""


@functools.lru_cache
def buffer_rows(
    rows: int,
    top_k: int,
    num_slots: int,
    num_local: int,
    peers: int,
    *,
    imbalance: float = IMBALANCE,
    probability: float = OVERFLOW_PROBABILITY,
) -> int:
    """Rows of the buffer from one rank to one other, at most `rows`: then none can overflow.

    A row needs a rank when any of its top_k distinct choices lies there, which for even choices among all slots has
    the hypergeometric probability 1 − Π_{i<top_k} (num_slots − num_local − i) / (num_slots − i). With that scaled by
    `imbalance`, the rows due to a rank are binomial; the result is the least number that they exceed with a
    probability below `probability` / peers², as there are that many buffers.
    """
    missed = math.prod(max(num_slots - num_local - i, 0) / (num_slots - i) for i in range(min(top_k, num_slots)))
    needed = min(1.0, imbalance * (1 - missed))
    if needed >= 1 or rows <= 1:
        return rows
    counts = np.arange(rows + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, rows + 1)))])
    log_choose = log_factorial[rows] - log_factorial - log_factorial[::-1]
    mass = np.exp(log_choose + counts * math.log(needed) + (rows - counts) * math.log1p(-needed))
    exceeded = np.cumsum(mass[::-1])[::-1] - mass  # of more than `counts`
    return max(1, int(np.argmax(exceeded < probability / peers**2)))


def alltoall(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
    capacity: int | None = None,
) -> Float[Array, "rows hidden"]:
    """Each rank gets the rows that chose it, once each, from their rank with its own place on tp.

    Every buffer carries its sender's word on whether any of its buffers overflowed, so that all ranks of the exchange
    know and take `allgather` together; no message is spent on asking, and `counters.counting` hears of it.

    Args:
      capacity: rows of a buffer; `buffer_rows` by default.
    """
    peers = axis_size("ep")
    if peers == 1:
        return allgather(rows, slots, weights, experts, num_local, expert_axes=expert_axes)
    if capacity is None:
        num_slots = num_local * axis_size(expert_axes)
        capacity = buffer_rows(rows.shape[0], slots.shape[1], num_slots, num_local, peers)
    with jax.named_scope("exchange"):
        local = local_slots(slots, column_ranks(expert_axes)[:, None, None], num_local)
        due = (local < num_local).any(-1)  # [peers, rows]
        overflow = (due.sum(-1) > capacity).any()
        # The rows due to each rank, first to last; places after them are filled with a row whose slots are nowhere.
        order = jnp.argsort(~due, axis=-1, stable=True)[:, :capacity]
        taken = jnp.take_along_axis(due, order, axis=-1)
        ids = jnp.where(taken[..., None], jnp.take_along_axis(local, order[..., None], axis=1), num_local)
        flag = jnp.broadcast_to(overflow.astype(jnp.int32), (peers * capacity, 1))
        columns = (rows[order.reshape(-1)], ids.reshape(-1, ids.shape[-1]), weights[order.reshape(-1)], flag)
        received = unpack_columns(_swap(pack_columns(columns)), columns)
        any_overflow = received[3].any()
        report_overflow(any_overflow)

    def bounded() -> Float[Array, "rows hidden"]:
        partial = experts(received[0], received[1], received[2])
        with jax.named_scope("exchange"):
            (returned,) = unpack_columns(_swap(pack_columns([partial])), [partial])
            returned = jnp.where(taken.reshape(-1, 1), returned.astype(jnp.float32), 0)
            summed = jnp.zeros(rows.shape, jnp.float32).at[order.reshape(-1)].add(returned)
            return summed.astype(rows.dtype)

    def exact() -> Float[Array, "rows hidden"]:
        return allgather(rows, slots, weights, experts, num_local, expert_axes=expert_axes)

    if capacity >= rows.shape[0]:
        return bounded()
    return jax.lax.cond(any_overflow, exact, bounded)


def _swap(words: Array) -> Array:
    """Block i of the first dimension to rank i of ep, and its block in return."""
    return jax.lax.all_to_all(words, "ep", split_axis=0, concat_axis=0, tiled=True)


def auto(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
) -> Float[Array, "rows hidden"]:
    """The exchange `chosen` for the step's number of rows."""
    num_slots = num_local * axis_size(expert_axes)
    name = chosen(rows.shape[0], slots.shape[1], num_slots, num_local, axis_size("ep"))
    backend = alltoall if name == "alltoall" else allgather
    return backend(rows, slots, weights, experts, num_local, expert_axes=expert_axes)


def chosen(rows: int, top_k: int, num_slots: int, num_local: int, peers: int) -> str:
    """What `auto` takes: `alltoall` where its buffers at most halve the rows that travel, else `allgather`.

    Both are two messages; the first carries `buffer_rows` to each peer and the second all `rows`. Short of a half the
    sorting into buffers and the overflow are not worth it.
    """
    if peers == 1:
        return "allgather"
    return "alltoall" if 2 * buffer_rows(rows, top_k, num_slots, num_local, peers) <= rows else "allgather"


def used(layout: Layout, rows: int, top_k: int, num_slots: int) -> str:
    """The backend that carries a step of `rows` rows a device: the layout's, or what `auto` takes."""
    if layout.exchange != "auto":
        return layout.exchange
    return chosen(rows, top_k, num_slots, num_slots // layout.expert_ranks, layout.ep)
