"""How many tokens a round yields for a budget of draft nodes."""

import functools
import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Acceptance:
    """Hit rates: `rates[d][r]` is the chance that, where the path so far is right, the drafter's candidate of rank r
    at depth d is what the model says. Ranks fall within a depth and sum to at most 1.
    """

    rates: tuple[tuple[float, ...], ...]
    name: str

    def __post_init__(self):
        for depth, ranks in enumerate(self.rates):
            if not ranks or min(ranks) < 0 or sum(ranks) > 1 + 1e-6:
                raise ValueError(f"hit rates at depth {depth} must be chances that sum to at most 1, got {ranks}")

    @property
    def max_depth(self) -> int:
        """Depth of the longest draft path."""
        return len(self.rates)

    def length(self, budget: int) -> float:
        """Expected tokens of a round, the model's own token included: 1 + Σ over the tree's nodes of their chance.

        The tree holds the `budget` nodes with the largest chance of being on the accepted path, which is what
        DDTree builds from the drafter's marginals (arXiv 2604.12989). Budget 0 is decoding without a draft.
        """
        return 1 + sum(_node_chances(self.rates, budget))

    def chain_length(self) -> float:
        """Expected tokens of a round whose draft is the best path alone."""
        return 1 + math.fsum(math.prod(ranks[0] for ranks in self.rates[: d + 1]) for d in range(self.max_depth))


@functools.lru_cache(maxsize=4096)
def _node_chances(rates: tuple[tuple[float, ...], ...], budget: int) -> tuple[float, ...]:
    chances: list[float] = []
    heap = [(-rates[0][0], 0, 0, 1.0)] if budget and rates else []
    while heap and len(chances) < budget:
        negative, depth, rank, parent = heapq.heappop(heap)
        chances.append(-negative)
        if rank + 1 < len(rates[depth]):
            heapq.heappush(heap, (-parent * rates[depth][rank + 1], depth, rank + 1, parent))
        if depth + 1 < len(rates):
            heapq.heappush(heap, (negative * rates[depth + 1][0], depth + 1, 0, -negative))
    return tuple(chances)


def constant(rate: float, max_depth: int, sibling_share: float, name: str = "", ranks: int = 16) -> Acceptance:
    """The same hit rate at every position.

    A miss of the first candidate is caught by the second with chance `sibling_share`, a miss of both by the third
    with the same chance, and so on.

    Raises:
        ValueError: rate or share outside 0 to 1.
    """
    if not 0 < rate < 1 or not 0 <= sibling_share <= 1:
        raise ValueError(f"hit rate {rate} and sibling share {sibling_share} must lie between 0 and 1")
    row = [rate]
    for _ in range(ranks - 1):
        row.append((1 - sum(row)) * sibling_share)
    return Acceptance((tuple(row),) * max_depth, name or f"constant hit rate {rate:.3f}")


def rate_for_length(length: float, block_size: int) -> float:
    """The constant hit rate a whose chain Σ_{d<block} a^d has this length (4.4 of 8: 0.8185; 14 of 16: 0.982).

    Raises:
        ValueError: a length that a block of this size cannot have.
    """
    if not 1 < length < block_size:
        raise ValueError(f"a block of {block_size} yields between 1 and {block_size} tokens, not {length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(block_size)) < length else (low, middle)
    return (low + high) / 2


def from_file(path: Path) -> Acceptance:
    """Read measured hit rates: JSON with a list `hit_rates`, one entry a depth, each a number or a list by rank.

    This is what the decoder's JSON report holds.

    Raises:
        ValueError: the file has no such list.
    """
    report = json.loads(Path(path).read_text())
    rates = report.get("hit_rates") if isinstance(report, dict) else report
    if not isinstance(rates, list) or not rates:
        raise ValueError(f"{path}: no list `hit_rates` with one entry for each draft depth")
    rows = tuple(tuple(map(float, row)) if isinstance(row, list) else (float(row),) for row in rates)
    return Acceptance(rows, f"measured, {Path(path).name}")
