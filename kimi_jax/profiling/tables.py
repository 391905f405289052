"""The report for a terminal and as a page: the answer in a few lines, then tables, then bars on the page."""

import html
import io
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kimi_jax.profiling.case import Case
from kimi_jax.profiling.live import Live
from kimi_jax.profiling.report import Holdings, PartReport, Report
from kimi_jax.tables import bars, left, right, table
from kimi_jax.text_files import write_text

GB, MB = 1e9, 1e6


def show(report: Report, live: Live | None = None, wide: bool = False) -> list[RenderableType]:
    """The report, with what was measured where rounds ran; `wide` tables have all their columns."""
    tables = [_memory_table(report), _parts_table(report, live, wide)]
    if any(part.collectives for part in report.parts):
        tables.append(_messages_table(report))
    if report.compiled.assembled:
        tables.append(_assembler_table(report, wide))
    return [*_answer(report, live), *tables, *_notes(report, live)]


def _answer(report: Report, live: Live | None) -> list[str]:
    lines = [*report.case.title.split(": "), report.verdict]
    if live is not None:
        times = [1e3 * seconds for seconds in live.round_seconds]
        lines.append(
            f"Measured: {len(times)} rounds, median {1e3 * live.median_seconds:.2f} ms, least {min(times):.2f}, most "
            f"{max(times):.2f}."
        )
    of = "" if report.whole is None else f" in these {report.case.config.num_hidden_layers} layers"
    if report.floor_us is not None:
        latency = sum(part.latency_us or 0 for part in report.parts)
        lines.append(
            f"Floor{of}: {report.floor_us / 1e3:.2f} ms on {report.case.gpu}, and {latency / 1e3:.2f} ms of messages."
        )
    if report.modelled_us is not None:
        started = report.launches
        lines.append(
            f"Modelled{of}: {report.modelled_us / 1e3:.2f} ms, with {started.kernels:,.0f} kernels, "
            f"{started.collective_kernels:,.0f} all-reduce kernels, {started.messages:,.0f} messages of NCCL and "
            f"{started.host_waits or 'no'} waits of the host."
        )
    lines.append(f"Moved{of}: {_bytes(moved(report.parts))}, {report.moved_ratio:.2f} × what it must.")
    copies = f"{len(report.materialised)}, {_bytes(sum(m.bytes for m in report.materialised))}"
    lines.append(f"Copies of weights or cache: {copies if report.materialised else 'none'}.")
    lines += [f"  {m.array}: {_bytes(m.bytes)} by {m.operation} ({m.part})" for m in report.materialised[:10]]
    lines.append(f"Host transfers: {len(report.host_transfers) or 'none'}.")
    return lines


def _notes(report: Report, live: Live | None) -> list[str]:
    sources = []
    if report.floor_us is not None:
        sources.append("Floors are data-sheet bandwidths and peaks; modelled times have rates for launches as well.")
    sources.append("Nothing here was measured." if live is None else "Round times and busy µs were measured.")
    notes = [
        exchange_note(report.case),
        f"Routed experts: {report.touched_experts:.1f} a rank and layer when routing is uniform.",
        f"Dense weights are read {report.read_ratio:.2f} × once each.",
        f"Lowered in {report.compiled.lower_seconds:.0f} s and compiled in {report.compiled.compile_seconds:.0f} s, "
        f"{report.compiled.host_bytes / GB:.1f} GB of host memory.",
        " ".join(sources),
    ]
    return [note for note in notes if note]


def exchange_note(case: Case) -> str:
    """What carries rows to experts, and what is left out of the figures; empty with one ep rank."""
    if case.preset.layout.ep == 1:
        return ""
    rows = case.step.device_rows
    note = f"Exchange: {case.exchange} for {rows} row{'s' if rows > 1 else ''} a device"
    if case.exchange != "alltoall":
        return note + "."
    return note + ", counted as where its buffers hold the rows due; one that overflows them takes allgather."


def moved(parts: tuple[PartReport, ...]) -> float:
    """Bytes of all parts."""
    return sum(part.moved_bytes for part in parts)


def _bytes(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / MB:.1f} MB"


def _held(h: Holdings) -> dict[str, float]:
    weights: dict[str, float] = {f"weights: {part}": num_bytes for part, num_bytes in h.weights.items()}
    state = {"cache": h.cache, "drafter's context": h.context, "other state": h.other_state}
    return weights | state | {"temporaries": h.temporaries, "reserve": h.reserve}


def _memory_table(report: Report) -> Table:
    """What one device holds; where a part of the layers was compiled, beside what all of them hold."""
    columns = [report.holdings] if report.whole is None else [report.holdings, report.whole]
    layers = report.case.config.num_hidden_layers
    unit, scale = ("GB", GB) if columns[-1].total >= GB else ("MB", MB)
    names = (unit,) if report.whole is None else (f"{unit}, {layers} layers", f"{unit}, all {report.whole_layers}")
    names_of_rows = dict.fromkeys(name for h in columns for name in _held(h))
    rows: list[tuple[str, ...] | None] = [
        (name, *(f"{_held(h).get(name, 0) / scale:,.3f}" for h in columns)) for name in names_of_rows
    ]
    rows += [None, ("total", *(f"{h.total / scale:,.3f}" for h in columns))]
    if report.holdings.card is not None:
        rows += [
            ("card", *(f"{(h.card or 0) / scale:,.3f}" for h in columns)),
            ("free", *(f"{(h.free or 0) / scale:,.3f}" for h in columns)),
            ("most requests at this context", *(str(h.most_requests) for h in columns)),
            ("most context at this batch", *(str(h.most_context) for h in columns)),
        ]
    return table("memory of one device", (*left("what"), *right(*names)), rows)


def _parts_table(report: Report, live: Live | None, wide: bool) -> Table:
    timed = report.floor_us is not None
    columns = [
        *left("part"), *right("must MB", "moved MB"), *right("GFLOP", wide=True), *right("messages"),
        *right("link MB", "Pallas kernels", wide=True), *right("launches"),
        *right(*["latency µs"] * timed, wide=True), *right(*["modelled µs", "floor µs"] * timed),
        *right(*["busy µs"] * (live is not None)),
    ]  # fmt: skip

    def row(name: str, parts: tuple[PartReport, ...]) -> tuple[str, ...]:
        messages = sum(part.messages for part in parts)
        cells = [
            name,
            f"{sum(part.need.hbm_bytes for part in parts) / MB:,.1f}",
            f"{moved(parts) / MB:,.1f}",
            f"{sum(part.need.flops for part in parts) / 1e9:.1f}",
            str(messages or ""),
            f"{sum(part.link_bytes for part in parts) / MB:.2f}" if messages else "",
            str(sum(kernel.count for part in parts for kernel in part.kernels) or ""),
            f"{sum(part.launches.kernels for part in parts):,.0f}",
        ]
        if timed:
            cells.append(f"{sum(part.latency_us or 0 for part in parts):,.0f}" if messages else "")
            cells.append(f"{sum(part.modelled_us or 0 for part in parts):,.0f}")
            cells.append(f"{sum(part.floor_us or 0 for part in parts):,.0f}")
        if live is not None:
            cells.append(f"{1e6 * sum(live.part_seconds.get(part.part, 0.0) for part in parts):,.0f}")
        return tuple(cells)

    rows = [*(row(part.part, (part,)) for part in report.parts), None, row("total", report.parts)]
    return table("one execution on one device", columns, rows, wide=wide)


def _messages_table(report: Report) -> Table:
    rows = [
        (part.part, message.kind, " × ".join(message.axes), report.case.preset.span(*message.axes).link,
         str(message.count), f"{message.bytes:,}")
        for part in report.parts
        for message in part.collectives
    ]  # fmt: skip
    return table("messages", (*left("part", "kind", "axes", "link"), *right("count", "bytes each")), rows)


def _assembler_table(report: Report, wide: bool) -> Table:
    columns = (*left("kernel"), *right("registers"), *right("stack", wide=True), *right("spilled", "reloaded"),
               *right("shared memory"))  # fmt: skip
    rows = [
        (k.name, *map(str, (k.registers, k.stack_bytes, k.spill_store_bytes, k.spill_load_bytes)),
         "" if k.shared_bytes is None else f"{k.shared_bytes:,}")
        for k in report.compiled.assembled
    ]  # fmt: skip
    return table("Pallas kernels as assembled: registers a thread, bytes", columns, rows, wide=wide)


def _bars(report: Report, live: Live | None) -> list[Table]:
    """What the tables say, drawn: memory, bytes, and where there is a card or a run, times."""
    parts = [part for part in report.parts if part.moved_bytes or part.messages or part.floor_us]
    drawn = [
        bars("memory of one device", "GB", {"held": {name: b / GB for name, b in _held(report.holdings).items()}}),
        bars(
            "bytes of one execution", "MB",
            {
                "must": {part.part: part.need.hbm_bytes / MB for part in parts},
                "moved": {part.part: part.moved_bytes / MB for part in parts},
            },
        ),
    ]  # fmt: skip
    if report.floor_us is not None:
        times = {"memory": "memory_us", "arithmetic": "compute_us", "links": "link_us", "latency": "latency_us"}
        series = {name: {part.part: getattr(part, field) for part in parts} for name, field in times.items()}
        drawn.append(bars("least time, and latency of messages", "µs", series))
    if live is not None:
        busy = {part.part: 1e6 * live.part_seconds.get(part.part, 0.0) for part in parts}
        drawn.append(bars("busy time of one device in a traced round", "µs", {"busy": busy}))
    return drawn


def write_page(report: Report, path: Path, live: Live | None = None) -> None:
    """Writes the report with all columns, every kernel and bars as one HTML file that needs nothing else."""
    counts = [(k.part, k.name, str(k.count)) for part in report.parts for k in part.kernels]
    kernels = table("kernels", (*left("part", "kernel"), *right("count")), counts)
    copies = table(
        "copies of weights or cache", (*left("array", "by", "part"), *right("bytes")),
        [(m.array, m.operation, m.part, f"{m.bytes:,}") for m in report.materialised],
    )  # fmt: skip
    console = Console(record=True, width=160, file=io.StringIO(), force_jupyter=False)
    for renderable in (*show(report, live, wide=True), kernels, copies, *_bars(report, live)):
        console.print(renderable, highlight=False, markup=False, crop=False)
        if not isinstance(renderable, str | Text):
            console.print()
    title = f"<head>\n<title>{html.escape(report.case.title)}</title>"
    write_text(path, console.export_html().replace("<head>", title, 1))
