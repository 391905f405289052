"""Which implementation serves a shape on a device, and how its work is cut."""

import dataclasses
import functools
import importlib
import importlib.resources
import json
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.operation import Architecture, Device, Implementation
from pallas_kernels.tree_attention.shapes import SCALE, Shape
from pallas_kernels.tree_attention.tile import BLOCK, TILE_ROWS, Config


def prefer(shape: Shape, device: Device) -> str:
    """The kernel written for the device's architecture."""
    return str(device.architecture)


def describe(shape: Shape, config: Config) -> str:
    """How the launch is cut."""
    return f"{config.query_tiles(shape.rows * shape.heads)} query tiles x {config.splits} pieces of the context"


def expanded_pays(rows: int, *, kv_lora_rank: int, nope: int, v: int) -> bool:
    """Whether a chunk of `rows` rows on one context should take `prefill_attention`.

    A row and head meet a position with 2·(2·kv_lora_rank + rope) operations absorbed and 2·(nope + rope + v)
    expanded, after 2·kv_lora_rank·(nope + v) once for the position: equal at 171 rows for K2.6. The form changes at
    a multiple of that, which is data (tuning.json): 1.5, that is 256 rows.
    """
    saved, expansion = rows * (2 * kv_lora_rank - nope - v), kv_lora_rank * (nope + v)
    return saved >= _tuning()["prefill"]["times_equal_operations"] * expansion


@functools.cache
def _tuning() -> dict:
    """The launch parameters that are data."""
    return json.loads(importlib.resources.files(__package__).joinpath("tuning.json").read_text())


def _obstacle(shape: Shape, dtype: jnp.dtype) -> str | None:
    if dtype != jnp.bfloat16:
        return f"the arrays are {dtype.name}, the tensor cores' tiles are bfloat16"
    if shape.kv_lora_rank not in (128, 256, 512):
        return f"kv_lora_rank is {shape.kv_lora_rank}, a tile takes 128, 256 or 512"
    if shape.rope != 64:
        return f"the rope width is {shape.rope}, a tile takes 64"
    if shape.page % 16 or BLOCK % shape.page:
        return f"a page holds {shape.page} positions, a tile of {BLOCK} is made of pages of 16, 32 or 64"
    return None


def _configure(
    architecture: Architecture,
    shape: Shape,
    device: Device,
    *,
    splits: int | None = None,
    min_tiles: int | None = None,
    cluster: int | None = None,
    lazy: float | None = None,
) -> Config:
    data = _tuning()[architecture]
    config = Config(min_tiles=min_tiles or data["min_tiles"])
    if architecture == "hopper":
        shared = -(-shape.rows * shape.heads // TILE_ROWS) >= data["cluster_from_tiles"]
        config = dataclasses.replace(config, cluster=cluster or (2 if shared else 1))
    else:
        config = dataclasses.replace(config, lazy=data["lazy"] if lazy is None else lazy)
    tiles = shape.requests * (-(-shape.positions // BLOCK) + -(-shape.rows // BLOCK))
    wanted = _pieces(config.query_tiles(shape.rows * shape.heads), device.cores)
    return dataclasses.replace(config, splits=splits or max(1, min(wanted, tiles // config.min_tiles)))


def _pieces(query_tiles: int, cores: int) -> int:
    """Pieces of the context: one wave of blocks where that fills the card well, else the best of two or three."""

    def filled(pieces):
        blocks = query_tiles * pieces
        return blocks / (-(-blocks // cores) * cores)

    candidates = [max(1, waves * cores // query_tiles) for waves in (1, 2, 3)]
    return next((pieces for pieces in candidates if filled(pieces) >= 0.85), max(candidates, key=filled))


def _run(architecture: Architecture, config: Config, *arrays: Array, scale: float = SCALE, **options: Any):
    # Not before a kernel is wanted: Mosaic's dialects take a second to import.
    from pallas_kernels.tree_attention import schedule

    kernel = importlib.import_module(f"{__package__}.{architecture}")
    return schedule.launch(kernel.attend, config, *arrays, scale=scale, **options)


def _implementation(architecture: Architecture) -> Implementation[Shape, Config]:
    configure = functools.partial(_configure, architecture)
    return Implementation((architecture,), _obstacle, configure, functools.partial(_run, architecture))


IMPLEMENTATIONS = {"hopper": _implementation("hopper"), "blackwell": _implementation("blackwell")}
