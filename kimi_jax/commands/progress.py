"""What is shown while something takes long: opening a checkpoint, compiling, going through many texts."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kimi_jax import compilation_cache
from kimi_jax.checkpoint import hub
from kimi_jax.commands.options import EngineOptions
from kimi_jax.opening import Listener, Opened, check_configurations, open_on
from kimi_jax.parallel import processes
from kimi_jax.parallel.processes import Watchdog
from meshes.devices import use_cpu_if_no_gpu, visible_gpu_count


def bar_on(console: Console) -> Progress:
    """A bar that counts and says how long it will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class _OnConsole(Listener):
    """Tells a console, with a bar for the bytes read; a watchdog watches from the first of them on."""

    def __init__(self, console: Console, bar: Progress, name: str, process: processes.Process, seconds: float | None):
        self.watchdog: Watchdog | None = None
        self._console, self._bar, self._process, self._seconds = console, bar, process, seconds
        self._task = bar.add_task("load", total=None, name=name, visible=False)

    def say(self, line: str) -> None:
        self._console.print(line, style="dim", highlight=False)

    def busy(self, doing: str) -> contextlib.AbstractContextManager[object]:
        return self._console.status(doing)

    def read(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, visible=True)
        if self.watchdog is not None:
            self.watchdog.beat()
        elif self._seconds is not None:
            stuck = f"{self._process}: nothing was loaded or decoded for {self._seconds} s; --watchdog allows more"
            self.watchdog = Watchdog(self._seconds, stuck).start()


def open_engine(options: EngineOptions, console: Console, drafter: Path | None = None) -> Opened:
    """Joins the processes and opens the checkpoint, and a drafter if given, with a progress bar.

    Where there are several processes, the first prints, here and afterwards.
    """
    machine = options.layout.preset()
    process = processes.join(options.processes, machine, simulated=visible_gpu_count() == 0)
    console.quiet |= not process.prints
    check_configurations(options.checkpoint, machine.layout, drafter)
    use_cpu_if_no_gpu()
    compilation_cache.switch(options.uses_cache)  # imports jax: what can be refused without has been
    columns = (TextColumn("loading {task.fields[name]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        listener = _OnConsole(console, bar, options.checkpoint.name, process, options.processes.watchdog)
        opened = open_on(
            machine, options.checkpoint, drafter, dtype=options.dtype, placement=options.placement,
            workers=options.workers, num_processes=process.count, listener=listener,
        )  # fmt: skip
    told = {"watchdog": listener.watchdog, "prefix_cache": options.shares_prefixes}
    return dataclasses.replace(opened, engine=dataclasses.replace(opened.engine, **told))


def on_disk(checkpoint: Path, console: Console, *, outline: bool = False) -> Path:
    """The folder of a checkpoint or drafter: itself, or downloaded from the hub. As `hub.local_folder`."""
    tell = functools.partial(console.print, style="dim", highlight=False)
    return hub.local_folder(checkpoint, tell, outline=outline)


def quiet_compiler() -> None:
    """Keeps XLA's warnings from a user who compiles for absent GPUs; errors stay. Comes before jax is imported.

    It would say of every sort that it lacks CUB's scratch sizes, which only a GPU gives.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextlib.contextmanager
def stages(console: Console) -> Iterator[Callable[[str], None]]:
    """A function to tell what begins: shown with the time it takes on a terminal, as plain lines elsewhere."""
    if not console.is_terminal:
        yield lambda name: console.print(f"{name} …", highlight=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:

        def begin(name: str) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(name, total=None)

        yield begin
