"""Estimate how K2.6 runs on a cluster: step time, memory, throughput, and which layout to choose.

Examples:
  uv run scripts/estimate.py point --mesh nvl72 --batch 64 --budget 8
  uv run scripts/estimate.py recommend --mesh hgx-ib-16 --batch 1
  uv run scripts/estimate.py recommend --mesh nvl72 --goal throughput --least-speed 40
  uv run scripts/estimate.py smallest --least-speed 100 --batch 64
  uv run scripts/estimate.py serve --mesh hgx-ib-8 --rate 1
  uv run scripts/estimate.py compare --gpus 8 16 36 72
  uv run scripts/estimate.py image --mesh nvl72 --sizes 1920x1080 3840x2160
  uv run scripts/estimate.py plot budget --output budget.png
  uv run scripts/estimate.py check --mesh nvl72 --gpu gb300
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from kimi_jax.commands.estimate_serve import run_serve
from kimi_jax.commands.options import (
    NVL72,
    Batch,
    Batches,
    Cache,
    Flag,
    Gpu,
    Json,
    LayoutOptions,
    OptionalFile,
    Wide,
    dispatch,
    option,
)
from kimi_jax.commands.progress import quiet_compiler, stages
from kimi_jax.commands.scenario import Load, Place
from kimi_jax.estimator import images, pictures, report, search, step
from kimi_jax.estimator.explain import explain
from kimi_jax.estimator.study import document, original
from kimi_jax.estimator.study import tables as study_tables
from kimi_jax.ledger.models import k26, k26_vision, kimi_drafter
from kimi_jax.text_files import require_writable, write_text
from kimi_jax.vision.config import VisionConfig
from meshes import gpu
from meshes.devices import use_cpu_if_no_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointOptions(Place):
    """Options of `point`."""

    budget: int = 8
    """Draft nodes of a request's tree; 0 decodes without a draft."""


def run_point(options: PointOptions) -> None:
    """One layout under one load: time by part, bottleneck, memory, speed, each beside its physical limit."""
    result = step.estimate(options.scenario(options.layout.preset(), options.gpu, options.budget))
    tables = [report.parts_table(result, options.wide), report.speed_table(result), report.memory_table(result)]
    report.output(options.json, lambda: report.details(result), *report.answer(result), *tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions(Place):
    """Options of `sweep`."""

    meshes: tuple[str, ...] = ()
    """Machines to go through instead of --mesh."""
    batches: Batches = (1, 8, 64, 512, 4096)
    """Requests in flight."""
    budgets: tuple[int, ...] = (0, 8, 32)
    """Draft nodes."""
    contexts: tuple[int, ...] = (8192,)
    """Cached tokens of each request."""
    best_layout: Flag = False
    """Search the best layout for each row instead of the mesh's."""


def run_sweep(options: SweepOptions) -> None:
    """Go over machines, concurrency, budget and context."""
    results = []
    for name in options.meshes or (options.layout.mesh,):
        layout = LayoutOptions(name, cache=options.layout.cache) if options.best_layout else options.layout
        machine = dataclasses.replace(layout, mesh=name).preset()
        for context in options.contexts:
            for load in options.batches:
                at = dataclasses.replace(options, context=context, batch=load)
                for budget in options.budgets:
                    s = at.scenario(machine, options.gpu, budget)
                    best = search.fastest(machine, s, (budget,), at.fixed()) if options.best_layout else None
                    results.append(best or step.estimate(s))
    table = report.estimates_table(results, "Sweep", options.wide)
    report.output(options.json, lambda: [report.summary(e) for e in results], table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecommendOptions(Place):
    """Options of `recommend`."""

    goal: search.Goal | None = None
    """latency: fastest for a user at --batch. throughput, cost: most tokens/s for the system, or for a GPU, at any
    concurrency. By default cost where --least-speed, --ttft or --price is given, else latency."""
    least_speed: float = 0.0
    """Tokens/s that every user must get (for throughput and cost)."""
    ttft: float | None = None
    """Seconds to the first token at most, on average; prompts are --input-tokens long, or else fill --context."""
    price: float | None = None
    """Dollars for an hour of a GPU; tells what a million tokens of answers cost."""
    budgets: tuple[int, ...] = search.BUDGETS
    """Draft budgets to try; 0 is no draft."""
    try_split_cache: Flag = False
    """Also try the latent cache split along the sequence."""


def run_recommend(options: RecommendOptions) -> None:
    """The best layout for a goal, the runner-up and why. Axes and other layout options that are given stay fixed."""
    machine = LayoutOptions(options.layout.mesh, cache=options.layout.cache).preset()
    if options.price is not None and not options.price > 0:
        raise ValueError(f"--price is {options.price:g}: give the dollars of a GPU-hour, more than 0")
    targeted = options.least_speed or options.ttft is not None or options.price is not None
    if options.ttft is not None and not options.input_tokens:
        options = dataclasses.replace(options, input_tokens=options.context)
    goal = options.goal or ("cost" if targeted else "latency")
    found = search.recommend(
        machine, options.scenario(machine, options.gpu), goal, options.budgets,
        search.CONCURRENCIES if goal == "throughput" else search.LOADS,
        least_tokens_per_s_per_user=options.least_speed, with_cache_split=options.try_split_cache,
        ttft=math.inf if options.ttft is None else options.ttft, fixed=options.fixed(),
    )  # fmt: skip
    rows = [e for e in (found.best, found.runner_up) if e]
    table = report.estimates_table(rows, f"{machine.name}, best and runner-up", options.wide)
    text = [*report.recommendation_text(found, options.price), table, *found.reasons]
    report.output(options.json, lambda: report.recommendation_data(found, options.price), *text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallestOptions(Load):
    """Options of `smallest`."""

    least_speed: float
    """Tokens/s that every user must get, with --batch users at once."""
    gpu: Annotated[str | None, option("NAME")] = None
    """Only machines of this card; by default each card's smallest machine is found."""
    budgets: tuple[int, ...] = search.BUDGETS
    """Draft budgets to try; 0 is no draft."""


def run_smallest(options: SmallestOptions) -> None:
    """The smallest machine, of whole HGX nodes or racks, that gives every one of --batch users --least-speed."""
    if options.gpu is not None:
        gpu(options.gpu)  # refuses an unknown name
    pairs = [(machine, options.scenario(machine, name)) for machine, name in search.machines(options.gpu)]
    found = search.smallest(pairs, options.least_speed, options.budgets)
    table = report.estimates_table(found, "The smallest of each card", options.wide)
    first, *others = (report.details(e) for e in found)
    text = report.smallest_text(found, options.least_speed)
    report.output(options.json, lambda: first | {"others": others}, *text, table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(Load):
    """Options of `compare`."""

    gpus: tuple[int, ...] = (8, 16, 36, 72)
    """Sizes to compare; for 36 the nearest HGX machines, 32 and 40, stand beside nvl36."""
    hgx_gpu: str = "b300"
    """GPU of the HGX nodes."""
    nvl_gpu: str = "gb300"
    """GPU of the rack."""
    batches: Batches = (1, 8, 64, 512, 2048, 8192)
    """Requests in flight."""
    cache: Cache = None


def run_compare(options: CompareOptions) -> None:
    """HGX with InfiniBand beside NVL72, the best layout of each at every load, and where they cross."""
    shown: list[Any] = []
    data: dict[str, Any] = {}
    for size in options.gpus:
        rack = search.machine_of("nvl", size).with_options(cache=options.cache)
        for hgx_size in (32, 40) if size == 36 else (size,):
            node = search.machine_of("hgx", hgx_size).with_options(cache=options.cache)
            rows = search.compare(
                (node, options.scenario(node, options.hgx_gpu)),
                (rack, options.scenario(rack, options.nvl_gpu)),
                options.batches,
            )
            names = f"{hgx_size} × {options.hgx_gpu} HGX", f"{size} × {options.nvl_gpu} NVL"
            shown.append(report.comparison_table(rows, names, options.wide))
            changes = search.crossovers(rows, "left"), search.crossovers(rows, "right")
            for name, side in zip(names, changes, strict=True):
                shown.append(f"{name}, by requests: " + "; ".join(f"from {load} {layout}" for load, layout in side))
            crossings = dict(zip(names, changes, strict=True))
            data[" / ".join(names)] = {"rows": report.comparison_data(rows), "crossovers": crossings}
    report.output(options.json, lambda: data, *shown)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(PointOptions):
    """Options of `explain`."""

    constants: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CONSTANT ...")] = ()
    """Constants to explain; none for all that matter here."""


def run_explain(options: ExplainOptions) -> None:
    """What a constant is, where it comes from, and how much the answer moves if it is 20 % off."""
    s = step.estimate(options.scenario(options.layout.preset(), options.gpu, options.budget)).scenario
    effects = explain(s, options.constants)
    if not options.constants:
        effects = [e for e in effects if e.swing >= 0.001]
    title = f"{s.preset.name}, {s.gpu.name}, {search.describe(s.preset.layout)}, {report.requests(s.concurrency)}"
    table = report.effects_table(effects, title, options.wide)
    report.output(options.json, lambda: [dataclasses.asdict(e) for e in effects], table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `check`."""

    layout: LayoutOptions = NVL72
    gpu: Gpu = None
    batch: Batch = 64
    """Requests in flight in the whole machine."""
    context: int = 8192
    """Tokens in each request's cache."""
    budget: int = 16
    """Draft nodes of a request's tree; 0 decodes without a draft."""
    layers: int = 3
    """Compile and estimate the first N layers, one dense and the others with experts; 61 is the whole model."""
    json: Json = False


def run_check(options: CheckOptions) -> None:
    """Hold the ledger's bytes and messages against a compiled round; fails where a part is more than 5 % apart."""
    quiet_compiler()
    use_cpu_if_no_gpu()
    from kimi_jax.profiling import check
    from kimi_jax.profiling.case import Case, with_layers
    from kimi_jax.profiling.compile import compile_program
    from kimi_jax.profiling.report import make_report

    machine = options.layout.preset()
    config, drafter = with_layers(k26(), kimi_drafter(), options.layers)
    case = Case(
        config, machine, options.gpu or machine.gpu_names[0], requests=options.batch, context=options.context,
        budget=options.budget, drafter=drafter if options.budget else None,
    )  # fmt: skip
    with stages(Console(stderr=True, quiet=options.json)) as stage:
        pairs = check.compare(make_report(compile_program(case, stage=stage)))
    wrong = check.apart(pairs)
    title = f"{options.layers} layers of a round on {machine.name} ({search.describe(machine.layout)}), {case.gpu}"
    verdict = "Ledger and compiler agree." if not wrong else ""
    report.output(options.json, lambda: check.data(pairs), check.show(pairs, title), verdict)
    if wrong:
        parts = ", ".join(dict.fromkeys(pair.part for pair in wrong))
        raise ValueError(f"ledger and compiler are more than {check.TOLERANCE:.0%} apart in: {parts}")


def run_original(json: Json = False, wide: Wide = False) -> None:
    """The original analysis, figure by figure, reproduced and beside the corrected model."""
    figures = list(original.figures())
    report.output(json, lambda: [dataclasses.asdict(f) for f in figures], study_tables.original_table(figures, wide))


def run_validate(json: Json = False, wide: Wide = False) -> None:
    """Predicted against published speeds, calibration and held-out points apart."""
    report.output(json, study_tables.validation_data, study_tables.validation_table(wide))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotOptions(Place):
    """Options of `plot`."""

    picture: Annotated[
        Literal["pareto", "equal-speed", "overhead-wall", "throughput", "budget"],
        tyro.conf.Positional,
        tyro.conf.arg(name="picture"),
    ]
    """pareto: users against GPUs. equal-speed: the same for 72 GPUs of HGX nodes and of a rack. overhead-wall: one
    stream's step by part against GPUs. throughput: load, HGX and NVL72. budget: speed against draft nodes."""
    output: OptionalFile = None
    """PNG file (needs the extra `plots`); without it the picture is drawn in the terminal."""
    budget: int = 8
    """Draft nodes, for the overhead wall."""


def run_plot(options: PlotOptions) -> None:
    """Draw a picture, as a PNG file or in the terminal."""
    machine = options.layout.preset()
    s = options.scenario(machine, options.gpu, options.budget)
    picture = {
        "pareto": lambda: pictures.pareto_picture(machine, s, search.CONCURRENCIES[::2]),
        "equal-speed": lambda: pictures.equal_speed_picture(
            {"72 × b300, HGX": document.points("hgx"), "72 × gb300, NVL72": document.points("nvl")}
        ),
        "overhead-wall": lambda: pictures.wall_picture(document.wall(s)),
        "throughput": lambda: pictures.throughput_picture(document.throughput(s)),
        "budget": lambda: pictures.budget_picture(document.budget_scenarios(s), (0, *range(1, 17), 24, 32, 48, 64)),
    }[options.picture]()
    if options.output:
        pictures.save_png(picture, options.output)
        report.output(options.json, lambda: {"output": str(options.output)}, f"{options.output}: {picture.title}")
    else:
        report.output(options.json, lambda: dataclasses.asdict(picture), pictures.terminal(picture))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocsOptions:
    """Options of `docs`."""

    folder: Path = Path("docs")
    """Folder to write to."""


def run_docs(options: DocsOptions) -> None:
    """Write docs/cluster_scaling.md and docs/estimator.md anew from the model."""
    for name in document.SECTIONS:
        require_writable(options.folder / name)
    for name in document.SECTIONS:
        write_text(options.folder / name, document.document(name))
        Console(stderr=True).print(f"{options.folder / name} written", style="dim", highlight=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions(Place):
    """Options of `image`."""

    sizes: tuple[str, ...] = ("224x224", "640x480", "1920x1080", "3840x2160")
    """Pictures, width x height in pixels."""


def run_image(options: ImageOptions) -> None:
    """What a picture costs until its answer begins: patches, tokens, tower and prompt, on a machine that is idle."""
    machine = options.layout.preset()
    s = options.scenario(machine, options.gpu)
    config = k26_vision() if options.checkpoint is None else VisionConfig.from_json(options.checkpoint)
    if config is None:
        raise ValueError(f"{options.checkpoint} has no vision_config: the model sees no images")
    sizes = [re.fullmatch(r"([1-9]\d{0,5})[x×]([1-9]\d{0,5})", size) for size in options.sizes]
    if None in sizes or not sizes:
        raise ValueError(f"--sizes are {' '.join(options.sizes)}; write each as width x height, such as 640x480")
    found = [images.image(s, config, int(size[1]), int(size[2])) for size in sizes if size]
    weights = f"Tower and projector hold {found[0].weights_gb:.3f} GB on every GPU, which sees one picture at a time."
    report.output(options.json, lambda: [images.as_dict(e) for e in found], images.images_table(s, found), weights)


COMMANDS = {
    "point": run_point,
    "sweep": run_sweep,
    "recommend": run_recommend,
    "smallest": run_smallest,
    "serve": run_serve,
    "compare": run_compare,
    "explain": run_explain,
    "image": run_image,
    "check": run_check,
    "original": run_original,
    "validate": run_validate,
    "plot": run_plot,
    "docs": run_docs,
}


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    dispatch(COMMANDS, args, prog, __doc__)
