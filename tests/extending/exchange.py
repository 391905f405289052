"""Like `allgather`, with three messages in place of one: easier to read in a trace."""

import jax

from kimi_jax.parallel.collectives import all_gather, axis_index, reduce_scatter
from kimi_jax.parallel.exchange import BACKENDS, Backend
from kimi_jax.parallel.exchange.base import EP, local_slots
from kimi_jax.parallel.messages import WORD, Message


def gather_all(rows, slots, weights, experts, num_local, *, expert_axes=("ep", "tp")):
    """Every rank sees the rows of all ep ranks; rows, slots and weights travel apart."""
    with jax.named_scope("exchange"):
        rows, slots, weights = (all_gather(x, "ep") for x in (rows, slots, weights))
    partial = experts(rows, local_slots(slots, axis_index(expert_axes), num_local), weights)
    with jax.named_scope("exchange"):
        return reduce_scatter(partial, "ep")


def messages(traffic):
    """All rows of all ep ranks, their slots and their weights apart, and as many sums back."""
    rows = traffic.layout.ep * traffic.rows
    for what, size in (("rows", traffic.row_bytes), ("slots", WORD * traffic.top_k), ("weights", WORD * traffic.top_k)):
        yield Message(what, "all-gather", EP, rows * size)
    yield Message("sums back", "reduce-scatter", EP, rows * traffic.sum_bytes)


BACKENDS["gather_all"] = Backend(gather_all, messages)
