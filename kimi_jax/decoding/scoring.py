"""Log-probabilities of given texts: requests that write nothing, in the same slots as those that do."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float

from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.session import Piece
from kimi_jax.serving import plan

SCORES = plan.Settings(prompt_logprobs=0)


@dataclasses.dataclass(frozen=True)
class Window:
    """Ids to run, and the ids that their last rows are to predict."""

    inputs: list[int]
    targets: list[int]

    @property
    def unscored(self) -> int:
        """Rows at the beginning that predict nothing."""
        return len(self.inputs) - len(self.targets)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the model says of a window's targets."""

    logprobs: Float[np.ndarray, " targets"]
    """Natural logarithms, float32."""
    greedy: Bool[np.ndarray, " targets"]
    """Whether the target is the most likely token."""
    reused: int = 0
    """Rows that were not run, because a window before this one begins alike."""


def check_windows(windows: Sequence[Window], vocab_size: int) -> None:
    """Refuses windows whose targets are not what follows their rows.

    Raises:
      ValueError: naming the window.
    """
    for index, window in enumerate(windows, 1):
        if not window.targets or window.unscored < 0:
            raise ValueError(f"window {index} has {len(window.targets)} targets for {len(window.inputs)} rows")
        if window.inputs[window.unscored + 1 :] != window.targets[:-1]:
            raise ValueError(f"window {index}: its targets are not the ids that follow its rows")
        if not 0 <= window.targets[-1] < vocab_size:
            raise ValueError(f"window {index} has an id outside 0..{vocab_size - 1}")


def score(queue: Queue, windows: Sequence[Window]) -> Iterator[tuple[int, Scores]]:
    """Scores of windows as they are known, each with its window's index.

    Args:
      queue: with nothing in it; it is emptied at the end, and when the iterator is dropped.

    Raises:
      ValueError: at the end, where log-probabilities are not finite, naming the windows.
    """
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    broken: list[int] = []
    for index, window in enumerate(windows):
        reusable = window.unscored
        ids, following = tuple(window.inputs), window.targets[-1]
        queue.submit(plan.Request(str(index), ids, 0, SCORES, reusable=reusable, following=following))
        found[index] = np.full(len(ids), np.nan, np.float32), np.zeros(len(ids), bool)
    try:
        while not queue.idle:
            for event, _ in queue.step():
                index = int(event.id)
                if isinstance(piece := event.extra, Piece):
                    for whole, part in zip(found[index], (piece.scored.logprobs, piece.scored.greedy), strict=True):
                        whole[piece.start : piece.start + len(part)] = part
                if event.reason is None:
                    continue
                logprobs, greedy = (rows[windows[index].unscored :] for rows in found.pop(index))
                if event.reason == "error" or not np.isfinite(logprobs).all():
                    broken.append(index)
                else:
                    yield index, Scores(logprobs, greedy, event.reused)
    finally:
        queue.close()
    if broken:
        which = ", ".join(str(index + 1) for index in sorted(broken))
        raise ValueError(f"window {which}: log-probabilities are not finite; check the checkpoint and the kernels")


def strided(ids: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Windows of up to `length` rows that predict every id but the first exactly once.

    The first predicts up to `length` ids; each later one up to `stride` more, behind as much context as fits. With
    `stride == length` windows do not overlap; a smaller stride gives each id more context and takes more windows.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"stride is {stride}; it must lie in 1..{length}, the window's length")
    end = 1
    while end < len(ids):
        first, end = end, min(end + (length if end == 1 else stride), len(ids))
        yield Window(list(ids[max(0, end - 1 - length) : end - 1]), list(ids[first:end]))
