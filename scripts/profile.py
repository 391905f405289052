"""Compile Kimi K2.6 for a cluster that is not here, and report what each GPU holds, moves and waits for in one round.

Examples:
  uv run scripts/profile.py --mesh nvl72 --gpu gb300 --batch 64 --budget 16 --context 8192
  uv run scripts/profile.py --mesh hgx-ib-16 --gpu h200 --layers 4 --json
  uv run scripts/profile.py --mesh nvl72 --gpu gb300 --xla-dump dump
  uv run scripts/profile.py diff before.json after.json
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from kimi_jax.cli import errors_in_one_line, table_console
from meshes.devices import use_cpu_if_no_gpu
from meshes.presets import preset


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of profile.py."""

    mesh: str = "nvl72"
    """Machine: local, hgx-ib-N (N GPUs in nodes of 8; hgx-ib is 16), nvl36 or nvl72."""
    gpu: str | None = None
    """h100, h200, b200, gb200, b300 or gb300; by default the machine's first."""
    dp: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Replicas with weights of their own; by default the preset's."""
    ep: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Ranks that share the experts and split the batch; by default the preset's."""
    tp: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Ranks that split heads and widths; by default the preset's."""
    experts: Literal["slots", "width"] = "slots"
    """Whole experts on ep × tp, or each one's width on tp."""
    batch: int = 64
    """Requests in the whole machine."""
    context: int = 8192
    """Cached tokens of each request."""
    budget: int = 16
    """Draft tree nodes verified each round; 0 decodes without a drafter."""
    program: Literal["round", "decode", "prefill"] = "round"
    """One round, the loop of rounds that decode.py dispatches, or one prefill chunk."""
    prefill_chunk: int = 512
    """Rows of each request in a prefill step."""
    layers: int | None = None
    """Only the first N layers, for a quick look; all 61 take minutes."""
    checkpoint: Path | None = None
    """Folder or config.json of another model of the family; by default K2.6."""
    drafter: Path | None = None
    """Folder or config.json of another DFlash drafter; by default the public Kimi drafter."""
    xla_dump: Path | None = None
    """Directory for XLA's dump: HLO before and after optimisation, buffer assignment, and an index of the files."""
    registers: bool = False
    """Also report each Pallas kernel's registers and spills, as the assembler prints them."""
    json: bool = False
    """Print one JSON object instead of tables."""


def main(options: Options) -> None:
    """Compiles one program and reports on it."""
    status = Console(stderr=True, quiet=options.json)
    with errors_in_one_line(Console(stderr=True)):
        machine = preset(options.mesh).with_axes(dp=options.dp, ep=options.ep, tp=options.tp)
        machine = machine.with_layout(dataclasses.replace(machine.layout, experts=options.experts))
        use_cpu_if_no_gpu()  # before jax starts: its CUDA plugin then registers without a driver, to compile only

        from kimi_jax.config import ModelConfig
        from kimi_jax.drafter.config import DrafterConfig
        from kimi_jax.estimator.model import k26
        from kimi_jax.profiling.compile import Case, compile_program, kimi_drafter, with_layers
        from kimi_jax.profiling.dump import write_index
        from kimi_jax.profiling.report import make_report
        from kimi_jax.profiling.tables import show

        config = k26() if options.checkpoint is None else ModelConfig.from_json(options.checkpoint)
        drafter = kimi_drafter() if options.drafter is None else DrafterConfig.from_json(options.drafter)
        if options.layers is not None:
            config, drafter = with_layers(config, drafter, options.layers)
        elif options.budget:
            drafter.check(config)
        case = Case(
            config,
            machine,
            (options.gpu or machine.gpu_names[0]).lower(),
            requests=options.batch,
            context=options.context,
            budget=options.budget,
            drafter=drafter,
            program=options.program,
            prefill_chunk=options.prefill_chunk,
        )
        with status.status(f"compiling {config.num_hidden_layers} layers for {machine.layout.num_devices} {case.gpu}"):
            compiled = compile_program(case, dump=options.xla_dump, registers=options.registers)
        report = make_report(compiled)
        if options.xla_dump is not None:
            write_index(options.xla_dump, compiled)
        if options.json:
            print(json.dumps(report.as_dict()))
        else:
            table_console().print(show(report))


@dataclasses.dataclass(frozen=True)
class Compare:
    """Two reports that `--json` printed."""

    before: Annotated[Path, tyro.conf.Positional]
    """The older one."""
    after: Annotated[Path, tyro.conf.Positional]
    """The newer one."""


def compare(options: Compare) -> None:
    """Shows every figure that differs."""
    from kimi_jax.profiling import diff

    with errors_in_one_line(Console(stderr=True)):
        table_console().print(diff.show(diff.changes(diff.load(options.before), diff.load(options.after))))


if __name__ == "__main__" and sys.argv[1:2] == ["diff"]:
    compare(tyro.cli(Compare, prog="profile.py diff", args=sys.argv[2:]))
elif __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
