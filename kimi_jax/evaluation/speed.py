"""How fast one checkpoint decodes with each kind of speculation: same prompts, same run, medians and spread."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits, dispatch, prefill
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.parameters import Parameters


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
    counted. Timed is what follows prefill, the first token's draw included: one dispatch of as many rounds as the text
    takes (several where an automatic budget probes), and the host's reading of it.
    """
    limits = Limits(max_new_tokens=max_new_tokens)
    longest = max(map(len, prompts))
    rates: list[list[float]] = [[] for _ in drafts]
    texts: list[list[list[int]]] = [[] for _ in drafts]
    lengths = [0.0 for _ in drafts]
    for repeat in range(repeats + 1):
        for kind, draft in enumerate(drafts):
            tokens = seconds = 0.0
            rounds = 0
            texts[kind] = []
            for prompt in prompts:
                with jax.default_matmul_precision("highest"):
                    programs, automatic = engine.begin(Sampling(), draft, 1, limits, longest)
                    parameters: Parameters = {name: engine.parameters[name] for name in programs.needs}
                    state = jax.block_until_ready(prefill(programs, parameters, [prompt], limits))
                    started, snapshot = time.perf_counter(), None
                    while snapshot is None or not snapshot.finished.all():
                        state, snapshot = dispatch(programs, parameters, state, max_new_tokens, automatic, snapshot)
                    text = snapshot.emitted[0, : snapshot.counts[0]].tolist()
                    seconds += time.perf_counter() - started
                tokens += len(text) - 1
                texts[kind].append(text)
                rounds += int(snapshot.rounds[0])
            lengths[kind] = tokens / max(rounds, 1)
            if repeat:
                rates[kind].append(tokens / seconds)
            if progress:
                progress()
    return [
        Speed(draft.kind, draft.budget if draft.kind == "ddtree" else None, rate, length, text)
        for draft, rate, length, text in zip(drafts, rates, lengths, texts, strict=True)
    ]
