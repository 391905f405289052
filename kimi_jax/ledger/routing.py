"""How many experts a step reads, and how unevenly they and their rows lie on the ranks."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimi_jax.text_files import read_json


@dataclass(frozen=True, eq=False)  # compared by identity, so that it is cheap to hash
class Routing:
    """How popular each expert is, and how alike the rows of one draft tree are.

    popularity: chance of each expert to be among a row's top-k, summing to k; empty means all alike.
    tree_diversity: share of a tree's rows that count as independent for the experts they touch. 1 is the
    upper bound (no correlation); there is no public measurement for trees.
    """

    num_experts: int
    top_k: int
    popularity: tuple[float, ...] = ()
    tree_diversity: float = 1.0
    name: str = "uniform"

    def effective_rows(self, requests: float, rows_per_request: int) -> float:
        """Independent rows that stand for `requests` trees of `rows_per_request` rows."""
        return requests * (1 + self.tree_diversity * (rows_per_request - 1))

    def distinct_experts(self, rows: float) -> float:
        """Expected number of different experts among `rows` independent rows: Σ 1 - (1 - p)^rows.

        All alike, that is E·(1 - (1 - k/E)^rows): 66.3 of 384 for 9 rows, 192.3 for 33.
        """
        return _distinct(self, rows)


@dataclass(frozen=True)
class Routed:
    """What routing makes of a step's rows on one rank, in each layer with experts."""

    experts: float
    """Different experts that it reads."""
    pairs: float
    """Row-expert pairs that it works on."""
    share: float
    """Its pairs over the mean."""


@functools.lru_cache(maxsize=65536)
def _distinct(routing: Routing, rows: float) -> float:
    if not routing.popularity:
        return routing.num_experts * (1 - (1 - routing.top_k / routing.num_experts) ** rows)
    return float(np.sum(1 - (1 - np.asarray(routing.popularity)) ** rows))


def uniform(num_experts: int, top_k: int, tree_diversity: float = 1.0) -> Routing:
    """Every expert is equally likely."""
    return Routing(num_experts, top_k, tree_diversity=tree_diversity)


@functools.cache
def zipf(num_experts: int, top_k: int, offset: float, tree_diversity: float = 1.0) -> Routing:
    """Popularity falls as 1 / (rank + offset); a large offset is nearly uniform."""
    weights = 1 / (np.arange(num_experts) + offset)
    return measured(weights, top_k, tree_diversity, name=f"zipf({offset:g})")


def measured(counts: np.ndarray, top_k: int, tree_diversity: float = 1.0, name: str = "measured") -> Routing:
    """From how often each expert was picked, `[experts]`.

    Raises:
        ValueError: counts that are not one non-negative number for each expert.
    """
    counts = np.asarray(counts, dtype=np.float64)
    if counts.ndim != 1 or len(counts) < top_k or (counts < 0).any() or counts.sum() == 0:
        raise ValueError("expert counts must be one list with a non-negative number for each expert")
    popularity = np.minimum(1.0, counts * (top_k / counts.sum()))
    return Routing(len(counts), top_k, tuple(popularity.tolist()), tree_diversity, name)


def from_file(path: Path, num_experts: int, top_k: int, tree_diversity: float = 1.0) -> Routing:
    """Read pick counts from JSON: a list with one number an expert, or a list of such lists, one a layer.

    Layers are averaged after sorting, since each has its own favourites.

    Raises:
        ValueError: another shape or another number of experts, naming both.
    """
    counts = np.atleast_2d(np.asarray(read_json(path), dtype=np.float64))
    if counts.ndim != 2 or counts.shape[1] != num_experts:
        raise ValueError(f"{path}: shape {counts.shape}, expected {num_experts} counts, or a list of such lists")
    per_layer = np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)
    return measured(per_layer.mean(axis=0), top_k, tree_diversity, name=Path(path).name)


@functools.lru_cache(maxsize=65536)
def busiest_rank_experts(distinct: float, num_experts: int, slots_per_rank: int, ranks: int) -> float:
    """Expected number of experts that the rank with the most of them must read.

    Each of a rank's slots is touched with chance distinct / num_experts; the largest of `ranks` such binomial
    counts is Σ_x 1 - F(x)^ranks. Slots beyond num_experts hold replicas, which are as busy as any.
    """
    if ranks == 1:
        return distinct
    n, p = slots_per_rank, min(1.0, distinct / num_experts)
    x = np.arange(n + 1)
    mass = np.array([math.comb(n, int(i)) for i in x]) * p**x * (1 - p) ** (n - x)
    cumulative = np.minimum(1.0, np.cumsum(mass))
    return float(np.sum(1 - cumulative[:-1] ** ranks))


def busiest_rank_share(pairs: float, ranks: int, skew: float) -> float:
    """Rows on the busiest rank over the mean: chance (normal approximation of the largest of `ranks`) times skew."""
    if ranks == 1:
        return 1.0
    mean = max(pairs / ranks, 1e-9)
    return min(ranks, skew * (1 + math.sqrt(2 * math.log(ranks) / mean)))
