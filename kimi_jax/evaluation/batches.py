"""Requests of any lengths and number, as an evaluation harness asks them, in batches that share compiled programs."""

import dataclasses
from collections.abc import Iterator, Sequence

from kimi_jax.chat import parse
from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.forcing import Scores, Window, score
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling

SMALLEST_BUCKET = 64
"""Lengths are rounded up to powers of two from here, so that batches of many lengths share a few compiled shapes."""


def bucket(length: int) -> int:
    """Length to compile for."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def score_all(engine: Engine, windows: Sequence[Window], batch: int) -> Iterator[tuple[list[int], Scores]]:
    """Scores of windows in batches of similar lengths, longest first: the first batch shows whether memory suffices.

    Equal windows run once. Yields the indices of the windows that are the same one, and its scores.

    Raises:
      ValueError: as `forcing.score`; the index is that within a batch.
    """
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, window in enumerate(windows):
        places.setdefault((tuple(window.inputs), tuple(window.targets)), []).append(index)
    distinct = sorted(places, key=lambda ids: -len(ids[0]))
    for first in range(0, len(distinct), batch):
        part = distinct[first : first + batch]
        cut = [windows[places[ids][0]] for ids in part]
        for ids, result in zip(part, score(engine, cut, requests=batch, length=bucket(len(part[0][0]))), strict=True):
            yield places[ids], result


@dataclasses.dataclass(frozen=True)
class Writing:
    """How texts are to be continued."""

    stops: tuple[str, ...] = ()
    """Strings that end a text; neither they nor what follows is part of it."""
    max_new_tokens: int = 256
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    chat: bool = False
    """The prompt ends in a turn of the assistant: of what comes, only the answer counts, not the thinking."""
    thinking: bool = False
    """The prompt leaves the thinking open."""

    def text(self, engine: Engine, ids: Sequence[int]) -> tuple[str, bool]:
        """The text that generated ids say, cut at the first stop string, and whether there was one."""
        if self.chat:
            text = parse(ids, engine.tokenizer, thinking=self.thinking).answer
        else:
            text = engine.tokenizer.decode([token for token in ids if token not in engine.stop_ids])
        ends = [at for stop in self.stops if stop and (at := text.find(stop)) >= 0]
        return (text[: min(ends)], True) if ends else (text, False)


def write_all(
    engine: Engine, prompts: Sequence[Sequence[int]], writing: Writing, *, batch: int, draft: Draft, seed: int = 0
) -> Iterator[tuple[int, str]]:
    """Continues prompts in batches of similar lengths, longest first, each until all its texts have ended.

    A prompt too long for the model's positions loses its beginning. The last batch is filled by repeating a prompt.
    Yields each prompt's index and its text.

    Raises:
      ValueError: as `Engine.generate`; no position left for a prompt.
    """
    room = engine.config.max_position_embeddings - writing.max_new_tokens
    if room < 1:
        raise ValueError(
            f"{writing.max_new_tokens} new tokens leave no room for a prompt: the model has "
            f"{engine.config.max_position_embeddings} positions"
        )
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        cut = [list(prompts[index][-room:]) for index in part]
        longest = len(cut[0])
        limits = Limits(writing.max_new_tokens, least_capacity=bucket(longest) + writing.max_new_tokens)
        padded = cut + cut[-1:] * (batch - len(cut))
        ids: list[list[int]] = [[] for _ in padded]
        # A sampled prompt may be asked several times, and answers to different ones should not share their noise.
        samples = part + part[-1:] * (batch - len(part))
        for step in engine.generate(padded, limits, writing.sampling, seed, draft, samples=samples):
            for text, new in zip(ids, step.new_tokens, strict=True):
                text += new
            if all(
                finished or writing.text(engine, text)[1]
                for finished, text in zip(step.finished[: len(part)], ids[: len(part)], strict=True)
            ):
                break
        for index, text in zip(part, ids, strict=False):
            yield index, writing.text(engine, text)[0]
