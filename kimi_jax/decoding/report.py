"""What a run of decoding did, in numbers: the one-line summary, the acceptance table and the JSON form.

Acceptance length is the number of tokens emitted a request and round: those that a round put into the text, so neither
what stands behind a stop token or the limit, nor the first token of a text, which prefill draws. It is 1 in plain
decoding. A draft's hit is another matter: the target would have written the drafted token too, be it behind the end of
the text. Hit rates say how good a drafter is, whatever the texts' lengths; acceptance lengths say what it brings.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
from rich.table import Table

from kimi_jax.decoding.generate import Counts, Progress


@dataclasses.dataclass
class Report:
    """Counts and times of some prompts, fed with every `Progress`."""

    prompts: int
    tokens: int = 0
    first_token_seconds: float = 0.0
    """From the start to the first dispatch's tokens: prefill, and compilation where nothing was compiled before."""
    seconds: float = 0.0
    counts: Counts | None = None
    """What the device has counted."""
    _first_tokens: int = 0

    def add(self, progress: Progress) -> None:
        """Counts one dispatch."""
        arrived = sum(map(len, progress.new_tokens))
        if not self.seconds:
            self.first_token_seconds, self._first_tokens = progress.seconds, arrived
        self.tokens += arrived
        self.seconds, self.counts = progress.seconds, progress.counts

    @property
    def rounds(self) -> int:
        """Rounds that the slots ran, one counting once for all its prompts."""
        return 0 if self.counts is None else self.counts.rounds_run

    @property
    def histogram(self) -> np.ndarray:
        """Entry n counts the rounds, over all prompts, that put n tokens into a text."""
        return np.zeros(2, int) if self.counts is None else rounds_by_tokens(self.counts)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a request and round, on average; None where no round ran."""
        rounds = self.histogram.sum()
        return float(self.histogram @ np.arange(len(self.histogram)) / rounds) if rounds else None

    @property
    def draft_hits(self) -> list[int]:
        """For each depth of the draft trees, the rounds whose draft there was a hit: what the drafter found alone."""
        return [] if self.counts is None else self.counts.hits.sum(0).tolist()

    @property
    def draft_hit_rates(self) -> list[float]:
        """For each depth, how often its draft was a hit among the rounds in which the one before was."""
        hits = [int(self.histogram.sum()), *self.draft_hits]
        return [after / before for before, after in itertools.pairwise(hits) if before]

    @property
    def draft_hits_per_round(self) -> float:
        """Drafts a round that the target would have written too."""
        return sum(self.draft_hits) / max(int(self.histogram.sum()), 1)

    @property
    def nodes_per_round(self) -> float:
        """Draft tree nodes verified a round on average: the budget in effect."""
        if self.counts is None:
            return 0.0
        return float(self.counts.nodes.sum() / max(self.counts.rounds.sum(), 1))

    @property
    def tokens_per_second(self) -> float | None:
        """Over all prompts, after the first dispatch; None where everything came with it."""
        elapsed = self.seconds - self.first_token_seconds
        return (self.tokens - self._first_tokens) / elapsed if elapsed > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; times in seconds."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "first_token_seconds": round(self.first_token_seconds, 4),
            "seconds": round(self.seconds, 4),
            "tokens_per_second": None if self.tokens_per_second is None else round(self.tokens_per_second, 2),
            "acceptance_length": None if self.acceptance_length is None else round(self.acceptance_length, 4),
            "acceptance_histogram": self.histogram.tolist(),
            "nodes_per_round": round(self.nodes_per_round, 2),
            "draft_hits": self.draft_hits,
            "draft_hits_per_round": round(self.draft_hits_per_round, 4),
            "draft_hit_rates": [round(rate, 4) for rate in self.draft_hit_rates],
            **self._prefixes(),
        } | self._exchanges()

    def _prefixes(self) -> dict[str, int]:
        """Tokens of prompts, those that shared pages held, and those of them that were run for the drafter's sake."""
        names = ("prompt_tokens", "reused_tokens", "drafter_misses")
        return {name: 0 if self.counts is None else getattr(self.counts, name) for name in names}

    def _exchanges(self) -> dict[str, int]:
        """Exchanges of layers through bounded buffers, and those that took the exact path; none where none are used."""
        if self.counts is None or self.counts.exchanges is None or self.counts.overflows is None:
            return {}
        return {"exchanges": self.counts.exchanges, "overflows": self.counts.overflows}

    def summary(self) -> str:
        """One line for everyone: how much text, how long it took, how fast it came."""
        several = f"{self.prompts} prompts, " if self.prompts > 1 else ""
        tokens = f"{self.tokens} token{'' if self.tokens == 1 else 's'} in {self.seconds:.1f} s"
        drafted = bool(self.draft_hits) and self.acceptance_length is not None
        accepted = f"{self.acceptance_length:.2f} tokens a round" if drafted else ""
        counts = self.counts
        reused = f"; {counts.reused_tokens} of {counts.prompt_tokens} prompt tokens reused" if counts else ""
        reused = reused if counts and counts.reused_tokens else ""
        if self.tokens_per_second is None:
            return f"{several}{tokens}, starting included" + (f"; {accepted}" if drafted else "") + reused
        start = f"{self.first_token_seconds:.1f} s to start, then {self.tokens_per_second:.1f} tokens/s"
        return f"{several}{tokens}: {start}" + (f", {accepted}" if drafted else "") + reused

    def details(self) -> str:
        """One line of what the devices did: rounds, drafts' hits, and exchanges that overflowed their buffers."""
        counts = self._exchanges()
        line = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        if self.draft_hits:
            line += f" with {self.draft_hits_per_round:.2f} drafts hit in each"
        if counts:
            line += f"; {counts['overflows']} of {counts['exchanges']} exchanges through buffers overflowed"
            line += " and were run again exactly" if counts["overflows"] else ""
        if self.counts is not None and self.counts.drafter_misses:
            line += f"; {self.counts.drafter_misses} prompt tokens run again for a drafter that keeps no pages"
        return line

    def table(self) -> Table:
        """Tokens of the rounds and hits of the drafts, for the terminal."""
        table = Table(box=None, header_style="dim", style="dim")
        for name in ("n", "rounds of n tokens", "hits of draft n", "of those where n - 1 hit"):
            table.add_column(name, justify="right")
        drafts = itertools.zip_longest(self.draft_hits, self.draft_hit_rates)
        for n, (count, draft) in enumerate(itertools.zip_longest(self.histogram[1:], drafts, fillvalue=(0, None)), 1):
            hits, rate = draft
            if count or hits:
                table.add_row(str(n), str(count or ""), str(hits or ""), "" if rate is None else f"{rate:.0%}")
        table.caption = f"{self.nodes_per_round:.1f} tree nodes a round"
        return table


def rounds_by_tokens(counts: Counts) -> np.ndarray:
    """Entry n counts the rounds that put n tokens into a text, over all requests."""
    more_than = counts.round_tokens.sum(0)
    return np.concatenate([[0], more_than - np.append(more_than[1:], 0)])
