"""Search over layouts, budgets and loads: the best layout for a goal, sweeps, and HGX against NVL72."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kimi_jax.estimator.scenario import Scenario
from kimi_jax.estimator.step import Estimate
from kimi_jax.estimator.step import estimate as estimate_step
from meshes import PRESETS, Layout, LayoutError, Preset, preset

BUDGETS = (*range(9), 12, 16, 24, 32, 48, 64, 96, 128)
"""Tree budgets that a search tries; 0 decodes without a draft."""

LOADS = (*range(1, 5), *(round(4 * 2 ** (n / 2)) for n in range(1, 23)))
"""Requests that a search for a speed tries, up to 8,192."""

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

Goal = Literal["latency", "throughput", "cost"]
Family = Literal["hgx", "nvl"]
Side = Literal["left", "right"]

ERROR_BAND = {"single-node": 0.15, "wide-ep": 0.30, "pcie": 0.25, "prefill": 0.25}
"""Largest error that the model claims, by the family of published points."""


def error_band(estimate: Estimate) -> float | None:
    """What the model's error was on published points like this one (`study.published`); None where there are none.

    There are none of this program, which has never been timed, nor of tensor parallelism beyond 8 GPUs or over the
    network but one machine that proves nothing.
    """
    s = estimate.scenario
    layout = s.preset.layout
    if s.kernels.name not in ("public", "vllm", "sglang"):
        return None
    if layout.tp > 8 or s.preset.span("tp").domains > 1:
        return None
    if not s.gpu.nvlink_bytes_per_s:
        return ERROR_BAND["pcie"] if layout.ep == 1 else None
    return ERROR_BAND["single-node" if layout.ep * layout.tp <= 8 and layout.ep == 1 else "wide-ep"]


def band_of(*estimates: Estimate | None) -> float | None:
    """The loosest band of estimates that are compared; None where one of them has none."""
    bands = [error_band(e) for e in estimates if e is not None]
    return None if None in bands else max((band for band in bands if band is not None), default=0.0)


@dataclass(frozen=True)
class Fixed:
    """What a search leaves alone; None is free."""

    dp: int | None = None
    ep: int | None = None
    tp: int | None = None
    experts: str | None = None
    exchange: str | None = None

    def allows(self, layout: Layout) -> bool:
        """Whether a layout keeps to it. The exchange is free where there is nothing to exchange."""
        wanted = {name: value for name, value in vars(self).items() if value is not None}
        if layout.ep == 1:
            wanted.pop("exchange", None)
        if layout.tp == 1:
            wanted.pop("experts", None)
        return all(getattr(layout, name) == value for name, value in wanted.items())


FREE = Fixed()


def layouts(machine: Preset, scenario: Scenario, fixed: Fixed = FREE) -> Iterator[Preset]:
    """All layouts of a machine that the model's sizes allow, whole or with tp 16, 32 or 64 on most of it."""
    from kimi_jax.ledger import layout_rules  # imports jax, for which `--help` should not wait

    total = machine.layout.num_devices
    exchanges = ("allgather", "alltoall") if fixed.exchange is None else (fixed.exchange,)
    for tp in (2**n for n in range(total.bit_length())):
        groups, cache = total // tp, machine.layout.cache if tp > 1 else "copied"
        for dp in (d for d in range(1, groups + 1) if groups % d == 0):
            ep = groups // dp
            splits = ("slots", "width") if tp > 1 else ("slots",)
            for experts, exchange in itertools.product(splits, exchanges if ep > 1 else ("allgather",)):
                layout = Layout(dp, ep, tp, experts, exchange, cache)
                try:
                    layout_rules.check(scenario.model, layout)
                except LayoutError:
                    continue
                if fixed.allows(layout):
                    yield dataclasses.replace(machine, layout=layout)


def describe(layout: Layout) -> str:
    """A layout in words, with what is not plain from its axes."""
    experts = "" if layout.tp == 1 else f", experts by {layout.experts}"
    exchange = "" if layout.ep == 1 else f", {layout.exchange}"
    cache = ", cache split" if layout.cache_ranks > 1 else ""
    return f"{layout}{experts}{exchange}{cache}"


@dataclass(frozen=True)
class Recommendation:
    """The best layout for a goal, the best of another shape, and why the first wins."""

    best: Estimate
    runner_up: Estimate | None
    goal: Goal
    margin: float
    """Best over runner-up, minus 1, in the goal's measure."""
    is_certain: bool
    """Whether the margin is larger than the model's error on such layouts."""
    reasons: tuple[str, ...]


def best_budget(scenario: Scenario, budgets: Iterable[int] = BUDGETS) -> Estimate:
    """The budget whose tokens over time are largest: argmax A(B) / t(B).

    Of many budgets every fourth is tried, and then the neighbours of the best so far while they are better. Prompts
    take a time in proportion to A(B), which changes nothing about the choice.
    """
    plain, choices = dataclasses.replace(scenario, prefill=None), sorted(set(budgets))

    @functools.cache
    def speed(place: int) -> float:
        return estimate_step(dataclasses.replace(plain, budget=choices[place])).tokens_per_s_per_user

    places = range(len(choices)) if len(choices) <= FEW else range(0, len(choices), FEW - 1)
    best, last = max(places, key=speed), -1
    while best != last:
        last = best
        best = max(range(max(best - 1, 0), min(best + 2, len(choices))), key=speed)
    return estimate_step(dataclasses.replace(scenario, budget=choices[best]))


FEW = 5
"""Budgets that are all tried."""


def candidates(
    machine: Preset,
    scenario: Scenario,
    budgets: Sequence[int] = BUDGETS,
    with_cache_split: bool = False,
    fixed: Fixed = FREE,
) -> list[Estimate]:
    """Each layout of the machine at its best budget, those that do not fit left out."""
    found = []
    for candidate in layouts(machine, scenario, fixed):
        split = dataclasses.replace(candidate.layout, cache="split")
        both = with_cache_split and split.tp > 1 and candidate.layout != split
        for layout in (candidate.layout, split) if both else (candidate.layout,):
            s = dataclasses.replace(scenario, preset=candidate.with_layout(layout))
            estimate = best_budget(s, budgets)
            if estimate.memory.fits:
                found.append(estimate)
    return found


def fastest(
    machine: Preset, scenario: Scenario, budgets: Sequence[int] = BUDGETS, fixed: Fixed = FREE
) -> Estimate | None:
    """The layout of a machine that gives a user most tokens/s, at its best budget; None where none fits."""
    found = candidates(machine, scenario, budgets, fixed=fixed)
    return max(found, key=lambda e: e.tokens_per_s_per_user, default=None)


def recommend(
    machine: Preset,
    scenario: Scenario,
    goal: Goal = "latency",
    budgets: Sequence[int] = BUDGETS,
    concurrencies: Sequence[int] = CONCURRENCIES,
    least_tokens_per_s_per_user: float = 0.0,
    ttft: float = math.inf,
    with_cache_split: bool = False,
    fixed: Fixed = FREE,
) -> Recommendation:
    """Find the best layout of a machine.

    latency: most tokens per second for a user at the scenario's concurrency.
    throughput, cost: most tokens per second for the system, or for a GPU that the layout uses, at any concurrency that
    leaves every user `least_tokens_per_s_per_user` and brings first tokens within `ttft` seconds.

    Raises:
        ValueError: nothing fits in memory, or nothing is fast enough; the message says by how much.
    """
    loads = (scenario.concurrency,) if goal == "latency" else concurrencies
    at_loads = (dataclasses.replace(scenario, concurrency=load) for load in loads)
    every = [e for s in at_loads for e in candidates(machine, s, budgets, with_cache_split, fixed)]
    if not every:
        raise ValueError(_nothing_fits(machine, scenario, fixed))
    fast = [e for e in every if e.tokens_per_s_per_user >= least_tokens_per_s_per_user]
    enough = [e for e in fast if e.ttft_s <= ttft]
    if fast and not enough:
        least = min(e.ttft_s for e in fast)
        told = "prompts come faster than they can be run" if math.isinf(least) else f"the least is {least:.2f} s"
        raise ValueError(
            f"no layout of {machine.name} brings first tokens within {ttft:g} s at {least_tokens_per_s_per_user:g} "
            f"tokens/s for every user: {told}; ask for less, or for shorter prompts or a larger --chunk"
        )
    if not enough:
        most = max(e.tokens_per_s_per_user for e in every)
        raise ValueError(
            f"no layout of {machine.name} gives every user {least_tokens_per_s_per_user:.0f} tokens/s: "
            f"the fastest gives {most:.0f}"
        )

    def value(e: Estimate) -> float:
        return {"latency": e.tokens_per_s_per_user, "throughput": e.tokens_per_s, "cost": e.tokens_per_s_per_gpu}[goal]

    ranked = sorted(enough, key=value, reverse=True)
    best = ranked[0]
    other = next((e for e in ranked if _axes(e) != _axes(best)), None)
    margin = value(best) / value(other) - 1 if other else math.inf
    # Two layouts of one model on one machine share most errors: the band is that of the pair's looser one.
    band = band_of(best, other) if other else 0.0
    return Recommendation(best, other, goal, margin, band is not None and margin > band, _reasons(best, other))


def _axes(e: Estimate) -> tuple[int, int, int]:
    layout = e.scenario.preset.layout
    return layout.dp, layout.ep, layout.tp


def _reasons(best: Estimate, other: Estimate | None) -> tuple[str, ...]:
    if other is None:
        return ("no other shape fits",)
    reasons = []
    if best.scenario.concurrency != other.scenario.concurrency or best.scenario.budget != other.scenario.budget:
        reasons.append(
            f"at its best the first serves {best.scenario.concurrency} requests with budget {best.scenario.budget} "
            f"in {best.step_ms:.1f} ms steps, the second {other.scenario.concurrency} with budget "
            f"{other.scenario.budget} in {other.step_ms:.1f} ms"
        )
    gaps = {part: other.parts[part].ms - best.parts[part].ms for part in best.parts}
    for part in sorted(gaps, key=lambda name: -abs(gaps[name]))[:3]:
        if abs(gaps[part]) >= 0.05:
            verb = "less" if gaps[part] > 0 else "more"
            reasons.append(
                f"{part}: {abs(gaps[part]):.2f} ms {verb} ({best.parts[part].ms:.2f} against "
                f"{other.parts[part].ms:.2f} ms)"
            )
    return tuple(reasons)


def _nothing_fits(machine: Preset, scenario: Scenario, fixed: Fixed) -> str:
    estimates = [
        estimate_step(dataclasses.replace(scenario, preset=candidate))
        for candidate in layouts(machine, scenario, fixed)
    ]
    if not estimates:
        return f"no layout of {machine.name} keeps to what was fixed: leave an axis free"
    closest = min(estimates, key=lambda e: e.memory.total)
    over = (closest.memory.total - closest.memory.capacity) / 1e9
    return (
        f"no layout of {machine.name} holds {scenario.concurrency} requests of {scenario.context} tokens: "
        f"the closest, {closest.scenario.preset.layout}, is {over:.0f} GB a GPU over "
        f"and holds {closest.memory.max_requests} requests"
    )


def machines(card: str | None = None) -> list[tuple[Preset, str]]:
    """Whole machines with the cards they are made of, smallest first: racks, HGX nodes, and for cards that are in
    neither a node of eight.

    Args:
      card: a GPU's short name, to leave out the others.
    """
    whole = [machine for machine in PRESETS.values() if machine.name != "local"]
    known = {name for machine in whole for name in machine.gpu_names}
    whole.append(preset("local").with_axes(tp=8))
    pairs = [
        (machine, name)
        for machine in whole
        for name in machine.gpu_names
        if card in (None, name) and (machine.name != "local" or name not in known)
    ]
    return sorted(pairs, key=lambda pair: pair[0].layout.num_devices)


def smallest(
    machines: Iterable[tuple[Preset, Scenario]], least_tokens_per_s_per_user: float, budgets: Sequence[int] = BUDGETS
) -> list[Estimate]:
    """For each card the smallest machine that gives every user a speed, in its best layout; fewest GPUs come first.

    Args:
      machines: smallest first, with the load and the card.

    Raises:
      ValueError: no machine does; the message names the fastest, or says that none holds the load.
    """
    if not least_tokens_per_s_per_user > 0:
        raise ValueError(f"--least-speed is {least_tokens_per_s_per_user:g}: ask for more than 0 tokens/s")
    found: dict[str, Estimate] = {}
    tried: list[Estimate] = []
    load = (0, 0)
    for machine, scenario in machines:
        load = scenario.concurrency, scenario.context
        if scenario.gpu.name in found:
            continue
        best = fastest(machine, scenario, budgets)
        tried += [best] if best else []
        if best and best.tokens_per_s_per_user >= least_tokens_per_s_per_user:
            found[scenario.gpu.name] = best
    if not tried:
        raise ValueError("no machine holds {} requests of {} tokens: ask for fewer or shorter ones".format(*load))
    if not found:
        most = max(tried, key=lambda e: e.tokens_per_s_per_user)
        s = most.scenario
        users = "1 user" if s.concurrency == 1 else f"each of {s.concurrency} users"
        raise ValueError(
            f"no machine gives {users} {least_tokens_per_s_per_user:g} tokens/s: the fastest, "
            f"{s.preset.name} with {s.gpu.name}, gives {most.tokens_per_s_per_user:.0f}"
        )
    return sorted(found.values(), key=lambda e: (e.scenario.preset.topology.num_gpus, -e.tokens_per_s_per_user))


def machine_of(family: Family, gpus: int) -> Preset:
    """A machine of one family with so many GPUs: `hgx-ib-N`, `nvl36`, `nvl72` and parts of it, or several racks.

    Raises:
        LayoutError: no such machine; the message names the nearest.
    """
    if family == "hgx":
        return preset(f"hgx-ib-{gpus}")
    if gpus in (36, 72):
        return preset(f"nvl{gpus}")
    if gpus > 72:
        if gpus % 72:
            raise LayoutError(f"{gpus} GPUs are no whole racks of 72: use {gpus // 72 * 72} or {-(-gpus // 72) * 72}")
        return preset(f"nvl72x{gpus // 72}")
    return preset("nvl72").with_axes(dp=1, ep=gpus, tp=1)


def operating_points(
    machine: Preset, scenario: Scenario, budgets: Sequence[int] = BUDGETS, loads: Sequence[int] = LOADS,
    fixed: Fixed = FREE,
) -> list[Estimate]:  # fmt: skip
    """Every layout that fits at its best budget, at every load: what a machine can be run as."""
    return [
        e
        for n in loads
        for e in candidates(machine, dataclasses.replace(scenario, concurrency=n), budgets, fixed=fixed)
    ]


def at_speed(points: Iterable[Estimate], least_speed: float, ttft: float = math.inf) -> Estimate | None:
    """Of points the one that gives a GPU most tokens/s while every user has so many; None where none does.

    Args:
      least_speed: tokens/s of every user.
      ttft: seconds to the first token, at most, on average.
    """
    enough = [e for e in points if e.tokens_per_s_per_user >= least_speed and e.ttft_s <= ttft]
    return max(enough, key=lambda e: e.tokens_per_s_per_gpu, default=None)


def dollars_per_million(e: Estimate, price: float) -> float:
    """What a million tokens of answers cost at a GPU-hour's price."""
    return price / 3600 / e.tokens_per_s_per_gpu * 1e6


@dataclass(frozen=True)
class Comparison:
    """The best layouts of two machines at one load."""

    concurrency: int
    left: Estimate | None
    right: Estimate | None

    @property
    def ratio(self) -> float:
        """Right over left, tokens per second for a user; infinite where only the right fits."""
        if self.left is None or self.right is None:
            return math.inf if self.left is None else 0.0
        return self.right.tokens_per_s_per_user / self.left.tokens_per_s_per_user

    @property
    def verdict(self) -> str:
        """Which machine is faster, or that the model cannot tell."""
        if self.left is None or self.right is None:
            return "neither fits" if self.left is self.right else "only one fits"
        band = band_of(self.left, self.right)
        if band is None:
            return "no band known"
        if abs(self.ratio - 1) <= band:
            return "too close to tell"
        return f"{self.right.scenario.preset.name if self.ratio > 1 else self.left.scenario.preset.name} faster"


def compare(
    left: tuple[Preset, Scenario],
    right: tuple[Preset, Scenario],
    concurrencies: Sequence[int] = CONCURRENCIES,
    budgets: Sequence[int] = BUDGETS,
) -> list[Comparison]:
    """Best layout of two machines at each concurrency. The scenarios carry each machine's GPU and kernels."""

    def best(machine: Preset, scenario: Scenario, load: int) -> Estimate | None:
        return fastest(machine, dataclasses.replace(scenario, concurrency=load), budgets)

    return [Comparison(load, best(*left, load), best(*right, load)) for load in concurrencies]


def crossovers(comparisons: Sequence[Comparison], side: Side) -> list[tuple[int, str]]:
    """Concurrencies at which the best layout of one side changes, each with the layout from there on."""
    changes: list[tuple[int, str]] = []
    for comparison in comparisons:
        estimate = comparison.left if side == "left" else comparison.right
        name = str(estimate.scenario.preset.layout) if estimate else "does not fit"
        if not changes or changes[-1][1] != name:
            changes.append((comparison.concurrency, name))
    return changes


def pareto(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Those that no other beats in both tokens/s for a user and tokens/s for a GPU, fastest for a user first."""
    front: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (-e.tokens_per_s_per_user, -e.tokens_per_s_per_gpu)):
        if not front or estimate.tokens_per_s_per_gpu > front[-1].tokens_per_s_per_gpu:
            front.append(estimate)
    return front
