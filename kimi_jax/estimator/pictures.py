"""Pictures of estimates: the same series as a PNG file (matplotlib) or as text in a terminal."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from kimi_jax.estimator import search
from kimi_jax.estimator.scenario import Scenario
from kimi_jax.estimator.step import TIMED, Estimate, estimate
from kimi_jax.text_files import whole_file
from meshes import Preset

MARKERS = "●◆▲■○◇△□✚✖"
COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white", "bright_cyan", "bright_yellow", "bright_green")


@dataclass(frozen=True)
class Series:
    """Points of one line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    labels: tuple[str, ...] = ()
    """Beside the points of a file."""


@dataclass(frozen=True)
class Picture:
    """What is plotted. `is_stacked` lays the series' heights on each other."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    is_log_x: bool = False
    is_log_y: bool = False
    is_stacked: bool = False
    band: float = 0.0
    """Share by which the heights may be off, shaded."""


def pareto_picture(machine: Preset, scenario: Scenario, concurrencies: Sequence[int]) -> Picture:
    """Tokens/s for a user against tokens/s for a GPU: the best of each layout's loads and budgets."""
    by_layout: dict[str, list[Estimate]] = {}
    for load in concurrencies:
        for found in search.candidates(machine, dataclasses.replace(scenario, concurrency=load)):
            by_layout.setdefault(str(found.scenario.preset.layout), []).append(found)
    fronts = {name: search.pareto(estimates) for name, estimates in by_layout.items()}
    # Only layouts that are best somewhere: the others lie behind them.
    best = {str(e.scenario.preset.layout) for e in search.pareto(e for front in fronts.values() for e in front)}
    series = tuple(
        Series(name, tuple(e.tokens_per_s_per_user for e in front), tuple(e.tokens_per_s_per_gpu for e in front))
        for name, front in fronts.items()
        if name in best
    )
    title = f"{machine.name}, {scenario.gpu.name}: what a user gets and what a GPU gives"
    return Picture("pareto", title, "tokens/s for a user", "tokens/s for a GPU", series, True, True)


def equal_speed_picture(machines: Mapping[str, Sequence[Estimate]]) -> Picture:
    """Tokens/s for a user against tokens/s for a GPU of several machines in their best layouts; requests at points."""
    fronts = {name: search.pareto(estimates) for name, estimates in machines.items()}
    series = tuple(
        Series(
            name, tuple(e.tokens_per_s_per_user for e in front), tuple(e.tokens_per_s_per_gpu for e in front),
            tuple(str(e.scenario.concurrency) for e in front),
        )
        for name, front in fronts.items()
    )  # fmt: skip
    band = search.ERROR_BAND["wide-ep"]
    title = "What a user gets and what a GPU gives, with requests at the points"
    return Picture("equal_speed", title, "tokens/s for a user", "tokens/s for a GPU", series, True, True, band=band)


def wall_picture(estimates: Sequence[Estimate]) -> Picture:
    """Step time by part against GPUs: what more GPUs cannot shorten."""
    gpus = tuple(float(e.scenario.preset.layout.num_devices) for e in estimates)
    series = tuple(
        Series(part, gpus, tuple(e.parts[part].ms for e in estimates))
        for part in TIMED
        if any(e.parts[part].ms > 0.005 for e in estimates)
    )
    budget = estimates[0].scenario.budget
    return Picture(
        "overhead_wall", f"One step by part: concurrency {estimates[0].scenario.concurrency}, budget {budget}",
        "GPUs", "ms a step", series, is_log_x=True, is_stacked=True,
    )  # fmt: skip


def throughput_picture(comparisons: Mapping[str, Sequence[Estimate]]) -> Picture:
    """System throughput against concurrency, one line a machine."""
    series = tuple(
        Series(name, tuple(float(e.scenario.concurrency) for e in estimates), tuple(e.tokens_per_s for e in estimates))
        for name, estimates in comparisons.items()
    )
    return Picture("throughput", "Best layout at each load", "requests", "tokens/s", series, True, True)


def budget_picture(scenarios: Mapping[str, Scenario], budgets: Sequence[int]) -> Picture:
    """Speed for a user against the draft tree's budget, one line a layout or load."""
    series = tuple(
        Series(
            name,
            tuple(float(b) for b in budgets),
            tuple(estimate(dataclasses.replace(s, budget=b)).tokens_per_s_per_user for b in budgets),
        )
        for name, s in scenarios.items()
    )
    return Picture("budget", "What a larger draft tree buys", "draft nodes", "tokens/s for a user", series)


def save_png(picture: Picture, path: Path) -> None:
    """Write a picture as a PNG file.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError(
            "PNG pictures need matplotlib: install the extra `plots` (uv sync --extra plots, or "
            "pip install 'kimi-jax[plots]'), or leave out the file for a picture in the terminal"
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    if picture.is_stacked:
        axes.stackplot(picture.series[0].x, *(s.y for s in picture.series), labels=[s.name for s in picture.series])
    else:
        for series in picture.series:
            axes.plot(series.x, series.y, marker="o", markersize=4, label=series.name)
            if picture.band:
                low, high = ([y * (1 + side * picture.band) for y in series.y] for side in (-1, 1))
                axes.fill_between(series.x, low, high, alpha=0.15)
            for x, y, label in zip(series.x, series.y, series.labels, strict=False):
                axes.annotate(label, (x, y), textcoords="offset points", xytext=(3, 3), fontsize=6)
    axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
    if picture.is_log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if picture.is_log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize="small")
    with whole_file(path) as stream:
        figure.savefig(stream, dpi=150, format=path.suffix.removeprefix(".") or "png")


def terminal(picture: Picture, width: int = 68, height: int = 20) -> Text:
    """Draw a picture with characters; each series has its mark."""
    series = _stacked(picture.series) if picture.is_stacked else picture.series
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True)]
    to_x = _scale([x for x, _ in points], width, picture.is_log_x)
    low_y = [0.0] if not picture.is_log_y else []
    to_y = _scale([y for _, y in points] + low_y, height, picture.is_log_y)
    cells: dict[tuple[int, int], int] = {}
    for number, s in enumerate(series):
        marks = [(to_x(x), to_y(y)) for x, y in zip(s.x, s.y, strict=True)]
        cells.update(dict.fromkeys(marks, number))
    text = Text(f"{picture.title}\n")
    low, high = min(y for _, y in points), max(y for _, y in points)
    low = low if picture.is_log_y else min(0.0, low)
    for row in range(height - 1, -1, -1):
        label = f"{high:,.4g}" if row == height - 1 else f"{low:,.4g}" if row == 0 else ""
        text.append(f"{label:>10} │")
        for column in range(width):
            number = cells.get((column, row))
            if number is None:
                text.append(" ")
            else:
                text.append(MARKERS[number % len(MARKERS)], COLORS[number % len(COLORS)])
        text.append("\n")
    text.append(f"{'':>10} └{'─' * width}\n")
    left, right = f"{min(x for x, _ in points):,.4g}", f"{max(x for x, _ in points):,.4g}"
    middle = f"{picture.x_label}  (up: {picture.y_label})"
    text.append(f"{'':>12}{left}{middle:^{width - len(left) - len(right)}}{right}\n")
    for number, s in enumerate(series):
        text.append(f"{'':>12}{MARKERS[number % len(MARKERS)]}", COLORS[number % len(COLORS)])
        text.append(f" {s.name}\n")
    return text


def _stacked(series: Sequence[Series]) -> tuple[Series, ...]:
    heights = [0.0] * len(series[0].x)
    stacked = []
    for s in series:
        heights = [below + y for below, y in zip(heights, s.y, strict=True)]
        stacked.append(Series(f"+ {s.name}" if stacked else s.name, s.x, tuple(heights)))
    return tuple(stacked)


def _scale(values: Sequence[float], size: int, is_log: bool):
    transform = math.log if is_log else float
    low, high = transform(min(values)), transform(max(values))
    span = high - low or 1.0
    return lambda value: round((transform(value) - low) / span * (size - 1))
