"""A checkpoint on a machine: devices chosen, weights loaded, ready to decode.

`load` is for programs; the commands do the same with progress bars and several processes.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kimi_jax.checkpoint import hub
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from meshes.devices import build_mesh, select_devices, use_cpu_if_no_gpu
from meshes.hardware import GPU, GPUS, card_of
from meshes.presets import Layout, Preset, preset

if TYPE_CHECKING:
    from kimi_jax.decoding.automatic import RoundCosts
    from kimi_jax.decoding.engine import Costs, Engine

ASSETS = Path(__file__).parent / "assets"
BUNDLED_CHECKPOINT = ASSETS / "small"
BUNDLED_DRAFTER = ASSETS / "small_drafter"
"""The drafter of the bundled checkpoint."""

Dtype = Literal["auto", "bfloat16", "float32"]


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
    drafter: Path | None
    """The drafter's folder."""
    dtype: str
    simulated: bool
    """Whether CPU devices stand in for the machine's."""


class Listener:
    """What is told while a checkpoint is opened; this one keeps silent."""

    def say(self, line: str) -> None:
        """Takes a line about the machine, or about a download."""

    def busy(self, doing: str) -> contextlib.AbstractContextManager[object]:
        """Covers something that takes seconds."""
        return contextlib.nullcontext()

    def read(self, done: int, total: int) -> None:
        """Takes the checkpoint's bytes read so far, and those in all."""


def load(
    checkpoint: str | Path = BUNDLED_CHECKPOINT,
    *,
    mesh: str | Preset = "local",
    drafter: str | Path | None = None,
    dtype: Dtype = "auto",
) -> "Engine":
    """Opens a checkpoint, by default the bundled one, with its drafter where one is known.

    Args:
      checkpoint: a folder in K2.6's own format or sharded by `convert`, or a name on the hub (owner/name[@revision]).
      mesh: a machine's name (`local`, `hgx-ib-N`, `nvl36`, `nvl72`), or a preset with a layout of your own, such as
        `meshes.preset("nvl72").with_axes(ep=72, tp=1)`. It is simulated where there are no GPUs; a simulated mesh of
        several devices must be loaded before JAX is used otherwise.
      drafter: folder or name of a DFlash drafter made for the checkpoint; the bundled checkpoint has one of its own,
        and any other decodes plainly without.
      dtype: of activations and dense weights; auto is bfloat16 on GPUs and float32 on simulated meshes.

    Raises:
      ConfigError, LayoutError, TokenizerError, CheckpointError: naming the file and field that does not fit.
      ValueError: an unknown machine, or devices that do not fit it.
    """
    machine = preset(mesh) if isinstance(mesh, str) else mesh
    folder = Path(checkpoint)
    return open_on(machine, folder, drafter_of(folder, drafter), dtype=dtype).engine


def drafter_of(checkpoint: Path, drafter: str | Path | None) -> Path | None:
    """The drafter that was named, or the bundled checkpoint's own; None for any other."""
    if drafter is not None:
        return Path(drafter)
    return BUNDLED_DRAFTER if checkpoint.resolve() == BUNDLED_CHECKPOINT else None


def open_on(
    machine: Preset,
    checkpoint: Path,
    drafter: Path | None = None,
    *,
    dtype: Dtype = "auto",
    placement: Path | None = None,
    workers: int = 8,
    num_processes: int = 1,
    listener: Listener | None = None,
) -> Opened:
    """Selects devices and loads the checkpoint onto them; names on the hub are downloaded first.

    Args:
      placement: JSON file that says which experts lie where; by default in order, or as a sharded checkpoint has them.
      workers: threads that read the checkpoint.
      num_processes: those that have joined.
    """
    listener = listener or Listener()
    check_configurations(checkpoint, machine.layout, drafter)
    use_cpu_if_no_gpu()
    import jax.numpy as jnp  # after the platform is known, or the CUDA plugin would log its search for a driver

    from kimi_jax.decoding.kernels import check
    from kimi_jax.decoding.loading import open_checkpoint
    from kimi_jax.parallel.host_arrays import require_devices

    devices = select_devices(machine, num_processes=num_processes)
    where = devices.notice + (f" of {num_processes} processes" if num_processes > 1 else "")
    listener.say(where)
    mesh = build_mesh(machine, devices.devices)
    require_devices(mesh)
    if not devices.simulated:
        with listener.busy("checking kernels against their references"):
            check(mesh.local_mesh.devices.flat[0])
    folder = hub.local_folder(checkpoint, listener.say)
    if drafter is not None:
        drafter = hub.local_folder(drafter, listener.say)
    name = dtype if dtype != "auto" else "float32" if devices.simulated else "bfloat16"
    engine = open_checkpoint(
        folder, mesh, machine.layout, jnp.dtype(name), drafter,
        progress=listener.read, placement=placement, workers=workers,
    )  # fmt: skip
    if mesh.size == 1 and devices.simulated and name == "float32":
        engine = engine.for_cpu()
    gpu = card_of(devices.devices[0].device_kind, machine.gpu_names) or GPUS[machine.gpu_names[0]]
    if devices.simulated and mesh.size > 1:
        engine = dataclasses.replace(engine, costs=_estimated_costs(machine, gpu, engine))
    return Opened(engine, machine, f"{where}, {name}", gpu, folder, drafter, name, devices.simulated)


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


def _estimated_costs(machine: Preset, gpu: GPU, engine: "Engine") -> "Costs":
    """What rounds would cost on the GPUs that simulated devices stand for."""

    def costs(requests: int, context: int) -> "RoundCosts":
        from kimi_jax.estimator.rounds import round_costs

        assert engine.drafter is not None
        return round_costs(machine, gpu, engine.config, engine.drafter.config, requests=requests, context=context)

    return costs
