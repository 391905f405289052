"""How fast one checkpoint decodes with each kind of speculation: same prompts, same run, medians and spread."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Speed:
    """Decoding speed of one decoder over repeated runs of the same prompts, one at a time."""

    decoder: str
    """`none`, `chain` and `ddtree` are this project's; others are peers."""
    budget: int | str | None
    """Nodes of a draft tree, where there is one."""
    tokens_per_second: list[float]
    """Of each repetition: all prompts' tokens after the first over the time they took, prefill and compilation
    excluded."""
    acceptance_length: float
    """Tokens emitted a round; see `decoding.report`."""
    texts: list[list[int]]
    """Token ids that followed each prompt."""

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.tokens_per_second)

    @property
    def spread(self) -> float:
        """Half the distance between the extremes, over the median."""
        return (max(self.tokens_per_second) - min(self.tokens_per_second)) / 2 / self.median


def row(speed: Speed, base: Speed) -> dict[str, Any]:
    """One line of a table, beside the decoder that counts as 1; `round_cost` is a round's time over one of its."""
    return {
        "decoder": speed.decoder,
        "budget": speed.budget,
        "tokens_per_second_median": round(speed.median, 1),
        "spread": round(speed.spread, 3),
        "acceptance_length": round(speed.acceptance_length, 3),
        "round_cost": round(speed.acceptance_length / speed.median * base.median / base.acceptance_length, 2),
        "speed_up": round(speed.median / base.median, 2),
        "same_text": speed.texts == base.texts,
    }


def measure_speculation(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    *,
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[], None] | None = None,
) -> list[Speed]:
    """Decodes every prompt alone with every kind, `repeats` times, the kinds taking turns within a repetition.

    Turns keep a slow moment of the machine from falling on one kind alone. A first repetition compiles and is not
    counted. Timed is what follows the first token: one dispatch of as many rounds as the text takes, and the host's
    reading of it.
    """
    limits = Limits(max_new_tokens, rounds_per_dispatch=max_new_tokens, least_capacity=max(map(len, prompts)))
    rates: list[list[float]] = [[] for _ in drafts]
    texts: list[list[list[int]]] = [[] for _ in drafts]
    lengths = [0.0 for _ in drafts]
    for repeat in range(repeats + 1):
        for kind, draft in enumerate(drafts):
            tokens = rounds = 0
            seconds = 0.0
            texts[kind] = []
            for prompt in prompts:
                report, text = Report(1), []
                for step in engine.generate([prompt], limits, Sampling(), draft=draft):
                    report.add(step)
                    text += step.new_tokens[0]
                seconds += report.seconds - report.first_token_seconds
                tokens += len(text) - 1
                texts[kind].append(text)
                rounds += report.rounds
            lengths[kind] = tokens / max(rounds, 1)
            if repeat:
                rates[kind].append(tokens / seconds)
            if progress:
                progress()
    return [
        Speed(draft.kind, draft.budget if draft.kind == "ddtree" else None, rate, length, text)
        for draft, rate, length, text in zip(drafts, rates, lengths, texts, strict=True)
    ]
