"""The training loop: batches by step, checkpoints through orbax, a log, and a run that any kill can be resumed from.

A run directory holds `recipe.json`, `log.jsonl` and `checkpoints/`. The batch of a step depends on the seed and the
step alone, so the state restored from a checkpoint is all that a resumed run needs to end on the same bits.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kimi_jax.text_files import lines_of, naming, read_text, whole_file, write_text

Record = dict[str, Any]
"""One line of the log: `step` and figures by name."""


class ResumeError(ValueError):
    """A run directory that belongs to another recipe, or cannot be read; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How often a run logs, evaluates and saves."""

    log_every: int = 50
    evaluate_every: int = 500
    checkpoint_every: int = 500
    stop_after: int | None = None
    """End at this step though the recipe goes on (the next run resumes); None runs to the end."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished or stopped run."""

    state: Any
    log: list[Record]


def run(
    state: Any,
    step: Callable[[Any, Any], tuple[Any, Mapping[str, jax.Array]]],
    batch: Callable[[int], Any],
    steps: int,
    directory: Path,
    recipe: Mapping[str, Any],
    options: LoopOptions | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    console: Console | None = None,
) -> Run:
    """Trains from the last checkpoint in `directory`, or from `state` where there is none.

    Args:
      state: a pytree with an integer array `step`; its arrays' shardings are kept when a checkpoint is restored.
      step: the jitted update; gives the new state and scalar figures.
      batch: the batch of a step, already on the devices.
      steps: the run's length.
      recipe: everything the result depends on; a directory with another recipe is refused.
      evaluate: figures of a state, slower than a step's own.

    Raises:
      ResumeError: the directory's recipe differs; the message names the fields.
    """
    options = options or LoopOptions()
    console = console or Console()
    directory.mkdir(parents=True, exist_ok=True)
    _check_recipe(directory / "recipe.json", recipe)
    with ocp.CheckpointManager(
        (directory / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
    ) as manager:
        latest = manager.latest_step()
        if latest is not None:
            state = _restore(manager, latest, state)
            console.print(f"resumed at step {latest} of {steps}")
        start = latest or 0
        log = _read_log(directory / "log.jsonl", start)
        end = min(steps, options.stop_after or steps)
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        task = progress.add_task("training", total=steps, completed=start)
        with progress, (directory / "log.jsonl").open("a") as file:
            began, last_logged = time.perf_counter(), start
            for index in range(start, end):
                state, metrics = step(state, batch(index))
                done = index + 1
                progress.update(task, completed=done)
                evaluated = evaluate and (done % options.evaluate_every == 0 or done == steps)
                if done % options.log_every == 0 or evaluated or done == steps:
                    record: Record = {"step": done} | {name: float(value) for name, value in metrics.items()}
                    now = time.perf_counter()
                    record["seconds_per_step"] = (now - began) / (done - last_logged)
                    if evaluated and evaluate:
                        record |= evaluate(state)
                    log.append(record)
                    with naming(directory / "log.jsonl"):
                        file.write(json.dumps(record) + "\n")
                        file.flush()
                    line = "  ".join(f"{name} {value:.4g}" for name, value in record.items())
                    progress.console.print(line, soft_wrap=True)
                    began, last_logged = time.perf_counter(), done
                if done % options.checkpoint_every == 0 or done == end:
                    manager.save(done, args=ocp.args.StandardSave(_named_leaves(state)), force=True)
    return Run(state, log)


def restore(directory: Path, state: Any) -> tuple[Any, int]:
    """The last checkpoint of a run directory, laid out as `state`, and its step.

    Raises:
      ResumeError: there is none.
    """
    with ocp.CheckpointManager((directory / "checkpoints").absolute()) as manager:
        latest = manager.latest_step()
        if latest is None:
            raise ResumeError(f"{directory} holds no checkpoint; train first, or name the run's directory")
        return _restore(manager, latest, state), latest


def _named_leaves(state: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _restore(manager: ocp.CheckpointManager, step: int, state: Any) -> Any:
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in _named_leaves(state).items()
    }
    leaves = manager.restore(step, args=ocp.args.StandardRestore(abstract))
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[jax.tree_util.keystr(path)], state)


def _check_recipe(path: Path, recipe: Mapping[str, Any]) -> None:
    recipe = json.loads(json.dumps(recipe))
    if not path.exists():
        write_text(path, json.dumps(recipe, indent=2) + "\n")
        return
    found = json.loads(read_text(path))
    different = sorted(key for key in {*found, *recipe} if found.get(key) != recipe.get(key))
    if different:
        changes = ", ".join(f"{key} {found.get(key)!r} there, {recipe.get(key)!r} now" for key in different)
        raise ResumeError(f"{path.parent} belongs to another run ({changes}); choose another directory or delete it")


def _read_log(path: Path, steps: int) -> list[Record]:
    """The log up to a step; lines of steps that were lost with a kill are dropped from the file too."""
    if not path.exists():
        return []
    log: list[Record] = []
    for line in lines_of(read_text(path)):
        try:
            log.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a kill can leave half a line, which was then the last
    log = [record for record in log if record["step"] <= steps]
    write_text(path, "".join(json.dumps(record) + "\n" for record in log))
    return log


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 60) -> str:
    """A line of text that shows how a figure went, lowest to highest; each character averages its share."""
    if not values:
        return ""
    parts = [float(np.mean(part)) for part in np.array_split(values, min(width, len(values)))]
    low, high = min(parts), max(parts)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((value - low) * scale)] for value in parts)


def plot(log: list[Record], figures: list[str], path: Path) -> None:
    """Draws figures of a log over the steps into a PNG.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "the plot needs matplotlib: `uv pip install matplotlib`; the log itself is complete"
        ) from None
    figure = Figure(figsize=(8, 3 * len(figures)), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(len(figures), 1)), figures, strict=True):
        points = [(record["step"], record[name]) for record in log if name in record]
        axes.plot(*zip(*points, strict=True))
        axes.set(xlabel="step", ylabel=name.replace("_", " "))
        axes.grid(alpha=0.3)
    with whole_file(path) as stream:
        figure.savefig(stream, dpi=120, format=path.suffix.removeprefix(".") or "png")
