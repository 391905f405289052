"""Which implementation serves a shape on a card, with which tile sizes, and why."""

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any, Literal, get_args

import jax

from meshes.hardware import GPUS
from pallas_kernels.int4_moe.routing import tile_bound
from pallas_kernels.int4_moe.tile import UNIT, EngineName, Kind, Tile, shared_memory_bytes

Implementation = Literal["auto", "reference", "warp", "hopper", "blackwell"]

_ENGINES: dict[Implementation, EngineName] = {"warp": "mma", "hopper": "wgmma", "blackwell": "tcgen05"}
_ARCHITECTURES = {"9.0": "hopper", "10.0": "blackwell", "10.3": "blackwell"}
SHARED_MEMORY_BYTES = 232_448 - 2_048  # what a CTA of sm_90, sm_100 and sm_103 may have, less barriers and alignment
MOST_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Target:
    """The card a kernel is made for. `compute_capability` is "" where it is not a GPU."""

    device_kind: str
    compute_capability: str
    core_count: int

    @property
    def architecture(self) -> str | None:
        """ "hopper", "blackwell", or None where no kernel of this package runs."""
        return _ARCHITECTURES.get(self.compute_capability)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call's sizes: local `slots`, width local to this rank, and the number of experts the router chooses from."""

    rows: int
    top_k: int
    slots: int
    hidden: int
    width: int
    num_experts: int

    @property
    def mean_rows(self) -> float:
        """Rows an expert meets when routing is uniform."""
        return self.rows * self.top_k / self.num_experts

    @property
    def expected_active(self) -> float:
        """Distinct local experts that have rows when routing is uniform."""
        return self.slots * (1 - (1 - 1 / self.num_experts) ** (self.rows * self.top_k))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run, and why. `gate_up` and `down` are None for the reference."""

    implementation: Implementation
    reason: str
    gate_up: Tile | None = None
    down: Tile | None = None
    ctas: int = 0
    workspace_bytes: int = 0
    """Grouped activations, intermediate and results: the temporaries of one call, sized for the worst routing."""


def target_of(device: Any) -> Target:
    """The card of a jax device, or of the device a compile mesh names (`AbstractMesh.abstract_device`)."""
    capability = getattr(device, "compute_capability", None)
    cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    kind = device.device_kind
    if capability is None and device.platform in ("gpu", "cuda"):
        present = [d for d in jax.local_devices() if d.device_kind == kind]
        known = [g for g in GPUS.values() if kind.startswith(g.device_kind)] if not present else []
        if present:
            return target_of(present[0])
        capability = f"{known[0].compute_capability[0]}.{known[0].compute_capability[1]}" if known else ""
    return Target(kind, capability or "", cores or 1)


def current_target() -> Target:
    """The card a call is being compiled for: that of the mesh in use if there is one, else the first device's."""
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    return target_of(mesh_device if mesh_device is not None else jax.devices()[0])


def plan(shape: Shape, dtype: Any, target: Target, implementation: Implementation = "auto") -> Plan:
    """Choose for one shape.

    "auto" takes the tuned engine where the card, the sizes and the dtype allow a kernel, else the reference, and the
    plan's reason says which of them did not.

    Raises:
        ValueError: the implementation is unknown, or was asked for by name and cannot serve this call.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(get_args(Implementation))}")
    if implementation == "reference":
        return Plan("reference", "asked for")
    obstacle = _obstacle(shape, dtype, target, implementation)
    if obstacle and implementation == "auto":
        return Plan("reference", obstacle)
    if obstacle:
        raise ValueError(f"int4_moe cannot use {implementation!r}: {obstacle}")
    if implementation == "auto":
        table = _tuning(target)
        entry = next(e for e in table if e["mean_rows"] is None or shape.mean_rows <= e["mean_rows"])
        engine, rows = entry["engine"], entry["rows"]
        name: Implementation = next(n for n, e in _ENGINES.items() if e == engine)
        reason = f"{target.device_kind}: {shape.mean_rows:.2f} rows an expert"
    else:
        name, engine = implementation, _ENGINES[implementation]
        rows = 8 if engine == "mma" else next((n for n in (16, 32) if shape.mean_rows <= n), 64)
        reason = "asked for"
    tiles = [_tile(shape, kind, engine, rows, target) for kind in ("gate_up", "down")]
    grouped = tile_bound(shape.rows * shape.top_k, shape.slots, rows) * rows
    partial = 2 * 4 * shape.width * tiles[0].split if tiles[0].split > 1 else 0
    workspace = grouped * (2 * shape.hidden + 2 * shape.width + partial + 4 * shape.hidden * tiles[1].split)
    return Plan(name, reason, *tiles, ctas=target.core_count, workspace_bytes=workspace)


def _obstacle(shape: Shape, dtype: Any, target: Target, implementation: str) -> str | None:
    architecture = target.architecture
    if implementation in ("hopper", "blackwell") and architecture not in (None, implementation):
        return f"{target.device_kind} is not {implementation.capitalize()}"
    if architecture is None:
        capability = f" (compute capability {target.compute_capability})" if target.compute_capability else ""
        return f"{target.device_kind}{capability} has no kernel here: they are for capabilities 9.0, 10.0 and 10.3"
    if jax.numpy.dtype(dtype) != jax.numpy.bfloat16:
        return f"activations are {jax.numpy.dtype(dtype).name}; the kernels multiply bfloat16"
    for name, size in (("hidden", shape.hidden), ("width", shape.width)):
        if size not in (64, 128) and size % 256:
            return f"{name} is {size}; the kernels need 64, 128 or a multiple of 256"
    if shape.hidden == 64:
        return "hidden is 64; the kernels need at least 128"
    return None


def _tile(shape: Shape, kind: Kind, engine: EngineName, rows: int, target: Target) -> Tile:
    out, k = (shape.width, shape.hidden) if kind == "gate_up" else (shape.hidden, shape.width)
    m_rows = UNIT if kind == "gate_up" else 2 * UNIT
    warpgroups = 2 if out % (2 * m_rows) == 0 else 1
    k_step = 256 if k % 256 == 0 else k
    blocks, k_steps = out // (m_rows * warpgroups), k // k_step
    # Few active experts leave CTAs without work: cut k until there is an item for each, keeping two stages an item.
    items = max(shape.expected_active, 1.0) * blocks
    splits = [s for s in range(1, k_steps // 2 + 1) if k_steps % s == 0] or [1]
    split = next((s for s in splits if items * s >= target.core_count), splits[-1])
    if items * 2 > target.core_count:
        split = 1
    tile = Tile(engine, rows, warpgroups, k_step, 2, split)
    stage = shared_memory_bytes(dataclasses.replace(tile, stages=3), kind) - shared_memory_bytes(tile, kind)
    free = SHARED_MEMORY_BYTES - shared_memory_bytes(tile, kind)
    return dataclasses.replace(tile, stages=min(2 + math.floor(free / stage), MOST_STAGES))


@functools.cache
def _tables() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath("tuning.json").read_text())


def _tuning(target: Target) -> list[dict[str, Any]]:
    tables = _tables()
    card = next((name for name in tables["cards"] if target.device_kind.startswith(name)), None)
    return tables["cards"][card] if card else tables[str(target.architecture)]
