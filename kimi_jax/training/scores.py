"""Scores on held-out prompts in the real decode loop: exact match, and what speculation accepts."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kimi_jax.chat import render
from kimi_jax.decoding.engine import PLAIN, Draft, Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.training.generations import MAX_NEW_TOKENS, answer_text
from kimi_jax.training.tasks import FAMILIES, held_out


@dataclasses.dataclass(frozen=True)
class FamilyScore:
    """One family's held-out prompts, decoded greedily."""

    exact: int
    """Answers equal to the reference, character by character."""
    prompts: int
    tokens: int
    """Generated, stop tokens included."""
    rounds_by_length: tuple[int, ...]
    """Rounds that gave 0, 1, 2, … tokens."""

    @property
    def exact_match(self) -> float:
        """Share of exact answers."""
        return self.exact / self.prompts

    @property
    def acceptance(self) -> float:
        """Mean tokens a round (1 in plain decoding)."""
        lengths = np.arange(len(self.rounds_by_length))
        return float(np.dot(self.rounds_by_length, lengths) / sum(self.rounds_by_length))


def score(
    engine: Engine,
    prompts: int,
    draft: Draft = PLAIN,
    families: Sequence[str] = tuple(FAMILIES),
    batch: int = 100,
    progress: Callable[[str, FamilyScore], None] | None = None,
) -> dict[str, FamilyScore]:
    """Decodes `prompts` held-out prompts of each family, in batches, without thinking.

    `progress` is told of each family as it is done.
    """
    scores: dict[str, FamilyScore] = {}
    for family in families:
        examples = held_out(family, prompts)
        exact, tokens, rounds = 0, 0, np.zeros(0, np.int64)
        for first in range(0, prompts, batch):
            part = examples[first : first + batch]
            asked = [
                render([{"role": "user", "content": example.prompt}], engine.tokenizer, thinking=False)
                for example in part
            ]
            texts: list[list[int]] = [[] for _ in part]
            snapshot = None
            for step in engine.generate(asked, Limits(max_new_tokens=MAX_NEW_TOKENS), Sampling(), draft=draft):
                for text, new in zip(texts, step.new_tokens, strict=True):
                    text += new
                snapshot = step.snapshot
            assert snapshot is not None
            exact += sum(answer_text(engine, text) == e.answer for text, e in zip(texts, part, strict=True))
            tokens += sum(map(len, texts))
            counted = snapshot.accepted.sum(0)
            rounds = counted if not rounds.size else rounds + counted
        scores[family] = FamilyScore(exact, prompts, tokens, tuple(int(n) for n in rounds))
        if progress:
            progress(family, scores[family])
    return scores


def mean_acceptance(scores: dict[str, FamilyScore]) -> float:
    """Tokens a round over all families' rounds together."""
    rounds = np.sum([score.rounds_by_length for score in scores.values()], axis=0)
    return float(np.dot(rounds, np.arange(len(rounds))) / rounds.sum())
