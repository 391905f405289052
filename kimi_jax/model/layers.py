"""The small parts every layer is made of: projection, norm, gated MLP, embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.collectives import all_reduce, axis_index
from kimi_jax.parameters import weight


class Matrix(nnx.Module):
    """A weight W [out, in] as the checkpoint stores it, for products that its owner writes itself."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str | None, str | None] = (None, None)):
        self.weight = weight((outputs, inputs), axes)


class Linear(Matrix):
    """y = x Wᵀ; no bias anywhere in the K2 family.

    With the input axis sharded the result is this device's partial sum: the caller reduces, once, where it is due.
    """

    transposed = False
    """Whether W lies as [in, out], which `decoding.cpu_form` may choose; only this class has to know."""

    @property
    def outputs(self) -> int:
        """Output features that this device has."""
        return self.weight.get_value().shape[1 if self.transposed else 0]

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        return self.product(x, self.weight[...])

    def part(self, first: Int[Array, ""] | int, outputs: int) -> Array:
        """The weight of some output features, as `product` takes it."""
        return jax.lax.dynamic_slice_in_dim(self.weight[...], first, outputs, axis=1 if self.transposed else 0)

    def product(self, x: Float[Array, "... in"], w: Array) -> Float[Array, "... out"]:
        """x times this weight, or the part of it that is given."""
        return jnp.einsum("...i,io->...o" if self.transposed else "...i,oi->...o", x, w)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x² + eps) in float32, cast to the input's type, then scaled (in that order, as the reference)."""

    def __init__(self, size: int, eps: float):
        self.weight = weight((size,), (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        wide = x.astype(jnp.float32)
        normalised = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normalised.astype(x.dtype) * self.weight[...]


class GatedMLP(nnx.Module):
    """down(silu(gate x) · up x), its width sharded on tp: returns this device's partial sum."""

    def __init__(self, hidden_size: int, width: int):
        self.gate_proj = Linear(hidden_size, width, ("mlp", None))
        self.up_proj = Linear(hidden_size, width, ("mlp", None))
        self.down_proj = Linear(width, hidden_size, (None, "mlp"))

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Embedding(nnx.Module):
    """Token embeddings with the vocabulary sharded on tp: each device looks up its own ids, one sum joins them."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.weight = weight((vocab_size, hidden_size), ("vocab", None))

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... hidden"]:
        with jax.named_scope("embedding"):
            table = self.weight[...]
            local = tokens - axis_index("tp") * table.shape[0]
            mine = (local >= 0) & (local < table.shape[0])
            rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
            partial = jnp.where(mine[..., None], rows, 0)
        with jax.named_scope("reductions"):
            return all_reduce(partial, "tp")
