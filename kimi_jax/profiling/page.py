"""The report as one HTML file with plots, which needs nothing else to be read."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from kimi_jax.profiling.report import Report
from kimi_jax.text_files import write_text

_COLOURS = ("#2f6f9f", "#c8742c", "#5b8a3c", "#8a5a9e", "#a8433f")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .15rem .7rem; border-bottom: 1px solid #ddd; }
td { text-align: right; } td:first-child, th:first-child { text-align: left; } svg text { font-size: 13px; }
.bad { color: #b00020; font-weight: bold; }
"""


def write(report: Report, path: Path) -> None:
    """Writes the page."""
    write_text(path, page(report))


def page(report: Report) -> str:
    """The page's text: what was compiled, memory, what each part must move and moves, floors and messages."""
    case, h = report.case, report.holdings
    title = f"{case.program} of {case.config.num_hidden_layers} layers on {case.preset.name} with {case.gpu}"
    state = {"cache": h.cache, "drafter's context": h.context, "other state": h.other_state}
    memory = {f"weights: {part}": num_bytes for part, num_bytes in h.weights.items()} | state
    memory |= {"temporaries": h.temporaries, "reserve": h.reserve}
    parts = [part for part in report.parts if part.floor_us or part.messages or part.moved_bytes]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(case.title)}. Nothing here was measured.</p>",
        f"<p class='{'' if h.free >= 0 else 'bad'}'>{html.escape(report.verdict)}</p>",
        f"<h2>Memory of one device: {h.total / 1e9:.1f} of {h.card / 1e9:.1f} GB</h2>",
        bars("GB", list(memory), {"held": [num_bytes / 1e9 for num_bytes in memory.values()]}),
        f"<p>At most {h.most_requests} requests at this context, or {h.most_context} tokens at this batch.</p>",
        f"<h2>Bytes of one execution: {report.moved_ratio:.2f} × what it must move</h2>",
        bars(
            "MB",
            [part.part for part in parts],
            {
                "must": [part.need.hbm_bytes / 1e6 for part in parts],
                "moved": [part.moved_bytes / 1e6 for part in parts],
            },
        ),
        f"<h2>Least time: {report.floor_us / 1e3:.2f} ms, and latency of messages</h2>",
        bars(
            "µs",
            [part.part for part in parts],
            {
                "memory": [part.memory_us for part in parts],
                "arithmetic": [part.compute_us for part in parts],
                "links": [part.link_us for part in parts],
                "latency": [part.latency_us for part in parts],
            },
        ),
        "<h2>Messages</h2>",
        table(
            ("part", "kind", "axes", "link", "count", "bytes each"),
            (
                (p.part, c.kind, " × ".join(c.axes), case.preset.span(*c.axes).link, f"{c.count}", f"{c.bytes:,}")
                for p in parts
                for c in p.collectives
            ),
        ),
        "<h2>Kernels</h2>",
        table(("part", "kernel", "count"), ((k.part, k.name, str(k.count)) for p in parts for k in p.kernels)),
        "<h2>Copies of weights or cache</h2>",
        table(
            ("array", "by", "part", "bytes"),
            ((m.array, m.operation, m.part, f"{m.bytes:,}") for m in report.materialised),
        ),
        f"<p>Host transfers: {len(report.host_transfers) or 'none'}. Dense weights are read "
        f"{report.read_ratio:.2f} × once each.</p>",
    ]
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table, or a line that says there is nothing."""
    body = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    if not body:
        return "<p>None.</p>"
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    return f"<table><tr>{heads}</tr>{''.join(body)}</table>"


def bars(unit: str, labels: Sequence[str], series: dict[str, Sequence[float]]) -> str:
    """Horizontal bars as SVG: for each label one bar of each series, all on one scale."""
    height, left, width = 16, 190, 560
    most = max((value for values in series.values() for value in values), default=0) or 1
    lines: list[str] = []
    y = 0
    for index, label in enumerate(labels):
        middle = y + height * len(series) / 2 + 5
        lines.append(f"<text x='{left - 8}' y='{middle:.0f}' text-anchor='end'>{html.escape(label)}</text>")
        for number, values in enumerate(series.values()):
            value = values[index]
            size = width * value / most
            lines.append(
                f"<rect x='{left}' y='{y}' width='{size:.1f}' height='{height - 2}' fill='{_COLOURS[number]}'/>"
                f"<text x='{left + size + 5:.1f}' y='{y + 12}'>{value:,.3g}</text>"
            )
            y += height
        y += 6
    legend = ""
    if len(series) > 1:
        names = (f"<span style='color:{_COLOURS[i]}'>■</span> {html.escape(n)}" for i, n in enumerate(series))
        legend = f"<p>{unit}: {' &nbsp; '.join(names)}</p>"
    total = left + width + 90
    return f"{legend}<svg viewBox='0 0 {total} {y}' width='100%' role='img'>{''.join(lines)}</svg>"
