"""The bundled model's tasks in the real decode loop: exact match with its uncertainty, acceptance and speed."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_jax.chat import render
from kimi_jax.decoding.engine import PLAIN, Draft, Engine
from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.report import Report, rounds_by_tokens
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.training.generations import MAX_NEW_TOKENS, answer_text
from kimi_jax.training.tasks import FAMILIES, Example, held_out

NORMAL_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""

LIMITS = Limits(MAX_NEW_TOKENS, prefill_chunk=32, rounds_per_dispatch=MAX_NEW_TOKENS, least_capacity=192)
"""The same shapes for all prompts, and one dispatch of rounds for a text."""


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927): honest for few trials and for shares near 0 and 1."""
    share, z2 = hits / trials, NORMAL_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = NORMAL_95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclasses.dataclass(frozen=True)
class FamilyScore:
    """One family's held-out prompts, decoded greedily."""

    exact: int
    """Answers equal to the reference, character by character."""
    prompts: int
    tokens: int
    """Generated, stop tokens included."""
    rounds_by_length: tuple[int, ...]
    """Rounds that put 0, 1, 2, … tokens into an answer."""
    seconds: float = 0.0
    """What they took, prefill included and compilation not."""
    steps: int = 0
    """Rounds that batches ran, one round counting once for all of a batch's prompts."""
    decoding_seconds: float = 0.0
    """What came after the first tokens."""
    answers: tuple[tuple[int, ...], ...] = ()
    """Token ids of each answer."""

    def __add__(self, other: "FamilyScore") -> "FamilyScore":
        pairs = itertools.zip_longest(self.rounds_by_length, other.rounds_by_length, fillvalue=0)
        return FamilyScore(
            self.exact + other.exact,
            self.prompts + other.prompts,
            self.tokens + other.tokens,
            tuple(a + b for a, b in pairs),
            self.seconds + other.seconds,
            self.steps + other.steps,
            self.decoding_seconds + other.decoding_seconds,
            self.answers + other.answers,
        )

    @property
    def exact_match(self) -> float:
        """Share of exact answers."""
        return self.exact / self.prompts

    @property
    def acceptance(self) -> float:
        """Acceptance length: mean tokens emitted a round (1 in plain decoding)."""
        lengths = np.arange(len(self.rounds_by_length))
        return float(np.dot(self.rounds_by_length, lengths) / sum(self.rounds_by_length))

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding without the prefill; None where everything came with it."""
        return (self.tokens - self.prompts) / self.decoding_seconds if self.decoding_seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; the interval is 95 %, times are seconds."""
        figures = dataclasses.asdict(self)
        del figures["answers"]
        return {
            **figures,
            "exact_match": self.exact_match,
            "exact_match_interval": wilson(self.exact, self.prompts),
            "acceptance": self.acceptance,
            "tokens_per_second": self.tokens_per_second,
        }


def score(
    engine: Engine,
    prompts: int,
    drafts: Sequence[Draft] = (PLAIN,),
    families: Sequence[str] = tuple(FAMILIES),
    *,
    batch: int = 100,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, FamilyScore]]:
    """Decodes `prompts` held-out prompts of each family without thinking, once for each kind of speculation.

    The kinds take turns with every batch, so that a slow moment of the machine falls on all of them. Each decodes a
    family's first batch once before, to compile.

    Args:
      engine: the bundled checkpoint, or another one trained on these tasks, with a drafter where one is needed.
      prompts: of each family, the same for every call.
      drafts: kinds of speculation.
      families: names in `training.tasks.FAMILIES`.
      batch: prompts decoded together.
      progress: told of every prompt decoded, by numbers of them.

    Raises:
      ValueError: an unknown family, a number below one.
    """
    if unknown := [family for family in families if family not in FAMILIES]:
        raise ValueError(f"no task family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    if prompts < 1 or batch < 1:
        raise ValueError(f"{prompts} prompts in batches of {batch}: both must be positive")
    batch = min(batch, prompts)
    scores: list[dict[str, FamilyScore]] = [{} for _ in drafts]
    for family in families:
        examples = held_out(family, prompts)
        for draft in drafts:
            _decode(engine, examples[:batch], batch, draft)
        for first in range(0, prompts, batch):
            part = examples[first : first + batch]
            for draft, kept in zip(drafts, scores, strict=True):
                result = _decode(engine, part, batch, draft)
                kept[family] = kept[family] + result if family in kept else result
                if progress:
                    progress(len(part))
    return scores


def _decode(engine: Engine, examples: Sequence[Example], batch: int, draft: Draft) -> FamilyScore:
    """Some prompts, with slots for `batch`."""
    asked = [render([{"role": "user", "content": e.prompt}], engine.tokenizer, thinking=False) for e in examples]
    texts: list[list[int]] = [[] for _ in examples]
    report = Report(len(examples))
    requests = [Request(ids, Sampling(), 0, MAX_NEW_TOKENS) for ids in asked]
    for step in engine.serve(requests, LIMITS, draft, slots=batch):
        report.add(step)
        for text, new in zip(texts, step.new_tokens, strict=True):
            text += new
    assert report.counts is not None
    return FamilyScore(
        exact=sum(answer_text(engine, text) == e.answer for text, e in zip(texts, examples, strict=True)),
        prompts=len(examples),
        tokens=sum(map(len, texts)),
        rounds_by_length=tuple(rounds_by_tokens(report.counts).tolist()),
        seconds=report.seconds,
        steps=report.rounds,
        decoding_seconds=report.seconds - report.first_token_seconds,
        answers=tuple(map(tuple, texts)),
    )


def together(scores: dict[str, FamilyScore]) -> FamilyScore:
    """All families as one: every prompt counts the same, and every round."""
    return sum(scores.values(), start=FamilyScore(0, 0, 0, ()))


def samples(engine: Engine, ways: Mapping[str, Mapping[str, FamilyScore]]) -> Iterator[dict[str, Any]]:
    """Every prompt that was scored, for a log: what was asked and expected, and what each way of decoding answered.

    Args:
      engine: that decoded.
      ways: scores of each way by family, as `score` gives them.
    """
    for family, scored in next(iter(ways.values())).items():
        for number, example in enumerate(held_out(family, scored.prompts)):
            answers = {}
            for way, scores in ways.items():
                ids = scores[family].answers[number]
                text = answer_text(engine, ids)
                answers[way] = {"text": text, "token_ids": list(ids), "exact": text == example.answer}
            yield {"family": family, "prompt": example.prompt, "reference": example.answer, "answers": answers}
