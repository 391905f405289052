"""Look at this machine: versions, devices, what would run on it and why, and what stands in the way. With --mesh also
what a node of that machine needs, and what to set there.

Examples:
  uv run scripts/doctor.py
  uv run scripts/doctor.py --mesh nvl72
  eval "$(uv run scripts/doctor.py --mesh nvl72 --exports)"

Exits with status 1 where something is wrong.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kimi_jax.commands.options import ANY, Flag, Json, LayoutOptions, parse
from kimi_jax.doctor import GB, Facts, Finding, Fit, examine, fits, gather, operations
from kimi_jax.parallel.processes import launched
from kimi_jax.tables import table_console
from meshes.devices import use_cpu_if_no_gpu
from meshes.environment import exports, settings
from meshes.presets import PRESETS


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of doctor.py."""

    layout: LayoutOptions = ANY
    exports: Flag = False
    """Print the lines that set a machine's XLA flags and variables in a shell, and nothing else; needs --mesh."""
    json: Json = False


def main(options: Options) -> None:
    """Prints what was found."""
    machine = None if options.layout.mesh is None else options.layout.preset()
    if options.exports:
        if machine is None:
            raise ValueError("--exports needs --mesh NAME: settings differ between machines")
        print("\n".join(exports(machine)))
        return
    use_cpu_if_no_gpu()
    facts = gather()
    findings, presets = examine(facts, machine), fits(facts)
    picks = operations(facts, machine or PRESETS["local"])
    if options.json:
        report = dataclasses.asdict(facts) | {
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "presets": [dataclasses.asdict(fit) for fit in presets],
            "operations": [dataclasses.asdict(pick) for pick in picks],
            "settings": [dataclasses.asdict(setting) for setting in settings(machine)] if machine else [],
        }
        # Whatever else is in the environment is nobody's business.
        kept = ("JAX_", "XLA_", "NCCL_", "CUDA_", "LD_LIBRARY_PATH", "SLURM_", "OMPI_COMM", "JOB_COMPLETION_INDEX")
        report["environment"] = {name: v for name, v in facts.environment.items() if name.startswith(kept)}
        print(json.dumps(report))
    else:
        out = table_console()
        out.print(machine_table(facts), presets_table(presets), sep="\n\n")
        out.print()
        rows = [(pick.operation, pick.implementation, pick.reason) for pick in picks]
        title = "a step of K2.6: one request, 17 rows, 8,192 cached tokens"
        out.print(table_of(title, ("operation", "served by", "why"), rows))
        if machine is not None:
            rows = [(setting.name, setting.value, setting.reason) for setting in settings(machine)]
            out.print()
            out.print(table_of(f"settings for {machine.name} (--exports)", ("name", "value", "why"), rows))
        out.print()
        print_findings(out, findings)
    if any(finding.level == "fault" for finding in findings):
        sys.exit(1)


def table_of(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """A plain table."""
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def machine_table(facts: Facts) -> Table:
    """Versions, devices and memory."""
    rows = [("python", facts.python), *facts.packages.items()]
    rows.append(("NVIDIA driver", facts.driver or "none"))
    kinds = ", ".join(f"{facts.gpu_kinds.count(kind)} × {kind}" for kind in dict.fromkeys(facts.gpu_kinds))
    rows.append(("GPUs", kinds or (f"{facts.gpus}, not usable" if facts.gpus else "none")))
    if facts.gpu_bytes is not None:
        rows.append(("GPU memory for jax", f"{facts.gpu_bytes / GB:.1f} GB each"))
    rows.append(("host memory", f"{facts.host_free_bytes / GB:.1f} of {facts.host_bytes / GB:.1f} GB free"))
    rows.append(("CPU cores", str(facts.cores)))
    launch = launched(facts.environment)
    started = "no launcher" if launch is None else f"{launch.launcher}, as {launch.process_id} of {launch.processes}"
    rows.append(("started by", started))
    return table_of("this machine", ("", ""), rows)


def presets_table(presets: list[Fit]) -> Table:
    """Machines, and whether this is one."""
    rows = [(fit.preset, fit.layout, f"{fit.weight_bytes / GB:.1f}", fit.runs) for fit in presets]
    table = table_of("presets", ("--mesh", "layout", "K2.6 GB a GPU", "runs here"), rows)
    table.columns[2].justify = "right"
    return table


def print_findings(out: Console, findings: list[Finding]) -> None:
    """Faults and notes with their fixes."""
    for finding in findings:
        style = "red" if finding.level == "fault" else "yellow"
        out.print(f"{finding.level}: {finding.what}", style=style, markup=False, highlight=False)
        out.print(f"  → {finding.fix}", markup=False, highlight=False)
    faults = sum(finding.level == "fault" for finding in findings)
    out.print(f"{faults or 'no'} fault{'' if faults == 1 else 's'} found", highlight=False)


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    main(parse(Options, args, prog, __doc__))
