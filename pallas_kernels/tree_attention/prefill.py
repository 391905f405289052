"""Prefill: the same attention with the heads expanded, block by block over the context.

In absorbed form a query-key pair costs 2 x (576 + 512) operations a head, expanded 2 x (192 + 128): with hundreds of
rows on one context the expansion of a block's latents (2 x 512 x 256 operations a head and position) is soon repaid.
One block's keys, values and scores are all that is ever held: `workspace_bytes` says how much.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention.reference import FLOOR, Blocks, _einsum, _finish

DEFAULT_BLOCK = 256
"""Positions a step, at least one page of cached ones."""


def prefill_attention(
    q_nope: Float[Array, "requests rows heads nope"],
    q_rope: Float[Array, "requests rows heads rope"],
    latent: Float[Array, "number_of_pages page kv_lora_rank"],
    rope: Float[Array, "number_of_pages page rope"],
    pages: Int[Array, "requests tiles"],
    lengths: Int[Array, " requests"],
    own_latent: Float[Array, "requests rows kv_lora_rank"],
    own_rope: Float[Array, "requests rows rope"],
    ancestors: Bool[Array, "requests rows rows"] | None,
    w_uk: Float[Array, "heads nope kv_lora_rank"],
    w_uv: Float[Array, "heads v kv_lora_rank"],
    *,
    scale: float,
    row_counts: Int[Array, " requests"] | None = None,
    valid: Bool[Array, "requests rows"] | None = None,
    block: int = DEFAULT_BLOCK,
) -> tuple[Float[Array, "requests rows heads v"], Float[Array, "requests rows heads"]]:
    """Attend from a chunk of rows to a cached prefix and to the chunk itself, with per-head keys and values.

    `ancestors` is the mask of `tree_attention`; None says that the chunk is causal, with `row_counts` real rows in
    each request (all of them if None; rows past it see nothing). `valid` says which rows are real where the mask does
    not, as for `tree_attention`. Returns per-head values, already through `w_uv`,
    in the queries' dtype, and the natural log-sum-exp in float32. Equal to `tree_attention` on `q_nope @ w_uk`
    followed by `w_uv`, up to rounding.

    Keys and values are computed in the latents' dtype, scores and sums in float32. Every block of the tables costs the
    same, whatever the lengths are, because a GPU's host would drive a loop whose trips only the device knows: cut them
    to the longest request.
    """
    requests, rows, heads, _ = q_nope.shape
    compute_dtype = q_nope.dtype
    if ancestors is None:
        counts = jnp.full((requests,), rows) if row_counts is None else row_counts
        valid = jnp.arange(rows) < counts[:, None]
    elif row_counts is not None:
        raise ValueError("row_counts belongs to a causal chunk (ancestors=None); a mask already marks padding rows")
    elif valid is None:
        valid = ancestors.any(axis=-1)

    def step(carry, latent, rope, mask):
        maximum, total, out = carry
        key = _einsum("bkc,hnc->bkhn", latent, w_uk).astype(compute_dtype)
        value = _einsum("bkc,hvc->bkhv", latent, w_uv).astype(compute_dtype)
        s = _einsum("brhn,bkhn->brhk", q_nope, key) + _einsum("brhe,bke->brhk", q_rope, rope)
        s = jnp.where(mask[:, :, None, :], s * scale, -jnp.inf)
        new_maximum = lax.stop_gradient(jnp.maximum(maximum, s.max(axis=-1)))
        shrink = jnp.exp(maximum - new_maximum)
        p = jnp.exp(s - new_maximum[..., None])
        out = out * shrink[..., None] + _einsum("brhk,bkhv->brhv", p.astype(compute_dtype), value)
        return new_maximum, total * shrink + p.sum(axis=-1), out

    def rows_step(carry, first, size):
        start = jnp.minimum(first, rows - size)  # the last block may overlap the one before it
        index = start + jnp.arange(size)
        fresh = jnp.broadcast_to(index >= first, (requests, size))
        if ancestors is None:
            mask = (index <= jnp.arange(rows)[:, None]) & valid[:, :, None]
        else:
            mask = lax.dynamic_slice_in_dim(ancestors, start, size, axis=2)
        latent, rope = (
            jnp.where(fresh[..., None], lax.dynamic_slice_in_dim(array, start, size, axis=1), 0)
            for array in (own_latent, own_rope)
        )
        return step(carry, latent, rope, mask & fresh[:, None, :])

    blocks = Blocks(latent, rope, pages, lengths, block)

    def cache_step(j, carry):
        latent, rope, seen = blocks.read(j)
        return step(carry, latent, rope, seen[:, None, :] & valid[:, :, None])

    zero = jnp.zeros((requests, rows, heads, w_uv.shape[1]), jnp.float32)
    carry = (zero[..., 0] + FLOOR, zero[..., 0], zero)
    # The first block stays outside the loop: its result varies over the inputs' mesh axes, as a loop's carry must.
    carry = rows_step(carry, 0, min(block, rows))
    if rows > block:
        # Training differentiates this scan (the cache is empty there): recompute a block's scores, do not store them.
        later = jax.checkpoint(lambda carry, first: (rows_step(carry, first, block), None))
        carry, _ = lax.scan(later, carry, block * jnp.arange(1, -(-rows // block)))
    if blocks.count:
        carry = lax.fori_loop(0, blocks.count, cache_step, carry)
    maximum, total, out = carry
    return _finish(maximum, total, out, q_nope.dtype)


def workspace_bytes(
    *, requests: int, rows: int, heads: int, nope: int, v: int, itemsize: int = 2, block: int = DEFAULT_BLOCK
) -> int:
    """Bytes that one step holds beside its arguments: a block's keys and values, its scores twice, sums, output."""
    expanded = requests * block * heads * (nope + v) * itemsize
    scores = requests * rows * heads * block * (4 + itemsize)
    sums = requests * rows * heads * (v + 2) * 4 * 2
    return expanded + scores + sums
