"""Which implementation serves a shape on a device, how it is cut, and why: plain Python, no arrays."""

import dataclasses
import functools
import importlib
import importlib.resources
import json
import re
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.tree_attention import blackwell, blackwell_pair, hopper

    Config = hopper.Config | blackwell.Config | blackwell_pair.Config

Implementation = Literal["auto", "reference", "hopper", "blackwell", "blackwell_pair"]

TILE_ROWS = 64
"""Query rows of a block of threads: a query row is one head of one tree row."""
_ARCHITECTURES = {
    "hopper": re.compile(r"\b(GH200|H20|H100|H200|H800)\b"),
    "blackwell": re.compile(r"\bG?B(100|200|300)\b"),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What a program is compiled for: jax's platform name, the device's kind, and its number of cores (SMs)."""

    platform: str
    kind: str
    cores: int | None = None

    @property
    def kernel(self) -> str | None:
        """The kernel written for this card; None where there is none."""
        if self.platform not in ("gpu", "cuda"):
            return None
        return next((name for name, pattern in _ARCHITECTURES.items() if pattern.search(self.kind)), None)


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation, the launch parameters of a kernel (None for the reference), and the reason in words."""

    implementation: str
    config: "Config | None"
    reason: str


def kernel_module(name: str) -> Any:
    """The module of a kernel, with its `Config` and `attend`. Mosaic's dialects take a second to import: not before."""
    return importlib.import_module(f"{__package__}.{name}")


def current_device() -> Device:
    """The device of the mesh in context, real or for compiling only; without a mesh, jax's default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.platform, abstract.device_kind, abstract.num_cores)
    default = jax.config.jax_default_device
    device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return Device(device.platform, device.device_kind, getattr(device, "core_count", None))


def choose(
    *,
    requests: int,
    rows: int,
    heads: int,
    positions: int,
    kv_lora_rank: int = 512,
    rope: int = 64,
    dtype=jnp.bfloat16,
    implementation: Implementation = "auto",
    device: Device | None = None,
) -> Choice:
    """Pick an implementation for local (per-device) shapes; `device` None means the one in context.

    Raises ValueError for an unknown name, and for a named kernel that cannot serve the shape. A kernel may be named
    for a device that lacks it: to compile for another one, or to interpret it.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"unknown implementation {implementation!r}: give one of {', '.join(get_args(Implementation))}"
        )
    if implementation == "reference":
        return Choice("reference", None, "asked for by name")
    device = device or current_device()
    name = device.kernel if implementation == "auto" else implementation
    if name is None:
        return Choice("reference", None, f"there is no kernel for {device.platform} device {device.kind!r}")
    obstacle = _obstacle(name, positions, kv_lora_rank, rope, dtype)
    if obstacle and implementation == "auto":
        return Choice("reference", None, f"the {name} kernel cannot serve this: {obstacle}")
    if obstacle:
        raise ValueError(f"implementation={name!r} cannot serve this: {obstacle}")
    cores = device.cores or 1
    config = _config(name, requests=requests, query_rows=rows * heads, rows=rows, positions=positions, cores=cores)
    why = f"{device.kind}" if implementation == "auto" else "asked for by name"
    tiles = -(-rows * heads // config.row_multiple) * config.row_multiple // TILE_ROWS
    return Choice(name, config, f"{why}: {tiles} query tiles x {config.splits} pieces of the context on {cores} cores")


def expanded_pays(rows: int, *, kv_lora_rank: int, nope: int, v: int) -> bool:
    """Whether a chunk of `rows` rows on one context should take `prefill_attention`.

    A row and head meet a position with 2·(2·kv_lora_rank + rope) operations absorbed and 2·(nope + rope + v)
    expanded, after 2·kv_lora_rank·(nope + v) once for the position: equal at 171 rows for K2.6. The form changes at
    a multiple of that, which is data (tuning.json): 1.5, that is 256 rows.
    """
    saved, expansion = rows * (2 * kv_lora_rank - nope - v), kv_lora_rank * (nope + v)
    return saved >= tuning()["prefill"]["times_equal_operations"] * expansion


def tuning() -> dict:
    """The launch parameters that are data (tuning.json)."""
    return _tuning()


@functools.cache
def _tuning() -> dict:
    return json.loads(importlib.resources.files(__package__).joinpath("tuning.json").read_text())


def _obstacle(name: str, positions: int, kv_lora_rank: int, rope: int, dtype) -> str | None:
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the arrays are {jnp.dtype(dtype).name}, the tensor cores' tiles are bfloat16"
    if kv_lora_rank not in (128, 256, 512):
        return f"kv_lora_rank is {kv_lora_rank}, a tile takes 128, 256 or 512"
    if name == "blackwell_pair" and kv_lora_rank not in (256, 512):
        return f"kv_lora_rank is {kv_lora_rank}, a pair of blocks halves 256 or 512"
    if rope != 64:
        return f"the rope width is {rope}, a tile takes 64"
    if positions == 0 or positions % 8:
        return f"the cache holds {positions} positions, the copy engine needs a positive multiple of 8"
    return None


def _config(name: str, *, requests: int, query_rows: int, rows: int, positions: int, cores: int):
    data = tuning()[name]
    kernel = kernel_module(name)
    options = {"min_tiles": data["min_tiles"]}
    if name == "hopper":
        options["cluster"] = 2 if -(-query_rows // TILE_ROWS) >= data["cluster_from_tiles"] else 1
    else:
        options["lazy"] = data["lazy"]
    config = kernel.Config(**options)
    query_tiles = -(-query_rows // config.row_multiple) * config.row_multiple // TILE_ROWS
    tiles = requests * (-(-positions // config.block) + -(-rows // config.block))
    splits = min(_pieces(query_tiles, cores), tiles // config.min_tiles)
    return dataclasses.replace(config, splits=max(1, splits))


def _pieces(query_tiles: int, cores: int) -> int:
    """Pieces of the context: one wave of blocks where that fills the card well, else the best of two or three."""

    def filled(pieces):
        blocks = query_tiles * pieces
        return blocks / (-(-blocks // cores) * cores)

    candidates = [max(1, waves * cores // query_tiles) for waves in (1, 2, 3)]
    return next((pieces for pieces in candidates if filled(pieces) >= 0.85), max(candidates, key=filled))
