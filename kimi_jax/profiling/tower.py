"""The vision tower compiled at full size for GPUs that need not be there: nothing is allocated."""

import dataclasses
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import abstract
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.encoder import DEVICES, Encoder
from kimi_jax.vision.tower import CHANNELS, VisionModel
from meshes.devices import build_mesh
from meshes.presets import Preset
from meshes.targets import topology_devices


@dataclasses.dataclass(frozen=True)
class CompiledTower:
    """The program that sees one picture on every device; bytes are those of one device."""

    temporaries: int
    arguments: int
    outputs: int
    seconds: float
    """Lowering and compiling."""


def compile_tower(
    config: VisionConfig, machine: Preset, gpu: str, patches: int, dtype: DTypeLike = jnp.bfloat16
) -> CompiledTower:
    """Compiles the tower's program for pictures of so many patches.

    Raises:
      ValueError: a card that programs are not compiled for.
      RuntimeError: no CUDA plugin.
    """
    mesh, places = build_mesh(machine, topology_devices(machine, gpu)), rules(machine.layout)
    module, started = VisionModel(config), time.perf_counter()

    def array(shape: tuple[int, ...], kind: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((mesh.size, *shape), kind, sharding=NamedSharding(mesh, DEVICES))

    pixels = CHANNELS * config.patch_size**2
    program = jax.jit(Encoder(module, {}, mesh, places).program)
    lowered = program.lower(
        abstract(module, dtype, mesh, places), array((patches, pixels), jnp.uint8), array((3,), jnp.int32)
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return CompiledTower(
        memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes,
        time.perf_counter() - started,
    )  # fmt: skip
