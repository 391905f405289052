"""What changed between two reports or dumps of profile.py or decode.py: memory, parts, messages, kernels and copies.

Of a dump the instructions that run are compared too: how many of each kind in each part, and the bytes between them.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kimi_jax.profiling.dump import PROGRAM, REPORT
from kimi_jax.profiling.hlo import Module, part_of
from kimi_jax.profiling.traffic import intermediates, is_kernel, kernel_name, launched
from kimi_jax.tables import left, right, table
from kimi_jax.text_files import read_text

_CASE = ("program", "mesh", "layout", "gpu", "layers", "requests", "rows_per_request", "context", "budget")
_PART = (
    ("HBM bytes", lambda part: part["need"]["hbm_bytes"]),
    ("FLOPs", lambda part: part["need"]["flops"]),
    ("weight bytes read", lambda part: part["weight_bytes_read"]),
    ("moved bytes", lambda part: part["moved_bytes"]),
    ("messages", lambda part: part["messages"]),
    ("link bytes", lambda part: part["link_bytes"]),
    ("floor µs", lambda part: part["floor_us"]),
    ("launches", lambda part: part["launches"]["kernels"]),
    ("host waits", lambda part: part["launches"]["host_waits"]),
    ("modelled µs", lambda part: part["modelled_us"]),
)


@dataclass(frozen=True)
class Change:
    """One figure that differs; None where one report does not have it."""

    what: str
    before: Any
    after: Any


def load(path: Path) -> dict[str, Any]:
    """Every figure of a report, or of a dump's directory, by name; times of compiling are left out.

    Raises:
      ValueError: a file that is no report of profile.py, a directory that is no dump.
    """
    if path.is_dir():
        report, program = path / REPORT, path / PROGRAM
        if not program.exists():
            raise ValueError(f"{path}: holds no {PROGRAM}; give a directory that --xla-dump wrote")
        known = load(report) if report.exists() else {}
        return known | dict(_instructions(Module(read_text(program))))
    try:
        report = json.loads(read_text(path))
    except OSError as error:
        hint = "give a file that `profile.py --json` printed, or a directory that --xla-dump wrote"
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); give what `profile.py --json` printed") from None
    if not isinstance(report, dict) or "parts" not in report or "memory" not in report:
        raise ValueError(f"{path}: not a report; give what `profile.py --json` printed")
    return dict(figures(report))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Every figure that differs."""
    names = [*before, *(name for name in after if name not in before)]
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return [Change(name, old, new) for name, old, new in pairs if old != new]


def _instructions(module: Module) -> Iterator[tuple[str, Any]]:
    counts: Counter[tuple[str, str]] = Counter()
    for _, instruction, count in launched(module):
        name = f"kernel {kernel_name(instruction)}" if is_kernel(instruction) else instruction.opcode
        counts[part_of(instruction.op_name), name] += count
    for (part, name), count in sorted(counts.items()):
        yield f"{part}: instructions, {name}", count
    for part, num_bytes in sorted(intermediates(module).items()):
        yield f"{part}: activations moved", num_bytes


def figures(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a report says, by name, without times of compiling."""
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
        yield f"kernel {kernel['name']}: shared memory", kernel["shared_bytes"]
    for found in report["materialised"]:
        yield f"copy of {found['array']} in {found['part']}", found["bytes"]
    yield "host transfers", len(report["host_transfers"])
    yield "host waits", report["launches"]["host_waits"]
    yield "floor µs", report["floor_us"]
    yield "modelled µs", report["modelled_us"]


def show(found: list[Change]) -> Table | str:
    """For a terminal."""
    if not found:
        return "they are equal"
    rows = [(c.what, _text(c.before), _text(c.after), _ratio(c.before, c.after)) for c in found]
    return table("figures that differ; memory in bytes", (*left("what"), *right("before", "after", "ratio")), rows)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.2f}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def _ratio(before: Any, after: Any) -> str:
    if not all(isinstance(value, int | float) for value in (before, after)) or not before:
        return ""
    return f"{after / before:.3g}"
