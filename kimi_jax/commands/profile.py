"""Profile a decoding step: of Kimi K2.6 compiled for a cluster that is not here (--gpu), or run on this machine.

Examples:
  uv run scripts/profile.py --mesh nvl72 --gpu gb300 --batch 64 --budget 15 --context 8192
  uv run scripts/profile.py --mesh hgx-ib-16 --gpu h200 --layers 4 --html report.html
  uv run scripts/profile.py --mesh nvl72 --gpu gb300 --xla-dump dump
  uv run scripts/profile.py --batch 2 --context 128 --trace trace
  uv run scripts/profile.py diff before.json after.json
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from kimi_jax import compilation_cache, tables
from kimi_jax.commands.options import (
    ANY,
    Count,
    DrafterOptions,
    Flag,
    Json,
    LayoutOptions,
    NoCache,
    OptionalFile,
    OptionalFolder,
    Wide,
    option,
    parse,
)
from kimi_jax.commands.progress import open_engine, quiet_compiler, stages
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.parallel.processes import ProcessOptions
from kimi_jax.text_files import require_folder, require_writable
from meshes.devices import use_cpu_if_no_gpu
from meshes.hardware import GPUS
from meshes.hardware import gpu as lookup

if TYPE_CHECKING:
    from kimi_jax.profiling.live import Live
    from kimi_jax.profiling.report import Report


@dataclasses.dataclass(frozen=True)
class Compare:
    """Two reports that `--json` printed, or two directories that `--xla-dump` wrote."""

    before: Annotated[Path, tyro.conf.Positional]
    """The older one."""
    after: Annotated[Path, tyro.conf.Positional]
    """The newer one."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of profile.py."""

    layout: LayoutOptions = ANY
    gpu: Annotated[
        str | None,
        option("NAME", f"Compile for absent GPUs ({', '.join(GPUS)}), on nvl72 unless --mesh says otherwise; a step's "
               "buffers are counted without the exact path of a step that overflows. Without it rounds are run and "
               "timed on this machine's devices, simulated on the CPU where there are no GPUs."),
    ] = None  # fmt: skip
    batch: Annotated[int | None, option("N", aliases=["--concurrency"])] = None
    """Requests in the whole machine; by default 64 with --gpu, else 4."""
    context: Count = None
    """Cached tokens of each request; by default 8192 with --gpu, else 128."""
    budget: int = 15
    """Draft tree nodes verified each round, cheapest where they and the root are a multiple of eight rows; 0 decodes
    without a drafter."""
    program: Literal["round", "decode", "prefill", "mixed"] = "round"
    """With --gpu: one round, the loop of rounds that decode.py dispatches, a prefill chunk of every request, or a round
    with a chunk of one prompt of each device group beside it."""
    prefill_chunk: int = 512
    """Rows of each request in a prefill step, or of one prompt of each device group in a mixed step."""
    layers: Count = None
    """With --gpu: only the first N layers, for a quick look; all 61 take minutes."""
    rounds: int = 20
    """Without --gpu: rounds to time."""
    checkpoint: OptionalFolder = None
    """With --gpu: folder or config.json of another model of the family than K2.6. Without: the checkpoint to run, by
    default the bundled one."""
    drafter: OptionalFolder = None
    """With --gpu: folder or config.json of another DFlash drafter than the public Kimi drafter. Without: a drafter made
    for the checkpoint; without one rounds are plain, but for the bundled checkpoint, which has one."""
    xla_dump: OptionalFolder = None
    """Directory for XLA's dump: HLO before and after optimisation, buffer assignment, and an index of the files."""
    trace: OptionalFolder = None
    """Without --gpu: directory that keeps the profiler trace of the rounds, for xprof."""
    registers: Flag = False
    """With --gpu: each Pallas kernel's registers, spills and shared memory."""
    html: OptionalFile = None
    """Also write the report with plots as an HTML file."""
    wide: Wide = False
    json: Json = False
    no_cache: NoCache = False
    processes: ProcessOptions = dataclasses.field(default_factory=ProcessOptions)
    diff: (
        Annotated[Compare, tyro.conf.subcommand("diff", description="Show every figure that differs between reports.")]
        | Annotated[None, tyro.conf.subcommand("step", description="Report on one step, as without a subcommand.")]
    ) = None


def main(options: Options) -> None:
    """Compiles or runs one program and reports on it."""
    status = Console(stderr=True, quiet=options.json)
    for folder in filter(None, (options.xla_dump, options.trace)):
        require_folder(folder)
    if options.html is not None:
        require_writable(options.html)
    if options.gpu is None:
        report, live = measure(options, status)
    else:
        report, live = compile_absent(options, options.gpu, status), None

    from kimi_jax.parallel import processes
    from kimi_jax.profiling.tables import show, write_page

    if options.html is not None and processes.this().prints:
        write_page(report, options.html, live)
    if options.json:
        print(json.dumps(report.as_dict() | ({} if live is None else live.as_dict())))
        return
    tables.show(*show(report, live, options.wide))


def compile_absent(options: Options, gpu: str, status: Console) -> "Report":
    """Compiles for GPUs that are not here."""
    if options.trace is not None:
        raise ValueError("--trace needs a run: leave --gpu away")
    machine = options.layout.preset("nvl72")
    card = lookup(gpu)
    config = k26() if options.checkpoint is None else ModelConfig.from_json(options.checkpoint)
    given = None if options.drafter is None else DrafterConfig.from_json(options.drafter)
    quiet_compiler()
    compilation_cache.switch(False)  # the report is on what the compiler says
    use_cpu_if_no_gpu()  # before jax starts: its CUDA plugin then registers without a driver, to compile only

    from kimi_jax.profiling.case import Case, with_layers
    from kimi_jax.profiling.compile import compile_program
    from kimi_jax.profiling.dump import write_index
    from kimi_jax.profiling.report import make_report

    drafter = given or kimi_drafter()
    if options.budget and options.layers is None:
        drafter.check(config)
    case = whole = Case(
        config, machine, card.name, requests=64 if options.batch is None else options.batch,
        context=8192 if options.context is None else options.context, budget=options.budget, drafter=drafter,
        program=options.program, prefill_chunk=options.prefill_chunk,
    )  # fmt: skip
    if options.layers is not None:
        config, drafter = with_layers(config, drafter, options.layers)
        case = dataclasses.replace(whole, config=config, drafter=drafter)
    with stages(status) as stage:
        compiled = compile_program(case, dump=options.xla_dump, registers=options.registers, stage=stage)
        report = make_report(compiled, None if case == whole else whole)
    if options.xla_dump is not None:
        write_index(options.xla_dump, compiled.text, case.title, report)
    return report


def measure(options: Options, status: Console) -> "tuple[Report, Live]":
    """Runs rounds on this machine's devices."""
    only_compiled = {
        "program": options.program != "round",
        "layers": options.layers is not None,
        "registers": options.registers,
    }
    for name, given in only_compiled.items():
        if given:
            raise ValueError(f"--{name} belongs to compiling for absent GPUs: add --gpu")
    engine_options = DrafterOptions(
        checkpoint=options.checkpoint or BUNDLED_CHECKPOINT, layout=options.layout, processes=options.processes,
        no_cache=options.no_cache or options.xla_dump is not None, drafter=options.drafter,
    )  # fmt: skip
    drafter = engine_options.known_drafter(status) if options.budget else None
    opened = open_engine(engine_options, status, drafter)

    from kimi_jax.profiling import live
    from kimi_jax.profiling.dump import write_index
    from kimi_jax.profiling.report import make_report

    load = live.Load(
        requests=4 if options.batch is None else options.batch,
        context=128 if options.context is None else options.context,
        budget=options.budget if drafter else 0,
        rounds=options.rounds,
    )
    with stages(status) as stage:
        found = live.run(
            opened.engine, opened.machine, opened.gpu.name, load,
            trace=options.trace, dump=options.xla_dump, stage=stage,
        )  # fmt: skip
    report = make_report(found.compiled)
    if options.xla_dump is not None:
        write_index(options.xla_dump, found.compiled.text, found.compiled.case.title, report)
    return report, found


def compare(options: Compare) -> None:
    """Shows every figure that differs."""
    from kimi_jax.profiling import diff

    tables.show(diff.show(diff.changes(diff.load(options.before), diff.load(options.after))))


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    options = parse(Options, args, prog, __doc__)
    if options.diff is not None:
        compare(options.diff)
    else:
        main(options)
