"""The specification of MLA tree attention in plain JAX: it runs on every backend.

Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads of a request share one
cached row per position, a latent of `kv_lora_rank` values that is both key and value, and a rope key of a few more.
A query row sees the first `lengths[request]` cached positions and, among the rows sent with it, its ancestors.
Plain decoding is one row, a causal chunk is a path, a draft tree is a tree: one operation.

The softmax is the streaming one (Milakov and Gimelshein, arXiv 1805.02867): a running maximum and sum, so that a long
cache is read block by block where it lies, is never copied or concatenated, and costs its filled length. A short one is
joined with the rows instead: two products, where streaming takes six.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

DEFAULT_BLOCK = 512
"""Cached positions a step; a cache of at most this capacity is joined with the rows (and differentiable)."""

FLOOR = -1e30
"""Start of the running maximum: finite, so that `-inf - FLOOR` and `exp(-inf)` never meet as NaN."""


def tree_attention(
    q_latent: Float[Array, "requests rows heads kv_lora_rank"],
    q_rope: Float[Array, "requests rows heads rope"],
    cache_latent: Float[Array, "requests positions kv_lora_rank"],
    cache_rope: Float[Array, "requests positions rope"],
    lengths: Int[Array, " requests"],
    row_latent: Float[Array, "requests rows kv_lora_rank"],
    row_rope: Float[Array, "requests rows rope"],
    ancestors: Bool[Array, "requests rows rows"],
    *,
    scale: float,
    valid: Bool[Array, "requests rows"] | None = None,
    block: int = DEFAULT_BLOCK,
) -> tuple[Float[Array, "requests rows heads kv_lora_rank"], Float[Array, "requests rows heads"]]:
    """Compute the operation that `pallas_kernels.tree_attention.tree_attention` documents.

    Scores, softmax and sums are float32; probabilities are not rounded. Differentiable in reverse mode where the
    cache's capacity is at most `block`; above it the trip count follows the longest request at run time.
    """
    valid = ancestors.any(axis=-1) if valid is None else valid
    capacity = cache_latent.shape[1]
    if capacity <= block:
        cache, rows = (cache_latent, cache_rope), (row_latent, row_rope)
        return _joined(q_latent, q_rope, cache, lengths, rows, ancestors & valid[..., None], valid, scale)

    def scores(latent, rope, mask):
        s = _einsum("brhc,bkc->brhk", q_latent, latent) + _einsum("brhe,bke->brhk", q_rope, rope)
        return jnp.where(mask[:, :, None, :], s * scale, -jnp.inf)

    def step(carry, latent, rope, mask):
        maximum, total, out = carry
        s = scores(latent, rope, mask)
        new_maximum = lax.stop_gradient(jnp.maximum(maximum, s.max(axis=-1)))
        shrink = jnp.exp(maximum - new_maximum)
        p = jnp.exp(s - new_maximum[..., None])
        out = out * shrink[..., None] + _einsum("brhk,bkc->brhc", p, latent.astype(jnp.float32))
        return new_maximum, total * shrink + p.sum(axis=-1), out

    zero = jnp.zeros_like(q_latent, dtype=jnp.float32)
    carry = (zero[..., 0] + FLOOR, zero[..., 0], zero)
    carry = step(carry, row_latent, row_rope, ancestors & valid[:, :, None])

    def cache_step(first, carry):
        start = jnp.minimum(first, capacity - block)  # the last block may overlap the one before it
        position = start + jnp.arange(block)
        seen = (position >= first) & (position < lengths[:, None])
        # What lies past the length is stale and may be anything: zero probability times NaN would be NaN.
        latent, rope = (
            jnp.where(seen[..., None], lax.dynamic_slice_in_dim(cache, start, block, axis=1), 0)
            for cache in (cache_latent, cache_rope)
        )
        return step(carry, latent, rope, seen[:, None, :] & valid[:, :, None])

    blocks = lax.div(jnp.minimum(lengths.max(), capacity) + block - 1, block)
    carry = lax.fori_loop(0, blocks, lambda j, carry: cache_step(j * block, carry), carry)

    maximum, total, out = carry
    return _finish(maximum, total, out, q_latent.dtype)


def _joined(q_latent, q_rope, cache, lengths, rows, ancestors, valid, scale):
    """Cached positions and rows in one softmax."""
    keys, mask = jnp.concatenate(rows, axis=-1), ancestors
    if capacity := cache[0].shape[1]:
        seen = jnp.arange(capacity) < lengths[:, None]
        # What lies past the length is stale and may be anything: zero probability times NaN would be NaN.
        past = jnp.where(seen[..., None], jnp.concatenate(cache, axis=-1), 0)
        keys = jnp.concatenate([past, keys], axis=1)
        mask = jnp.concatenate([seen[:, None] & valid[..., None], mask], axis=-1)
    s = _einsum("brhe,bke->brhk", jnp.concatenate([q_latent, q_rope], axis=-1), keys)
    s = jnp.where(mask[:, :, None], s * scale, -jnp.inf)
    maximum = lax.stop_gradient(jnp.maximum(s.max(axis=-1), FLOOR))
    p = jnp.exp(s - maximum[..., None])
    out = _einsum("brhk,bkc->brhc", p, keys[..., : q_latent.shape[-1]].astype(jnp.float32))
    return _finish(maximum, p.sum(axis=-1), out, q_latent.dtype)


def merge(
    outs: Float[Array, "splits *rows width"] | Sequence[Float[Array, "*rows width"]],
    lses: Float[Array, "splits *rows"] | Sequence[Float[Array, "*rows"]],
) -> tuple[Float[Array, "*rows width"], Float[Array, "*rows"]]:
    """Join attention over parts of a context: the softmax over their union, from each part's output and log-sum-exp.

    The parts lie on a leading axis (or in a sequence). A part that saw nothing has a log-sum-exp of −inf; a row for
    which all parts have gives 0 and −inf.
    """
    outs, lses = jnp.stack(tuple(outs)), jnp.stack(tuple(lses)).astype(jnp.float32)
    maximum = jnp.maximum(lses.max(axis=0), FLOOR)
    weights = jnp.exp(lses - maximum)
    out = (outs.astype(jnp.float32) * weights[..., None]).sum(axis=0)
    return _finish(maximum, weights.sum(axis=0), out, outs.dtype)


def _finish(maximum, total, out, dtype):
    seen = total > 0
    total = jnp.where(seen, total, 1)
    out = jnp.where(seen[..., None], out / total[..., None], 0)
    return out.astype(dtype), jnp.where(seen, maximum + jnp.log(total), -jnp.inf)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    # Without "highest" a GPU would round float32 operands to TF32; bfloat16 operands are exact either way.
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
