"""The specification of MLA tree attention in plain JAX: it runs on every backend.

Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads of a request share one
cached row per position, a latent of `kv_lora_rank` values that is both key and value, and a rope key of a few more.
A query row sees the first `lengths[request]` cached positions and, among the rows sent with it, its ancestors.
Plain decoding is one row, a causal chunk is a path, a draft tree is a tree: one operation.

The softmax is the streaming one (Milakov and Gimelshein, arXiv 1805.02867): a running maximum and sum, so that a long
cache is gathered one block of pages at a time, and costs its filled length. A short one is joined with the rows
instead: two products, where streaming takes six.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

DEFAULT_BLOCK = 512
"""Cached positions a step; tables of at most as many are joined with the rows (and differentiable)."""

FLOOR = -1e30
"""Start of the running maximum: finite, so that `-inf - FLOOR` and `exp(-inf)` never meet as NaN."""


def tree_attention(
    q_latent: Float[Array, "requests rows heads kv_lora_rank"],
    q_rope: Float[Array, "requests rows heads rope"],
    latent: Float[Array, "number_of_pages page kv_lora_rank"],
    rope: Float[Array, "number_of_pages page rope"],
    pages: Int[Array, "requests tiles"],
    lengths: Int[Array, " requests"],
    own_latent: Float[Array, "requests rows kv_lora_rank"],
    own_rope: Float[Array, "requests rows rope"],
    ancestors: Bool[Array, "requests rows rows"],
    *,
    scale: float,
    valid: Bool[Array, "requests rows"] | None = None,
    block: int = DEFAULT_BLOCK,
) -> tuple[Float[Array, "requests rows heads kv_lora_rank"], Float[Array, "requests rows heads"]]:
    """Compute the operation that `pallas_kernels.tree_attention.tree_attention` documents.

    Scores, softmax and sums are float32; probabilities are not rounded. Differentiable in reverse mode where a table
    has at most `block` positions; above it the trip count follows the longest request at run time.
    """
    valid = ancestors.any(axis=-1) if valid is None else valid
    blocks = Blocks(latent, rope, pages, lengths, block)
    if blocks.count <= 1:
        past, rows = blocks.read(0) if blocks.count else None, (own_latent, own_rope)
        return _joined(q_latent, q_rope, past, rows, ancestors & valid[..., None], valid, scale)

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
    carry = step(carry, own_latent, own_rope, ancestors & valid[:, :, None])

    def cache_step(j, carry):
        latent, rope, seen = blocks.read(j)
        return step(carry, latent, rope, seen[:, None, :] & valid[:, :, None])

    maximum, total, out = lax.fori_loop(0, blocks.filled, cache_step, carry)
    return _finish(maximum, total, out, q_latent.dtype)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The cached positions of each request, gathered a block of pages at a time."""

    latent: Float[Array, "number_of_pages page kv_lora_rank"]
    rope: Float[Array, "number_of_pages page rope"]
    pages: Int[Array, "requests tiles"]
    lengths: Int[Array, " requests"]
    block: int
    """Positions a block, at most, and at least one page."""

    @property
    def tiles(self) -> int:
        """Pages of each request in a block."""
        return min(max(1, self.block // self.latent.shape[1]), self.pages.shape[1])

    @property
    def count(self) -> int:
        """Blocks of the table."""
        return -(-self.pages.shape[1] // max(1, self.tiles))

    @property
    def filled(self) -> Int[Array, ""]:
        """Blocks that the longest request reaches."""
        positions = self.tiles * self.latent.shape[1]
        return jnp.minimum(lax.div(self.lengths.max() + positions - 1, positions), self.count)

    def read(self, j: int | Int[Array, ""]) -> tuple[Array, Array, Bool[Array, "requests positions"]]:
        """Latents and rope keys of the j-th block, and which of its positions are seen; the others are zero."""
        page = self.latent.shape[1]
        first = j * self.tiles
        start = jnp.minimum(first, self.pages.shape[1] - self.tiles)  # the last may overlap the one before it
        pages = lax.dynamic_slice_in_dim(self.pages, start, self.tiles, axis=1)
        position = start * page + jnp.arange(self.tiles * page)
        seen = (position >= first * page) & (position < self.lengths[:, None])
        # What lies past the length is stale and may be anything: zero probability times NaN would be NaN.
        latent, rope = (jnp.where(seen[..., None], gather(pool, pages), 0) for pool in (self.latent, self.rope))
        return latent, rope, seen


def gather(
    pool: Float[Array, "number_of_pages page width"], pages: Int[Array, "requests tiles"]
) -> Float[Array, "requests positions width"]:
    """The positions of each request in order; arbitrary where an entry names no page."""
    return pool.at[pages].get(mode="clip").reshape(pages.shape[0], -1, pool.shape[-1])


def _joined(q_latent, q_rope, past, rows, ancestors, valid, scale):
    """Cached positions and rows in one softmax."""
    keys, mask = jnp.concatenate(rows, axis=-1), ancestors
    if past is not None:
        *past, seen = past
        keys = jnp.concatenate([jnp.concatenate(past, axis=-1), keys], axis=1)
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
