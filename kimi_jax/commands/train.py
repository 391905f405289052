"""Train the bundled small model and its DFlash drafter from scratch, export them, and measure how they route.

Examples:
  uv run scripts/train.py target --directory runs/target --dp 2 --output small
  uv run scripts/train.py drafter --target small --directory runs/drafter --dp 2 --output small_drafter
  uv run scripts/train.py routing --target small --drafter small_drafter
On a CPU two devices of one core each (--dp 2) are faster than one of two cores. `evaluate tasks --chain` scores both.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from kimi_jax import compilation_cache
from kimi_jax.commands.options import Dp, Ep, LayoutOptions, NoCache, OptionalFile, OptionalFolder, Tp, parse
from kimi_jax.opening import check_configurations
from kimi_jax.standard_output import OutputConsole
from kimi_jax.tables import left, right, table
from kimi_jax.text_files import require_folder, require_writable, write_text
from meshes.devices import use_cpu_if_no_gpu
from meshes.presets import Layout

if TYPE_CHECKING:
    from kimi_jax.training.target import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options of both runs."""

    directory: Path
    """Where checkpoints and the log go; a run found here is resumed."""
    output: OptionalFolder = None
    """Write the model here in K2.6's layout when the run ends or stops; the folder must not exist."""
    steps: int | None = None
    """Updates in all; by default those of the bundled model. The learning rate's schedule spans them."""
    learning_rate: float | None = None
    """Peak of the schedule."""
    seed: int = 0
    """Same seed and devices, same model."""
    dp: Dp = 1
    ep: Ep = 1
    tp: Tp = 1
    stop_after: int | None = None
    """End at this step; the same command without it goes on."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    evaluate_every: int = 500
    """Steps between evaluations on held-out prompts."""
    plot: OptionalFile = None
    """Draw the run's figures into this PNG (needs matplotlib)."""
    no_cache: NoCache = False

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh axes."""
        return LayoutOptions(dp=self.dp, ep=self.ep, tp=self.tp).preset().layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Common):
    """Train the K2.6-shaped target on the generated tasks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter(Common):
    """Train a DFlash drafter on a target's own answers."""

    target: Path
    """Checkpoint of the target."""
    loss: Literal["decay", "d-pace"] = "decay"
    """Weights of the positions in a block: falling by e over --gamma positions, or by what each adds to the expected
    acceptance length (D-PACE)."""
    gamma: float = 4.0
    """4 for blocks of 8, 7 for blocks of 16."""
    alpha: float = 0.5
    """D-PACE: floor of a position's survival, (1 - alpha) q + alpha."""
    texts: int = 8192
    """Training prompts that the target answers."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """Count how popular experts are and how many the rows of draft trees touch."""

    target: Path
    """Checkpoint of the target."""
    drafter: Path
    """Checkpoint of the drafter."""
    texts: int = 200
    """Held-out texts over all families."""
    output: OptionalFile = None
    """Write the figures here as JSON."""
    no_cache: NoCache = False


Command = (
    Annotated[Target, tyro.conf.subcommand("target")]
    | Annotated[Drafter, tyro.conf.subcommand("drafter")]
    | Annotated[Routing, tyro.conf.subcommand("routing")]
)


def changed[R: Recipe](recipe: R, options: Common) -> R:
    """The recipe with the options that were given."""
    given = {"steps": options.steps, "learning_rate": options.learning_rate}
    return dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})


def report(console: Console, log: list[dict[str, Any]], figures: list[str], plot: Path | None) -> None:
    """A sparkline for each figure, the last evaluation as a table, and the plot where one is wanted."""
    from kimi_jax.training.loop import plot as draw
    from kimi_jax.training.loop import sparkline

    courses = {name: [record[name] for record in log if name in record] for name in figures}
    rows = [(n.replace("_", " "), f"{v[0]:.3g}", f"{v[-1]:.3g}", sparkline(v)) for n, v in courses.items() if v]
    console.print(table("", (*left("figure"), *right("first", "last"), *left("course")), rows))
    of_families = [{n: v for n, v in record.items() if n.startswith(("em_", "acceptance_"))} for record in log]
    if evaluated := [record for record in of_families if record]:
        columns = right(*(name.partition("_")[2] for name in evaluated[-1]))
        scores = [f"{value:.2f}" for value in evaluated[-1].values()]
        console.print(table("held-out prompts by family", columns, [scores]))
    if plot:
        draw(log, [name for name, values in courses.items() if values], plot)
        console.print(f"plot: {plot}")


def open_target(options: Drafter | Routing, drafter: Path | None = None):
    """The checkpoint on one device, in float32."""
    check_configurations(options.target, Layout(), drafter)
    use_cpu_if_no_gpu()
    compilation_cache.switch(not options.no_cache)
    import jax.numpy as jnp

    from kimi_jax.decoding.loading import open_checkpoint
    from kimi_jax.training.recipes import training_mesh

    return open_checkpoint(options.target, training_mesh(Layout()), Layout(), jnp.float32, drafter)


def train(options: Target | Drafter, console: Console) -> None:
    """Runs, reports and exports."""
    if options.output and options.output.exists():
        raise ValueError(f"{options.output} exists; name a folder that does not")
    for folder in filter(None, (options.directory, options.output)):
        require_folder(folder)
    if isinstance(options, Drafter):
        check_configurations(options.target, Layout())
    use_cpu_if_no_gpu()
    compilation_cache.switch(not options.no_cache)
    import jax

    if options.layout.num_devices > 1:
        jax.config.update("jax_num_cpu_devices", options.layout.num_devices)
    from kimi_jax.drafter.loss import DraftLoss
    from kimi_jax.training.loop import LoopOptions
    from kimi_jax.training.recipes import DrafterRun, TargetRun

    loop = LoopOptions(
        evaluate_every=options.evaluate_every, checkpoint_every=options.checkpoint_every, stop_after=options.stop_after
    )
    if isinstance(options, Target):
        target_run = TargetRun(seed=options.seed)
        target_run = dataclasses.replace(target_run, recipe=changed(target_run.recipe, options))
        finished = target_run.train(options.directory, options.layout, loop)
        report(console, finished.log, ["loss", "accuracy", "worst_load", "em"], options.plot)
        if options.output:
            target_run.export(options.directory, options.output)
    else:
        engine = open_target(options)
        loss = DraftLoss(options.loss, options.gamma, options.alpha)
        run = DrafterRun(seed=options.seed, loss=loss, texts=options.texts)
        run = dataclasses.replace(run, recipe=changed(run.recipe, options))

        def answered(done: int) -> None:
            if done % 1024 == 0 or done == options.texts:
                console.print(f"the target has answered {done} of {options.texts} training prompts")

        finished = run.train(engine, options.directory, options.layout, loop, progress=answered)
        report(console, finished.log, ["loss", "acceptance", "heldout_acceptance"], options.plot)
        if options.output:
            run.export(engine, options.directory, options.output)
    if options.output:
        console.print(f"checkpoint: {options.output}")


def measure_routing(options: Routing, console: Console) -> None:
    """Expert popularity and the experts that tree rows touch."""
    engine = open_target(options, options.drafter)

    from kimi_jax.training.recipes import routing_statistics

    statistics = routing_statistics(engine, options.texts)
    rows = [(str(d.rows), *(f"{x:.2f}" for x in (d.tree, d.independent, d.uniform))) for d in statistics.distinct]
    columns = right("rows", "draft tree", "independent rows", "uniform formula")
    console.print(
        table("experts touched, of a layer's", columns, rows),
        f"tree diversity {statistics.tree_diversity:.2f} from {statistics.trees} trees", sep="\n",
    )  # fmt: skip
    if options.output:
        write_text(options.output, json.dumps(statistics.as_dict(), indent=1) + "\n")


def main(options: Command) -> None:
    """Runs one command."""
    console = OutputConsole(highlight=False)
    file = options.plot if isinstance(options, Target | Drafter) else options.output
    if file is not None:
        require_writable(file)
    if isinstance(options, Routing):
        measure_routing(options, console)
    else:
        train(options, console)


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    command: Any = Command
    main(parse(command, args, prog, __doc__))
