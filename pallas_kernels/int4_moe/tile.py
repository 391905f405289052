"""Sizes of the kernels, without the kernels: what a choice needs before Mosaic is imported, which takes a second."""

import dataclasses
from typing import Literal

GROUP = 32  # values that share a scale
Kind = Literal["gate_up", "down"]
EngineName = Literal["warp", "hopper", "blackwell"]
UNIT = 64  # weight rows of a unit


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of one kernel. `k_step` is the k of a pipeline stage, `split` the shares k is cut into."""

    engine: EngineName
    rows: int
    warpgroups: int = 2
    k_step: int = 256
    stages: int = 4
    split: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Launch parameters of a call: the tiles of both kernels, and how many persistent CTAs walk them."""

    gate_up: Tile
    down: Tile
    ctas: int


def shared_memory_bytes(tile: Tile, kind: Kind) -> int:
    """Shared memory of a CTA: the ring's stages and the output staging."""
    weights = 2 * UNIT * tile.warpgroups * (tile.k_step // 2 + tile.k_step // GROUP * 2)
    stage = weights + tile.rows * tile.k_step * 2
    fused = kind == "gate_up" and tile.split == 1
    out = tile.warpgroups * UNIT * tile.rows * (2 if fused else 4)
    return tile.stages * stage + out
