"""Requests of any lengths and number, as an evaluation harness asks them, in batches that share compiled programs."""

import dataclasses
from collections.abc import Iterator, Sequence

from kimi_jax.chat import parse
from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.scoring import Scores, Window

SMALLEST_BUCKET = 64
"""Lengths are rounded up to powers of two from here, so that batches of many lengths share a few compiled shapes."""


def bucket(length: int) -> int:
    """Length to compile for."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def score_all(engine: Engine, windows: Sequence[Window], batch: int) -> Iterator[tuple[list[int], Scores]]:
    """Scores of windows, `batch` at a time, as they are known.

    Equal windows run once, and those that begin alike one after the other. Yields the indices of the windows that are
    the same one, and its scores.

    Raises:
      ValueError: as `Engine.score`; the index is that among the different windows, in their order.
    """
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for index, window in enumerate(windows):
        places.setdefault((tuple(window.inputs), tuple(window.targets)), []).append(index)
    distinct = sorted(places)
    if not distinct:
        return
    limits = Limits(least_capacity=bucket(max(len(inputs) for inputs, _ in distinct)))
    for index, scores in engine.score([windows[places[ids][0]] for ids in distinct], batch, limits):
        yield places[distinct[index]], scores


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
    """Continues prompts, `batch` at a time, each until its text has ended.

    A prompt too long for the model's positions loses its beginning. Yields each prompt's index and its text, as they
    end.

    Raises:
      ValueError: as `Engine.serve`; no position left for a prompt.
    """
    room = engine.config.max_position_embeddings - writing.max_new_tokens
    if room < 1:
        raise ValueError(
            f"{writing.max_new_tokens} new tokens leave no room for a prompt: the model has "
            f"{engine.config.max_position_embeddings} positions"
        )
    if not prompts:
        return
    longest = max(map(len, prompts))
    limits = Limits(writing.max_new_tokens, least_capacity=bucket(min(longest, room)) + writing.max_new_tokens)
    # A sampled prompt may be asked several times, and answers to different ones should not share their noise.
    requests = [
        Request(list(prompt[-room:]), writing.sampling, seed, writing.max_new_tokens, sample)
        for sample, prompt in enumerate(prompts)
    ]
    ids: list[list[int]] = [[] for _ in prompts]
    told: set[int] = set()
    for step in engine.serve(requests, limits, draft, slots=batch, ended=told.__contains__):
        for index, new in enumerate(step.new_tokens):
            if index in told or not (new or step.finished[index]):
                continue
            ids[index] += new
            text, stopped = writing.text(engine, ids[index])
            if stopped or step.finished[index]:
                told.add(index)
                yield index, text
