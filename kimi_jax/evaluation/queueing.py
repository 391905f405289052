"""A queue of requests through an engine's slots, beside static batches of the same requests."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits, Progress, Request
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.serving.arrivals import Lengths


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests whose answers are as long as log-normal numbers say, which have no end of their own."""

    requests: int = 200
    slots: int = 8
    prompt: int = 24
    """Tokens of each prompt."""
    median: int = 40
    """New tokens of the median answer."""
    sigma: float = 0.8
    """Deviation of the answers' logarithms."""
    longest: int = 400
    """New tokens at most."""
    seed: int = 0

    def draw(self, vocab_size: int) -> list[Request]:
        """The requests."""
        random = np.random.default_rng(self.seed)
        limits = Lengths(self.median, self.sigma, self.longest).draw(random, self.requests)
        prompts = random.integers(0, vocab_size // 2, (self.requests, self.prompt)).tolist()
        return [Request(ids, Sampling(), 0, limit, stop_ids=()) for ids, limit in zip(prompts, limits, strict=True)]


@dataclasses.dataclass(frozen=True)
class Served:
    """What serving the load took."""

    way: str
    tokens: int
    rounds: int
    """Rounds of the engine, one counting once for all its slots."""
    slot_use: float
    """Share of the slots that a round advanced, on average."""
    seconds: float

    def as_dict(self, base: "Served") -> dict[str, Any]:
        """A line of a table, beside the one that counts as 1."""
        speed, before = self.tokens / self.seconds, base.tokens / base.seconds
        return {
            "way": self.way,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "slot_use": round(self.slot_use, 3),
            "tokens_per_second": round(speed, 1),
            "speed_up": round(speed / before, 2),
        }


def measure(
    engine: Engine, load: Load, draft: Draft, *, static: bool = True, progress: Callable[[int], None] | None = None
) -> list[Served]:
    """Serves the load as a queue, and before it as static batches where wanted; each once before, to compile.

    A static batch ends with its longest answer; its batches are the requests in their order.
    """
    requests, slots = load.draw(engine.config.vocab_size), load.slots
    limits = Limits(load.longest, prefill_chunk=32, least_capacity=load.prompt + load.longest)
    batches = [requests[first : first + slots] for first in range(0, len(requests), slots)]

    def serve(parts: Sequence[Sequence[Request]]) -> Iterator[Progress]:
        for part in parts:
            yield from engine.serve(part, limits, draft, slots=slots)

    found = []
    for way, parts in ((("static batches", batches),) if static else ()) + (("queue", [requests]),):
        for _ in serve([part[: 2 * slots] for part in parts[:1]]):
            pass
        tokens = rounds = busy = 0
        started = time.perf_counter()
        for part in parts:
            last = None
            for last in serve([part]):
                new = sum(map(len, last.new_tokens))
                tokens += new
                if progress:
                    progress(new)
            if last is not None:
                rounds, busy = rounds + last.counts.rounds_run, busy + last.counts.slot_rounds
        found.append(Served(way, tokens, rounds, busy / max(rounds * slots, 1), time.perf_counter() - started))
    return found
