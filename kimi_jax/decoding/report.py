"""What a run of decoding did, in numbers: the one-line summary, the acceptance table and the JSON form."""

import dataclasses
from typing import Any

import numpy as np
from rich.table import Table

from kimi_jax.decoding.generate import Progress
from kimi_jax.decoding.state import Snapshot


@dataclasses.dataclass
class Report:
    """Counts and times of one batch, fed with every `Progress`."""

    prompts: int
    tokens: int = 0
    first_token_seconds: float = 0.0
    """From the start to the first dispatch's tokens: prefill, and compilation where nothing was compiled before."""
    seconds: float = 0.0
    snapshot: Snapshot | None = None
    """The device's counts after the last dispatch."""
    _first_tokens: int = 0

    def add(self, progress: Progress) -> None:
        """Counts one dispatch."""
        arrived = sum(map(len, progress.new_tokens))
        if not self.seconds:
            self.first_token_seconds, self._first_tokens = progress.seconds, arrived
        self.tokens += arrived
        self.seconds, self.snapshot = progress.seconds, progress.snapshot

    @property
    def rounds(self) -> int:
        """Rounds of the prompt that took most."""
        return 0 if self.snapshot is None else int(np.max(self.snapshot.rounds))

    @property
    def histogram(self) -> np.ndarray:
        """Entry n counts the rounds, over all prompts, with acceptance length n."""
        return np.zeros(2, int) if self.snapshot is None else np.asarray(self.snapshot.accepted).sum(0)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round gave on average: accepted drafts and the target's own token after them.

        The last round of a text counts whole, with what stood behind the stop token or the limit.
        """
        histogram = self.histogram
        return float(histogram @ np.arange(len(histogram)) / max(histogram.sum(), 1))

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each draft position, how often it was accepted among the rounds that accepted the one before."""
        at_least = np.cumsum(self.histogram[::-1])[::-1]
        return [float(at_least[n + 1] / at_least[n]) for n in range(1, len(at_least) - 1) if at_least[n]]

    @property
    def nodes_per_round(self) -> float:
        """Draft tree nodes verified a round on average: the budget in effect."""
        if self.snapshot is None:
            return 0.0
        return float(np.sum(self.snapshot.nodes) / max(np.sum(self.snapshot.rounds), 1))

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
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_histogram": self.histogram.tolist(),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "nodes_per_round": round(self.nodes_per_round, 2),
        } | self._exchanges()

    def _exchanges(self) -> dict[str, int]:
        """Exchanges of layers through bounded buffers, and those that took the exact path; none where none are used."""
        if self.snapshot is None or self.snapshot.exchanges is None or self.snapshot.overflows is None:
            return {}
        return {"exchanges": int(self.snapshot.exchanges), "overflows": int(self.snapshot.overflows)}

    def summary(self) -> str:
        """One line for everyone: how much text, how long it took, how fast it came."""
        several = f"{self.prompts} prompts, " if self.prompts > 1 else ""
        tokens = f"{self.tokens} token{'' if self.tokens == 1 else 's'} in {self.seconds:.1f} s"
        drafted = len(self.histogram) > 2
        accepted = f"{self.acceptance_length:.2f} tokens a round" if drafted else ""
        if self.tokens_per_second is None:
            return f"{several}{tokens}, starting included" + (f"; {accepted}" if drafted else "")
        start = f"{self.first_token_seconds:.1f} s to start, then {self.tokens_per_second:.1f} tokens/s"
        return f"{several}{tokens}: {start}" + (f", {accepted}" if drafted else "")

    def details(self) -> str:
        """One line of what the devices did: rounds, and exchanges that overflowed their buffers."""
        counts = self._exchanges()
        line = f"{self.rounds} rounds"
        if counts:
            line += f"; {counts['overflows']} of {counts['exchanges']} exchanges through buffers overflowed"
            line += " and took the exact path" if counts["overflows"] else ""
        return line

    def table(self) -> Table:
        """Acceptance by draft position, for the terminal."""
        table = Table(box=None, header_style="dim", style="dim")
        table.add_column("tokens a round", justify="right")
        table.add_column("rounds", justify="right")
        table.add_column("next draft accepted", justify="right")
        rates = {n: rate for n, rate in enumerate(self.acceptance_by_position, 1)}
        for length, count in enumerate(self.histogram):
            if count:
                rate = f"{rates[length]:.0%}" if length in rates else ""
                table.add_row(str(length), str(count), rate)
        table.caption = f"{self.nodes_per_round:.1f} tree nodes a round"
        return table
