"""What the scripts share: the options that place a checkpoint on a mesh, and errors told in one line."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from meshes.devices import build_mesh, select_devices, use_cpu_if_no_gpu
from meshes.hardware import GPU, GPUS
from meshes.presets import Preset, preset

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Engine

ASSETS = Path(__file__).parent / "assets"
BUNDLED_CHECKPOINT = ASSETS / "small"
BUNDLED_DRAFTER = ASSETS / "small_drafter"
"""Drafts for the bundled checkpoint."""

Dtype = Literal["auto", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Where a checkpoint runs."""

    checkpoint: Path = BUNDLED_CHECKPOINT
    """Directory in K2.6's own format: config.json, safetensors shards with their index, tiktoken.model."""
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

    def preset(self) -> Preset:
        """The preset with the overrides applied. Raises LayoutError naming what works."""
        return preset(self.mesh).with_axes(dp=self.dp, ep=self.ep, tp=self.tp)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint on its mesh, and what a report says of both."""

    engine: "Engine"
    machine: Preset
    where: str
    """Machine, layout, devices and type."""
    gpu: GPU
    """The GPU in use, or the one a simulated machine would have."""


def open_engine(options: MeshOptions, console: Console, drafter: Path | None = None) -> Opened:
    """Selects devices and loads the checkpoint, and a drafter if given, with a progress bar."""
    use_cpu_if_no_gpu()
    import jax.numpy as jnp  # after the platform is known, or the CUDA plugin would log its search for a driver

    from kimi_jax.decoding.engine import open_checkpoint
    from kimi_jax.decoding.kernels import check

    machine = options.preset()
    devices = select_devices(machine)
    console.print(devices.notice, style="dim", highlight=False)
    mesh = build_mesh(machine, devices.devices)
    if not devices.simulated:
        with console.status("checking kernels against their references"):
            check(mesh.local_mesh.devices.flat[0])
    name = options.dtype if options.dtype != "auto" else "float32" if devices.simulated else "bfloat16"
    columns = (TextColumn("loading {task.fields[name]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("load", total=None, name=options.checkpoint.name)
        engine = open_checkpoint(
            options.checkpoint,
            mesh,
            machine.layout,
            jnp.dtype(name),
            drafter,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    kind = devices.devices[0].device_kind
    gpu = next((GPUS[name] for name in machine.gpu_names if kind.startswith(GPUS[name].device_kind)), None)
    return Opened(engine, machine, f"{devices.notice}, {name}", gpu or GPUS[machine.gpu_names[0]])


TABLE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe, where rich would take 80."""


def table_console() -> Console:
    """Standard output for tables, as wide as the terminal or TABLE_WIDTH."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


@contextlib.contextmanager
def errors_in_one_line(console: Console) -> Iterator[None]:
    """Prints an expected error (a wrong file, option or device) without a traceback and exits with status 1."""
    try:
        yield
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if type(error).__module__.split(".")[0] in ("jax", "jaxlib"):
            raise
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        sys.exit(130)
