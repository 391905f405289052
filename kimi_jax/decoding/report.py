"""What a run of decoding did, in numbers: for the one-line summary and for `--json`."""

import dataclasses
from typing import Any

from kimi_jax.decoding.generate import Progress


@dataclasses.dataclass
class Report:
    """Counts and times of one batch, fed with every `Progress`."""

    prompts: int
    tokens: int = 0
    rounds: int = 0
    first_token_seconds: float = 0.0
    """From the start to the first dispatch's tokens: prefill, and compilation where nothing was compiled before."""
    seconds: float = 0.0
    _first_tokens: int = 0

    def add(self, progress: Progress) -> None:
        """Counts one dispatch."""
        arrived = sum(map(len, progress.new_tokens))
        if not self.seconds:
            self.first_token_seconds, self._first_tokens = progress.seconds, arrived
        self.tokens += arrived
        self.rounds, self.seconds = int(progress.snapshot.rounds.max()), progress.seconds

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
        }

    def summary(self) -> str:
        """One line."""
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} tokens/s"
        several = f"{self.prompts} prompts, " if self.prompts > 1 else ""
        return (
            f"{several}{self.tokens} tokens in {self.rounds} rounds{speed}, "
            f"first after {self.first_token_seconds:.1f} s (compilation included)"
        )
