"""Benchmarks. Timings are ratios within one run on one machine; nothing here is a test.

Examples:
  uv run scripts/benchmark.py speculation
  uv run scripts/benchmark.py speculation --checkpoint DIR --drafter DIR --file prompts.txt --budgets 7 15 31 --json
  uv run --group fixtures scripts/benchmark.py peers
  uv run scripts/benchmark.py serve --static
  uv run scripts/benchmark.py serve --rate 20 --ways none ddtree
  uv run scripts/benchmark.py scaling
  uv run scripts/benchmark.py gpu
  uv run scripts/benchmark.py gpu --rehearse h200
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from kimi_jax.commands.benchmark_gpu import gpu
from kimi_jax.commands.benchmark_serve import serve
from kimi_jax.commands.options import Checkpoint, Drafter, DrafterOptions, Json, OptionalFile, dispatch
from kimi_jax.commands.progress import bar_on, open_engine
from kimi_jax.opening import BUNDLED_CHECKPOINT, drafter_of
from kimi_jax.prompts import NO_WISHES, Prompt, encode, read_prompts
from kimi_jax.tables import Column, left, right, show, table
from kimi_jax.text_files import write_text
from meshes.devices import use_cpu_if_no_gpu

PROMPTS = (
    "Add 612 and 259.",
    'Count "k" in "kxkkbkxb".',
    "Convert 37 km to m.",
    "Write as JSON: name=kxq, age=31, city=abcd.",
    "Table: Otto blue, Mila red, Nora green, Ida gold, Karl pink, Lena white. Sort by name.",
    "Tell a story about a fox named Mila, a forest and a coin.",
)


@dataclasses.dataclass(frozen=True)
class SpeculationOptions(DrafterOptions):
    """Options of `speculation` and `peers`."""

    file: OptionalFile = None
    """Prompts, as for decode.py; by default a few that suit the bundled checkpoint."""
    budgets: tuple[int, ...] = (7, 15, 31)
    """Tree nodes to try, beside plain decoding and the chain; 7 verify as many rows as a chain of a block of 8."""
    max_new_tokens: int = 64
    """Tokens generated for each prompt at most."""
    repeats: int = 5
    """Timed repetitions; one more compiles."""
    instant: bool = True
    """Prompts in instant mode, without a thinking part."""
    json: Json = False


def speculation(options: SpeculationOptions) -> None:
    """Plain decoding, chain and trees on the same prompts, one at a time: tokens/s, acceptance, speed-up."""
    _speeds(options, with_peers=False)


def peers(options: SpeculationOptions) -> None:
    """The same beside transformers' generate on the CPU, with the same weights and prompts in the same run."""
    _speeds(options, with_peers=True)


def _speeds(options: SpeculationOptions, with_peers: bool) -> None:
    status = Console(stderr=True, soft_wrap=True, quiet=options.json)
    if with_peers and options.layout.mesh != "local":
        raise ValueError(f"peers compares on one device, and --mesh is {options.layout.mesh}: leave it out")
    drafter = options.known_drafter(status)
    opened = open_engine(options, status, drafter)

    from kimi_jax.decoding.engine import PLAIN, Draft
    from kimi_jax.decoding.loading import open_checkpoint
    from kimi_jax.evaluation.peers import measure_transformers
    from kimi_jax.evaluation.runs import record
    from kimi_jax.evaluation.speed import measure_speculation, row

    prompts = read_prompts(options.file) if options.file else [Prompt.of(text) for text in PROMPTS]
    if wishing := [prompt.where for prompt in prompts if prompt.wishes != NO_WISHES]:
        raise ValueError(f"{wishing[0]}: its own settings are for decode.py; a benchmark decodes all rows alike")
    ids = encode(prompts, opened.engine.tokenizer, raw=False, thinking=not options.instant, system=None)
    trees = [Draft(), Draft("chain"), *(Draft("ddtree", budget) for budget in options.budgets)]
    drafts = [PLAIN, *(trees if drafter else [])]
    steps = (len(drafts) + with_peers) * (options.repeats + 1)
    with bar_on(status) as bar:
        task = bar.add_task("decoding", total=steps)
        shared = {
            "max_new_tokens": options.max_new_tokens,
            "repeats": options.repeats,
            "progress": lambda: bar.advance(task),
        }
        speeds = measure_speculation(opened.engine, ids, drafts, **shared)
        if with_peers:
            engine = opened.engine  # its weights lie as a CPU reads them; transformers takes the checkpoint's form
            original = open_checkpoint(opened.folder, engine.mesh, engine.layout, engine.dtype)
            speeds = [measure_transformers(original, ids, **shared), *speeds]
    rows = [row(speed, speeds[0]) for speed in speeds]
    if options.json:
        name = "peers" if with_peers else "speculation"
        print(json.dumps(record(name, f"{len(prompts)} prompts, batch 1; {opened.where}", rows)))
        return
    cells = [
        (
            each["decoder"], str(each["budget"] or ""), f"{each['tokens_per_second_median']:,.0f}",
            f"{each['spread']:.0%}", f"{each['acceptance_length']:.2f}", f"{each['round_cost']:.2f}×",
            f"{each['speed_up']:.2f}×", "yes" if each["same_text"] else "NO",
        )
        for each in rows
    ]  # fmt: skip
    names = ("budget", "tokens/s", "±", "tokens a round", "round costs", "speed-up", "same text")
    best = max(rows, key=lambda each: each["tokens_per_second_median"])
    show(
        f"Fastest: {best['decoder']} {best['budget'] or ''}".rstrip()
        + f", {best['speed_up']:.2f} × {rows[0]['decoder']}; {opened.where}.",
        table(f"{len(prompts)} prompts, batch 1, {options.repeats} repeats", (*left("decoder"), *right(*names)), cells),
    )


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """Options of `scaling`."""

    checkpoint: Checkpoint = BUNDLED_CHECKPOINT
    drafter: Drafter = None
    meshes: tuple[str, ...] = ("local", "hgx-ib-8", "hgx-ib-16", "nvl36", "nvl72")
    """Machines to simulate."""
    budget: int = 15
    """Tree nodes of a round."""
    context: int = 64
    """Tokens of each request's prompt."""
    json: Json = False


def scaling(options: ScalingOptions) -> None:
    """One round compiled for simulated meshes: what a device holds and sends, and what compiling takes."""
    status = Console(stderr=True, quiet=options.json)
    drafter = drafter_of(options.checkpoint, options.drafter)
    if drafter is None:
        raise ValueError(f"scaling compiles rounds with drafts: --drafter DIR names one for {options.checkpoint}")
    use_cpu_if_no_gpu()
    from kimi_jax.evaluation.runs import record
    from kimi_jax.evaluation.scaling import measure_scaling

    with status.status("starting") as line:
        scales = measure_scaling(
            options.checkpoint, drafter, options.meshes, budget=options.budget, context=options.context,
            stage=line.update,
        )  # fmt: skip
        rows = [dataclasses.asdict(scale) for scale in scales]
    ran = f"a round with {options.budget} tree nodes, one request a device group, context {options.context}"
    if options.json:
        print(json.dumps(record("scaling", ran, rows)))
        return
    columns = [Column(name.replace("_", " "), name not in ("mesh", "layout")) for name in rows[0]]
    cells = [
        [f"{cell:.1f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell
         for cell in row.values()]
        for row in rows
    ]  # fmt: skip
    show(table(ran, columns, cells))


def page(runs: tyro.conf.Positional[Path], output: tyro.conf.Positional[Path]) -> None:
    """Writes the page of saved runs.

    Args:
        runs: Folder of what `--json` printed, one file a run.
        output: Markdown file.
    """
    from kimi_jax.evaluation import runs as saved

    write_text(output, saved.page(saved.load(runs)))


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    commands = {
        "speculation": speculation,
        "peers": peers,
        "serve": serve,
        "scaling": scaling,
        "gpu": gpu,
        "page": page,
    }
    dispatch(commands, args, prog, __doc__)
