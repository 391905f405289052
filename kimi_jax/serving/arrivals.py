"""Requests as a server meets them, drawn at random: when they come, and how long their prompts and answers are."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths in tokens whose logarithms are normal, rounded and cut at `longest`."""

    median: int
    sigma: float = 0.0
    """Deviation of the logarithms; 0 makes all alike."""
    longest: int | None = None

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """So many lengths, each at least 1."""
        lengths = np.exp(np.log(self.median) + self.sigma * random.standard_normal(count)).round()
        return np.clip(lengths, 1, self.longest).astype(int).tolist()


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request on its way to a server."""

    seconds: float
    """When it comes, from the start."""
    prompt: int
    answer: int


def arrival_times(requests: int, rate: float | None, random: np.random.Generator) -> list[float]:
    """Seconds after the first at which requests come, independently of each other and `rate` a second on average.

    Without a rate all come at once.

    Raises:
      ValueError: a number or a rate that is not positive.
    """
    for name, value in (("requests", requests), ("rate", 1.0 if rate is None else rate)):
        if not value > 0:
            raise ValueError(f"{name} is {value:g}; it must be more than 0")
    gaps = np.zeros(requests) if rate is None else random.exponential(1 / rate, requests)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def poisson(
    requests: int, rate: float | None, prompts: Lengths, answers: Lengths, seed: int = 0
) -> tuple[Arrival, ...]:
    """Requests that come at `arrival_times`, with lengths that are drawn after those."""
    random = np.random.default_rng(seed)
    times = arrival_times(requests, rate, random)
    pairs = zip(prompts.draw(random, requests), answers.draw(random, requests), strict=True)
    return tuple(Arrival(time, *pair) for time, pair in zip(times, pairs, strict=True))
