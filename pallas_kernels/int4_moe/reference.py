"""The specification of the operation in plain JAX: runs on every platform, and is what the CPU uses.

Work is proportional to the routed pairs, in one of two forms that give the same values up to float32 rounding:
few pairs unpack one expert per pair and multiply in one batched product; many pairs walk the tiles of `routing`,
unpacking each tile's expert once. Everything is computed in float32.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.int4_moe.routing import combine, gather_rows, group_pairs, varying_over

# Largest number of weights (pairs x weights of an expert) the per-pair form unpacks. Measured on two CPU cores, hidden
# 128, 16 experts, top-4: 64 pairs x 24,576 weights take 0.33 ms per pair against 0.66 ms by tiles; 256 pairs 2.8
# against 1.2 ms; 16 pairs x 98,304 weights 0.38 against 1.3 ms; 64 pairs 1.9 against 1.8 ms.
PER_PAIR_WEIGHTS = 4_000_000
TILE_ROWS = (8, 16, 32, 64, 128)

Form = Literal["pairs", "tiles"]


def dequantize(
    packed: Int[Array, "*batch out in_words"], scale: BFloat16[Array, "*batch out groups"]
) -> Float[Array, "*batch out in"]:
    """Float32 weights from the checkpoint's format.

    Value j of a row is `((packed[j // 8] >> 4 (j % 8)) & 15) - 8` times the scale of its group of 32
    (compressed-tensors, pack-quantized, symmetric).
    """
    nibbles = (packed[..., None] >> (4 * jnp.arange(8, dtype=jnp.int32))) & 15
    values = (nibbles - 8).astype(jnp.float32)
    grouped = values.reshape(*scale.shape, -1) * scale.astype(jnp.float32)[..., None]
    return grouped.reshape(*packed.shape[:-1], packed.shape[-1] * 8)


def int4_moe_reference(
    x: Float[Array, "rows hidden"],
    expert_ids: Int[Array, "rows top_k"],
    expert_weights: Float[Array, "rows top_k"],
    gate_packed: Int[Array, "slots width hidden_words"],
    gate_scale: BFloat16[Array, "slots width hidden_groups"],
    up_packed: Int[Array, "slots width hidden_words"],
    up_scale: BFloat16[Array, "slots width hidden_groups"],
    down_packed: Int[Array, "slots hidden width_words"],
    down_scale: BFloat16[Array, "slots hidden width_groups"],
    *,
    form: Form | None = None,
) -> Float[Array, "rows hidden"]:
    """Σ_k weight · down(silu(gate x) · up x) over the experts of each row that live here, in float32.

    Ids outside 0..slots-1 contribute nothing. `form` overrides the choice between the two forms.
    """
    rows, hidden = x.shape
    if expert_ids.size == 0:
        return jnp.zeros((rows, hidden), jnp.float32)
    weights = (gate_packed, gate_scale, up_packed, up_scale, down_packed, down_scale)
    unpacked = expert_ids.size * 8 * sum(w[0].size for w in (gate_packed, up_packed, down_packed))
    form = form or ("pairs" if unpacked <= PER_PAIR_WEIGHTS else "tiles")
    return (_by_pairs if form == "pairs" else _by_tiles)(x, expert_ids, expert_weights, *weights)


def _by_pairs(x, expert_ids, expert_weights, *weights):
    slots = weights[0].shape[0]
    here = (expert_ids >= 0) & (expert_ids < slots)
    expert = jnp.where(here, expert_ids, 0).reshape(-1)

    def matmul(a: jax.Array, packed: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.einsum("pk,pnk->pn", a, dequantize(packed[expert], scale[expert]), precision="highest")

    a = jnp.repeat(x.astype(jnp.float32), expert_ids.shape[1], axis=0)
    y = _expert(matmul, a, *weights).reshape(*expert_ids.shape, -1)
    # `where` and not a zero weight: what a foreign pair computes, an infinity included, must not reach the sum.
    y = jnp.where(here[..., None], y * expert_weights.astype(jnp.float32)[..., None], 0.0)
    return jnp.sum(y, axis=1)


def _by_tiles(x, expert_ids, expert_weights, *weights):
    slots = weights[0].shape[0]
    tile_rows = next((n for n in TILE_ROWS if expert_ids.size <= n * slots), TILE_ROWS[-1])
    groups = group_pairs(expert_ids, slots, tile_rows)
    grouped = gather_rows(x, groups, tile_rows).astype(jnp.float32)

    def tile(i: jax.Array, y: jax.Array) -> jax.Array:
        expert = groups.tile_expert[i]

        def matmul(a: jax.Array, packed: jax.Array, scale: jax.Array) -> jax.Array:
            return jnp.einsum("mk,nk->mn", a, dequantize(packed[expert], scale[expert]), precision="highest")

        a = lax.dynamic_slice_in_dim(grouped, i * tile_rows, tile_rows)
        return lax.dynamic_update_slice_in_dim(y, _expert(matmul, a, *weights), i * tile_rows, 0)

    y = varying_over((x, expert_ids, *weights), jnp.zeros_like(grouped))
    return combine(lax.fori_loop(0, groups.tile_count[0], tile, y), groups, expert_weights)


def _expert(matmul, a, gate_packed, gate_scale, up_packed, up_scale, down_packed, down_scale):
    gated = jax.nn.silu(matmul(a, gate_packed, gate_scale)) * matmul(a, up_packed, up_scale)
    return matmul(gated, down_packed, down_scale)
