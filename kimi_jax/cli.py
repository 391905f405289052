"""What the scripts share: the options that place a checkpoint on a mesh, and errors told in one line."""

import contextlib
import dataclasses
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from kimi_jax import compilation_cache, standard_output
from kimi_jax.checkpoint import hub
from kimi_jax.opening import BUNDLED_CHECKPOINT, Dtype, Listener, Opened, check_configurations, open_on
from kimi_jax.opening import BUNDLED_DRAFTER as BUNDLED_DRAFTER  # the commands take these from here
from kimi_jax.parallel import processes
from kimi_jax.parallel.processes import ProcessOptions, Watchdog
from kimi_jax.standard_output import harmless
from kimi_jax.tables import table_console as table_console  # the commands take it from here
from meshes.devices import use_cpu_if_no_gpu, visible_gpu_count
from meshes.presets import Preset, preset

NoCache = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.arg(help="Compile everything anew: use none of the programs that earlier runs left in the cache folder."),
]
"""The option that leaves JAX's compilation cache unused."""


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Where a checkpoint runs."""

    checkpoint: Path = BUNDLED_CHECKPOINT
    """Directory in K2.6's own format (config.json, safetensors shards with their index, tiktoken.model) or sharded by
    convert.py; for what runs the model also a name on the hub, owner/name or owner/name@revision."""
    mesh: str = "local"
    """Machine: local, hgx-ib-N (N GPUs in nodes of 8; hgx-ib is 16), nvl36 or nvl72; simulated without GPUs."""
    dp: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Replicas with weights of their own; by default the preset's."""
    ep: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Ranks that share the experts and split the batch; by default the preset's."""
    tp: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Ranks that split heads and widths; by default the preset's."""
    dtype: Dtype = "auto"
    """Type of activations and dense weights; auto is bfloat16 on GPUs and float32 on simulated meshes."""
    experts: Literal["slots", "width"] = "slots"
    """Whole experts over ep and tp, or over ep only with each one's width split over tp."""
    exchange: Literal["auto", "allgather", "alltoall", "ragged"] = "auto"
    """How rows reach experts on other ep ranks; auto takes buffers where they halve what travels, by the rows of a
    step. ragged is for GPUs, and has known problems (docs/parallel.md)."""
    cache: Literal["copied", "split"] = "copied"
    """Latent cache whole on every tp rank, or split over them by position: for long contexts."""

    def preset(self) -> Preset:
        """The preset with the overrides applied. Raises LayoutError naming what works."""
        return preset(self.mesh).with_options(
            dp=self.dp, ep=self.ep, tp=self.tp, experts=self.experts, exchange=self.exchange, cache=self.cache
        )


@dataclasses.dataclass(frozen=True)
class EngineOptions(MeshOptions):
    """Where a checkpoint runs, and by which processes."""

    processes: ProcessOptions = dataclasses.field(default_factory=ProcessOptions)
    placement: Path | None = None
    """JSON file that says which experts lie where, as decode.py --save-placement writes; by default in order, or as a
    sharded checkpoint has them."""
    workers: int = 8
    """Threads of each process that read the checkpoint; network storage often wants more."""
    no_cache: NoCache = False

    @property
    def uses_cache(self) -> bool:
        """Whether compiled programs are kept for later runs, and those of earlier ones used."""
        return not self.no_cache


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
    machine = options.preset()
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
    return dataclasses.replace(opened, engine=dataclasses.replace(opened.engine, watchdog=listener.watchdog))


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


_ADVICE = {
    errno.ENOENT: "there is no such file or folder; check the name, and create the folder of a file to be written",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check the name",
    errno.EISDIR: "this is a folder; name a file",
    errno.EEXIST: "this exists already; remove it or choose another name",
    errno.ENOTEMPTY: "this folder is not empty; empty it or choose another name",
    errno.EACCES: "permission denied; change its permissions or choose another place",
    errno.EPERM: "this is not permitted; change its permissions or choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.ENOSPC: "no space is left on the device; free some or choose another place",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another place",
    errno.EFBIG: "the file would exceed the limit of its size (ulimit -f, or the file system's)",
    errno.EMFILE: "too many files are open; raise the limit with ulimit -n",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "the links lead in a circle; check the name",
}


def message_of(error: BaseException) -> str:
    """What to tell of an error: for an operating system's the file, what is wrong with it, and what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    what = _ADVICE.get(error.errno, error.strerror or os.strerror(error.errno))
    if error.filename is None:
        return what
    name = error.filename if isinstance(error.filename, int) else os.fsdecode(error.filename)
    return f"{name}: {what}"


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Around a whole command, its parsing included: errors in one line, and nothing lost on the way out.

    Output is on its way only when it has been flushed: what fails there is an error of the command.
    """
    standard_output.own()
    with errors_in_one_line(Console(stderr=True)):
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()


@contextlib.contextmanager
def errors_in_one_line(console: Console) -> Iterator[None]:
    """Prints an expected error (a wrong file, option or device) without a traceback and exits with status 1.

    Where nobody reads standard output any more, exits with `CLOSED_PIPE_STATUS` and prints nothing. One
    of several processes exits at once after any error, and the others follow.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename == standard_output.NAME:
            standard_output.abandon()
            if isinstance(error, BrokenPipeError):
                processes.end(standard_output.CLOSED_PIPE_STATUS)
        process, of_jax = processes.this(), type(error).__module__.split(".")[0] in ("jax", "jaxlib")
        expected = isinstance(error, ValueError | OSError | RuntimeError) and not of_jax
        if not expected and not isinstance(error, KeyboardInterrupt) and process.count == 1:
            raise
        console.quiet = False
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {message_of(error)}"
        if process.count > 1:
            text = f"{process}: {text}"
            if of_jax:
                text += "\nIf this is a failed collective, another process has ended: see its messages first"
            elif not expected:
                console.print_exception()
        with contextlib.suppress(OSError):
            # A name may hold control characters, which a terminal must not obey, and rich would read :names: of emoji.
            text = harmless(text) if console.is_terminal else text
            console.print(text, style="red", highlight=False, markup=False, emoji=False, soft_wrap=True)
        processes.end(130 if isinstance(error, KeyboardInterrupt) else 1)
