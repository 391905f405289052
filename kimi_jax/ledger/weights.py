"""The weights that a device holds, from the declarations of the modules and the layout: nothing is allocated."""

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.ledger.part import PARTS, part_of
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.placement import even_placement
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import Declaration, Path, declarations
from kimi_jax.quantization import CODES_PER_WORD
from meshes.presets import AXES, Layout


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device holds of one declared array, or of the equal arrays of equal layers."""

    part: str
    path: Path
    axes: tuple[str, ...]
    """Mesh axes that split it, those of size 1 left out; on the other axes every device has a copy."""
    values: float
    """Weights, a quantised one counted as one; the scales of INT4 weights are none."""
    bytes: float

    def of(self, count: float) -> "Shard":
        """As many of them."""
        return dataclasses.replace(self, values=count * self.values, bytes=count * self.bytes)


def _shard(declaration: Declaration, layout: Layout, part: str, slots: int = 0) -> Shard:
    shape = (slots, *declaration.shape[1:]) if declaration.stacked else declaration.shape
    spec = [axes for axes in declaration.spec(rules(layout)) if axes]
    named = {axis for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes)}
    axes = tuple(axis for axis in AXES if axis in named and layout.axis_sizes[axis] > 1)
    elements = math.prod(shape) // math.prod(layout.axis_sizes[axis] for axis in axes)
    codes = {"packed": CODES_PER_WORD, "scale": 0}.get(str(declaration.path[-1]), 1)
    return Shard(part, declaration.path, axes, codes * elements, elements * jnp.dtype(declaration.dtype).itemsize)


@functools.cache
def _declared(config: ModelConfig, dtype: jnp.dtype) -> tuple[tuple[int, Declaration], ...]:
    """The declarations of the dense layers and one layer with experts, and how many layers each stands for."""
    first = config.first_k_dense_replace
    layers = min(config.num_hidden_layers, first + 1)
    model = CausalLM(dataclasses.replace(config, num_hidden_layers=layers), even_placement(config.n_routed_experts, 1))
    return tuple(
        (config.num_moe_layers if declaration.path[:3] == ("model", "layers", first) else 1, declaration)
        for declaration in declarations(model, dtype)
    )


def model_shards(config: ModelConfig, layout: Layout, dtype: DTypeLike, slots: int) -> tuple[Shard, ...]:
    """What a device holds of a model whose experts lie in so many slots a layer."""
    return tuple(
        _shard(declaration, layout, part_of(declaration.path), slots).of(layers)
        for layers, declaration in _declared(config, jnp.dtype(dtype))
    )


@functools.lru_cache(maxsize=64)
def _drafter_declared(drafter: DrafterConfig, tp: int, dtype: jnp.dtype) -> tuple[Declaration, ...]:
    return tuple(declarations(DFlash(drafter, tp), dtype))


def drafter_shards(drafter: DrafterConfig, layout: Layout, dtype: DTypeLike) -> tuple[Shard, ...]:
    """What a device holds of a drafter."""
    declared = _drafter_declared(drafter, layout.tp, jnp.dtype(dtype))
    return tuple(_shard(declaration, layout, "drafter") for declaration in declared)


def fills_context(path: Path) -> bool:
    """Whether a drafter's weight makes keys and values of committed rows: all that a prefill needs of it."""
    return path[0] in ("fc", "hidden_norm") or path[-2] in ("k_proj", "k_norm", "v_proj")


def _sum(shards: Iterable[Shard], part: str) -> Shard:
    of_part = [shard for shard in shards if shard.part == part]
    return Shard(part, (), (), sum(shard.values for shard in of_part), sum(shard.bytes for shard in of_part))


@functools.lru_cache(maxsize=4096)
def model_held(config: ModelConfig, layout: Layout, dtype: DTypeLike, slots: int) -> dict[str, Shard]:
    """What a device holds of each part of a model; the parts' paths and axes are empty."""
    shards = model_shards(config, layout, dtype, slots)
    return {part: _sum(shards, part) for part in PARTS if part != "drafter"}


@functools.lru_cache(maxsize=4096)
def drafter_held(drafter: DrafterConfig, layout: Layout, dtype: DTypeLike) -> Shard:
    """What a device holds of a drafter."""
    return _sum(drafter_shards(drafter, layout, dtype), "drafter")


@functools.lru_cache(maxsize=4096)
def drafter_read(drafter: DrafterConfig, layout: Layout, dtype: DTypeLike, *, prefill: bool) -> Shard:
    """What a device reads of a drafter: a prefill what fills the context, a round all of it.

    Of key and value projections that it holds whole, it reads the one head that its queries need.
    """

    def read(shard: Shard) -> Shard:
        whole = layout.tp > 1 and not shard.axes and shard.path[-2] in ("k_proj", "v_proj")
        return shard.of(1 / drafter.num_key_value_heads) if whole else shard

    shards = drafter_shards(drafter, layout, dtype)
    return _sum((read(shard) for shard in shards if not prefill or fills_context(shard.path)), "drafter")
