"""Estimates as tables for a terminal and as plain data for JSON."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kimi_jax.estimator import search
from kimi_jax.estimator.explain import Effect
from kimi_jax.estimator.scenario import Scenario
from kimi_jax.estimator.search import Comparison, Recommendation
from kimi_jax.estimator.step import Estimate
from kimi_jax.ledger.precision import STORED
from kimi_jax.tables import command_line, left, right, show, table
from meshes import Layout

GB = 1e9


def output(as_json: bool, data: Callable[[], Any], *renderables: Any) -> None:
    """Prints one JSON object, or text and tables."""
    if as_json:
        print(json.dumps(data(), indent=2, ensure_ascii=False))
    else:
        show(*renderables)


def percent(part: float, whole: float) -> str:
    """Share of a whole in per cent, or a dash for nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def requests(count: int) -> str:
    """A number of requests, in words."""
    return "1 request" if count == 1 else f"{count:,} requests"


def _named(item: object, *names: str) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def summary(e: Estimate) -> dict[str, Any]:
    """One estimate as one flat row."""
    s, layout = e.scenario, e.scenario.preset.layout
    place = {"mesh": s.preset.name, "gpu": s.gpu.name, "gpus": layout.num_devices, "layout": search.describe(layout)}
    figures = _named(
        e, "acceptance_length", "step_ms", "prefill_ms", "limit_ms", "limit_resource", "bottleneck",
        "tokens_per_s_per_user", "tokens_per_s_per_gpu", "tokens_per_s",
    )  # fmt: skip
    figures |= {"ttft_s": e.ttft_s if s.prefill and math.isfinite(e.ttft_s) else None}
    memory = {"memory_bytes": e.memory.total, "memory_capacity_bytes": e.memory.capacity}
    return {
        **place, **_named(s, "concurrency", "context", "budget"), **figures, "error_band": search.error_band(e),
        **memory, **_named(e.memory, "max_requests", "fits"),
    }  # fmt: skip


def details(e: Estimate) -> dict[str, Any]:
    """One estimate with its parts and memory."""
    parts = {
        name: {"count": part.count, "us": part.total_us, "ms": part.ms, "limit_ms": part.limit_ms(e.scenario.gpu)}
        | _named(part, "fixed_us", "memory_us", "compute_us", "link_us")
        | {"hbm_bytes": part.count * part.hbm_bytes, "flops": part.count * part.flops}
        | {"local_link_bytes": part.count * part.local_bytes, "network_link_bytes": part.count * part.network_bytes}
        | {"note": part.note}
        for name, part in e.parts.items()
    }
    inputs = {name: getattr(e.scenario, name).name for name in ("acceptance", "routing", "kernels")}
    return summary(e) | {
        "command": command(e), "hidden_ms": e.hidden_ms, "parts": parts,
        "memory": _named(e.memory, "weights", "cache", "drafter", "reserve"),
        "inputs": inputs | {"overlap": e.scenario.overlap},
    }  # fmt: skip


def command(e: Estimate) -> str:
    """The command that decodes on this machine, with this layout and draft budget."""
    s, layout = e.scenario, e.scenario.preset.layout
    options = [f"--mesh {s.preset.name}", *(f"--{axis} {size}" for axis, size in layout.axis_sizes.items())]
    if layout.experts != "slots":
        options.append(f"--experts {layout.experts}")
    if layout.ep > 1 and layout.exchange != "auto":
        options.append(f"--exchange {layout.exchange}")
    if layout.cache_ranks > 1:
        options.append("--cache split")
    options.append(f"--budget {s.budget}" if s.budget else "--speculation none")
    return f"uv run scripts/decode.py {' '.join(options)}"


def band_text(band: float | None) -> str:
    """An error band in words."""
    return "error unknown: no such machine was published" if band is None else f"± {100 * band:.0f} %"


def answer(e: Estimate) -> list[str | Text]:
    """An estimate in a few short lines: machine, speed, step, memory, and the command that runs it."""
    s, m = e.scenario, e.memory
    fits = "fits" if m.fits else f"does not fit, {(m.total - m.capacity) / GB:.1f} GB over"
    drafted = f"{e.acceptance_length:.2f} tokens a step, {s.budget} draft nodes" if s.budget else "no draft"
    return [
        f"{s.preset.name} with {s.gpu.name}: {search.describe(s.preset.layout)}",
        f"Speed: {e.tokens_per_s_per_user:,.0f} tokens/s a user, {e.tokens_per_s:,.0f} in all "
        f"({band_text(search.error_band(e))}).",
        f"Step: {e.step_ms:.2f} ms, limit {e.limit_ms:.2f} ms ({e.limit_resource}); {drafted}.",
        f"Bottleneck: {e.bottleneck}",
        f"Memory: {m.total / GB:.1f} of {m.capacity / GB:.1f} GB, {fits}; room for {requests(m.max_requests)}.",
        *([command_line(command(e))] if s.precision == STORED else []),
    ]


def parts_table(e: Estimate, wide: bool = False) -> Table:
    """A step by part: µs a layer, ms a step, and the physical limit beside it."""
    gpu = e.scenario.gpu
    columns = (*left("part"), *right("calls"), *right("µs each", wide=True), *right("ms", "limit ms", "of limit"),
               *left("mostly"), *left("note", wide=True))  # fmt: skip
    rows: list[tuple[str, ...] | None] = []
    for name, part in e.parts.items():
        if part.total_us:
            limit = part.limit_ms(gpu)
            rows.append(
                (name, str(part.count), f"{part.total_us:.1f}", f"{part.ms:.2f}", f"{limit:.2f}",
                 percent(limit, part.ms), part.dominant, part.note)
            )  # fmt: skip
    if e.hidden_ms:
        rows.append(("overlap", "", "", f"-{e.hidden_ms:.2f}", "", "", "an input", f"{e.scenario.overlap:g}"))
    rows += [None, ("step", "", "", f"{e.step_ms:.2f}", f"{e.limit_ms:.2f}", percent(e.limit_ms, e.step_ms),
                    e.limit_resource, "")]  # fmt: skip
    if e.prefill_ms:
        rows.append(("prefill", "", "", f"{e.prefill_ms:.2f}", "", "", "prompts", "between decode steps"))
    return table(f"One step on the busiest GPU: {e.scenario.preset.name}, {gpu.name}", columns, rows, wide=wide)


def speed_table(e: Estimate) -> Table:
    """Tokens per second for a user, a GPU and the system, each with its limit."""
    s, devices = e.scenario, e.scenario.preset.layout.num_devices
    limit = e.limit_tokens_per_s_per_user
    rows = [
        (name, f"{value:,.0f}", f"{most:,.0f}", percent(value, most))
        for name, value, most in (
            ("a user", e.tokens_per_s_per_user, limit),
            ("a GPU", e.tokens_per_s_per_gpu, limit * s.concurrency / devices),
            ("the system", e.tokens_per_s, limit * s.concurrency),
        )
    ]
    return table(
        "Speed", (*left(""), *right("tokens/s", "limit", "of limit")), rows,
        caption=f"{requests(s.concurrency)} of {s.context} tokens; {s.acceptance.name if s.budget else 'no draft'}",
    )  # fmt: skip


def memory_table(e: Estimate) -> Table:
    """Bytes on one GPU."""
    m = e.memory
    held = m.weights | {"drafter": m.drafter, "latent cache": m.cache, "reserve": m.reserve}
    rows = [*((name, f"{value / GB:.2f}") for name, value in held.items()), None,
            ("total", f"{m.total / GB:.2f}"), ("capacity", f"{m.capacity / GB:.2f}")]  # fmt: skip
    return table("Memory of a GPU", (*left(""), *right("GB")), rows)


def axes(layout: Layout) -> str:
    """Sizes of the three axes, for a column headed AXES."""
    return " × ".join(str(size) for size in layout.axis_sizes.values())


AXES = "dp × ep × tp"


def estimates_table(estimates: Iterable[Estimate], title: str, wide: bool = False) -> Table:
    """Several estimates, one a row. Machine, card, batch and context are left out where all have the same."""
    estimates = list(estimates)

    def varies(value: Callable[[Scenario], object]) -> bool:
        return len({value(e.scenario) for e in estimates}) > 1

    columns = (
        *left("mesh", wide=not varies(lambda s: s.preset.name)), *left("card", wide=not varies(lambda s: s.gpu.name)),
        *left(AXES), *left("experts", "exchange", wide=True), *right("batch", wide=not varies(lambda s: s.concurrency)),
        *right("context", wide=not varies(lambda s: s.context)), *right("budget", "ms"), *right("of limit", wide=True),
        *right("a user"), *right("a GPU", "all", wide=True), *left("bottleneck"),
    )  # fmt: skip
    rows = []
    for e in estimates:
        s, layout = e.scenario, e.scenario.preset.layout
        rows.append((
            s.preset.name, s.gpu.name, axes(layout), layout.experts, layout.exchange, str(s.concurrency),
            str(s.context), str(s.budget), f"{e.step_ms:.2f}", percent(e.limit_ms, e.step_ms),
            f"{e.tokens_per_s_per_user:,.0f}", f"{e.tokens_per_s_per_gpu:,.0f}", f"{e.tokens_per_s:,.0f}",
            max(e.parts, key=lambda part: e.parts[part].ms) if e.memory.fits else "does not fit",
        ))  # fmt: skip
    return table(f"{title}: ms a step, tokens/s", columns, rows, wide=wide)


def recommendation_text(r: Recommendation, price: float | None = None) -> list[str | Text]:
    """The best layout with its speed and command, the runner-up, and whether the model can tell them apart.

    Args:
      price: dollars of a GPU-hour.
    """
    lines = [f"Best for {r.goal}:", *answer(r.best)]
    if r.goal != "latency":
        e = r.best
        first = f"; first tokens come within {e.ttft_s:.2f} s on average" if e.scenario.prefill else ""
        lines.insert(
            2, f"Load: {requests(e.scenario.concurrency)}, {number(e.tokens_per_s_per_gpu)} tokens/s a GPU{first}."
        )
    if price is not None:
        cost = search.dollars_per_million(r.best, price)
        lines.insert(3, f"Cost: {cost:.2f} dollars for a million tokens of answers, at {price:g} a GPU-hour.")
    if r.runner_up is not None:
        lines.append(f"{100 * r.margin:.0f} % ahead of {search.describe(r.runner_up.scenario.preset.layout)}.")
        if not r.is_certain:
            lines.append("The model cannot tell the two apart: the gap is within its error. Measure both.")
    return lines


def smallest_text(found: Sequence[Estimate], least: float) -> list[str | Text]:
    """The smallest machine for a speed with its command, and whether the model can be sure."""
    e, s = found[0], found[0].scenario
    lines = [
        f"{s.preset.topology.num_gpus} × {s.gpu.name} give {requests(s.concurrency)} {least:g} tokens/s each.",
        *answer(e),
    ]
    if e.tokens_per_s_per_user < least * (1 + (search.error_band(e) or 1.0)):
        lines.append("The speed asked for is within the model's error of this: measure before you rely on it.")
    return lines


def recommendation_data(r: Recommendation, price: float | None = None) -> dict[str, Any]:
    """A recommendation as plain data; dollars for a million tokens where a GPU-hour's price is given."""
    cost = {} if price is None else {"dollars_per_million_tokens": search.dollars_per_million(r.best, price)}
    return cost | {
        "goal": r.goal,
        "best": details(r.best),
        "runner_up": details(r.runner_up) if r.runner_up else None,
        "margin": r.margin if math.isfinite(r.margin) else None,
        "is_certain": r.is_certain,
        "reasons": list(r.reasons),
    }


def comparison_table(comparisons: Sequence[Comparison], names: tuple[str, str], wide: bool = False) -> Table:
    """Two machines side by side by concurrency; the left one's columns come first."""
    side = *right("user"), *left(AXES), *right("budget", wide=True), *left("experts, exchange", wide=True)
    rows = []
    for c in comparisons:
        cells = [str(c.concurrency)]
        for e in (c.left, c.right):
            if e is None:
                cells += ["–", "does not fit", "", ""]
            else:
                layout = e.scenario.preset.layout
                cells += [f"{e.tokens_per_s_per_user:,.0f}", axes(layout), str(e.scenario.budget),
                          f"{layout.experts}, {layout.exchange}"]  # fmt: skip
        rows.append((*cells, f"{c.ratio:.2f}" if c.left and c.right else "–", c.verdict))
    columns = (*right("batch"), *side, *side, *right("ratio"), *left("verdict"))
    return table(f"{names[0]} | {names[1]}: tokens/s for a user, best layout of each", columns, rows, wide=wide)


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


def effects_table(effects: Sequence[Effect], title: str, wide: bool = False) -> Table:
    """Constants, their sources, and what 20 % of each does."""
    columns = (*left("constant"), *right("value"), *left("unit"), *left("kind", wide=True), *right("-20 %", "+20 %"),
               *left("source", wide=True))  # fmt: skip
    rows = [
        (e.name.removeprefix("kernels."), f"{e.value:.4g}", e.unit, e.kind,
         f"{100 * e.lower:+.1f} %", f"{100 * e.higher:+.1f} %", e.source)
        for e in effects
    ]  # fmt: skip
    caption = "change of tokens/s for a user when the constant is 20 % smaller or larger"
    return table(title, columns, rows, wide=wide, caption=caption)


def number(value: float) -> str:
    """Three or four significant digits, with thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
