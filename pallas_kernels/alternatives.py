"""What jax itself offers in the place of each operation, in plain forms that one would write without kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.int4_moe.reference import PackedWeight, dequantize
from pallas_kernels.tree_attention.reference import Blocks
from pallas_kernels.tree_attention.shapes import SCALE


def ragged_dot(
    x: jax.Array, ids: jax.Array, router: jax.Array, gate: PackedWeight, up: PackedWeight, down: PackedWeight
) -> jax.Array:
    """The experts: dequantise everything to bfloat16, sort the pairs by expert, three `jax.lax.ragged_dot`."""
    g, u, d = (dequantize(w.packed, w.scale).astype(jnp.bfloat16).swapaxes(1, 2) for w in (gate, up, down))
    slots, top_k = g.shape[0], ids.shape[1]
    flat = jnp.where((ids >= 0) & (ids < slots), ids, slots).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(slots), 0, dtype=jnp.int32)
    a = x[order // top_k].astype(jnp.bfloat16)
    h = jax.nn.silu(jax.lax.ragged_dot(a, g, sizes)) * jax.lax.ragged_dot(a, u, sizes)
    y = jax.lax.ragged_dot(h, d, sizes).astype(jnp.float32)
    weight = jnp.where(flat < slots, router.reshape(-1), 0.0)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[order // top_k].add(jnp.where(weight != 0, y, 0) * weight)


def dot_product_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    own_latent: jax.Array,
    own_rope: jax.Array,
    ancestors: jax.Array,
) -> jax.Array:
    """Attention: keys of context and rows gathered, one dense mask, `jax.nn.dot_product_attention`."""
    *cached, seen = Blocks(latent, rope, pages, lengths, block=latent.shape[1] * pages.shape[1]).read(0)
    past, own = (jnp.concatenate(pair, axis=-1) for pair in (cached, (own_latent, own_rope)))
    keys = jnp.concatenate([past, own], axis=1)[:, :, None]
    context = seen[:, None]
    mask = jnp.concatenate([jnp.broadcast_to(context, (*ancestors.shape[:2], context.shape[-1])), ancestors], axis=-1)
    queries = jnp.concatenate([q_latent, q_rope], axis=-1)
    out = jax.nn.dot_product_attention(queries, keys, keys, mask=mask[:, None], scale=SCALE)
    return out[..., : latent.shape[-1]]


ALTERNATIVES: dict[str, Callable[..., jax.Array]] = {"int4_moe": ragged_dot, "tree_attention": dot_product_attention}
