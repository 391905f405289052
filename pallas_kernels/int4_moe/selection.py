"""Which implementation serves a shape on a card, and with which tile sizes."""

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.int4_moe.reference import PackedWeight
from pallas_kernels.int4_moe.routing import group_pairs, tile_bound
from pallas_kernels.int4_moe.tile import UNIT, Config, EngineName, Kind, Tile, shared_memory_bytes
from pallas_kernels.operation import Architecture, Device, Implementation

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY_BYTES = 232_448 - 2_048  # what a CTA of sm_90, sm_100 and sm_103 may have, less barriers and alignment
MOST_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call's sizes: local `slots`, width local to this rank, and the number of experts the router chooses from."""

    rows: int
    top_k: int
    slots: int
    hidden: int
    width: int
    num_experts: int
    routed_rows: int = 0
    """Rows that choose among all experts, where `rows` is the room of a buffer; 0 for all of `rows`."""

    @property
    def choices(self) -> int:
        """Choices among all experts, of which this rank's slots get their share."""
        return (self.routed_rows or self.rows) * self.top_k

    @property
    def mean_rows(self) -> float:
        """Rows an expert meets when routing is uniform."""
        return self.choices / self.num_experts

    @property
    def expected_active(self) -> float:
        """Distinct local experts that have rows when routing is uniform."""
        return self.slots * (1 - (1 - 1 / self.num_experts) ** self.choices)


def prefer(shape: Shape, device: Device) -> EngineName:
    """The engine that the tuning table gives for the rows an expert meets."""
    return next(e for e in _entries(device) if _within(shape, e))["implementation"]


def describe(shape: Shape, config: Config) -> str:
    """What the table is entered with, and what it gave."""
    return f"{shape.mean_rows:.2f} rows an expert, in tiles of {config.gate_up.rows}"


def workspace_bytes(shape: Shape, config: Config) -> int:
    """Grouped activations, intermediate and results: the temporaries of one call, sized for the worst routing."""
    gate_up, down = config.gate_up, config.down
    grouped = tile_bound(shape.rows * shape.top_k, shape.slots, gate_up.rows) * gate_up.rows
    partial = 2 * 4 * shape.width * gate_up.split if gate_up.split > 1 else 0
    return grouped * (2 * shape.hidden + 2 * shape.width + partial + 4 * shape.hidden * down.split)


def _obstacle(shape: Shape, dtype: jnp.dtype) -> str | None:
    if dtype != jnp.bfloat16:
        return f"activations are {dtype.name}; the kernels multiply bfloat16"
    for name, size in (("hidden", shape.hidden), ("width", shape.width)):
        if size not in (64, 128) and size % 256:
            return f"{name} is {size}; the kernels need 64, 128 or a multiple of 256"
    if shape.hidden == 64:
        return "hidden is 64; the kernels need at least 128"
    return None


def _configure(
    engine: EngineName,
    shape: Shape,
    device: Device,
    *,
    rows: int | None = None,
    split: int | None = None,
    stages: int | None = None,
    ctas: int | None = None,
) -> Config:
    """Tile rows from the tuning table, as many stages as shared memory holds, a CTA a core; or what is asked for."""
    entries = [e for e in _entries(device) if e["implementation"] == engine]
    rows = None if engine == "warp" else rows  # its registers hold one size
    tile_rows: int = rows or next((e for e in entries if _within(shape, e)), entries[-1])["rows"]
    tiles = [_tile(shape, kind, engine, tile_rows, device) for kind in ("gate_up", "down")]
    if split is not None:
        tiles[0] = dataclasses.replace(tiles[0], split=split)
    if stages is not None:
        tiles = [dataclasses.replace(tile, stages=stages) for tile in tiles]
    return Config(*tiles, ctas=ctas or device.cores)


def _tile(shape: Shape, kind: Kind, engine: EngineName, rows: int, device: Device) -> Tile:
    out, k = (shape.width, shape.hidden) if kind == "gate_up" else (shape.hidden, shape.width)
    m_rows = UNIT if kind == "gate_up" else 2 * UNIT
    warpgroups = 2 if out % (2 * m_rows) == 0 else 1
    k_step = 256 if k % 256 == 0 else k
    blocks, k_steps = out // (m_rows * warpgroups), k // k_step
    # Few active experts leave CTAs without work: cut k until there is an item for each, keeping two stages an item.
    items = max(shape.expected_active, 1.0) * blocks
    splits = [s for s in range(1, k_steps // 2 + 1) if k_steps % s == 0] or [1]
    split = next((s for s in splits if items * s >= device.cores), splits[-1])
    if items * 2 > device.cores:
        split = 1
    tile = Tile(engine, rows, warpgroups, k_step, 2, split)
    stage = shared_memory_bytes(dataclasses.replace(tile, stages=3), kind) - shared_memory_bytes(tile, kind)
    free = SHARED_MEMORY_BYTES - shared_memory_bytes(tile, kind)
    return dataclasses.replace(tile, stages=min(2 + math.floor(free / stage), MOST_STAGES))


def _run(
    config: Config,
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    *,
    dtype: DTypeLike = jnp.float32,
    interpret: "plgpu.InterpretGPUParams | None" = None,
) -> jax.Array:
    # Not before a kernel is wanted: Mosaic's dialects take a second to import.
    from pallas_kernels.int4_moe import matmul
    from pallas_kernels.int4_moe.registers import pair_order
    from pallas_kernels.int4_moe.rows import combine, gather

    launch = matmul.Launch(config.ctas, interpret)
    rows = config.gate_up.rows
    groups = group_pairs(expert_ids, gate.packed.shape[0], rows)
    grouped = gather(pair_order(x), groups, rows, launch)
    gated = matmul.gate_up(grouped, groups, gate, up, config.gate_up, launch)
    shares = matmul.down(gated, groups, down, config.down, launch)
    return combine(shares, groups, expert_weights, dtype, launch)


def _implementation(engine: EngineName, *architectures: Architecture) -> Implementation[Shape, Config]:
    return Implementation(architectures, _obstacle, functools.partial(_configure, engine), _run)


IMPLEMENTATIONS = {
    "warp": _implementation("warp", "hopper", "blackwell"),
    "hopper": _implementation("hopper", "hopper"),
    "blackwell": _implementation("blackwell", "blackwell"),
}


def _within(shape: Shape, entry: dict[str, Any]) -> bool:
    return entry["mean_rows"] is None or shape.mean_rows <= entry["mean_rows"]


@functools.cache
def _tables() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath("tuning.json").read_text())


def _entries(device: Device) -> list[dict[str, Any]]:
    tables = _tables()
    card = next((name for name in tables["cards"] if device.kind.startswith(name)), None)
    return tables["cards"][card] if card else tables[str(device.architecture)]
