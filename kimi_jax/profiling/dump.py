"""The index page of an XLA dump: what each file holds, and which instruction belongs to which part of the model."""

import re
from pathlib import Path

from kimi_jax.profiling.compile import Compiled
from kimi_jax.profiling.hlo import Module, part_of

_KINDS = (
    ("before_optimizations.txt", "HLO as jax lowered it, before any of XLA's passes"),
    ("after_optimizations.txt", "scheduled, optimised HLO: what runs, in order"),
    ("after_optimizations-buffer-assignment.txt", "where every value lies in memory, and what shares a place"),
    ("memory-usage-report.txt", "the largest buffers, and those alive at the peak"),
    ("after_optimizations-live-range.txt", "when each buffer is alive, at the peak above all"),
    ("thunk_sequence.txt", "the launches, in order"),
    ("debug_options", "XLA's options of this compile"),
    ("gpu_target_config.pbtxt", "the GPU that was compiled for"),
    ("execution_options.txt", "devices and partitions of this compile"),
    ("autotune_results.pbtxt", "tile sizes that XLA chose for its own kernels"),
)


def write_index(directory: Path, compiled: Compiled) -> Path:
    """Writes `index.md` into a dump that `compile_program` made, and the optimised HLO as `program.hlo.txt`."""
    case = compiled.case
    (directory / "program.hlo.txt").write_text(compiled.text)
    lines = [
        f"# XLA dump: {case.program} on {case.preset.name} ({case.preset.layout}) with {case.gpu}",
        "",
        f"{case.config.num_hidden_layers} layers, {case.requests} requests, context {case.context}, budget "
        f"{case.budget}. Files of the program itself have `jit_{case.program}` in their names.",
        "",
        "| file | bytes | what it holds |",
        "|---|---|---|",
    ]
    for file in sorted(directory.iterdir()):
        if file.name != "index.md":
            lines.append(f"| {file.name} | {file.stat().st_size:,} | {_kind(file.name)} |")
    lines += [
        "",
        "## Instructions by part",
        "",
        "In the order they run, without what costs nothing. `layer` is the target's.",
        "",
        "| instruction | operation | part | layer | result bytes | scope |",
        "|---|---|---|---|---|---|",
    ]
    free = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
    for _, instruction, _ in Module(compiled.text).executed():
        if instruction.opcode in free:
            continue
        layer = re.search(r"layer(\d+)/", instruction.op_name)
        lines.append(
            f"| {instruction.name} | {instruction.opcode} | {part_of(instruction.op_name)} | "
            f"{layer[1] if layer else ''} | {instruction.bytes:,} | {instruction.op_name} |"
        )
    index = directory / "index.md"
    index.write_text("\n".join(lines) + "\n")
    return index


def _kind(name: str) -> str:
    if name == "program.hlo.txt":
        return "the optimised HLO that the report reads"
    matching = [what for ending, what in _KINDS if ending in name]
    return matching[-1] if matching else ""
