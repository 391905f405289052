"""Tables for a terminal: they follow its width, keep words whole, and go into a pipe as wide as they are."""

import dataclasses
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kimi_jax.standard_output import OutputConsole

NARROW_WORDS = 44
"""Columns of words in a table that is not wide wrap here, also where nothing else limits them."""

PIPE_WIDTH = 10_000
"""Columns where there is no terminal: nothing is wrapped or cut for a reader that is a program or a file."""

Cell = str | Text


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    is_right: bool = False
    """Figures stand at the right."""
    is_wide: bool = False
    """Only shown where the wide table is asked for."""


def left(*names: str, wide: bool = False) -> tuple[Column, ...]:
    """Columns of words."""
    return tuple(Column(name, False, wide) for name in names)


def right(*names: str, wide: bool = False) -> tuple[Column, ...]:
    """Columns of figures."""
    return tuple(Column(name, True, wide) for name in names)


def table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell] | None],
    *,
    wide: bool = False,
    caption: str | None = None,
) -> Table:
    """A table whose columns are never narrower than their longest word.

    Args:
      title: the line above it; empty for none.
      columns: all of them; those marked wide are left out unless `wide`.
      rows: one cell for each column, or None for a line between groups of rows. Cells are text, never markup.
      caption: the line below it.
    """
    shown = [index for index, column in enumerate(columns) if wide or not column.is_wide]
    made = Table(
        title=Text(title, style="bold") if title else None, title_justify="left",
        caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        collapse_padding=True,
        header_style="dim",
    )  # fmt: skip
    kept = [row if row is None else [row[index] for index in shown] for row in rows]
    for place, index in enumerate(shown):
        cells = [columns[index].name, *(str(row[place]) for row in kept if row is not None)]
        longest = max((len(word) for cell in cells for word in cell.split()), default=1)
        made.add_column(
            columns[index].name, justify="right" if columns[index].is_right else "left", min_width=longest,
            max_width=None if wide or columns[index].is_right else max(longest, NARROW_WORDS), overflow="fold",
        )  # fmt: skip
    for row in kept:
        if row is None:
            made.add_section()
        else:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def bars(title: str, unit: str, series: dict[str, dict[str, float]], width: int = 40) -> Table:
    """Horizontal bars: for each label one bar of each series, all on one scale.

    Args:
      title: the line above them.
      unit: of the values.
      series: by name of the series, values by label; every series has the same labels.
      width: columns of the longest bar.
    """
    most = max((value for values in series.values() for value in values.values()), default=0) or 1
    labels = next(iter(series.values()), {})
    rows = [
        (label if number == 0 else "", name, f"{values[label]:,.4g}", "█" * round(width * values[label] / most))
        for label in labels
        for number, (name, values) in enumerate(series.items())
    ]
    return table(title, (*left("", ""), *right(unit), *left("")), rows)


def command_line(command: str) -> Text:
    """A command to copy: a terminal may wrap it, but no line break gets into it."""
    return Text(command, style="bold")


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, and as wide as need be elsewhere."""
    console = OutputConsole()
    return console if console.is_terminal else OutputConsole(width=PIPE_WIDTH)


def show(*renderables: RenderableType) -> None:
    """Prints tables and lines: strings wrap at words, a `Text` stands as it is, and no table is cut."""
    console = table_console()
    for renderable in renderables:
        console.print(renderable, highlight=False, markup=False, crop=False, soft_wrap=isinstance(renderable, Text))
