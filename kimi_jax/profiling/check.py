"""The estimator against the compiler: the same layout and load, bytes and messages part by part.

What is compared has one definition on both sides. Bytes of memory traffic are those of weights, cache and the drafter's
context that a part reads in one step; activations are left out. Of the routed experts the program holds all and routing
picks some, so the bytes of one expert are compared. The cache is compared for the positions that are filled, the
program has room for a few more. Bytes on links are the least that a device sends for the messages.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from kimi_jax.estimator.model import Drafter
from kimi_jax.estimator.routing import uniform
from kimi_jax.estimator.scenario import Scenario, make_scenario
from kimi_jax.estimator.step import Estimate, estimate, expert_load
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.report import PartReport, Report
from meshes import gpu

TOLERANCE = 0.05
"""How far the two may be apart, as a share of the compiler's figure."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One figure from both sides."""

    part: str
    what: str
    unit: str
    estimated: float
    compiled: float

    @property
    def difference(self) -> float:
        """Of the estimate from the compiler's figure, as a share of it; 0 where both are nothing."""
        if self.estimated == self.compiled:
            return 0.0
        return self.estimated / self.compiled - 1 if self.compiled else math.inf

    @property
    def agrees(self) -> bool:
        """Whether the two are close enough."""
        return abs(self.difference) <= TOLERANCE


def scenario_of(case: Case) -> Scenario:
    """What the estimator is asked for a compiled case: its very sizes, with uniform routing.

    Raises:
      ValueError: a program other than a round.
    """
    if case.program != "round":
        raise ValueError(f"the estimator knows decoding steps: compile the program 'round', not {case.program!r}")
    config = case.config
    return make_scenario(
        case.preset,
        gpu(case.gpu or case.preset.gpu_names[0]),
        concurrency=case.requests,
        context=case.context,
        model=config,
        budget=case.budget,
        routing=uniform(config.n_routed_experts, config.num_experts_per_tok),
        drafter=Drafter.of(case.drafter) if case.drafter else Drafter(),
        is_cache_split=case.preset.layout.cache == "split",
    )


def compare(report: Report) -> tuple[Pair, ...]:
    """Every figure that both sides have."""
    scenario = scenario_of(report.case)
    estimated = estimate(scenario)
    pairs = [*_held(report, estimated)]
    for part in report.parts:
        pairs += _traffic(report, part, estimated, scenario)
        pairs += _messages(part, estimated)
    return tuple(pair for pair in pairs if pair.estimated or pair.compiled)


def _filled(case: Case, window: float = math.inf) -> float:
    """Share of the room for cached positions that the context fills, of a cache that keeps the last `window`."""
    return min(window, case.context) / min(window, case.capacity)


def _context_filled(case: Case) -> float:
    return _filled(case, case.drafter.draft_window) if case.drafter else 1.0


def _held(report: Report, estimated: Estimate) -> Iterator[Pair]:
    holdings, memory = report.holdings, estimated.memory
    for part, num_bytes in memory.weights.items():
        yield Pair(part, "weights held", "B", num_bytes, holdings.weights.get(part, 0))
    yield Pair("attention", "cache held", "B", memory.cache, holdings.cache * _filled(report.case))
    drafter = holdings.weights.get("drafter", 0) + holdings.context * _context_filled(report.case)
    yield Pair("drafter", "weights and context held", "B", memory.drafter, drafter)


def _traffic(report: Report, part: PartReport, estimated: Estimate, scenario: Scenario) -> Iterator[Pair]:
    found = estimated.parts.get(part.part)
    if found is None:
        return
    if part.part == "experts":
        layout, layers = report.case.preset.layout, report.case.config.num_moe_layers
        touched = expert_load(scenario)[0]
        slots = report.case.expert_slots / layout.expert_ranks
        one = found.hbm_bytes / touched if touched else 0.0
        yield Pair("experts", "bytes of one expert", "B", one, part.weight_bytes_held / slots / max(1, layers))
        return
    case = report.case
    read = part.weight_bytes_read
    read += part.cache_bytes_read * _filled(case) + part.context_bytes_read * _context_filled(case)
    yield Pair(part.part, "weights and cache read", "B", found.count * found.argument_bytes, read)


def _messages(part: PartReport, estimated: Estimate) -> Iterator[Pair]:
    found = estimated.parts.get(part.part)
    count = found.count * found.messages if found else 0
    sent = found.count * (found.local_bytes + found.network_bytes) if found else 0.0
    yield Pair(part.part, "messages", "", round(count), part.messages)
    yield Pair(part.part, "bytes sent", "B", sent, part.link_bytes)


def apart(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Those that do not agree."""
    return tuple(pair for pair in pairs if not pair.agrees)


def data(pairs: tuple[Pair, ...]) -> list[dict[str, Any]]:
    """Plain values for JSON; a difference of None is from nothing."""
    shares = [None if math.isinf(pair.difference) else pair.difference for pair in pairs]
    return [
        dataclasses.asdict(pair) | {"difference": share, "agrees": pair.agrees}
        for pair, share in zip(pairs, shares, strict=True)
    ]


def show(pairs: tuple[Pair, ...], title: str) -> Table:
    """Both sides for a terminal; bytes in MB."""
    table = Table(title=title, title_justify="left")
    for name in ("part", "what"):
        table.add_column(name)
    for name in ("estimator", "compiler", "difference"):
        table.add_column(name, justify="right")
    last = ""
    for pair in sorted(pairs, key=lambda pair: pair.part):
        if pair.part != last:
            table.add_section()
        scale = 1e6 if pair.unit == "B" else 1
        digits = 3 if pair.unit == "B" else 0
        name = f"{pair.what}, MB" if pair.unit == "B" else pair.what
        table.add_row(
            pair.part if pair.part != last else "", name, f"{pair.estimated / scale:,.{digits}f}",
            f"{pair.compiled / scale:,.{digits}f}", f"{100 * pair.difference:+.1f} %",
            style=None if pair.agrees else "bold red",
        )  # fmt: skip
        last = pair.part
    return table
