"""Tables of the study: the original analysis reproduced, and predictions beside published speeds."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kimi_jax.estimator.report import number
from kimi_jax.estimator.study import published
from kimi_jax.estimator.study.original import Figure
from kimi_jax.tables import left, right, table


def original_table(figures: Sequence[Figure], wide: bool = False) -> Table:
    """The original analysis, its formulas' reproduction and the corrected model."""
    columns = (*left(""), *right("published"), *right("reproduced", "error", wide=True), *right("corrected"),
               *left("unit"), *left("note", wide=True))  # fmt: skip
    rows: list[tuple[str | Text, ...] | None] = []
    group = ""
    for f in figures:
        if f.group != group:
            group = f.group
            rows += [None, (Text(group, style="bold"), *[""] * 6)]
        rows.append((f"  {f.name}", f"{f.published:,g}", number(f.reproduced), f"{100 * f.error:+.2f} %",
                     number(f.corrected), f.unit, f.note))  # fmt: skip
    return table("The original analysis, reproduced, beside the corrected model", columns, rows, wide=wide)


def validation_table(wide: bool = False) -> Table:
    """Published and predicted speeds, calibration points first."""
    columns = (*left(""), *left("role", wide=True), *right("published", "predicted", "error", "band"),
               *left("source", wide=True))  # fmt: skip
    rows: list[tuple[str | Text, ...] | None] = []
    for role in ("calibration", "held-out"):
        rows += [None, (Text(role, style="bold"), *[""] * 6)]
        for name, p, band in published.compared(role):
            rows.append((name, role, number(p.published), number(p.predicted), f"{100 * p.error:+.0f} %",
                         f"±{100 * band:.0f} %" if band else "none", p.source))  # fmt: skip
    caption = f"overlap {published.OVERLAP:g} for all rows"
    return table("Predicted against published", columns, rows, wide=wide, caption=caption)


def validation_data() -> list[dict[str, Any]]:
    """All published points as plain data."""
    fields = ("name", "role", "published", "predicted", "error", "source")
    return [{name: getattr(p, name) for name in fields} for p in (*published.POINTS, *published.ACCEPTANCE_POINTS)]
