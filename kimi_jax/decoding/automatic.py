"""An automatic budget: how many rows the next dispatch verifies, from what rounds cost and what drafts gave.

Each row count is a program of its own; this picks among them between dispatches, in plain Python on the host. The best
count has the most expected tokens per unit of time (as CaDDTree, arXiv 2606.01813, chooses within a round). A drafter
is described by one number, the tokens of a round with a tree of REFERENCE_ROWS, because a tree's size matters far less
than how well its drafter knows the text.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from kimi_jax.ddtree.budget import ROW_COUNTS

REFERENCE_ROWS = 8
"""Rows of the smallest tree, and those of a probe."""
SHRINK = 0.87
"""Factor on what a round misses of a whole block for each doubling of a tree's rows: 0.8 to 0.9 in the published sweeps
of DDTree (arXiv 2604.12989) and on the bundled model."""
NEARLY = 0.98
"""The fewest rows are taken that reach this share of the best speed: neither costs nor acceptance are known better."""
STAY = 0.9
"""The rows of the last dispatch are kept while they reach this share of the best speed: others may want compiling."""
PROBE_ROUNDS = 2
"""Rounds of a dispatch that only finds out how good the drafts are."""
PROBE_EVERY = 16
"""Plain dispatches, or plain batches, after which drafts are tried again."""
HALF_LIFE = 64
"""Rounds, over all requests, after which a measured round counts half."""
PRIOR_ROUNDS = 4
"""Rounds that a prior acceptance counts for."""


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """What a round costs by the rows it verifies for each request, for a fixed number of requests."""

    microseconds: Mapping[int, float]
    """By rows, the root included: 1 is plain decoding. Row counts that are absent are not chosen."""
    source: Literal["measured", "estimated"]

    def __post_init__(self) -> None:
        wrong = [rows for rows in self.microseconds if rows not in ROW_COUNTS]
        if 1 not in self.microseconds or wrong:
            raise ValueError(f"costs are needed for 1 row and others of {ROW_COUNTS}, not for {[*self.microseconds]}")
        if not all(0 < time < math.inf for time in self.microseconds.values()):
            raise ValueError(f"costs must be positive and finite, not {[*self.microseconds.values()]} µs")


class AutomaticBudget:
    """Picks the rows of every dispatch of an engine's slots, and learns from each.

    It starts plain where nothing is known of the drafter, tries drafts for PROBE_ROUNDS, and then takes what pays.

    Args:
      costs: of a round with all slots at work.
      block: tokens of the drafter's block: no round gives more.
      prior: tokens a round with a tree of REFERENCE_ROWS that the drafter is known for; None where it is not.
      fewer: costs of rounds that are compiled for so many slots, fewer than all.
    """

    def __init__(
        self, costs: RoundCosts, block: int, prior: float | None = None, fewer: Mapping[int, RoundCosts] | None = None
    ):
        self.costs, self._block = costs, block
        self._fewer = dict(sorted((fewer or {}).items()))
        self._rounds = 0.0 if prior is None else float(PRIOR_ROUNDS)
        self._tokens = 0.0 if prior is None else prior * PRIOR_ROUNDS
        self._plain_dispatches = self._plain_batches = 0
        self._last: int | None = None

    @property
    def acceptance(self) -> float | None:
        """Tokens a round with a tree of REFERENCE_ROWS, a decayed mean over drafted rounds; None before any."""
        return self._tokens / self._rounds if self._rounds else None

    def expected(self, rows: int) -> float:
        """Tokens of a round that verifies so many rows a request."""
        if rows == 1 or self.acceptance is None:
            return 1.0
        return min(self._block - (self._block - self.acceptance) * _shrink(rows), rows)

    def begin(self) -> bool:
        """Whether a new batch keeps what drafts need: a batch that does not decodes plainly, at no cost, to its end.

        It does where nothing is known of the drafter, where drafts pay, and once in PROBE_EVERY batches all the same.
        """
        if self.acceptance is None or self._best() > 1:
            self._plain_batches = 0
            return True
        self._plain_batches += 1
        if self._plain_batches < PROBE_EVERY:
            return False
        self._plain_batches, self._plain_dispatches = 0, PROBE_EVERY
        return True

    def _best(self, running: int | None = None) -> int:
        """The last dispatch's rows, or where they are much slower the fewest that nearly reach the best speed."""
        costs = self._of(running).microseconds
        speed = {rows: self.expected(rows) / cost for rows, cost in sorted(costs.items())}
        most = max(speed.values())
        if self._last in speed and speed[self._last] >= STAY * most:
            return self._last
        return next(rows for rows in speed if speed[rows] >= NEARLY * most)

    def _of(self, running: int | None) -> RoundCosts:
        """Costs of the rounds that are compiled for the fewest slots that hold those that are at work."""
        return next(
            (costs for slots, costs in self._fewer.items() if running is not None and running <= slots), self.costs
        )

    def next(self, rounds: int, running: int | None = None) -> tuple[int, int]:
        """Rows of the next dispatch, and its rounds where `rounds` are wanted: a probe takes few.

        Args:
          running: slots at work; by default all.
        """
        drafts = [rows for rows in self._of(running).microseconds if rows > 1]
        if not drafts:
            return 1, rounds
        if self._plain_dispatches >= (1 if self.acceptance is None else PROBE_EVERY):
            return min(drafts), min(rounds, PROBE_ROUNDS)
        self._last = self._best(running)
        return self._last, rounds

    def observe(self, rows: int, rounds: int, tokens: int) -> None:
        """Learns from a dispatch: its rounds, added up over the requests, and the tokens that they emitted."""
        kept = 0.5 ** (rounds / HALF_LIFE)  # plain rounds too: what was seen long ago says less
        self._rounds, self._tokens = kept * self._rounds, kept * self._tokens
        if rows == 1:
            self._plain_dispatches += 1
        elif rounds:
            self._plain_dispatches = 0
            self._rounds += rounds
            missed = (self._block - tokens / rounds) / _shrink(rows)
            self._tokens += rounds * max(self._block - missed, 1.0)

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        times = {rows: round(time, 1) for rows, time in sorted(self.costs.microseconds.items())}
        acceptance = None if self.acceptance is None else round(self.acceptance, 3)
        return {"round_us_by_rows": times, "costs": self.costs.source, "expected_tokens_a_round": acceptance}


def _shrink(rows: int) -> float:
    """What a round with so many rows misses of a block over what one with REFERENCE_ROWS does."""
    return SHRINK ** math.log2(rows / REFERENCE_ROWS)
