"""Which exchange carries a step's rows, and how large its buffers are: from sizes alone.

Everything that has to know asks here: the compiled exchange, the ledger, the profiler's reports and the estimator.
"""

import functools
import math

import numpy as np

from meshes.presets import Layout

IMBALANCE = 1.5
"""How much more than its even share of the choices a rank is given room for: max over mean of balanced placements is
1.0 to 1.3 for 64 ranks, of the public measurements with expert replicas 1.11 (docs/parallel.md)."""
OVERFLOW_PROBABILITY = 1e-4
"""Of any buffer of a layer overflowing in a step, for rows that choose independently and as unevenly as that."""

OVERFLOW = "overflow"
"""Named scope of what a step runs whose rows do not fit the buffers: reports on a program leave that branch out."""


def needed(top_k: int, num_slots: int, num_local: int) -> float:
    """Probability that a row needs a rank that holds `num_local` of the slots, for even choices among all of them.

    It does when any of its top_k distinct choices lies there, which has the hypergeometric probability
    1 − Π_{i<top_k} (num_slots − num_local − i) / (num_slots − i).
    """
    return 1 - math.prod(max(num_slots - num_local - i, 0) / (num_slots - i) for i in range(min(top_k, num_slots)))


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

    With the probability that a row needs a rank (`needed`) scaled by `imbalance`, the rows due to it are binomial; the
    result is the least number that they exceed with a probability below `probability` / peers², as there are that many
    buffers.
    """
    due = min(1.0, imbalance * needed(top_k, num_slots, num_local))
    if due >= 1 or rows <= 1:
        return rows
    counts = np.arange(rows + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, rows + 1)))])
    log_choose = log_factorial[rows] - log_factorial - log_factorial[::-1]
    mass = np.exp(log_choose + counts * math.log(due) + (rows - counts) * math.log1p(-due))
    exceeded = np.cumsum(mass[::-1])[::-1] - mass  # of more than `counts`
    return max(1, int(np.argmax(exceeded < probability / peers**2)))


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


def expert_rows(layout: Layout, rows: int, top_k: int, num_slots: int) -> int:
    """Rows that a rank has room for from each ep rank, of whose steps have `rows` rows a device."""
    name = used(layout, rows, top_k, num_slots)
    if name == "hierarchical" and layout.ep > 1:
        return -(-rows // layout.tp) * layout.tp
    if name != "alltoall" or layout.ep == 1:
        return rows
    return buffer_rows(rows, top_k, num_slots, num_slots // layout.expert_ranks, layout.ep)


def may_overflow(layout: Layout, top_k: int, num_slots: int) -> bool:
    """Whether steps of some size go through buffers that can overflow."""
    if layout.ep == 1 or layout.exchange not in ("alltoall", "auto"):
        return False
    # Buffers take more than the rows that are due: `auto` does not take them where those are half of all rows.
    due = IMBALANCE * needed(top_k, num_slots, num_slots // layout.expert_ranks)
    return layout.exchange == "alltoall" or due < 0.5
