"""The latent cache: kv_lora_rank + qk_rope_head_dim values a token and layer, shared by all heads, in pages.

A page holds `PAGE` positions of one request (of each rank's own positions where ranks share a request's), in every
layer under the same number. A request's table names the pages of its positions, in order.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.collectives import axis_index, axis_size
from pallas_kernels.tree_attention import PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latents:
    """One layer's normalised latents and rotated shared rope keys, of cached pages or of a step's rows."""

    latent: Float[Array, "pages page kv_lora_rank"]
    rope: Float[Array, "pages page qk_rope_head_dim"]
    axis: str | None = dataclasses.field(default=None, metadata={"static": True})
    """Mesh axis whose ranks take positions in turn (p lies on rank p mod its size, in place p div its size); None where
    every rank has them all."""


Cache = list[Latents]
"""One entry a layer. What no request has written is zero or stale, and always finite: kernels read whole pages."""


def empty_cache(config: ModelConfig, pages: int, dtype: DTypeLike, axis: str | None = None, ranks: int = 1) -> Cache:
    """A pool of so many pages, over all device groups, as global arrays; the axis' `ranks` share a page's positions."""
    return [
        Latents(
            jnp.zeros((pages, PAGE * ranks, config.kv_lora_rank), dtype),
            jnp.zeros((pages, PAGE * ranks, config.qk_rope_head_dim), dtype),
            axis,
        )
        for _ in range(config.num_hidden_layers)
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where a step's rows go in every layer's pool; a page past its end drops the row."""

    pages: Int[Array, " rows"]
    offsets: Int[Array, " rows"]


def places_of(
    cache: Cache,
    pages: Int[Array, "requests tiles"],
    lengths: Int[Array, " requests"],
    counts: Int[Array, " requests"],
    rows: int,
    before: int = 0,
) -> Places:
    """Places of the first `counts` of `rows` rows behind each request's `lengths`.

    The others are dropped, and so are rows that another rank holds; see `find_places`.
    """
    pool, axis = cache[0].latent, cache[0].axis
    row = jnp.arange(rows)
    kept, position = row < counts[:, None], lengths[:, None] + row
    if axis is not None:
        ranks = axis_size(axis)
        kept &= position % ranks == axis_index(axis)
        position = position // ranks
    return find_places((pool.shape[0], pool.shape[1]), pages, position, kept, before)


def find_places(
    pool: tuple[int, int],
    pages: Int[Array, "requests tiles"],
    position: Int[Array, "requests rows"],
    kept: Bool[Array, "requests rows"],
    before: int = 0,
) -> Places:
    """Places of rows at positions of their requests' pages, in a pool of so many pages of so many positions.

    Rows that are not `kept` are dropped, and so are those past a request's table. A dropped row has a place of its own
    past the pool, so that no two rows share one; `before` counts the rows of the same scatter that stand before these.
    """
    tile, offset = position // pool[1], position % pool[1]
    kept &= tile < pages.shape[1]
    page = jnp.take_along_axis(pages, jnp.minimum(tile, pages.shape[1] - 1), axis=1)
    nowhere = pool[0] + before + jnp.arange(kept.size).reshape(kept.shape)
    return Places(jnp.where(kept, page, nowhere).reshape(-1), offset.reshape(-1))


def commit(cache: Cache, groups: Sequence[Sequence[Latents]], places: Sequence[Places]) -> Cache:
    """Writes rows to their places, in place where the cache is donated; both have an entry for each group of rows.

    Values that are not finite are written as zeros: kernels multiply what lies behind a length by probabilities of
    zero, and the page's next owner must not inherit them. Their own request fails by its logits, since a row sees
    itself.
    """
    pages, offsets = (jnp.concatenate([getattr(place, name) for place in places]) for name in ("pages", "offsets"))

    def write(held: Array, new: list[Array]) -> Array:
        flat = jnp.concatenate([rows.reshape(-1, rows.shape[-1]) for rows in new]).astype(held.dtype)
        flat = jnp.where(jnp.isfinite(flat), flat, 0)
        return held.at[pages, offsets].set(flat, mode="drop", unique_indices=True)

    return [
        Latents(write(old.latent, [new.latent for new in rows]), write(old.rope, [new.rope for new in rows]), old.axis)
        for old, *rows in zip(cache, *groups, strict=True)
    ]
