"""The ledger against the compiler: the same layout and load, bytes and messages part by part.

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
from rich.text import Text

from kimi_jax.ledger.rates import Network, transfer
from kimi_jax.ledger.step import Need, ledger
from kimi_jax.parallel.messages import as_sent
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.report import PartReport, Report
from kimi_jax.tables import left, right, table
from meshes import gpu

TOLERANCE = 0.05
"""How far the two may be apart, as a share of the compiler's figure."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One figure from both sides."""

    part: str
    what: str
    unit: str
    counted: float
    """By the ledger."""
    compiled: float

    @property
    def difference(self) -> float:
        """The ledger's figure over the compiler's, minus 1; 0 where both are nothing."""
        if self.counted == self.compiled:
            return 0.0
        return self.counted / self.compiled - 1 if self.compiled else math.inf

    @property
    def agrees(self) -> bool:
        """Whether the two are close enough."""
        return abs(self.difference) <= TOLERANCE


def compare(report: Report) -> tuple[Pair, ...]:
    """Every figure that both sides have.

    Raises:
      ValueError: a program other than a round.
    """
    if report.case.program != "round":
        raise ValueError(f"decoding steps are checked: compile the program 'round', not {report.case.program!r}")
    pairs: list[Pair] = []
    needs = ledger(report.case.step)
    for part in report.parts:
        need = needs[part.part]
        pairs += _held(report, part, need)
        pairs += _read(report, part, need)
        pairs += _messages(report, part, need)
    return tuple(pair for pair in pairs if pair.counted or pair.compiled)


def _filled(case: Case, window: float = math.inf) -> float:
    """Share of the room for cached positions that the context fills, of a cache that keeps the last `window`."""
    return min(window, case.context) / min(window, case.capacity)


def _context_filled(case: Case) -> float:
    return _filled(case, case.drafter.draft_window) if case.drafter else 1.0


def _held(report: Report, part: PartReport, need: Need) -> Iterator[Pair]:
    holdings = report.holdings
    yield Pair(part.part, "weights held", "B", need.weights, holdings.weights.get(part.part, 0))
    cached = {
        "attention": holdings.cache * _filled(report.case),
        "drafter": holdings.context * _context_filled(report.case),
    }
    yield Pair(part.part, "cache held", "B", need.cache, cached.get(part.part, 0.0))


def _read(report: Report, part: PartReport, need: Need) -> Iterator[Pair]:
    if part.part == "experts":
        layers = max(1, need.layers)
        touched = layers * report.case.step.experts.experts
        slots = report.case.expert_slots / report.case.preset.layout.expert_ranks
        one = need.total.hbm_bytes / touched
        yield Pair("experts", "bytes of one expert", "B", one, part.weight_bytes_held / slots / layers)
        return
    read = part.weight_bytes_read
    read += part.cache_bytes_read * _filled(report.case) + part.context_bytes_read * _context_filled(report.case)
    counted = sum(work.hbm_bytes for what, work in need.work.items() if what != "activations")
    yield Pair(part.part, "weights and cache read", "B", counted, read)


def _messages(report: Report, part: PartReport, need: Need) -> Iterator[Pair]:
    machine, messages = report.case.preset, as_sent(need.messages)
    network = Network.of(machine, gpu(report.case.gpu or machine.gpu_names[0]))
    sent = [transfer(network, machine.span(*each.axes), each).times(each.count) for each in messages]
    yield Pair(part.part, "messages", "", sum(each.count for each in messages), part.messages)
    yield Pair(part.part, "bytes sent", "B", sum(t.local_bytes + t.network_bytes for t in sent), part.link_bytes)


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
    rows: list[tuple[str | Text, ...] | None] = []
    last = ""
    for pair in sorted(pairs, key=lambda pair: pair.part):
        name, scale, digits = (f"{pair.what}, MB", 1e6, 3) if pair.unit == "B" else (pair.what, 1, 0)
        figures = (f"{value / scale:,.{digits}f}" for value in (pair.counted, pair.compiled))
        apart = Text(f"{100 * pair.difference:+.1f} %", "" if pair.agrees else "bold red")
        rows += [] if pair.part == last else [None]
        rows.append((pair.part if pair.part != last else "", name, *figures, apart))
        last = pair.part
    return table(title, (*left("part", "what"), *right("ledger", "compiler", "difference")), rows[1:])
