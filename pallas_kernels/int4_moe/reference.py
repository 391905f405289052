"""The specification of the operation in plain JAX: runs on every platform, and is what the CPU uses.

Three forms give the same values up to float32 rounding. A small stack is unpacked whole, with plain matrix products
over every row and slot of which the chosen are kept. Of a large one few pairs unpack one expert each and multiply in
one batched product; many go tile by tile along `routing`, with work proportional to the pairs. Everything is computed
in float32.
"""

from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.int4_moe.routing import combine, gather_rows, group_pairs, varying_over

# Largest number of weights unpacked at once, 16 MB as float32. Measured on two CPU cores inside a loop, hidden 128,
# width 64, 16 slots, top-4, µs a layer by pairs, tiles and dense: 9 rows 1,011, 642, 81; 17 rows 1,533, 763, 243;
# 256 rows 28,700, 3,820, 1,590 (XLA moves the dense form's unpacking out of the loop). One row, three such layers in a
# whole step: pairs 0.66 ms, dense 0.59.
UNPACKED_WEIGHTS = 4_000_000
TILE_ROWS = (8, 16, 32, 64, 128)

Form = Literal["pairs", "dense", "tiles"]


class PackedWeight(Protocol):
    """A stack of INT4 matrices [slots, out, in] in the checkpoint's bits."""

    @property
    def packed(self) -> Int[Array, "slots out in_words"]:
        """Eight codes a word, low nibble first."""
        ...

    @property
    def scale(self) -> Float[Array, "slots out groups"]:
        """One for each group of 32 input values."""
        ...


class Stack(NamedTuple):
    """The simplest `PackedWeight`."""

    packed: Int[Array, "slots out in_words"]
    scale: Float[Array, "slots out groups"]


def dequantize(
    packed: Int[Array, "*batch out in_words"], scale: Float[Array, "*batch out groups"]
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
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    *,
    dtype: DTypeLike = jnp.float32,
    form: Form | None = None,
) -> Float[Array, "rows hidden"]:
    """Σ_k weight · down(silu(gate x) · up x) over the experts of each row that live here, in float32 until the end.

    Ids outside 0..slots-1 contribute nothing. `form` overrides the choice of the form.
    """
    rows, hidden = x.shape
    if expert_ids.size == 0:
        return jnp.zeros((rows, hidden), dtype)
    weights = (gate, up, down)
    form = form or _form(expert_ids.size, gate.packed.shape[0], weights)
    compute = {"pairs": _by_pairs, "dense": _dense, "tiles": _by_tiles}[form]
    return compute(x, expert_ids, expert_weights, *weights).astype(dtype)


def _form(pairs: int, slots: int, weights) -> Form:
    expert = 8 * sum(weight.packed[0].size for weight in weights)
    if slots * expert <= UNPACKED_WEIGHTS:
        return "dense"
    return "pairs" if min(pairs, slots) * expert <= UNPACKED_WEIGHTS else "tiles"


def _by_pairs(x, expert_ids, expert_weights, *weights):
    slots = weights[0].packed.shape[0]
    here = (expert_ids >= 0) & (expert_ids < slots)
    expert = jnp.where(here, expert_ids, 0).reshape(-1)

    def matmul(a: jax.Array, weight: PackedWeight) -> jax.Array:
        unpacked = dequantize(weight.packed[expert], weight.scale[expert])
        return jnp.einsum("pk,pnk->pn", a, unpacked, precision="highest")

    a = jnp.repeat(x.astype(jnp.float32), expert_ids.shape[1], axis=0)
    y = _expert(matmul, a, *weights).reshape(*expert_ids.shape, -1)
    # `where` and not a zero weight: what a foreign pair computes, an infinity included, must not reach the sum.
    y = jnp.where(here[..., None], y * expert_weights.astype(jnp.float32)[..., None], 0.0)
    return jnp.sum(y, axis=1)


def _dense(x, expert_ids, expert_weights, gate, up, down):
    both = [unpack_outputs(weight.packed, weight.scale) for weight in (gate, up)]
    gate_up, unpacked = jnp.concatenate(both, axis=1), unpack_inputs(down.packed, down.scale)
    return unpacked_moe(x, expert_ids, expert_weights, gate_up, unpacked, slots=gate.packed.shape[0])


def unpack_outputs(
    packed: Int[Array, "slots width hidden_words"], scale: Float[Array, "slots width hidden_groups"]
) -> Float[Array, "hidden slots_width"]:
    """Gate or up projections of all slots side by side in float32, as one product takes them."""
    return _unpack_transposed(packed.reshape(-1, packed.shape[-1]), scale.reshape(-1, scale.shape[-1]))


def unpack_inputs(
    packed: Int[Array, "slots hidden width_words"], scale: Float[Array, "slots hidden width_groups"]
) -> Float[Array, "slots_width hidden"]:
    """Down projections of all slots below one another in float32: one product also sums over the slots."""
    return _unpack_transposed(packed, scale).reshape(-1, packed.shape[1])


def unpacked_moe(
    x: Float[Array, "rows hidden"],
    expert_ids: Int[Array, "rows top_k"],
    expert_weights: Float[Array, "rows top_k"],
    gate_up: Float[Array, "hidden gate_and_up"],
    down: Float[Array, "slots_width hidden"],
    *,
    slots: int,
) -> Float[Array, "rows hidden"]:
    """The operation on a stack that is unpacked already, every slot computed for every row."""
    rows = x.shape[0]
    projected = jnp.dot(x.astype(jnp.float32), gate_up, precision="highest").reshape(rows, 2, slots, -1)
    gated = jax.nn.silu(projected[:, 0]) * projected[:, 1]
    chosen = expert_ids[..., None] == jnp.arange(slots)
    weight = jnp.sum(jnp.where(chosen, expert_weights.astype(jnp.float32)[..., None], 0.0), axis=1)
    # What an expert that was not chosen computes, an infinity included, must not reach the sum.
    gated = jnp.where(chosen.any(axis=1)[..., None], gated * weight[..., None], 0.0)
    return jnp.dot(gated.reshape(rows, -1), down, precision="highest")


def _unpack_transposed(packed, scale):
    """`dequantize` as [*batch, in, out], which a product takes as it is: along `out` the loop is of plain vectors."""
    words, groups = packed.swapaxes(-1, -2), scale.swapaxes(-1, -2).astype(jnp.float32)
    nibbles = (words[..., None, :] >> (4 * jnp.arange(8, dtype=jnp.int32))[:, None]) & 15
    values = (nibbles - 8).astype(jnp.float32).reshape(*groups.shape[:-1], -1, groups.shape[-1])
    return (values * groups[..., None, :]).reshape(*words.shape[:-2], -1, words.shape[-1])


def _by_tiles(x, expert_ids, expert_weights, *weights):
    slots = weights[0].packed.shape[0]
    tile_rows = next((n for n in TILE_ROWS if expert_ids.size <= n * slots), TILE_ROWS[-1])
    groups = group_pairs(expert_ids, slots, tile_rows)
    grouped = gather_rows(x, groups, tile_rows).astype(jnp.float32)

    def tile(i: jax.Array, y: jax.Array) -> jax.Array:
        expert = groups.tile_expert[i]

        def matmul(a: jax.Array, weight: PackedWeight) -> jax.Array:
            unpacked = dequantize(weight.packed[expert], weight.scale[expert])
            return jnp.einsum("mk,nk->mn", a, unpacked, precision="highest")

        a = lax.dynamic_slice_in_dim(grouped, i * tile_rows, tile_rows)
        return lax.dynamic_update_slice_in_dim(y, _expert(matmul, a, *weights), i * tile_rows, 0)

    y = varying_over((x, expert_ids, *jax.tree.leaves(weights)), jnp.zeros_like(grouped))
    return combine(lax.fori_loop(0, groups.tile_count[0], tile, y), groups, expert_weights)


def _expert(matmul, a, gate, up, down):
    return matmul(jax.nn.silu(matmul(a, gate)) * matmul(a, up), down)
