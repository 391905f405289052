"""How many tokens a round yields for a budget of draft nodes."""

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimi_jax.text_files import read_json

Rates = tuple[tuple[float, ...], ...]
"""`rates[d][r]`: chance that the drafter's candidate of rank r at depth d is right where the path so far is."""


@dataclass(frozen=True, eq=False)  # compared by identity: hashing its tables would cost more than an estimate
class Acceptance:
    """Hit rates of a drafter, as one table or as several equally likely ones, each a kind of round.

    A tree is built for the round at hand, deep where the drafter is sure and broad where it is not; averages over
    rounds hide that, so several tables describe a drafter better than their mean.

    after_sibling: factor on the rates below a node that is not its depth's first candidate. The drafter's rates are
    marginals: what it says at the next position assumes its own first candidates.
    """

    tables: tuple[Rates, ...]
    name: str
    after_sibling: float = 1.0

    def __post_init__(self):
        for table in self.tables:
            for depth, ranks in enumerate(table):
                if not ranks or min(ranks) < 0 or sum(ranks) > 1 + 1e-6:
                    raise ValueError(f"hit rates at depth {depth} must be chances that sum to at most 1, got {ranks}")

    @property
    def max_depth(self) -> int:
        """Depth of the longest draft path."""
        return len(self.tables[0])

    def length(self, budget: int) -> float:
        """Expected tokens of a round, the model's own token included: 1 + Σ over the tree's nodes of their chance.

        The tree holds the `budget` nodes with the largest chance of being on the accepted path, as DDTree builds it
        from the drafter's marginals (arXiv 2604.12989). Budget 0 is decoding without a draft.
        """
        return _length(self, budget)

    def chain_length(self) -> float:
        """Expected tokens of a round whose draft is the path of first candidates."""
        first = np.array([[ranks[0] for ranks in table] for table in self.tables])
        return _chain(first)


def _chain(first: np.ndarray) -> float:
    return float(1 + np.cumprod(first, axis=1).sum(axis=1).mean())


@functools.lru_cache(maxsize=4096)
def _length(acceptance: Acceptance, budget: int) -> float:
    return 1 + float(np.mean([_accepted(table, acceptance.after_sibling, budget) for table in acceptance.tables]))


def _accepted(rates: Rates, after_sibling: float, budget: int) -> float:
    """Sum of the chances of the `budget` likeliest nodes, found best first."""
    total = 0.0
    heap = [(-rates[0][0], 0, 0, 1.0, False)]  # minus chance, depth, rank, parent's chance, below a sibling
    for _ in range(budget):
        if not heap:
            break
        negative, depth, rank, parent, below = heapq.heappop(heap)
        total -= negative
        if rank + 1 < len(rates[depth]):
            factor = after_sibling if below else 1.0
            heapq.heappush(heap, (-parent * factor * rates[depth][rank + 1], depth, rank + 1, parent, below))
        if depth + 1 < len(rates):
            below = below or rank > 0
            factor = after_sibling if below else 1.0
            heapq.heappush(heap, (negative * factor * rates[depth + 1][0], depth + 1, 0, -negative, below))
    return total


def rate_for_length(length: float, block_size: int) -> float:
    """The constant hit rate a whose chain Σ_{d<block} a^d has this length (4.4 of 8: 0.8185; 14 of 16: 0.982).

    Raises:
        ValueError: a length that a block of this size cannot have.
    """
    if not 1 < length < block_size:
        raise ValueError(f"a block of {block_size} yields between 1 and {block_size} tokens, not {length}")
    return _bisect(lambda rate: sum(rate**d for d in range(block_size)), length, 0.0, 1.0)


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


@functools.lru_cache(maxsize=64)
def constant(
    rate: float, max_depth: int, *, sibling_share: float, unsure_rate: float, after_sibling: float, name: str = ""
) -> Acceptance:
    """The same mean hit rate at every position, which is sure in some places and unsure in others.

    A position is unsure (hit rate `unsure_rate`) so often that a chain is as long as one with `rate` throughout.
    A miss of the first candidate is caught by the second with chance `sibling_share`, and so on.

    Raises:
        ValueError: a rate or share outside 0 to 1.
    """
    for label, value in (("hit rate", rate), ("sibling share", sibling_share), ("unsure rate", unsure_rate)):
        if not 0 < value < 1:
            raise ValueError(f"{label} is {value}: a chance between 0 and 1")
    name = name or f"hit rate {rate:.3f}"
    if rate <= unsure_rate:
        return Acceptance((tuple(_ranks(rate, sibling_share) for _ in range(max_depth)),), name, after_sibling)
    rounds = 64
    target = sum(rate**d for d in range(max_depth + 1))
    # Stratified over the rounds, the same share of unsure positions at every depth.
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(rounds) for _ in range(max_depth)], axis=1)
    unsure = round(rounds * (1 - rate) / (1 - unsure_rate))
    while True:
        is_unsure = order < unsure

        def chain(sure: float, is_unsure: np.ndarray = is_unsure) -> float:
            return _chain(np.where(is_unsure, unsure_rate, sure))

        if chain(1.0) >= target:
            break
        unsure -= 1
    sure = _bisect(chain, target, unsure_rate, 1.0)
    rows = {False: _ranks(sure, sibling_share), True: _ranks(unsure_rate, sibling_share)}
    tables = tuple(tuple(rows[bool(flag)] for flag in kind) for kind in is_unsure)
    return Acceptance(tables, name, after_sibling)


def _ranks(rate: float, sibling_share: float, ranks: int = 8) -> tuple[float, ...]:
    row = [rate]
    for _ in range(ranks - 1):
        row.append((1 - sum(row)) * sibling_share)
    return tuple(row)


def from_file(path: Path, *, sibling_share: float, after_sibling: float) -> Acceptance:
    """Read measured hit rates, one entry a draft depth.

    Either decode.py's --json output of a run with a chain (`draft_hit_rates` of its `summary`), or JSON with a
    list `hit_rates`. An entry is the first candidate's rate, whose siblings then follow from `sibling_share`, or a
    list of rates by rank.

    Raises:
        ValueError: the file has neither.
    """
    report = read_json(path)
    rates = None
    if isinstance(report, dict):
        rates = report.get("hit_rates") or report.get("summary", {}).get("draft_hit_rates")
    if not isinstance(rates, list) or not rates:
        raise ValueError(
            f"{path}: neither a list `hit_rates` nor a decode.py report that speculated (`draft_hit_rates`)"
        )
    rows = tuple(
        tuple(map(float, row)) if isinstance(row, list) else _ranks(float(row), sibling_share) for row in rates
    )
    return Acceptance((rows,), f"measured, {Path(path).name}", after_sibling)
