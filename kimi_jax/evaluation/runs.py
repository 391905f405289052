"""Benchmark runs as files, and the page that shows them: nothing on it that a saved run doesn't hold."""

import datetime
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_jax.provenance import commit, cores, processor, versions
from kimi_jax.text_files import read_text

INTRODUCTION = """# Benchmarks

Saved runs of `scripts/benchmark.py`; this page is written from them by
`uv run scripts/benchmark.py page docs/data/benchmarks docs/benchmarks.md`. Speeds are ratios within one run on one
machine: compare the rows of a table, not tables.
"""


def record(benchmark: str, ran: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run as `--json` prints it: what was measured, with which command, on what.

    `results` are the rows of one table, flat and with units in their names.
    """
    group = ["--group", "fixtures"] if "transformers" in sys.modules else []
    return {
        "benchmark": benchmark,
        "command": shlex.join(["uv", "run", *group, "scripts/benchmark.py", *sys.argv[1:]]),
        "ran": ran,
        "machine": f"{processor()}, {cores()} cores",
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "results": list(results),
    }


def load(directory: Path) -> list[dict[str, Any]]:
    """All saved runs of a folder, in the order of their names.

    Raises:
      ValueError: no run there, or a file that is none.
    """
    files = sorted(directory.glob("*.json"))
    if not files:
        raise ValueError(
            f"{directory} holds no saved run: scripts/benchmark.py speculation --json > {directory}/NAME.json"
        )
    return [_run(file) for file in files]


def _run(file: Path) -> dict[str, Any]:
    try:
        run = json.loads(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); save what --json prints, without standard error") from None
    missing = [name for name in ("benchmark", "command", "ran", "machine", "results") if name not in run]
    if missing:
        raise ValueError(f"{file}: no {', '.join(missing)}; is this a run of scripts/benchmark.py?")
    return run


def page(runs: Iterable[Mapping[str, Any]]) -> str:
    """The Markdown page of saved runs: a section each, with its command, machine, versions and table."""
    return "\n".join([INTRODUCTION, *map(_section, runs)])


def _section(run: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    rows = run["results"]
    columns = list(dict.fromkeys(name for row in rows for name in row if any(r.get(name) is not None for r in rows)))
    lines = [
        f"## {run['benchmark'].capitalize()}\n",
        f"    {run['command']}\n",
        f"{run['ran']}; {run['machine']}; {versions}; {run.get('date', 'undated')}.\n",
        f"| {' | '.join(name.replace('_', ' ') for name in columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
