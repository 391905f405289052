"""Exactly the rows that are due, `ragged_all_to_all` both ways: on GPUs, and only where a layout names it.

Never the default: public reports tell of wrong values at 64 ranks (marin #8077), a hang at 704 (marin #8870) and 2 % of
the link's bandwidth on one node (openxla/xla #33386). XLA has none for the CPU.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import axis_index, axis_size
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
from kimi_jax.parallel.exchange.choice import needed
from kimi_jax.parallel.messages import WORD, Message


def ragged(
    rows: Float[Array, "rows hidden"],
    slots: Int[Array, "rows top_k"],
    weights: Float[Array, "rows top_k"],
    experts: LocalExperts,
    num_local: int,
    *,
    expert_axes: tuple[str, ...] = ("ep", "tp"),
) -> Float[Array, "rows hidden"]:
    """Each rank gets the rows that chose it, once each, in a part of its buffer that is the sender's own.

    The buffer has room for all rows of all senders, so nothing can overflow and no offsets need be agreed on; only
    the rows that are due travel. One small message more than the others: how many rows come from whom.

    Raises:
      ValueError: the mesh is of CPU devices.
    """
    _refuse_cpu()
    peers, count = axis_size("ep"), rows.shape[0]
    if peers == 1:
        return allgather(rows, slots, weights, experts, num_local, expert_axes=expert_axes)
    with jax.named_scope("exchange"):
        local = local_slots(slots, column_ranks(expert_axes)[:, None, None], num_local)
        due = (local < num_local).any(-1)  # [peers, rows]
        order = jnp.argsort(~due, axis=-1, stable=True)
        ids = jnp.take_along_axis(local, order[..., None], axis=1).reshape(peers * count, -1)
        columns = (rows[order.reshape(-1)], ids, weights[order.reshape(-1)])
        sent = due.sum(-1, dtype=jnp.int32)
        received = jax.lax.all_to_all(sent, "ep", split_axis=0, concat_axis=0, tiled=True)
        # Places that stay empty keep ids past the local slots.
        empty = (jnp.zeros_like(columns[0]), jnp.full_like(ids, num_local), jnp.zeros_like(columns[2]))
        arrived = unpack_columns(_send(pack_columns(columns), pack_columns(empty), sent, received, count), columns)
    partial = experts(*arrived, routed_rows=peers * count)
    with jax.named_scope("exchange"):
        back = _send(pack_columns([partial]), pack_columns([jnp.zeros_like(partial)]), received, sent, count)
        (returned,) = unpack_columns(back, [partial])
        summed = jnp.zeros(rows.shape, jnp.float32).at[order.reshape(-1)].add(returned.astype(jnp.float32))
        return summed.astype(rows.dtype)


def messages(traffic: Traffic) -> Iterator[Message]:
    """The rows that even choices would send, and how many of them are due to each rank."""
    peers = traffic.layout.ep
    due = math.ceil(traffic.rows * peers * needed(traffic.top_k, traffic.num_slots, traffic.num_local))
    row_bytes = traffic.row_bytes + traffic.choice_bytes
    yield Message("rows due by rank", "all-to-all", EP, WORD * peers)
    yield Message("rows to experts, expected", "ragged-all-to-all", EP, due * row_bytes)
    yield Message("sums back, expected", "ragged-all-to-all", EP, due * traffic.sum_bytes)


def _refuse_cpu() -> None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.device_kind == "cpu":
        raise ValueError(
            "exchange 'ragged' needs GPUs: XLA does not implement ragged-all-to-all on the CPU. "
            "Choose 'alltoall', which sends the same rows through buffers, or 'allgather'"
        )


def _send(words: Array, into: Array, sent: Array, received: Array, stride: int) -> Array:
    """The first `sent[i]` words of part i to this rank's part of rank i's buffer; parts are `stride` rows apart."""
    parts = jnp.arange(sent.shape[0], dtype=jnp.int32) * stride
    own = jnp.full_like(parts, axis_index("ep") * stride)
    return jax.lax.ragged_all_to_all(words, into, parts, sent, own, received, axis_name="ep")
