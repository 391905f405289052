"""Benchmarks. Timings are ratios within one run on one machine; nothing here is a test.

Examples:
  uv run scripts/benchmark.py speculation
  uv run scripts/benchmark.py speculation --checkpoint DIR --drafter DIR --file prompts.txt --budgets 8 16 32 --json
  uv run --group fixtures scripts/benchmark.py peers
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
from rich.progress import Progress
from rich.table import Table

from kimi_jax.cli import (
    BUNDLED_CHECKPOINT,
    BUNDLED_DRAFTER,
    EngineOptions,
    errors_in_one_line,
    open_engine,
    table_console,
)
from kimi_jax.commands.benchmark_gpu import gpu
from kimi_jax.prompts import NO_WISHES, Prompt, encode, read_prompts
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
class SpeculationOptions(EngineOptions):
    """Options of `speculation` and `peers`."""

    drafter: Path = BUNDLED_DRAFTER
    """Directory of a DFlash drafter made for the checkpoint."""
    file: Path | None = None
    """Prompts, as for decode.py; by default a few that suit the bundled checkpoint."""
    budgets: tuple[int, ...] = (7, 16, 32)
    """Tree nodes to try, beside plain decoding and the chain; 7 verify as many rows as a chain of a block of 8."""
    max_new_tokens: int = 64
    """Tokens generated for each prompt at most."""
    repeats: int = 5
    """Timed repetitions; one more compiles."""
    instant: bool = True
    """Prompts in instant mode, without a thinking part."""
    json: bool = False
    """Print one JSON object instead of a table."""


def speculation(options: SpeculationOptions) -> None:
    """Plain decoding, chain and trees on the same prompts, one at a time: tokens/s, acceptance, speed-up."""
    _speeds(options, with_peers=False)


def peers(options: SpeculationOptions) -> None:
    """The same beside transformers' generate on the CPU, with the same weights and prompts in the same run."""
    _speeds(options, with_peers=True)


def _speeds(options: SpeculationOptions, with_peers: bool) -> None:
    status = Console(stderr=True, soft_wrap=True, quiet=options.json)
    with errors_in_one_line(Console(stderr=True)):
        if with_peers and options.mesh != "local":
            raise ValueError(f"peers compares on one device, and --mesh is {options.mesh}: leave it out")
        opened = open_engine(options, status, options.drafter)

        from kimi_jax.decoding.engine import PLAIN, Draft, open_checkpoint
        from kimi_jax.evaluation.peers import measure_transformers
        from kimi_jax.evaluation.runs import record
        from kimi_jax.evaluation.speed import measure_speculation, row

        prompts = read_prompts(options.file) if options.file else [Prompt.of(text) for text in PROMPTS]
        if wishing := [prompt.where for prompt in prompts if prompt.wishes != NO_WISHES]:
            raise ValueError(f"{wishing[0]}: its own settings are for decode.py; a benchmark decodes all rows alike")
        ids = encode(prompts, opened.engine.tokenizer, raw=False, thinking=not options.instant, system=None)
        drafts = [PLAIN, Draft(), Draft("chain"), *(Draft("ddtree", budget) for budget in options.budgets)]
        steps = (len(drafts) + with_peers) * (options.repeats + 1)
        with Progress(console=status, transient=True, disable=not status.is_terminal) as bar:
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
        table = Table(title=f"{len(prompts)} prompts, batch 1, {options.repeats} repeats; {opened.where}")
        for name in ("decoder", "budget", "tokens/s", "±", "tokens a round", "round costs", "speed-up", "same text"):
            table.add_column(name, justify="left" if name == "decoder" else "right")
        for each in rows:
            table.add_row(
                each["decoder"], str(each["budget"] or ""), f"{each['tokens_per_second_median']:.1f}",
                f"{each['spread']:.0%}", f"{each['acceptance_length']:.2f}", f"{each['round_cost']:.2f}×",
                f"{each['speed_up']:.2f}×", "yes" if each["same_text"] else "NO",
            )  # fmt: skip
        table_console().print(table)


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """Options of `scaling`."""

    checkpoint: Path = BUNDLED_CHECKPOINT
    """Directory in K2.6's own format."""
    drafter: Path = BUNDLED_DRAFTER
    """Directory of a DFlash drafter made for the checkpoint."""
    meshes: tuple[str, ...] = ("local", "hgx-ib-8", "hgx-ib-16", "nvl36", "nvl72")
    """Machines to simulate."""
    budget: int = 16
    """Tree nodes of a round."""
    context: int = 64
    """Tokens of each request's prompt."""
    json: bool = False
    """Print one JSON object instead of a table."""


def scaling(options: ScalingOptions) -> None:
    """One round compiled for simulated meshes: what a device holds and sends, and what compiling takes."""
    status = Console(stderr=True, quiet=options.json)
    with errors_in_one_line(Console(stderr=True)):
        use_cpu_if_no_gpu()
        from kimi_jax.evaluation.runs import record
        from kimi_jax.evaluation.scaling import measure_scaling

        with status.status("starting") as line:
            scales = measure_scaling(
                options.checkpoint, options.drafter, options.meshes, budget=options.budget, context=options.context,
                stage=line.update,
            )  # fmt: skip
            rows = [dataclasses.asdict(scale) for scale in scales]
        ran = f"a round with {options.budget} tree nodes, one request a device group, context {options.context}"
        if options.json:
            print(json.dumps(record("scaling", ran, rows)))
            return
        table = Table(title=ran)
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="left" if name in ("mesh", "layout") else "right")
        for row in rows:
            table.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell
                            for cell in row.values()))  # fmt: skip
        table_console().print(table)


def page(runs: tyro.conf.Positional[Path], output: tyro.conf.Positional[Path]) -> None:
    """Writes the page of saved runs.

    Args:
        runs: Folder of what `--json` printed, one file a run.
        output: Markdown file.
    """
    with errors_in_one_line(Console(stderr=True)):
        from kimi_jax.evaluation import runs as saved

        write_text(output, saved.page(saved.load(runs)))


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    tyro.extras.subcommand_cli_from_dict(
        {"speculation": speculation, "peers": peers, "scaling": scaling, "gpu": gpu, "page": page},
        prog=prog,
        args=args,
        description=__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
