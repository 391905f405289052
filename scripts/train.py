"""Train the bundled small model and its DFlash drafter from scratch, and export them as checkpoints.

Examples:
  uv run scripts/train.py target --directory runs/target --output small
  uv run scripts/train.py drafter --target small --directory runs/drafter --output small_drafter
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from kimi_jax.cli import errors_in_one_line
from kimi_jax.drafter.loss import DraftLoss
from meshes.devices import use_cpu_if_no_gpu
from meshes.presets import Layout


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of both runs."""

    directory: Path
    """Where checkpoints and the log go; a run found here is resumed."""
    output: Path | None = None
    """Write the finished model here as a checkpoint in K2.6's layout; the folder must not exist."""
    steps: int | None = None
    """Updates in all; by default those of the bundled model. The learning rate's schedule spans them."""
    learning_rate: float | None = None
    """Peak of the schedule."""
    seed: int = 0
    """Same seed and devices, same model."""
    dp: int = 1
    """Devices that share a step's texts. On a CPU 2 devices of one core each are faster than one of two cores."""
    ep: int = 1
    """Devices that share the experts."""
    tp: int = 1
    """Devices that share heads, widths and experts."""
    stop_after: int | None = None
    """End at this step; the same command without it goes on."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    evaluate_every: int = 500
    """Steps between evaluations on held-out prompts."""
    plot: Path | None = None
    """Draw the run's figures into this PNG (needs matplotlib)."""

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh axes."""
        return Layout(dp=self.dp, ep=self.ep, tp=self.tp)


@dataclasses.dataclass(frozen=True)
class Target(Common):
    """Train the K2.6-shaped target on the generated tasks."""


@dataclasses.dataclass(frozen=True)
class Drafter(Common):
    """Train a DFlash drafter on a target's own answers."""

    target: Path = Path()
    """Checkpoint of the target."""
    loss: DraftLoss = dataclasses.field(default_factory=DraftLoss)
    """Weights of the positions in a block."""
    texts: int = 1536
    """Training prompts that the target answers."""


Command = Annotated[Target, tyro.conf.subcommand("target")] | Annotated[Drafter, tyro.conf.subcommand("drafter")]


def changed(recipe, options: Common):
    """The recipe with the options that were given."""
    given = {"steps": options.steps, "learning_rate": options.learning_rate}
    return dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})


def report(console: Console, log: list[dict], figures: list[str], plot: Path | None) -> None:
    """A sparkline for each figure, the last evaluation as a table, and the plot where one is wanted."""
    from kimi_jax.training.loop import plot as draw
    from kimi_jax.training.loop import sparkline

    table = Table("figure", "first", "last", "course")
    for name in figures:
        values = [record[name] for record in log if name in record]
        if values:
            table.add_row(name.replace("_", " "), f"{values[0]:.3g}", f"{values[-1]:.3g}", sparkline(values))
    console.print(table)
    evaluated = [record for record in log if any(name.startswith(("em_", "acceptance_")) for name in record)]
    if evaluated:
        last = {name: value for name, value in evaluated[-1].items() if name.startswith(("em_", "acceptance_"))}
        scores = Table(*(name.partition("_")[2] for name in last), title="held-out prompts by family")
        scores.add_row(*(f"{value:.2f}" for value in last.values()))
        console.print(scores)
    if plot:
        draw(log, [name for name in figures if any(name in record for record in log)], plot)
        console.print(f"plot: {plot}")


def main(options: Command) -> None:
    """Runs, reports and exports."""
    use_cpu_if_no_gpu()
    import jax

    if options.layout.num_devices > 1:
        jax.config.update("jax_num_cpu_devices", options.layout.num_devices)
    from kimi_jax.training.loop import LoopOptions
    from kimi_jax.training.recipes import DrafterRun, TargetRun

    console = Console(highlight=False)
    loop = LoopOptions(
        evaluate_every=options.evaluate_every, checkpoint_every=options.checkpoint_every, stop_after=options.stop_after
    )
    if options.output and options.output.exists():
        raise ValueError(f"{options.output} exists; name a folder that does not")
    if isinstance(options, Target):
        job = TargetRun(seed=options.seed)
        job = dataclasses.replace(job, recipe=changed(job.recipe, options))
        finished = job.train(options.directory, options.layout, loop)
        report(console, finished.log, ["loss", "accuracy", "worst_load", "em"], options.plot)
        if options.output and options.stop_after is None:
            job.export(options.directory, options.output)
    else:
        import jax.numpy as jnp

        from kimi_jax.decoding.engine import open_checkpoint
        from kimi_jax.training.recipes import training_mesh

        engine = open_checkpoint(options.target, training_mesh(Layout()), Layout(), jnp.float32)
        job = DrafterRun(seed=options.seed, loss=options.loss, texts=options.texts)
        job = dataclasses.replace(job, recipe=changed(job.recipe, options))
        with console.status("the target answers the training prompts") as status:
            finished = job.train(
                engine, options.directory, options.layout, loop,
                progress=lambda done: status.update(f"the target answers the training prompts: {done}/{options.texts}"),
            )  # fmt: skip
        report(console, finished.log, ["loss", "acceptance", "heldout_acceptance"], options.plot)
        if options.output and options.stop_after is None:
            job.export(engine, options.directory, options.output)
    if options.output and options.stop_after is None:
        console.print(f"checkpoint: {options.output}")


if __name__ == "__main__":
    console = Console(file=sys.stderr)
    with errors_in_one_line(console):
        main(tyro.cli(Command, description=__doc__))  # pyright: ignore[reportArgumentType]
