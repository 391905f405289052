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
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from kimi_jax.commands.options import ANY, Flag, Json, LayoutOptions, parse
from kimi_jax.doctor import GB, Facts, Finding, Fit, examine, fits, gather, operations
from kimi_jax.parallel.processes import launched
from kimi_jax.tables import left, right, show, table
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
        title = "a step of K2.6: one request, 16 rows, 8,192 cached tokens"
        served = [(pick.operation, pick.implementation, pick.reason) for pick in picks]
        shown = [machine_table(facts), "", presets_table(presets), ""]
        shown += [table(title, left("operation", "served by", "why"), served), ""]
        if machine is not None:
            shown += [Text(f"settings for {machine.name} (--exports)", "bold")]
            shown += [*(f"{setting}: {setting.reason}" for setting in settings(machine)), ""]
        show(*shown, *told(findings))
    if any(finding.level == "fault" for finding in findings):
        sys.exit(1)


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
    return table("this machine", left("what", "found"), rows)


def presets_table(presets: list[Fit]) -> Table:
    """Machines, and whether this is one."""
    rows = [(fit.preset, fit.layout, f"{fit.weight_bytes / GB:.1f}", fit.runs) for fit in presets]
    columns = (*left("--mesh", "layout"), *right("K2.6 GB a GPU"), *left("runs here"))
    return table("presets", columns, rows)


def told(findings: list[Finding]) -> Iterator[Text]:
    """Faults and notes with their fixes."""
    for finding in findings:
        yield Text(f"{finding.level}: {finding.what}", "red" if finding.level == "fault" else "yellow")
        yield Text(f"  → {finding.fix}")
    faults = sum(finding.level == "fault" for finding in findings)
    yield Text(f"{faults or 'no'} fault{'' if faults == 1 else 's'} found")


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    main(parse(Options, args, prog, __doc__))
