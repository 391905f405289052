"""INT4 weights with one scale per group of input elements: the only file that knows about nibbles.

Format (compressed-tensors `pack-quantized`, as K2.6 stores its routed experts): code u = q + 8 in 0..15; element k of
an output row is bits 4·(k mod 8) of int32 word k // 8, so the low nibble comes first along the input axis; the weight
is q · scale[row, k // group].
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int, Int32

CODES_PER_WORD = 8
OFFSET = 8
MAX_CODE = 7
"""Moonshot quantises to -7..7 (scale = absmax / 7); -8 is decoded too but never written."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """A stack of INT4 matrices in the checkpoint's bits: `packed` [..., out, in/8], `scale` [..., out, in/group]."""

    packed: Int32[Array, "*stack out words"]
    scale: BFloat16[Array, "*stack out groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight it stands for: [..., out, in]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * CODES_PER_WORD)

    @property
    def group_size(self) -> int:
        """Input elements that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]


def pack(codes: Int[Array, "*stack out in_features"]) -> Int32[Array, "*stack out words"]:
    """Packs signed codes -8..7 into int32 words, eight along the last axis."""
    if codes.shape[-1] % CODES_PER_WORD:
        raise ValueError(f"the last axis has {codes.shape[-1]} codes; a word holds {CODES_PER_WORD}")
    nibbles = (codes + OFFSET).astype(jnp.uint32).reshape(*codes.shape[:-1], -1, CODES_PER_WORD)
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type((nibbles << shifts).sum(-1, dtype=jnp.uint32), jnp.int32)


def unpack(packed: Int32[Array, "*stack out words"]) -> Int32[Array, "*stack out in_features"]:
    """Signed codes -8..7 of packed words. Transpose the result, never the words."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32)
    codes = ((packed[..., None] >> shifts) & 0xF) - OFFSET
    return codes.reshape(*packed.shape[:-1], -1)


def dequantize(weight: Int4Weight, dtype: DTypeLike = jnp.float32) -> Float[Array, "*stack out in_features"]:
    """The weight as `dtype`; exact in float32, where a code times a bfloat16 scale always fits."""
    codes = unpack(weight.packed).astype(jnp.float32)
    grouped = codes.reshape(*weight.scale.shape, weight.group_size)
    return (grouped * weight.scale.astype(jnp.float32)[..., None]).reshape(codes.shape).astype(dtype)


def quantize(weight: Float[Array, "*stack out in_features"], group_size: int = 32) -> Int4Weight:
    """Rounds to INT4 as Moonshot does: scale = absmax / 7 per group, in bfloat16, codes -7..7.

    Quantising a dequantised weight returns the same bits, because absmax / 7 is then the stored scale itself.
    """
    if weight.shape[-1] % group_size:
        raise ValueError(f"group size {group_size} does not divide the input size {weight.shape[-1]}")
    grouped = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group_size)
    scale = (jnp.abs(grouped).max(-1) / MAX_CODE).astype(jnp.bfloat16)
    divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]
    codes = jnp.clip(jnp.round(grouped / divisor), -MAX_CODE, MAX_CODE).astype(jnp.int32)
    return Int4Weight(pack(codes.reshape(weight.shape)), scale)
