"""Estimates as tables for a terminal and as plain data for JSON."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from kimi_jax.estimator import published, search
from kimi_jax.estimator.explain import Effect
from kimi_jax.estimator.original import Figure
from kimi_jax.estimator.published import AcceptancePoint, Point
from kimi_jax.estimator.search import Comparison, Recommendation
from kimi_jax.estimator.step import Estimate

GB = 1e9


def percent(part: float, whole: float) -> str:
    """Share of a whole in per cent, or a dash for nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def requests(count: int) -> str:
    """So many, in words."""
    return "1 request" if count == 1 else f"{count} requests"


def summary(e: Estimate) -> dict[str, Any]:
    """One estimate as one flat row."""
    layout = e.scenario.preset.layout
    return {
        "mesh": e.scenario.preset.name,
        "gpu": e.scenario.gpu.name,
        "gpus": layout.num_devices,
        "layout": search.describe(layout),
        "concurrency": e.scenario.concurrency,
        "context": e.scenario.context,
        "budget": e.scenario.budget,
        "acceptance_length": e.acceptance_length,
        "step_ms": e.step_ms,
        "prefill_ms": e.prefill_ms,
        "limit_ms": e.limit_ms,
        "limit_resource": e.limit_resource,
        "bottleneck": e.bottleneck,
        "tokens_per_s_per_user": e.tokens_per_s_per_user,
        "tokens_per_s_per_gpu": e.tokens_per_s_per_gpu,
        "tokens_per_s": e.tokens_per_s,
        "error_band": search.error_band(e),
        "memory_bytes": e.memory.total,
        "memory_capacity_bytes": e.memory.capacity,
        "max_requests": e.memory.max_requests,
        "fits": e.memory.fits,
    }


def details(e: Estimate) -> dict[str, Any]:
    """One estimate with its parts and memory."""
    gpu = e.scenario.gpu
    parts = {
        name: {
            "count": part.count,
            "us": part.total_us,
            "ms": part.ms,
            "limit_ms": part.limit_ms(gpu),
            "fixed_us": part.fixed_us,
            "memory_us": part.memory_us,
            "compute_us": part.compute_us,
            "link_us": part.link_us,
            "hbm_bytes": part.count * part.hbm_bytes,
            "flops": part.count * part.flops,
            "local_link_bytes": part.count * part.local_bytes,
            "network_link_bytes": part.count * part.network_bytes,
            "note": part.note,
        }
        for name, part in e.parts.items()
    }
    memory = {"weights": e.memory.weights, "cache": e.memory.cache, "drafter": e.memory.drafter,
              "reserve": e.memory.reserve}  # fmt: skip
    inputs = {"acceptance": e.scenario.acceptance.name, "routing": e.scenario.routing.name,
              "kernels": e.scenario.kernels.name, "overlap": e.scenario.overlap}  # fmt: skip
    return summary(e) | {"hidden_ms": e.hidden_ms, "parts": parts, "memory": memory, "inputs": inputs}


def parts_table(e: Estimate) -> Table:
    """A step by part: µs a layer, ms a step, and the physical limit beside it."""
    gpu = e.scenario.gpu
    table = Table(title=f"One step on the busiest GPU: {e.scenario.preset.name}, {gpu.name}")
    for name in ("part", "calls", "µs each", "ms", "limit ms", "of limit", "mostly"):
        table.add_column(name, justify="left" if name in ("part", "mostly") else "right", no_wrap=name != "mostly")
    for name, part in e.parts.items():
        if part.total_us:
            limit = part.limit_ms(gpu)
            table.add_row(
                name, str(part.count), f"{part.total_us:.1f}", f"{part.ms:.2f}", f"{limit:.2f}",
                percent(limit, part.ms), part.dominant + (f"; {part.note}" if part.note else ""),
            )  # fmt: skip
    if e.hidden_ms:
        table.add_row("overlap", "", "", f"-{e.hidden_ms:.2f}", "", "", f"an input: {e.scenario.overlap:g}")
    table.add_section()
    table.add_row("step", "", "", f"{e.step_ms:.2f}", f"{e.limit_ms:.2f}", percent(e.limit_ms, e.step_ms),
                  f"limit: {e.limit_resource}")  # fmt: skip
    if e.prefill_ms:
        table.add_row("prefill", "", "", f"{e.prefill_ms:.2f}", "", "", "prompts between decode steps")
    return table


def speed_table(e: Estimate) -> Table:
    """Tokens per second for a user, a GPU and the system, each with its limit."""
    s, devices = e.scenario, e.scenario.preset.layout.num_devices
    table = Table(title=f"Speed: {search.describe(s.preset.layout)}")
    for name in ("", "tokens/s", "limit", "of limit"):
        table.add_column(name, justify="right" if name else "left")
    limit = e.limit_tokens_per_s_per_user
    for name, value, most in (
        ("a user", e.tokens_per_s_per_user, limit),
        ("a GPU", e.tokens_per_s_per_gpu, limit * s.concurrency / devices),
        ("the system", e.tokens_per_s, limit * s.concurrency),
    ):
        table.add_row(name, f"{value:,.0f}", f"{most:,.0f}", percent(value, most))
    drafted = f"{e.acceptance_length:.2f} tokens a step with {s.budget} draft nodes ({s.acceptance.name})"
    table.caption = (
        f"{requests(s.concurrency)} of {s.context} tokens; {drafted if s.budget else 'no draft'}; "
        f"model error ±{100 * search.error_band(e):.0f} % on published systems like this"
    )
    return table


def memory_table(e: Estimate) -> Table:
    """Bytes on one GPU, and the requests that fit."""
    m = e.memory
    table = Table(title="Memory of a GPU")
    table.add_column("")
    table.add_column("GB", justify="right")
    for name, value in m.weights.items():
        table.add_row(name, f"{value / GB:.2f}")
    table.add_row("drafter", f"{m.drafter / GB:.2f}")
    table.add_row("latent cache", f"{m.cache / GB:.2f}")
    table.add_row("reserve", f"{m.reserve / GB:.2f}")
    table.add_section()
    table.add_row("total", f"{m.total / GB:.1f}")
    table.add_row("capacity", f"{m.capacity / GB:.1f}")
    verdict = "fits" if m.fits else f"does not fit, {(m.total - m.capacity) / GB:.1f} GB over"
    table.caption = f"{verdict}; room for {requests(m.max_requests)} of {e.scenario.context} tokens in the system"
    return table


def estimates_table(estimates: Iterable[Estimate], title: str) -> Table:
    """Several estimates, one a row."""
    table = Table(title=title)
    for name in ("mesh", "GPUs", "layout", "requests", "context", "budget", "step ms", "of limit", "tok/s/user",
                 "tok/s/GPU", "tok/s", "bottleneck"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("mesh", "layout", "bottleneck") else "right")
    for e in estimates:
        s = e.scenario
        table.add_row(
            s.preset.name, str(s.preset.layout.num_devices), search.describe(s.preset.layout), str(s.concurrency),
            str(s.context), str(s.budget), f"{e.step_ms:.2f}", percent(e.limit_ms, e.step_ms),
            f"{e.tokens_per_s_per_user:,.0f}", f"{e.tokens_per_s_per_gpu:,.0f}", f"{e.tokens_per_s:,.0f}",
            e.bottleneck if e.memory.fits else "does not fit",
        )  # fmt: skip
    return table


def recommendation_text(r: Recommendation) -> str:
    """Why the best layout is the best, and whether the model can tell."""
    lines = [f"Best for {r.goal}: {search.describe(r.best.scenario.preset.layout)}, budget {r.best.scenario.budget}"]
    if r.runner_up is not None:
        lines.append(f"Runner-up: {search.describe(r.runner_up.scenario.preset.layout)}, {100 * r.margin:.0f} % behind")
        if not r.is_certain:
            lines.append("The model cannot tell the two apart: the difference is within its error. Measure both.")
    lines += [f"  {reason}" for reason in r.reasons]
    return "\n".join(lines)


def recommendation_data(r: Recommendation) -> dict[str, Any]:
    """A recommendation as plain data."""
    return {
        "goal": r.goal,
        "best": details(r.best),
        "runner_up": details(r.runner_up) if r.runner_up else None,
        "margin": r.margin if math.isfinite(r.margin) else None,
        "is_certain": r.is_certain,
        "reasons": list(r.reasons),
    }


def comparison_table(comparisons: Sequence[Comparison], left: str, right: str) -> Table:
    """Two machines side by side by concurrency."""
    table = Table(title=f"{left} and {right}: best layout of each, tokens/s for a user")
    for name in ("requests", left, "layout, budget", right, "layout, budget ", "ratio", ""):
        table.add_column(name, justify="left" if "layout" in name or not name else "right")
    for c in comparisons:
        cells = [str(c.concurrency)]
        for e in (c.left, c.right):
            if e is None:
                cells += ["–", "does not fit"]
            else:
                cells += [f"{e.tokens_per_s_per_user:,.0f}", f"{search.describe(e.scenario.preset.layout)}, "
                          f"{e.scenario.budget}"]  # fmt: skip
        cells += [f"{c.ratio:.2f}" if c.left and c.right else "–", c.verdict]
        table.add_row(*cells)
    return table


def comparison_data(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Comparisons as plain data."""
    return [
        {
            "concurrency": c.concurrency,
            "left": summary(c.left) if c.left else None,
            "right": summary(c.right) if c.right else None,
            "ratio": c.ratio if c.left and c.right else None,
            "verdict": c.verdict,
        }
        for c in comparisons
    ]


def effects_table(effects: Sequence[Effect], title: str) -> Table:
    """Constants, their sources, and what 20 % of each does."""
    table = Table(title=title, caption="change of tokens/s for a user when the constant is 20 % smaller or larger")
    for name in ("constant", "value", "unit", "kind", "-20 %", "+20 %", "source"):
        table.add_column(name, justify="right" if name in ("value", "-20 %", "+20 %") else "left", overflow="fold")
    for e in effects:
        table.add_row(e.name, f"{e.value:.6g}", e.unit, e.kind, f"{100 * e.lower:+.1f} %", f"{100 * e.higher:+.1f} %",
                      e.source)  # fmt: skip
    return table


def original_table(figures: Sequence[Figure]) -> Table:
    """The original analysis, its formulas' reproduction and the corrected model."""
    table = Table(title="The original analysis, reproduced, beside the corrected model")
    for name in ("", "published", "reproduced", "error", "corrected", "unit", "note"):
        table.add_column(name, justify="left" if name in ("", "unit", "note") else "right", overflow="fold")
    group = ""
    for f in figures:
        if f.group != group:
            group = f.group
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
        error = f"{100 * (f.reproduced / f.published - 1):+.2f} %"
        table.add_row(
            f"  {f.name}", f"{f.published:,g}", number(f.reproduced), error, number(f.corrected), f.unit, f.note
        )
    return table


def number(value: float) -> str:
    """Three or four significant digits, with thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def validation_table(points: Sequence[Point], acceptance_points: Sequence[AcceptancePoint]) -> Table:
    """Published and predicted speeds, calibration points first."""
    table = Table(title="Predicted against published", caption=f"overlap {published.OVERLAP:g} for all rows")
    for name in ("", "role", "published", "predicted", "error", "band", "source"):
        table.add_column(name, justify="left" if name in ("", "role", "source") else "right", overflow="fold")
    for role in ("calibration", "held-out"):
        table.add_section()
        for p in points:
            if p.role == role:
                table.add_row(p.name, role, number(p.published), number(p.predicted), f"{100 * p.error:+.0f} %",
                              f"±{100 * published.BANDS[p.family]:.0f} %", p.source)  # fmt: skip
        for a in acceptance_points:
            if a.role == role:
                table.add_row(
                    f"acceptance: {a.name}", role, f"{a.published:.2f}", f"{a.predicted:.2f}",
                    f"{100 * a.error:+.0f} %", f"±{100 * published.ACCEPTANCE_BAND:.0f} %", a.source,
                )  # fmt: skip
    return table


def validation_data() -> list[dict[str, Any]]:
    """All published points as plain data."""
    fields = ("name", "role", "published", "predicted", "error", "source")
    return [{name: getattr(p, name) for name in fields} for p in (*published.POINTS, *published.ACCEPTANCE_POINTS)]


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty one after it."""
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
