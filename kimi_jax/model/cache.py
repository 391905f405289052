"""The latent cache: kv_lora_rank + qk_rope_head_dim values a token and layer, shared by all heads."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.collectives import axis_index, axis_size
from pallas_kernels.tree_attention import PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latents:
    """One layer's normalised latents and rotated shared rope keys, of cached positions or of a step's rows."""

    latent: Float[Array, "requests positions kv_lora_rank"]
    rope: Float[Array, "requests positions qk_rope_head_dim"]
    axis: str | None = dataclasses.field(default=None, metadata={"static": True})
    """Mesh axis whose ranks take positions in turn (p lies on rank p mod its size, in place p div its size); None where
    every rank has them all."""

    def paged(self) -> tuple[Array, Array, Int[Array, "requests tiles"]]:
        """Latents and rope keys as pages, and the pages of each request, as attention takes them."""
        requests, positions = self.latent.shape[:2]
        page = positions if positions % PAGE else PAGE
        tiles = positions // page
        pages = jnp.arange(requests * tiles, dtype=jnp.int32).reshape(requests, tiles)
        latent, rope = (x.reshape(requests * tiles, page, x.shape[-1]) for x in (self.latent, self.rope))
        return latent, rope, pages


Cache = list[Latents]
"""One entry a layer; a request's first `length` positions are filled, what follows is arbitrary."""


def empty_cache(config: ModelConfig, requests: int, capacity: int, dtype: DTypeLike, axis: str | None = None) -> Cache:
    """A cache for `capacity` positions a request, committed and speculative rows together, as global arrays.

    With an axis its ranks share the positions, so their number must divide `capacity`.
    """
    return [
        Latents(
            jnp.zeros((requests, capacity, config.kv_lora_rank), dtype),
            jnp.zeros((requests, capacity, config.qk_rope_head_dim), dtype),
            axis,
        )
        for _ in range(config.num_hidden_layers)
    ]


def commit(cache: Cache, rows: list[Latents], lengths: Int[Array, " requests"]) -> Cache:
    """Writes a step's rows, in order, behind each request's `lengths`.

    Rows behind the accepted ones are written too and overwritten by the next step, since its length does not count
    them; what would fall past the capacity is dropped.
    """

    def write(cached: Array, new: Array, axis: str | None) -> Array:
        row = jnp.arange(new.shape[1])
        places = lengths[:, None] + row
        if axis is not None:
            ranks = axis_size(axis)
            # Another rank's rows go past the end, each to a place of its own: indices stay unique.
            places = jnp.where(places % ranks == axis_index(axis), places // ranks, cached.shape[1] + row)
        requests = jnp.arange(cached.shape[0])[:, None]
        return cached.at[requests, places].set(new.astype(cached.dtype), mode="drop", unique_indices=True)

    return [
        Latents(write(old.latent, new.latent, old.axis), write(old.rope, new.rope, old.axis), old.axis)
        for old, new in zip(cache, rows, strict=True)
    ]
