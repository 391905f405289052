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

LEAST_ROWS_FOR_LEVELS = 64
"""Rows of K2.6 that come to a device over the network below which two more messages over NVLink cost more than they
save: 0.57 µs a row over 400 Gb/s, both ways, against two times 14 µs and the bytes."""
MOST_ROWS_FOR_LEVELS = 8192
"""Rows of all groups above which buffers are taken where they halve what travels: the experts' workspace is sized for
the worst routing of all rows that a rank sees, GB for more than these."""

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


def chosen(rows: int, top_k: int, num_slots: int, num_local: int, peers: int, sharing: int = 1) -> str:
    """What `auto` takes: `alltoall` where its buffers at most halve the rows that travel, else `allgather`.

    Both are two messages; the first carries `buffer_rows` to each peer and the second all `rows`. Short of a half the
    sorting into buffers and the overflow are not worth it. Where a network parts the peers, `hierarchical` carries a
    part of the rows to each, with two more messages inside: it is taken where that is less than the buffers, and
    enough rows come over the network.

    Args:
      sharing: tp ranks that share what is sent over a network; 1 where none parts the peers.
    """
    if peers == 1:
        return "allgather"
    buffer = buffer_rows(rows, top_k, num_slots, num_local, peers)
    otherwise = "alltoall" if 2 * buffer <= rows else "allgather"
    shorter = sharing > 1 and rows <= sharing * buffer and rows * (peers - 1) >= LEAST_ROWS_FOR_LEVELS
    too_many = otherwise == "alltoall" and rows * peers > MOST_ROWS_FOR_LEVELS
    return "hierarchical" if shorter and not too_many else otherwise


def sharing(layout: Layout) -> int:
    """Ranks of a layout that share what its rows' groups send over a network."""
    return layout.tp if layout.across else 1


def used(layout: Layout, rows: int, top_k: int, num_slots: int) -> str:
    """The backend that carries a step of `rows` rows a device: the layout's, or what `auto` takes."""
    if layout.exchange != "auto":
        return layout.exchange
    return chosen(rows, top_k, num_slots, num_slots // layout.expert_ranks, layout.ep, sharing(layout))


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
