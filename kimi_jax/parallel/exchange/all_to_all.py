"""Rows to the ranks they chose through bounded buffers, dense `all_to_all` both ways; `allgather` when they overflow.

A rank's buffer takes rows with the ids of its local slots, not rows grouped by expert: a row that chose two experts of
one rank travels once and comes back as one weighted sum, and the INT4 kernel groups rows by expert itself.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import axis_size
from kimi_jax.parallel.counters import on_overflow, report_overflow
from kimi_jax.parallel.exchange import all_gather, hierarchical
from kimi_jax.parallel.exchange.all_gather import allgather
from kimi_jax.parallel.exchange.base import (
    EP,
    LocalExperts,
    Traffic,
    column_ranks,
    local_slots,
    pack_columns,
    unpack_columns,
)
from kimi_jax.parallel.exchange.choice import OVERFLOW, buffer_rows, chosen, sharing
from kimi_jax.parallel.messages import WORD, Message


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
    know without a message of its own, and `counters.counting` hears of it. What follows is `counters.OnOverflow`.

    Args:
      capacity: rows of a buffer; `buffer_rows` by default.
    """
    peers = axis_size("ep")
    if peers == 1 or on_overflow() == "exact":
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
        partial = experts(received[0], received[1], received[2], routed_rows=peers * rows.shape[0])
        with jax.named_scope("exchange"):
            (returned,) = unpack_columns(_swap(pack_columns([partial])), [partial])
            returned = jnp.where(taken.reshape(-1, 1), returned.astype(jnp.float32), 0)
            summed = jnp.zeros(rows.shape, jnp.float32).at[order.reshape(-1)].add(returned)
            return summed.astype(rows.dtype)

    def exact() -> Float[Array, "rows hidden"]:
        with jax.named_scope(OVERFLOW):
            return allgather(rows, slots, weights, experts, num_local, expert_axes=expert_axes)

    if capacity >= rows.shape[0] or on_overflow() == "report":
        return bounded()
    return jax.lax.cond(any_overflow, exact, bounded)


def _swap(words: Array) -> Array:
    """Block i of the first dimension to rank i of ep, and its block in return."""
    return jax.lax.all_to_all(words, "ep", split_axis=0, concat_axis=0, tiled=True)


def messages(traffic: Traffic) -> Iterator[Message]:
    """Full buffers both ways; a row travels with its choices and the word on overflow.

    A step whose buffers overflow sends the first of them, and then what `allgather` sends.
    """
    peers = traffic.layout.ep
    rows = peers * buffer_rows(traffic.rows, traffic.top_k, traffic.num_slots, traffic.num_local, peers)
    yield Message("rows to experts", "all-to-all", EP, rows * (traffic.row_bytes + traffic.choice_bytes + WORD))
    yield Message("sums back", "all-to-all", EP, rows * traffic.sum_bytes)


def auto(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
    across: bool = False,
) -> Float[Array, "rows hidden"]:
    """The exchange `chosen` for the step's number of rows; `across` says whether a network parts the ep ranks."""
    num_slots, ranks = num_local * axis_size(expert_axes), axis_size("tp") if across else 1
    name = chosen(rows.shape[0], slots.shape[1], num_slots, num_local, axis_size("ep"), ranks)
    backend = {"alltoall": alltoall, "hierarchical": hierarchical.hierarchical, "allgather": allgather}[name]
    return backend(rows, slots, weights, experts, num_local, expert_axes=expert_axes)


def auto_messages(traffic: Traffic) -> Iterator[Message]:
    """Those of the exchange `chosen`."""
    numbers = traffic.rows, traffic.top_k, traffic.num_slots, traffic.num_local, traffic.layout.ep
    name = chosen(*numbers, sharing(traffic.layout))
    declared = {"alltoall": messages, "hierarchical": hierarchical.messages, "allgather": all_gather.messages}
    return declared[name](traffic)
