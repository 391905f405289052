"""The latent cache: kv_lora_rank + qk_rope_head_dim values a token and layer, shared by all heads."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latents:
    """One layer's normalised latents and rotated shared rope keys, of cached positions or of a step's rows."""

    latent: Float[Array, "requests positions kv_lora_rank"]
    rope: Float[Array, "requests positions qk_rope_head_dim"]


Cache = list[Latents]
"""One entry a layer; a request's first `length` positions are filled, what follows is arbitrary."""


def empty_cache(config: ModelConfig, requests: int, capacity: int, dtype: DTypeLike) -> Cache:
    """A cache for `capacity` positions a request, committed and speculative rows together."""
    return [
        Latents(
            jnp.zeros((requests, capacity, config.kv_lora_rank), dtype),
            jnp.zeros((requests, capacity, config.qk_rope_head_dim), dtype),
        )
        for _ in range(config.num_hidden_layers)
    ]


def commit(cache: Cache, rows: list[Latents], lengths: Int[Array, " requests"]) -> Cache:
    """Writes a step's rows, in order, behind each request's `lengths`.

    Rows behind the accepted ones are written too and overwritten by the next step, since its length does not count
    them; what would fall past the capacity is dropped.
    """

    def write(cached: Array, new: Array) -> Array:
        positions = lengths[:, None] + jnp.arange(new.shape[1])
        requests = jnp.arange(cached.shape[0])[:, None]
        return cached.at[requests, positions].set(new.astype(cached.dtype), mode="drop", unique_indices=True)

    return [
        Latents(write(old.latent, new.latent), write(old.rope, new.rope)) for old, new in zip(cache, rows, strict=True)
    ]
