"""What changed between two reports (`scripts/profile.py --json`): memory, parts, messages, kernels and copies."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

_CASE = ("program", "mesh", "layout", "gpu", "layers", "requests", "rows_per_request", "context", "budget")
_PART = (
    ("HBM bytes", lambda part: part["need"]["hbm_bytes"]),
    ("FLOPs", lambda part: part["need"]["flops"]),
    ("weight bytes read", lambda part: part["weight_bytes_read"]),
    ("messages", lambda part: part["messages"]),
    ("link bytes", lambda part: part["link_bytes"]),
    ("floor µs", lambda part: part["floor_us"]),
)


@dataclass(frozen=True)
class Change:
    """One figure that differs; None where one report does not have it."""

    what: str
    before: Any
    after: Any


def load(path: Path) -> dict[str, Any]:
    """Reads a report.

    Raises:
      ValueError: a file that is no report of profile.py.
    """
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); give what `profile.py --json` printed") from None
    if not isinstance(report, dict) or "parts" not in report or "memory" not in report:
        raise ValueError(f"{path}: not a report; give what `profile.py --json` printed")
    return report


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Every figure that differs, times of compiling left out."""
    first, second = dict(_figures(before)), dict(_figures(after))
    names = [*first, *(name for name in second if name not in first)]
    pairs = ((name, first.get(name), second.get(name)) for name in names)
    return [Change(name, old, new) for name, old, new in pairs if old != new]


def _figures(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _CASE:
        yield name, report[name]
    memory = report["memory"]
    for part, num_bytes in memory["weights"].items():
        yield f"memory: weights of {part}", num_bytes
    for name, value in memory.items():
        if name != "weights":
            yield f"memory: {name}", value
    for part in report["parts"]:
        for name, figure in _PART:
            yield f"{part['part']}: {name}", figure(part)
        for c in part["collectives"]:
            yield f"{part['part']}: {c['kind']} over {' × '.join(c['axes'])} of {c['bytes']:,} bytes", c["count"]
        for kernel in part["kernels"]:
            yield f"{part['part']}: kernel {kernel['name']}", kernel["count"]
    for kernel in report["assembled"]:
        yield f"kernel {kernel['name']}: registers", kernel["registers"]
        yield f"kernel {kernel['name']}: spill stores", kernel["spill_store_bytes"]
    for found in report["materialised"]:
        yield f"copy of {found['array']} in {found['part']}", found["bytes"]
    yield "host transfers", len(report["host_transfers"])
    yield "floor µs", report["floor_us"]


def show(found: list[Change]) -> Table | str:
    """For a terminal."""
    if not found:
        return "the reports are equal"
    table = Table()
    table.add_column("what")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for change in found:
        table.add_row(change.what, _text(change.before), _text(change.after))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
