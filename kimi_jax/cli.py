"""What the scripts share: the options that place a checkpoint on a mesh, and errors told in one line."""

import contextlib
import dataclasses
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.parallel import processes
from kimi_jax.parallel.processes import ProcessOptions
from kimi_jax.standard_output import harmless
from kimi_jax.tables import table_console as table_console  # the commands take it from here
from meshes.devices import build_mesh, select_devices, use_cpu_if_no_gpu, visible_gpu_count
from meshes.hardware import GPU, GPUS, card_of
from meshes.presets import Layout, Preset, preset

if TYPE_CHECKING:
    from kimi_jax.decoding.automatic import RoundCosts
    from kimi_jax.decoding.engine import Costs, Engine

ASSETS = Path(__file__).parent / "assets"
BUNDLED_CHECKPOINT = ASSETS / "small"
BUNDLED_DRAFTER = ASSETS / "small_drafter"
"""Drafts for the bundled checkpoint."""

Dtype = Literal["auto", "bfloat16", "float32"]
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


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint on its mesh, and what a report says of both."""

    engine: "Engine"
    machine: Preset
    where: str
    """Machine, layout, devices and type."""
    gpu: GPU
    """The GPU in use, or the one a simulated machine would have."""
    folder: Path
    """The checkpoint's, in the hub's cache where a name was given."""


def open_engine(options: EngineOptions, console: Console, drafter: Path | None = None) -> Opened:
    """Joins the processes, selects devices and loads the checkpoint, and a drafter if given, with a progress bar.

    Names on the hub are downloaded first. Where there are several processes, the first prints, here and afterwards.
    """
    machine = options.preset()
    process = processes.join(options.processes, machine, simulated=visible_gpu_count() == 0)
    console.quiet |= not process.prints
    check_configurations(options.checkpoint, machine.layout, drafter)
    use_cpu_if_no_gpu()
    compilation_cache.switch(options.uses_cache)
    import jax.numpy as jnp  # after the platform is known, or the CUDA plugin would log its search for a driver

    from kimi_jax.decoding.engine import open_checkpoint
    from kimi_jax.decoding.kernels import check
    from kimi_jax.parallel.host_arrays import require_devices

    devices = select_devices(machine, num_processes=process.count)
    where = devices.notice + (f" of {process.count} processes" if process.count > 1 else "")
    console.print(where, style="dim", highlight=False)
    mesh = build_mesh(machine, devices.devices)
    require_devices(mesh)
    if not devices.simulated:
        with console.status("checking kernels against their references"):
            check(mesh.local_mesh.devices.flat[0])
    folder, drafter = (None if path is None else on_disk(path, console) for path in (options.checkpoint, drafter))
    assert folder is not None
    name = options.dtype if options.dtype != "auto" else "float32" if devices.simulated else "bfloat16"
    columns = (TextColumn("loading {task.fields[name]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    seconds = options.processes.watchdog
    stuck = f"{process}: nothing was loaded or decoded for {seconds} s; --watchdog allows more"
    watchdog = None if seconds is None else processes.Watchdog(seconds, stuck).start()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("load", total=None, name=options.checkpoint.name)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if watchdog is not None:
                watchdog.beat()

        engine = open_checkpoint(
            folder,
            mesh,
            machine.layout,
            jnp.dtype(name),
            drafter,
            progress=progress,
            placement=options.placement,
            workers=options.workers,
        )
    gpu = card_of(devices.devices[0].device_kind, machine.gpu_names)
    if mesh.size == 1 and devices.simulated and name == "float32":
        engine = engine.for_cpu()
    gpu = gpu or GPUS[machine.gpu_names[0]]
    costs = estimated_costs(machine, gpu, engine) if mesh.size > 1 and devices.simulated else None
    engine = dataclasses.replace(engine, watchdog=watchdog, costs=costs)
    return Opened(engine, machine, f"{where}, {name}", gpu, folder)


def estimated_costs(machine: Preset, gpu: GPU, engine: "Engine") -> "Costs":
    """What rounds would cost on the GPUs that simulated devices stand for."""

    def costs(requests: int, context: int) -> "RoundCosts":
        from kimi_jax.estimator.rounds import round_costs

        assert engine.drafter is not None
        return round_costs(
            machine, gpu, engine.config, engine.drafter.config, requests=requests, context=context
        )

    return costs


def check_configurations(checkpoint: Path, layout: Layout, drafter: Path | None = None) -> None:
    """Refuses configurations that cannot be run or do not fit the layout, before the imports that take seconds.

    Names on the hub are left for later: a download should wait until devices have been found.

    Raises:
      ConfigError, LayoutError: naming the file and field, or the dimension, that does not fit.
    """
    config = None if hub.is_name(checkpoint) else ModelConfig.from_json(checkpoint)
    drafter_config = None if drafter is None or hub.is_name(drafter) else DrafterConfig.from_json(drafter)
    if config is not None:
        if drafter is not None and drafter_config is not None:
            drafter_config.check(config, drafter)
        from kimi_jax.ledger import layout_rules  # imports jax

        layout_rules.check(config, layout, drafter_config)


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
