"""The report for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table

from kimi_jax.profiling.case import Case
from kimi_jax.profiling.live import Live
from kimi_jax.profiling.report import PartReport, Report
from kimi_jax.profiling.traffic import Materialised


def show(report: Report) -> RenderableType:
    """Tables and notes."""
    notes = [
        report.verdict,
        exchange_note(report.case),
        f"Routed experts: {report.touched_experts:.1f} a rank and layer when routing is uniform.",
        f"Dense weights are read {report.read_ratio:.2f} × once each. "
        f"The step moves {_bytes(moved(report.parts))}, {report.moved_ratio:.2f} × what it must.",
        _materialised(report.materialised),
        f"Host transfers: {len(report.host_transfers) or 'none'}.",
        f"Lowered in {report.lower_seconds:.0f} s and compiled in {report.compile_seconds:.0f} s, "
        f"{report.host_bytes / 1e9:.1f} GB of host memory. "
        "Floors are data-sheet bandwidths and peaks, latencies the estimator's; nothing here was measured.",
    ]
    tables = [_memory_table(report), _parts_table(report)]
    if any(part.collectives for part in report.parts):
        tables.append(_messages_table(report))
    if report.assembled:
        tables.append(_assembler_table(report))
    return Group(report.case.title, *tables, *filter(None, notes))


def exchange_note(case: Case) -> str:
    """What carries rows to experts, and what is left out of the figures; empty with one ep rank."""
    if case.preset.layout.ep == 1:
        return ""
    rows = case.device_requests * case.rows
    note = f"Exchange: {case.exchange} for {rows} row{'s' if rows > 1 else ''} a device"
    if case.exchange != "alltoall":
        return note + "."
    return note + ", counted as where its buffers hold the rows due; a step that overflows them takes allgather."


def moved(parts: tuple[PartReport, ...]) -> float:
    """Bytes of all parts."""
    return sum(part.moved_bytes for part in parts)


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


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
    for name in ("must MB", "moved MB", "GFLOP", "messages", "link MB", "latency µs", "kernels", "floor µs"):
        table.add_column(name, justify="right")
    for part in report.parts:
        table.add_row(
            part.part,
            f"{part.need.hbm_bytes / 1e6:,.1f}",
            f"{part.moved_bytes / 1e6:,.1f}",
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
        f"{report.necessary_bytes / 1e6:,.1f}",
        f"{moved(report.parts) / 1e6:,.1f}",
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
    for name in ("registers a thread", "stack bytes", "spilled bytes, stores", "loads", "shared memory bytes"):
        table.add_column(name, justify="right")
    for k in report.assembled:
        shared = "" if k.shared_bytes is None else f"{k.shared_bytes:,}"
        table.add_row(k.name, *map(str, (k.registers, k.stack_bytes, k.spill_store_bytes, k.spill_load_bytes)), shared)
    return table


def show_live(live: Live, report: Report) -> RenderableType:
    """What was measured, beside the floors."""
    times = [1e3 * seconds for seconds in live.round_seconds]
    line = (
        f"Measured: {len(times)} rounds, median {1e3 * live.median_seconds:.2f} ms, least {min(times):.2f}, most "
        f"{max(times):.2f}; floor {report.floor_us / 1e3:.3f} ms on {report.case.gpu}."
    )
    table = Table(title="a round, traced", title_justify="left")
    table.add_column("part")
    for name in ("busy µs", "floor µs"):
        table.add_column(name, justify="right")
    for part in report.parts:
        busy = live.part_seconds.get(part.part, 0.0)
        table.add_row(part.part, f"{1e6 * busy:,.0f}", f"{part.floor_us:,.0f}")
    return Group(table, line)
