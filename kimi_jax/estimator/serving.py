"""A simulation of serving: the engine's own scheduler decides, and every dispatch takes as long as the estimate says.

Discrete events: requests arrive, the scheduler plans a dispatch (`kimi_jax.serving.scheduler`: slots, pages, chunks
of prompts beside rounds), the clock moves by its cost, and the scheduler is told what came.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kimi_jax.estimator.scenario import CHUNK, Scenario
from kimi_jax.estimator.step import Estimate, estimate
from kimi_jax.serving.arrivals import Arrival
from kimi_jax.serving.events import Seen
from kimi_jax.serving.plan import Plan, Request, Shape
from kimi_jax.serving.scheduler import Scheduler

PAGE_TOKENS = 64
ACCEPTANCE_SIGMA = 0.2
"""Deviation of requests' accepted tokens over their mean: the drafter's card has 3.7 to 5.5 by kind of text."""
MOST_SLOTS = 256
"""Slots that are simulated at most; of a machine with more, some groups stand for all."""


class Costs(Protocol):
    """Milliseconds of a dispatch."""

    def __call__(self, requests: int, context: int, rounds: int, chunks: Sequence[int], seen: int) -> float:
        """Time of some rounds, the first of them beside chunks of prompts.

        Args:
          requests: in the whole machine that take part in the rounds.
          context: cached tokens of each, on average over the fullest group.
          rounds: one after the other; 0 for chunks alone.
          chunks: prompt tokens that each group runs.
          seen: cached tokens that a prompt's token sees, on average.
        """
        ...


class EstimatedCosts:
    """Costs of a scenario's steps. Sizes are rounded to steps of a few per cent, so that few estimates are made."""

    def __init__(self, scenario: Scenario):
        self._scenario = dataclasses.replace(scenario, prefill=None)
        self._estimate = functools.cache(self._of)

    def __call__(self, requests: int, context: int, rounds: int, chunks: Sequence[int], seen: int) -> float:
        """As the protocol says."""
        groups = self._scenario.preset.layout.groups
        load = 0 if not rounds else requests if requests <= 16 * groups else _rounded(requests)
        context = _rounded(max(context, 1))
        most, mean = max(chunks, default=0), sum(chunks) / groups
        if not most:
            return rounds * self._estimate(load, context, 0, 0).step_ms
        # Dense parts wait for the group with most to do; what experts and exchange do is shared by all groups.
        fullest = self._estimate(load, context, _rounded(most), _rounded(max(seen, 1)))
        step_ms = fullest.step_ms
        if mean < 0.9 * most:
            average = self._estimate(load, context, _rounded(max(round(mean), 1)), _rounded(max(seen, 1)))
            step_ms -= sum(fullest.parts[part].ms - average.parts[part].ms for part in ("experts", "exchange"))
        return step_ms + max(rounds - 1, 0) * self._estimate(load, context, 0, 0).step_ms if rounds else step_ms

    def _of(self, requests: int, context: int, chunk: int, seen: int) -> Estimate:
        return estimate(
            dataclasses.replace(
                self._scenario, concurrency=requests, context=context, chunk=chunk, chunk_context=seen,
                budget=self._scenario.budget if requests else 0,
            )
        )  # fmt: skip


def _rounded(value: int) -> int:
    """The nearest of numbers that are a sixteenth of a doubling apart; small ones stay."""
    return value if value <= 16 else round(2 ** (round(16 * math.log2(value)) / 16))


@dataclasses.dataclass(frozen=True)
class Served:
    """One request's times, in seconds from the start."""

    arrived: float
    first: float
    """When its first token came."""
    ended: float
    prompt: int
    answer: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 for an answer of one token."""
        return (self.ended - self.first) / (self.answer - 1) if self.answer > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a simulation came to; requests of its beginning, before the machine was full, are left out."""

    served: tuple[Served, ...]
    gpus: int
    seconds: float
    """Between the first and the last of them to end."""
    tokens: int
    """Of answers in that time."""
    busy: float
    """Share of the time in which dispatches ran."""
    requests: float
    """At work at the same time, on average."""
    queued: float
    """Requests that waited for a slot, on average."""
    preemptions: int
    reused: float
    """Share of the prompts' tokens that was found in kept pages."""

    @property
    def tokens_per_s(self) -> float:
        """Of the whole machine."""
        return self.tokens / self.seconds

    def percentile(self, figure: str, percent: float) -> float:
        """Of `ttft` or `tpot` over requests, in seconds."""
        return float(np.percentile([getattr(each, figure) for each in self.served], percent))

    def mean(self, figure: str) -> float:
        """Of `ttft` or `tpot` over requests, in seconds."""
        return float(np.mean([getattr(each, figure) for each in self.served]))

    def goodput(self, ttft: float, speed: float) -> float:
        """Share of requests whose first token comes within `ttft` seconds and the others at `speed` tokens/s at least.

        The published definition (DistServe): requests that keep both promises.
        """
        good = sum(each.ttft <= ttft and each.tpot * speed <= 1 for each in self.served)
        return good / len(self.served)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Slots and pages as the engine would compile them, and what its dispatches cost."""

    shape: Shape
    costs: Costs
    gpus: int
    acceptance: float
    """Tokens of a round, on average."""
    share: float = 1.0
    """Of the machine's groups that are simulated; the others do the same."""

    @classmethod
    def of(
        cls, scenario: Scenario, slots: int, longest: int, chunk: int = CHUNK, costs: Costs | None = None
    ) -> "Machine":
        """The scenario's machine with so many slots in all, for requests of `longest` tokens at most.

        Pages are as many as its memory holds. Replicas (dp) are servers of their own, which share the requests evenly.

        Raises:
          ValueError: not one such request fits in a group's memory.
        """
        layout = scenario.preset.layout
        each = max(1, slots // layout.groups)
        page = PAGE_TOKENS * layout.cache_ranks
        tiles = -(-longest // page)
        memory = estimate(dataclasses.replace(scenario, concurrency=layout.groups, context=page * tiles)).memory
        pages = min(memory.max_requests // layout.groups, each) * tiles
        if pages < tiles:
            raise ValueError(
                f"a request of {longest} tokens does not fit in the memory of {scenario.preset.name} with "
                f"{scenario.gpu.name}: take a larger machine, more ep, or shorter prompts and answers"
            )
        simulated = max(1, min(layout.ep, MOST_SLOTS // each))
        depth = min(scenario.drafter.block_size - 1, scenario.budget)
        shape = Shape(
            groups=simulated, slots_per_group=each, pages=pages, page_tokens=page, tiles=tiles, lanes=1,
            chunk=chunk, depth=depth, ahead=0,
        )  # fmt: skip
        return cls(
            shape, costs or EstimatedCosts(scenario), layout.num_devices, scenario.acceptance.length(scenario.budget),
            simulated / layout.groups,
        )  # fmt: skip


def simulate(
    machine: Machine, arrivals: Sequence[Arrival], *, in_flight: int | None = None, shared_prefix: int = 0,
    acceptance_sigma: float = ACCEPTANCE_SIGMA, warm_up: float = 0.1, seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Outcome:  # fmt: skip
    """Serves requests, as many as there are.

    Args:
      in_flight: requests that clients keep under way, each sending its next one as one ends; the arrivals' times
        do not count then. None for arrivals at their times.
      shared_prefix: tokens that all prompts begin with, which kept pages then hold.
      acceptance_sigma: deviation of requests' accepted draft tokens over their mean.
      warm_up: share of the requests, the first to come, whose times are left out.
      progress: told how many requests have ended.

    Raises:
      ValueError: no request, or one that fits into no slot.
    """
    return _Run(machine, arrivals, in_flight, shared_prefix, acceptance_sigma, seed).outcome(warm_up, progress)


class _Free:
    """Costs of a machine whose prompts were run elsewhere."""

    def __init__(self, costs: Costs):
        self._costs = costs

    def __call__(self, requests: int, context: int, rounds: int, chunks: Sequence[int], seen: int) -> float:
        """As the protocol says."""
        return self._costs(requests, context, rounds, (), 0) if rounds else 0.0


def disaggregated(
    machine: Machine, scenario: Scenario, arrivals: Sequence[Arrival], prefill_machines: int, *,
    acceptance_sigma: float = ACCEPTANCE_SIGMA, warm_up: float = 0.1, seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Outcome:  # fmt: skip
    """Serves requests whose prompts run on machines of their own, to which they come in turn.

    A prompt's latents then travel over one GPU's network link, or its local one where all is one domain.
    """
    from kimi_jax.ledger.step import Step, cache_bytes  # imports jax

    first: list[tuple[float, Arrival]] = []
    alone = dataclasses.replace(
        machine, shape=dataclasses.replace(machine.shape, slots_per_group=1, slot_counts=()), share=1.0,
    )  # fmt: skip
    for number in range(prefill_machines):
        mine = arrivals[number::prefill_machines]
        prompts = [dataclasses.replace(each, answer=1) for each in mine]
        served = simulate(alone, prompts, acceptance_sigma=0, warm_up=0).served if mine else ()
        first += [(each.first, arrival) for each, arrival in zip(served, mine, strict=True)]
    first.sort(key=lambda pair: pair[0])
    token = cache_bytes(Step(scenario.model, scenario.preset.layout, 1, 1, 1, precision=scenario.precision))
    link = scenario.gpu.network_link.bytes_per_s * scenario.constants.network_bandwidth_fraction
    coming = [dataclasses.replace(a, seconds=at + a.prompt * token / link) for at, a in first]
    free = dataclasses.replace(
        machine, costs=_Free(machine.costs), shape=dataclasses.replace(machine.shape, chunk=machine.shape.capacity),
    )  # fmt: skip
    decoded = simulate(free, coming, acceptance_sigma=acceptance_sigma, warm_up=warm_up, seed=seed, progress=progress)
    kept = first[len(first) - len(decoded.served) :]
    whole = [
        dataclasses.replace(each, arrived=arrival.seconds, first=at)
        for each, (at, arrival) in zip(decoded.served, kept, strict=True)
    ]
    return dataclasses.replace(decoded, served=tuple(whole), gpus=machine.gpus * (1 + prefill_machines))


class _Run:
    def __init__(
        self, machine: Machine, arrivals: Sequence[Arrival], in_flight: int | None, shared_prefix: int,
        acceptance_sigma: float, seed: int,
    ):  # fmt: skip
        if not arrivals:
            raise ValueError("there is nothing to serve: ask for at least one request")
        self._machine, self._random = machine, np.random.default_rng(seed)
        self._closed = None if in_flight is None else max(1, round(in_flight * machine.share))
        # Fewer groups meet as many requests, in a time that is longer in proportion.
        later = [dataclasses.replace(each, seconds=each.seconds / machine.share) for each in arrivals]
        self._coming = later[::-1]
        self._shared = shared_prefix
        self._scheduler = Scheduler(machine.shape, prefix_cache=shared_prefix > 0)
        spread = self._random.normal(1.0, acceptance_sigma, len(arrivals)).clip(0.2, 1.8)
        most = machine.shape.depth + 1
        self._rates = np.clip(1 + (machine.acceptance - 1) * spread, 1, most).tolist()
        self._now = self._busy = self._at_work = self._waited = 0.0
        self._under_way: dict[str, tuple[Arrival, float, float]] = {}
        """By id: the request, when it came, and when its first token did (−1 before)."""
        self._tokens: Counter[str] = Counter()
        self._ids: dict[int, str] = {}
        self._contexts: dict[int, int] = {}
        """Tokens in the cache by slot."""
        self._done: list[tuple[int, Served]] = []

    def outcome(self, warm_up: float, progress: Callable[[int], None] | None) -> Outcome:
        total = len(self._coming)
        while self._coming or not self._scheduler.idle:
            self._admit(total)
            plan = self._scheduler.plan()
            if plan is None:
                self._now = max(self._now, self._coming[-1].seconds)
                continue
            self._dispatch(plan)
            if progress:
                progress(len(self._done))
        return self._summary(int(warm_up * total))

    def _admit(self, total: int) -> None:
        """Submits what has come by now."""
        while self._coming:
            if self._closed is None and self._coming[-1].seconds > self._now:
                return
            if self._closed is not None and len(self._under_way) >= self._closed:
                return
            arrival = self._coming.pop()
            number = total - len(self._coming) - 1
            common = min(self._shared, arrival.prompt - 1)
            ids = (0,) * common + (number + 1,) * (arrival.prompt - common)
            self._scheduler.submit(Request(str(number), ids, arrival.answer))
            came = self._now if self._closed is not None else arrival.seconds
            self._under_way[str(number)] = arrival, came, -1.0

    def _dispatch(self, plan: Plan) -> None:
        machine, shape = self._machine, self._machine.shape
        for admission in plan.admissions:
            self._ids[admission.slot], self._contexts[admission.slot] = admission.id, 0
        cached: Counter[int] = Counter()
        running: Counter[int] = Counter()
        for slot in plan.active:
            cached[shape.group(slot)] += self._contexts[slot]
            running[shape.group(slot)] += 1
        fullest = max(running.values(), default=0)
        context = max(cached.values(), default=0) // max(fullest, 1)
        chunks = [0] * shape.groups
        for lane in plan.lanes:
            chunks[shape.group(lane.slot)] += len(lane.tokens)
            self._contexts[lane.slot] = lane.start + len(lane.tokens)
        seen = max((lane.start + len(lane.tokens) // 2 for lane in plan.lanes), default=0)
        told = {lane.slot: int(lane.last) for lane in plan.lanes}
        rounds = 0
        for slot in plan.active:
            told[slot], took = self._rounds(self._ids[slot], plan.rounds)
            self._contexts[slot] += told[slot]
            rounds = max(rounds, took)  # the device stops when nobody goes on
        requests, copies = round(len(plan.active) / machine.share), round(1 / machine.share)
        ms = machine.costs(requests, context, rounds, chunks * copies, seen)
        self._now += ms / 1e3
        self._busy += ms / 1e3
        self._at_work += ms / 1e3 * self._scheduler.occupied
        self._waited += ms / 1e3 * self._scheduler.waiting
        self._observe(plan, told)

    def _rounds(self, name: str, rounds: int) -> tuple[int, int]:
        """Tokens that a request gets of so many rounds, and the rounds that it takes part in."""
        left, rate = self._under_way[name][0].answer - self._tokens[name], self._rates[int(name)]
        new = 0
        for number in range(rounds):
            new += int(rate + self._random.random())
            if new >= left:
                return left, number + 1
        return new, rounds

    def _observe(self, plan: Plan, told: dict[int, int]) -> None:
        seen = {}
        for slot, new in told.items():
            name = self._ids[slot]
            self._tokens[name] += new
            seen[slot] = Seen((0,) * new, finished=self._tokens[name] == self._under_way[name][0].answer)
            if new and self._under_way[name][2] < 0:
                self._under_way[name] = *self._under_way[name][:2], self._now
        for event in self._scheduler.observe(plan.number, seen):
            if event.reason:
                arrival, came, first = self._under_way.pop(event.id)
                served = Served(came, first, self._now, arrival.prompt, arrival.answer)
                self._done.append((int(event.id), served))

    def _summary(self, left_out: int) -> Outcome:
        machine, scheduler = self._machine, self._scheduler
        kept = [served for number, served in sorted(self._done, key=lambda pair: pair[0]) if number >= left_out]
        begin = max((served.ended for number, served in self._done if number < left_out), default=0.0)
        # Tokens of the time between, those of a request spread evenly over the time in which it answered.
        end = max(served.arrived for served in kept) if self._closed is None else max(s.ended for s in kept)
        begin, end = (begin, end) if end > begin else (0.0, max(served.ended for served in kept))
        tokens = sum(_within(served, begin, end) for _, served in self._done)
        return Outcome(
            tuple(kept), machine.gpus, end - begin, round(tokens / machine.share), self._busy / self._now,
            self._at_work / self._now / machine.share, self._waited / self._now / machine.share, scheduler.preemptions,
            scheduler.reused_tokens / scheduler.prompt_tokens,
        )  # fmt: skip


def _within(served: Served, begin: float, end: float) -> float:
    """Tokens of an answer that came in a time."""
    length = served.ended - served.first
    if length <= 0:
        return served.answer if begin < served.ended <= end else 0
    return served.answer * max(0.0, min(end, served.ended) - max(begin, served.first)) / length
