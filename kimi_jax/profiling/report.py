"""What a compiled program holds, moves and waits for on one device, by part of the model, beside the least it must.

The floor of a part is the larger of its necessary bytes at the card's bandwidth and its operations at the card's
bfloat16 peak, and the bytes of its messages at the link's. Nothing here is a measured time.
"""

import dataclasses
import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from kimi_jax.decoding.generate import CACHE_MULTIPLE
from kimi_jax.estimator.collectives import Network, Transfer, all_reduce, gather_and_scatter
from kimi_jax.estimator.constants import LINKS, Constants
from kimi_jax.profiling.assembler import Assembled
from kimi_jax.profiling.compile import Case, Compiled, Placed
from kimi_jax.profiling.hlo import PARTS, Collective, Kernel, Materialised, Module
from kimi_jax.profiling.necessary import Need, needs, state_bytes, touched_experts, weight_bytes, weight_part
from meshes.hardware import GPU, gpu


@dataclasses.dataclass(frozen=True)
class Holdings:
    """Bytes on one device, and what else would fit."""

    weights: dict[str, int]
    cache: int
    context: int
    """The drafter's keys and values."""
    other_state: int
    temporaries: int
    reserve: float
    """Kept free for driver, communication buffers and fragmentation."""
    card: float
    most_requests: int
    """In the whole machine, at this context."""
    most_context: int
    """At this batch; 0 where not even the weights fit."""

    @property
    def total(self) -> float:
        """All of it, the reserve included."""
        state = self.cache + self.context + self.other_state
        return sum(self.weights.values()) + state + self.temporaries + self.reserve

    @property
    def free(self) -> float:
        """What is left of the card; negative where the program does not fit."""
        return self.card - self.total


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One part of one execution on one device."""

    part: str
    need: Need
    weight_bytes_read: int
    """Of weights, by the compiled instructions; kernels are taken to read their operands whole."""
    weight_bytes_held: int
    collectives: tuple[Collective, ...]
    messages: int
    link_bytes: float
    """Least that a device must send over a link, for all messages."""
    latency_us: float
    """Fixed cost of the messages, from the estimator's published measurements: an estimate."""
    kernels: tuple[Kernel, ...]
    memory_us: float
    compute_us: float
    link_us: float

    @property
    def floor_us(self) -> float:
        """Least time."""
        return max(self.memory_us, self.compute_us) + self.link_us


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything about one compiled program."""

    case: Case
    parts: tuple[PartReport, ...]
    holdings: Holdings
    materialised: tuple[Materialised, ...]
    host_transfers: tuple[str, ...]
    custom_calls: dict[str, int]
    touched_experts: float
    lower_seconds: float
    compile_seconds: float
    peak_bytes: int
    assembled: tuple[Assembled, ...]

    @property
    def floor_us(self) -> float:
        """Of all parts, one after the other."""
        return sum(part.floor_us for part in self.parts)

    @property
    def read_ratio(self) -> float:
        """Bytes of dense weights that compiled instructions read over those there are: 1 is once each.

        The head is needed twice where there is a drafter. Routed experts are left out: their kernel reads what
        routing touches.
        """
        read = sum(part.weight_bytes_read for part in self.parts if part.part != "experts")
        held = {part.part: part.weight_bytes_held for part in self.parts if part.part != "experts"}
        twice = held.get("head", 0) if held.get("drafter") and self.case.program != "prefill" else 0
        return read / max(1, sum(held.values()) + twice)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bytes and µs."""
        case, layout = self.case, self.case.preset.layout
        return {
            "program": case.program,
            "mesh": case.preset.name,
            "layout": layout.axis_sizes | {"experts": layout.experts, "exchange": layout.exchange},
            "gpu": case.gpu,
            "layers": case.config.num_hidden_layers,
            "requests": case.requests,
            "requests_per_device_group": case.device_requests,
            "rows_per_request": case.rows,
            "context": case.context,
            "budget": case.budget,
            "memory": dataclasses.asdict(self.holdings)
            | {"total": self.holdings.total, "free": self.holdings.free, "xla_peak": self.peak_bytes},
            "parts": [dataclasses.asdict(part) | {"floor_us": part.floor_us} for part in self.parts],
            "floor_us": self.floor_us,
            "dense_weight_read_ratio": self.read_ratio,
            "touched_experts_per_rank": self.touched_experts,
            "materialised": [dataclasses.asdict(found) for found in self.materialised],
            "host_transfers": list(self.host_transfers),
            "custom_calls": self.custom_calls,
            "assembled": [dataclasses.asdict(kernel) for kernel in self.assembled],
            "lower_seconds": self.lower_seconds,
            "compile_seconds": self.compile_seconds,
        }


def make_report(compiled: Compiled) -> Report:
    """Reads a compiled program."""
    case, module = compiled.case, Module(compiled.text)
    card = gpu(case.gpu)
    needed, held = needs(case, compiled.weights), weight_bytes(compiled.weights)
    reads: dict[str, int] = {}
    names = {array.name for array in compiled.weights}
    for (array, part), num_bytes in module.reads().items():
        if array in names and weight_part(array) != "embedding":
            reads[part] = reads.get(part, 0) + num_bytes
    collectives, kernels = module.collectives(case.preset.layout.axis_sizes), module.kernels()
    network = Network(card, case.preset.topology, Constants(), LINKS[card.local_link.name])
    parts = []
    for part in PARTS:
        messages = tuple(c for c in collectives if c.part == part)
        transfers = [transfer(network, case, message).times(message.count) for message in messages]
        need = needed.get(part, Need())
        parts.append(
            PartReport(
                part=part,
                need=need,
                weight_bytes_read=reads.get(part, 0),
                weight_bytes_held=held.get(part, 0),
                collectives=messages,
                messages=sum(message.count for message in messages),
                link_bytes=sum(t.local_bytes + t.network_bytes for t in transfers),
                latency_us=sum(t.latency_us for t in transfers),
                kernels=tuple(kernel for kernel in kernels if kernel.part == part),
                memory_us=1e6 * need.hbm_bytes / card.hbm_bytes_per_s,
                compute_us=1e6 * need.flops / card.bf16_flops_per_s,
                link_us=sum(t.local_bytes / network.local + t.network_bytes / network.remote for t in transfers),
            )
        )
    return Report(
        case=case,
        parts=tuple(parts),
        holdings=holdings(case, compiled.weights, compiled.state, compiled.memory.temporaries, card),
        materialised=tuple(_with_part(found, names) for found in module.materialised()),
        host_transfers=tuple(module.host_transfers()),
        custom_calls=module.custom_calls(),
        touched_experts=touched_experts(case),
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
        peak_bytes=compiled.memory.peak,
        assembled=compiled.assembled,
    )


def _with_part(found: Materialised, weights: set[str]) -> Materialised:
    """XLA leaves the scope of what it merges from two operations: a weight's own part then."""
    if found.part == "other" and found.array in weights:
        return dataclasses.replace(found, part=weight_part(found.array))
    return found


def transfer(network: Network, case: Case, message: Collective) -> Transfer:
    """One message's least bytes on each link, and its fixed cost."""
    span = case.preset.span(*message.axes)
    if span.size == 1:
        return Transfer()
    if message.kind == "all-reduce":
        return all_reduce(network, span, message.bytes)
    if message.kind in ("all-gather", "reduce-scatter"):
        return gather_and_scatter(network, span, message.bytes).times(0.5)
    sent = message.bytes * (span.size - 1) / span.size
    local = sent if span.domains == 1 else 0.0
    return Transfer(latency_us=network.link.nccl_us, local_bytes=local, network_bytes=sent - local)


def holdings(
    case: Case, weights: tuple[Placed, ...], state: tuple[Placed, ...], temporaries: int, card: GPU
) -> Holdings:
    """What one device holds and how far batch and context could grow.

    Temporaries are taken to grow with the batch, and the cache with both.
    """
    held, kept = weight_bytes(weights), state_bytes(state)
    reserve = Constants().reserve_bytes
    free = card.hbm_bytes - reserve - sum(held.values())
    each = (sum(kept.values()) + temporaries) / case.device_requests
    most_requests = max(0, math.floor(free / each)) * case.layout_multiple
    rest = free - kept["context"] - kept["other"] - temporaries
    positions = max(0, math.floor(rest / (kept["cache"] / case.capacity))) // CACHE_MULTIPLE * CACHE_MULTIPLE
    most_context = min(max(0, positions - case.depth - 1), case.config.max_position_embeddings)
    return Holdings(
        held, kept["cache"], kept["context"], kept["other"], temporaries, reserve, card.hbm_bytes,
        most_requests, most_context,
    )  # fmt: skip


def show(report: Report) -> RenderableType:
    """The report for a terminal."""
    case = report.case
    head = (
        f"{case.program} of {case.config.num_hidden_layers} layers on {case.preset.name} ({case.preset.layout}) with "
        f"{case.gpu}: {case.requests} requests × {case.rows} rows at context {case.context}, "
        f"{case.device_requests} requests a device"
    )
    notes = [
        f"Routed experts: {report.touched_experts:.1f} a rank and layer when routing is uniform.",
        f"Dense weights are read {report.read_ratio:.2f} × once each.",
        _materialised(report.materialised),
        f"Host transfers: {len(report.host_transfers) or 'none'}.",
        f"Lowered in {report.lower_seconds:.0f} s and compiled in {report.compile_seconds:.0f} s. "
        "Floors are data-sheet bandwidths and peaks, latencies the estimator's; nothing here was measured.",
    ]
    tables = [_memory_table(report), _parts_table(report), _messages_table(report)]
    if report.assembled:
        tables.append(_assembler_table(report))
    return Group(head, *tables, *notes)


def _materialised(found: tuple[Materialised, ...]) -> str:
    if not found:
        return "Copies of weights or cache: none."
    lines = [f"  {m.array}: {m.bytes / 1e6:.1f} MB by {m.operation} ({m.part})" for m in found[:10]]
    total = sum(m.bytes for m in found)
    return f"Copies of weights or cache: {len(found)}, {total / 1e6:.1f} MB\n" + "\n".join(lines)


def _memory_table(report: Report) -> Table:
    h = report.holdings
    table = Table(title="memory of one device", title_justify="left")
    table.add_column("what")
    table.add_column("GB", justify="right")
    for part, num_bytes in h.weights.items():
        table.add_row(f"weights: {part}", f"{num_bytes / 1e9:.3f}")
    rows = (
        ("cache", h.cache),
        ("drafter's context", h.context),
        ("other state", h.other_state),
        ("temporaries", h.temporaries),
        ("reserve", h.reserve),
    )
    for name, num_bytes in rows:
        table.add_row(name, f"{num_bytes / 1e9:.3f}")
    table.add_section()
    table.add_row("total", f"{h.total / 1e9:.3f}")
    table.add_row("card", f"{h.card / 1e9:.3f}")
    table.add_row("free" if h.free >= 0 else "DOES NOT FIT by", f"{abs(h.free) / 1e9:.3f}")
    table.add_row("most requests at this context", str(h.most_requests))
    table.add_row("most context at this batch", str(h.most_context))
    return table


def _parts_table(report: Report) -> Table:
    table = Table(title="one execution on one device", title_justify="left")
    table.add_column("part")
    for name in ("HBM MB", "GFLOP", "messages", "link MB", "latency µs", "kernels", "floor µs"):
        table.add_column(name, justify="right")
    for part in report.parts:
        table.add_row(
            part.part,
            f"{part.need.hbm_bytes / 1e6:.1f}",
            f"{part.need.flops / 1e9:.1f}",
            str(part.messages or ""),
            f"{part.link_bytes / 1e6:.2f}" if part.messages else "",
            f"{part.latency_us:.0f}" if part.messages else "",
            str(sum(kernel.count for kernel in part.kernels) or ""),
            f"{part.floor_us:.0f}",
        )
    table.add_section()
    table.add_row(
        "total",
        f"{sum(p.need.hbm_bytes for p in report.parts) / 1e6:.1f}",
        f"{sum(p.need.flops for p in report.parts) / 1e9:.1f}",
        str(sum(p.messages for p in report.parts)),
        f"{sum(p.link_bytes for p in report.parts) / 1e6:.2f}",
        f"{sum(p.latency_us for p in report.parts):.0f}",
        str(sum(k.count for p in report.parts for k in p.kernels)),
        f"{report.floor_us:.0f}",
    )
    return table


def _messages_table(report: Report) -> Table:
    table = Table(title="messages", title_justify="left")
    for name in ("part", "kind", "axes", "link"):
        table.add_column(name)
    for name in ("count", "bytes each"):
        table.add_column(name, justify="right")
    for part in report.parts:
        for message in part.collectives:
            link = report.case.preset.span(*message.axes).link
            table.add_row(
                part.part, message.kind, " × ".join(message.axes), link, str(message.count), f"{message.bytes:,}"
            )
    return table


def _assembler_table(report: Report) -> Table:
    table = Table(title="Pallas kernels as assembled", title_justify="left")
    table.add_column("kernel")
    for name in ("registers a thread", "stack bytes", "spilled bytes, stores", "loads"):
        table.add_column(name, justify="right")
    for kernel in report.assembled:
        table.add_row(*map(str, dataclasses.astuple(kernel)))
    return table
