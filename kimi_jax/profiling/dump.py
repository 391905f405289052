"""The index page of an XLA dump: what each file holds, and which instruction belongs to which part of the model."""

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_jax.profiling.hlo import Module, part_of
from kimi_jax.profiling.traffic import launched
from kimi_jax.text_files import write_text

if TYPE_CHECKING:
    from kimi_jax.profiling.report import Report

PROGRAM, REPORT = "program.hlo.txt", "report.json"
"""Files of a dump."""

_KINDS = (
    ("before_optimizations.txt", "HLO as jax lowered it, before any of XLA's passes"),
    ("before_optimizations.hlo.pb", "the same as an HloProto, for tools"),
    ("after_optimizations.hlo.pb", "scheduled, optimised HLO as an HloProto, for tools"),
    ("after_spmd_partitioner.txt", "HLO of one device, after the partitioner"),
    ("before_config_assignment.txt", "HLO before XLA configures its kernels"),
    ("after_optimizations.txt", "scheduled, optimised HLO: what runs, in order"),
    ("after_optimizations-buffer-assignment.txt", "where every value lies in memory, and what shares a place"),
    ("buffer-assignment-values.txt", "the values behind the buffer assignment, and where each is used"),
    ("memory-usage-report.txt", "the largest buffers, and those alive at the peak"),
    ("after_optimizations-live-range.txt", "when each buffer is alive, at the peak above all"),
    ("thunk_sequence", "the launches, in order"),
    ("thunk_metadata.txt", "which instruction each launch is"),
    ("config.pbtxt", "XLA's configuration of this module"),
    ("debug_options", "XLA's options of this compile"),
    ("gpu_target_config.pbtxt", "the GPU that was compiled for"),
    ("execution_options.txt", "devices and partitions of this compile"),
    ("obj-file.", "machine code of one fusion, on the CPU"),
    ("autotune_results.pbtxt", "tile sizes that XLA chose for its own kernels"),
)


WANTED = ("before_optimizations.txt", "after_optimizations.txt", "buffer-assignment.txt", "after_optimizations.hlo.pb")
"""Endings of what a whole dump has."""


def missing(directory: Path) -> list[str]:
    """Those of WANTED that a dump lacks."""
    names = [file.name for file in directory.iterdir()]
    return [ending for ending in WANTED if not any(name.endswith(ending) for name in names)]


def write_index(directory: Path, text: str, title: str, report: "Report | None" = None) -> Path:
    """Writes into a dump what `profile.py diff` reads and a person needs: `index.md` and the optimised HLO.

    Args:
      directory: where a compile with `dump_options` left its files.
      text: the compiled program's.
      title: what was compiled, in one line.
      report: written beside it as `report.json`.

    Warns where XLA left out a file that a whole dump has.
    """
    lacking = missing(directory)
    if lacking:
        warnings.warn(f"{directory}: the dump lacks {', '.join(lacking)}: XLA wrote none", stacklevel=2)
    write_text(directory / PROGRAM, text)
    if report is not None:
        write_text(directory / REPORT, json.dumps(report.as_dict()))
    lines = [f"# XLA dump: {title}", "", "| file | bytes | what it holds |", "|---|---|---|"]
    for file in sorted(directory.iterdir()):
        if file.name != "index.md":
            lines.append(f"| {file.name} | {file.stat().st_size:,} | {_kind(file.name)} |")
    lines += [
        "",
        "## Instructions by part",
        "",
        "In the order they run, without what costs nothing. `layer` is the target's. A trace shows the same names.",
        "",
        "| instruction | operation | part | layer | result bytes | scope |",
        "|---|---|---|---|---|---|",
    ]
    for _, instruction, _ in launched(Module(text)):
        layer = re.search(r"layer(\d+)/", instruction.op_name)
        lines.append(
            f"| {instruction.name} | {instruction.opcode} | {part_of(instruction.op_name)} | "
            f"{layer[1] if layer else ''} | {instruction.bytes:,} | {instruction.op_name} |"
        )
    index = directory / "index.md"
    write_text(index, "\n".join(lines) + "\n")
    return index


def _kind(name: str) -> str:
    if name == PROGRAM:
        return "the optimised HLO that the report reads"
    if name == REPORT:
        return "the report, as --json prints it"
    matching = [what for ending, what in _KINDS if ending in name]
    return matching[-1] if matching else ""
