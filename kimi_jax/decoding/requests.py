"""Prompts that want different sampling: batches of those that want the same, told as one."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from kimi_jax.decoding.engine import PLAIN, Draft, Engine
from kimi_jax.decoding.generate import Limits, Progress
from kimi_jax.decoding.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how its answer is drawn."""

    ids: Sequence[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int


def generate_all(
    engine: Engine,
    requests: Sequence[Request],
    draft: Draft = PLAIN,
    batch: int | None = None,
    ended: Callable[[int], bool] = lambda index: False,
) -> Iterator[Progress]:
    """Decodes requests in batches of the same sampling, yielding after every dispatch.

    Progress is that of all requests in their order: those of later batches have no tokens yet. Its snapshot holds no
    `emitted`, since batches differ in the length of their texts.

    Args:
      batch: requests decoded together at most; by default all that want the same sampling.
      ended: whether the host has ended a request's text; a batch stops once all its texts have ended. What still comes
        for such a request is among its new tokens.

    Raises:
      ValueError, NonFiniteLogitsError: as `Engine.generate`; prompts are counted within their batch.
    """
    alike: dict[Sampling, list[int]] = {}
    for index, request in enumerate(requests):
        alike.setdefault(request.sampling, []).append(index)
    size = batch or len(requests)
    batches = [(sampling, found[i : i + size]) for sampling, found in alike.items() for i in range(0, len(found), size)]
    most = max((request.max_new_tokens for request in requests), default=1)
    room = max((len(request.ids) for request in requests), default=0) + most
    finished, before, whole = [False] * len(requests), 0.0, None
    for sampling, indices in batches:
        together = [requests[index] for index in indices]
        each = tuple(request.max_new_tokens for request in together)
        # Batches that are given the same room share their programs.
        limits = Limits(most, each=each, least_capacity=room)
        seeds, seconds = [request.seed for request in together], 0.0
        earlier = whole
        for progress in engine.generate([request.ids for request in together], limits, sampling, seeds, draft):
            new: list[list[int]] = [[] for _ in requests]
            for index, ids, done in zip(indices, progress.new_tokens, progress.finished, strict=True):
                new[index], finished[index] = ids, done
            seconds = before + progress.seconds
            part = dataclasses.replace(progress.snapshot, emitted=progress.snapshot.emitted[:, :0])
            whole = part if len(batches) == 1 else _merged(earlier, part, indices, len(requests))
            yield Progress(new, list(finished), seconds, whole)
            if all(finished[index] or ended(index) for index in indices):
                break
        before = seconds


def _merged[S](earlier: S | None, part: S, indices: Sequence[int], count: int) -> S:
    """A batch's counts in their places among all requests; counts of the whole batch are added up."""

    def place(new: np.ndarray, old: np.ndarray | None) -> np.ndarray:
        if not new.ndim:
            return new if old is None else new + old
        rows = np.zeros((count, *new.shape[1:]), new.dtype) if old is None else old.copy()
        rows[list(indices)] = new
        return rows

    if earlier is None:
        return jax.tree.map(lambda new: place(new, None), part)
    return jax.tree.map(place, part, earlier)
